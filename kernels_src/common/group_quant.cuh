// Block quantization of one group of 128 values, held by LANES lanes of a warp.
//
//   amax  = max(|v|, 1e-10), NaN ignored      scale = amax / 448, or the power of two above it
//   code  = e4m3(v / scale), saturating; every NaN becomes 0x7F
//
// FROM_16_BITS: v is a bf16 or fp16 number. Then divisions are replaced by a product with the
// reciprocal and one correction by the exact remainder, which gives the correctly rounded quotient
// wherever it can reach a code other than 0 (tested for all amax and all pairs of mantissas).
#pragma once
#include "common/types.cuh"

constexpr int GROUP = 128;
constexpr u32 INFINITY_BITS = 0x7F800000u;

// A lane holds RUNS runs of RUN consecutive values; the lanes' runs lie side by side, so that each
// load of a warp reads whole lines.
template <int LANES>
struct Lane {
    static constexpr int VALUES = GROUP / LANES;
    static constexpr int RUN = VALUES < 8 ? VALUES : 8;
    static constexpr int RUNS = VALUES / RUN;
    static_assert(LANES <= 32 && RUN >= 4, "a group is held by 8, 16 or 32 lanes");

    DEVICE static int index() { return threadIdx.x % LANES; }
    DEVICE static int column(int run) { return (run * LANES + index()) * RUN; }

    // The lanes of this thread's group: the groups of a warp may diverge.
    DEVICE static u32 mask() {
        return LANES == 32 ? 0xFFFFFFFFu : ((1u << (LANES % 32)) - 1) << (threadIdx.x & (32 - LANES));
    }
};

// The largest of the lanes' values, at least 1e-10. fmaxf drops NaN, as the contract wants: a NaN
// element marks itself, not its group. `mask`: the lanes that call this together. All of a warp is
// cheapest: a mask that is no constant costs a dozen instructions, among them a slow match.
template <int LANES>
DEVICE float group_amax(float lane_amax, u32 mask = Lane<LANES>::mask()) {
    float amax = fmaxf(lane_amax, 1e-10f);
#pragma unroll
    for (int lanes = LANES / 2; lanes; lanes /= 2)
        amax = fmaxf(amax, __shfl_xor_sync(mask, amax, lanes));
    return amax;
}

// 2^ceil(log2(s)) of a positive normal number or +inf: round the exponent up where a mantissa bit is set.
DEVICE float ceil_power_of_two(float s) {
    const u32 bits = __float_as_uint(s);
    return __uint_as_float((bits + 0x7FFFFF) & 0x7F800000);
}

// amax / 448, rounded to nearest.
template <bool FROM_16_BITS>
DEVICE float scale_of(float amax) {
    if constexpr (!FROM_16_BITS) return amax / 448.0f;
    constexpr float RECIPROCAL = 1.0f / 448.0f;
    const float q = amax * RECIPROCAL;
    const float corrected = fmaf(fmaf(-q, 448.0f, amax), RECIPROCAL, q);
    return __float_as_uint(amax) == INFINITY_BITS ? amax : corrected;
}

template <bool UE8M0, bool FROM_16_BITS>
DEVICE float group_scale(float amax) {
    const float scale = scale_of<FROM_16_BITS>(amax);
    return UE8M0 ? ceil_power_of_two(fmaxf(scale, 1e-10f)) : scale;
}

// v / scale for the values of a group. An infinite scale has the reciprocal 0 and is then taken as 0
// itself, so that finite values become a signed zero, and inf NaN.
template <bool UE8M0, bool FROM_16_BITS>
struct Divider {
    float scale, reciprocal;

    DEVICE explicit Divider(float s) : scale(s) {
        const bool infinite = __float_as_uint(s) == INFINITY_BITS;
        if constexpr (UE8M0) {
            // 2^-e from the exponent bits; exact, and normal for every finite scale.
            reciprocal = infinite ? 0.0f : __uint_as_float(0x7F000000u - __float_as_uint(s));
        } else {
            float r;
            asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(s));
            reciprocal = infinite ? 0.0f : fmaf(r, fmaf(-s, r, 1.0f), r);
            if (infinite && FROM_16_BITS) scale = 0.0f;
        }
    }

    DEVICE float operator()(float v) const {
        const float q = v * reciprocal;
        if constexpr (UE8M0) return q;
        // q * scale - v, not v - q * scale: so a zero keeps its sign.
        if constexpr (FROM_16_BITS) return fmaf(-fmaf(q, scale, -v), reciprocal, q);
        return v / scale;
    }
};

// satfinite clamps to +-448 and maps every NaN to 0x7F. The low byte is the second operand.
DEVICE u32 e4m3x2(float low, float high) {
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}

DEVICE u32 e4m3x4(float a, float b, float c, float d) { return e4m3x2(a, b) | e4m3x2(c, d) << 16; }

// Where scales go: element (row, group) of a strided fp32 array, or, packed, its exponent byte in an
// int32 array [rows, groups / 4] whose columns are contiguous.
template <bool PACKED>
DEVICE void store_scale(void* scale, i64 row, i64 group, i64 row_stride, i64 group_stride, float s) {
    if constexpr (PACKED) {
        const i64 word = row + (group / 4) * group_stride;
        static_cast<u8*>(scale)[word * 4 + group % 4] = u8(__float_as_uint(s) >> 23);
    } else {
        static_cast<float*>(scale)[row * row_stride + group * group_stride] = s;
    }
}
