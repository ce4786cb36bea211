// A named barrier among some warps of a CTA; 0 is that of __syncthreads.
#pragma once
#include "common/types.cuh"

template <int ID, int THREADS>
DEVICE void barrier_sync() {
    static_assert(ID > 0 && ID < 16 && THREADS % 32 == 0, "one of 15 barriers, whole warps");
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

// The same, where each set of warps has its own, from 1 to 15.
template <int THREADS>
DEVICE void barrier_sync_of(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// Does not wait: what these threads wrote is there for those that sync.
template <int ID, int THREADS>
DEVICE void barrier_arrive() {
    asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}
