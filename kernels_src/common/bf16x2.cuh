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

// The number of the smaller magnitude, with the sign of a, for a positive b.
DEVICE u32 clamp_nan_bf16x2(u32 a, u32 b) {
    u32 r;
    asm("min.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// The larger magnitude, with any sign. A number wins over NaN.
DEVICE u32 max_abs_bf16x2(u32 a, u32 b) {
    u32 r;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// The largest magnitude among PAIRS pairs, a power of two; NaN is dropped.
template <int PAIRS>
DEVICE float amax_bf16x2(const u32 (&v)[PAIRS]) {
    u32 amax[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++) amax[i] = v[i];
#pragma unroll
    for (int half = PAIRS / 2; half; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; i++) amax[i] = max_abs_bf16x2(amax[i], amax[i + half]);
    }
    return fmaxf(fabsf(low_f32(amax[0])), fabsf(high_f32(amax[0])));
}
