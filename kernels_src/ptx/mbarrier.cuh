// Barriers in shared memory that count arrivals and bytes (sm_90 and newer). A wait names the parity
// of the phase that is to be over: 0 for the first. A fresh barrier counts as if phase -1 were over.
#pragma once
#include "common/types.cuh"

DEVICE void mbarrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
DEVICE void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds `bytes` to what the phase waits for.
DEVICE void mbarrier_arrive_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// This thread's cp.async copies so far arrive when they are done; part of the expected count.
DEVICE void mbarrier_arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

DEVICE void mbarrier_wait(u32 barrier, int parity) {
    u32 done;
    do {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}
