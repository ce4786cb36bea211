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

// Which lines L2 gives up first: weights, which nobody reads again soon.
DEVICE u64 evict_first() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// The box of an array of rank 5, and how L2 keeps what it reads.
DEVICE void copy_box_5d(u32 smem, const TensorMap& map, int x, int y, int z, int u, int v, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(
            smem),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v), "l"(policy)
        : "memory");
}
