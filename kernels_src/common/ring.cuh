// A ring of buffers in shared memory, each with a barrier for who fills it and one for who reads it.
#pragma once
#include "common/types.cuh"

// Where in a ring a thread is. A wait for `parity` is for what fills the stage, for the other one until
// it is free.
template <int COUNT>
struct Ring {
    int stage = 0, parity = 0;
    DEVICE void advance() {
        if (++stage == COUNT) stage = 0, parity ^= 1;
    }
};
