// What the combine of a token wants to know of one of its slots.
#pragma once
#include "common/types.cuh"

struct alignas(8) Route {
    u16 token, repeat;                  // so many of the token's slots before this one have the same expert
    float weight;
};
