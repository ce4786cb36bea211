// Asynchronous 16-byte copies from global to shared memory (sm_80 and newer).
#pragma once
#include "common/types.cuh"

DEVICE u32 smem_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// Copies 16 bytes, or writes 16 zero bytes where `valid` is false (nothing is then read).
DEVICE void cp_async_16(u32 smem, const void* gmem, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem), "r"(bytes)
                 : "memory");
}

DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups are in flight.
template <int PENDING>
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
