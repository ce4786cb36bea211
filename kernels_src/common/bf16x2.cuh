// Arithmetic on two bf16 values in a register, each result rounded to nearest, ties to even.
#pragma once
#include "common/types.cuh"

DEVICE u32 bf16x2(u16 low, u16 high) { return u32(low) | u32(high) << 16; }
DEVICE float low_f32(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_f32(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

DEVICE u32 round_bf16x2(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// NaN wins over a bound.
DEVICE u32 min_nan_bf16x2(u32 a, u32 b) {
    u32 r;
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEVICE u32 max_nan_bf16x2(u32 a, u32 b) {
    u32 r;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// The number wins over NaN.
DEVICE u32 max_bf16x2(u32 a, u32 b) {
    u32 r;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEVICE u32 abs_bf16x2(u32 a) { return a & 0x7FFF7FFFu; }

DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// The largest magnitude among PAIRS pairs; NaN is dropped.
template <int PAIRS>
DEVICE float amax_bf16x2(const u32 (&v)[PAIRS]) {
    u32 amax = abs_bf16x2(v[0]);
#pragma unroll
    for (int i = 1; i < PAIRS; i++) amax = max_bf16x2(amax, abs_bf16x2(v[i]));
    return fmaxf(low_f32(amax), high_f32(amax));
}
