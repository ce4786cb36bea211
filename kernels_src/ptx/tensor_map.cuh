// Tensor maps (sm_90 and newer): the copy engine fetches boxes of a matrix, swizzled as the map says.
// What lies outside of the matrix arrives as zeros, and counts.
#pragma once
#include "ptx/mbarrier.cuh"

// CUtensorMap. A parameter of this type is `const __grid_constant__`.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

DEVICE void prefetch_tensor_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The box whose first element is at column x of row y.
DEVICE void copy_box_2d(u32 smem, const TensorMap& map, int x, int y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            smem),
        "l"(&map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

// The same of matrix z.
DEVICE void copy_box_3d(u32 smem, const TensorMap& map, int x, int y, int z, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
            smem),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}
