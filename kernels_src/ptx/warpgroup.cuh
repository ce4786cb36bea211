// What a kernel of specialised warpgroups needs besides barriers.
#pragma once
#include "common/types.cuh"

// Registers per thread from here on; all warps of the warpgroup.
template <int COUNT>
DEVICE void give_registers_back() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Shared memory that threads or their cp.async wrote, and this thread knows to be complete, becomes
// visible to wgmma and the copy engine.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit values to shared memory; lane l names row l % 8 of matrix l / 8, and
// holds of each matrix row l / 4, columns l % 4 * 2 and the next.
DEVICE void store_matrices_x4(u32 smem, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// Read-only loads that stay where they are written: before what hides their latency.
DEVICE void load_now(const float* p, float (&v)[1]) {
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v[0]) : "l"(p));
}
DEVICE void load_now(const float* p, float (&v)[2]) {
    asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "l"(p));
}
DEVICE void load_now(const float* p, float (&v)[4]) {
    asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "l"(p));
}
