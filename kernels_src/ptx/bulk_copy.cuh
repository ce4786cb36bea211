// The copy engine: global to shared memory (sm_90 and newer). A copy reports its bytes to a barrier.
#pragma once
#include "ptx/mbarrier.cuh"

// Contiguous bytes; addresses and sizes are multiples of 16.
DEVICE void bulk_copy(u32 smem, const void* gmem, int bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
        "l"(gmem), "r"(bytes), "r"(barrier)
        : "memory");
}
