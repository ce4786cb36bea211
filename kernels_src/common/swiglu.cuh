// The clamped SwiGLU of one lane's values, rounded to bf16 where the contract rounds.
//
//   g = bf16(min(gate, limit))   u = clamp(up, -limit, limit)   s = bf16(g / (1 + exp(-alpha g)))
//   y = bf16(s (u + beta))
//
// `swiglu_slow` is that formula, value by value. `swiglu_fast` gives the same bits with packed bf16
// arithmetic and without a division, where all gates of the lane are of moderate size.
#pragma once
#include "common/bf16x2.cuh"

// How the clamp is compiled: not at all; with a limit that bf16 holds; with any other.
enum Clamp { NO_CLAMP = 0, BF16_CLAMP = 1, FP32_CLAMP = 2 };

struct Swiglu {
    float limit, alpha, beta;
};

// Comparisons, not fminf: a NaN must stay NaN.
DEVICE float clamp_above(float v, float limit) { return v > limit ? limit : v; }
DEVICE float clamp_below(float v, float limit) { return v < limit ? limit : v; }

template <int CLAMPED>
DEVICE float swiglu(float gate, float up, Swiglu p) {
    constexpr u32 NEGATIVE_INFINITY = 0xFF800000u;
    const float g = CLAMPED ? round_bf16(clamp_above(gate, p.limit)) : gate;
    const float u = CLAMPED ? clamp_below(clamp_above(up, p.limit), -p.limit) : up;
    // -inf / (1 + exp(inf)) would be NaN; its limit is -0.
    const float s = __float_as_uint(g) == NEGATIVE_INFINITY ? -0.0f
                                                            : g / (1.0f + expf(-p.alpha * g));
    return round_bf16(s) * (u + p.beta);
}

template <int CLAMPED, int PAIRS>
DEVICE void swiglu_slow(const u32 (&gate)[PAIRS], const u32 (&up)[PAIRS], Swiglu p,
                        u32 (&y)[PAIRS]) {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        y[i] = round_bf16x2(swiglu<CLAMPED>(low_f32(gate[i]), low_f32(up[i]), p),
                            swiglu<CLAMPED>(high_f32(gate[i]), high_f32(up[i]), p));
    }
}

// The same for one pair, out of the way of code that hardly ever needs it.
__device__ __noinline__ u32 swiglu_pair(u32 gate, u32 up) {
    const Swiglu plain{0.0f, 1.0f, 0.0f};
    return round_bf16x2(swiglu<NO_CLAMP>(low_f32(gate), low_f32(up), plain),
                        swiglu<NO_CLAMP>(high_f32(gate), high_f32(up), plain));
}

// g / (1 + exp(-g)) by approximations good to about 2^-20. For each of the bf16 numbers below
// FAST_LIMIT the bf16 result is that of expf and a true division: tested one by one, on sm_90.
DEVICE float silu_moderate(float g) {
    constexpr float LOG2_E = 1.44269504088896340736f;
    float power, reciprocal;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(g * -LOG2_E));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(power + 1.0f));
    return g * reciprocal;
}

constexpr float FAST_LIMIT = 80.0f;  // beyond, 1 / (1 + exp(-g)) leaves the normal range

template <int PAIRS>
DEVICE void swiglu_fast(const u32 (&gate)[PAIRS], const u32 (&up)[PAIRS], u32 (&y)[PAIRS]) {
    constexpr u32 ONE = 0x3F803F80u, MINUS_ZERO = 0x80008000u;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const u32 s = round_bf16x2(silu_moderate(low_f32(gate[i])), silu_moderate(high_f32(gate[i])));
        // u + 0 turns -0 into +0; the product takes -0 as addend, which changes nothing.
        y[i] = fma_bf16x2(s, fma_bf16x2(up[i], ONE, 0u), MINUS_ZERO);
    }
}

// y for one lane's values. SCALED: alpha or beta differ from 1 and 0.
template <int CLAMPED, bool SCALED, int PAIRS>
DEVICE void swiglu_lane(u32 (&gate)[PAIRS], u32 (&up)[PAIRS], Swiglu p, u32 (&y)[PAIRS]) {
    if constexpr (SCALED || CLAMPED == FP32_CLAMP) {
        swiglu_slow<CLAMPED>(gate, up, p, y);
    } else {
        if constexpr (CLAMPED == BF16_CLAMP) {
            const u16 bound = f32_to_bf16(p.limit);
            const u32 limit = bf16x2(bound, bound);
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                gate[i] = min_nan_bf16x2(gate[i], limit);
                up[i] = clamp_nan_bf16x2(up[i], limit);
            }
        }
        if (amax_bf16x2(gate) < FAST_LIMIT) {
            swiglu_fast(gate, up, y);
        } else if constexpr (PAIRS == 1) {
            swiglu_slow<NO_CLAMP>(gate, up, Swiglu{0.0f, 1.0f, 0.0f}, y);  // as short as a call
        } else {
#pragma unroll
            for (int i = 0; i < PAIRS; i++) y[i] = swiglu_pair(gate[i], up[i]);
        }
    }
}
