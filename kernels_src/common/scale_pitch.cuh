// How the decode kernels lay out the scales of slots.
#pragma once
#include "common/types.cuh"

// Floats from one slot's scales to the next: rows start at multiples of 16 bytes, and those of 4 slots
// that are 2 apart in different banks.
DEVICE constexpr int scale_pitch(int blocks) { return (blocks + 3) / 8 * 8 + 4; }
