// Block quantization of one group of 128 values, held by LANES lanes of a warp, VALUES values each.
//
//   amax  = max(|v|, 1e-10), NaN ignored      scale = amax / 448, or the power of two above it
//   code  = e4m3(v / scale), saturating; every NaN becomes 0x7F
#pragma once
#include "common/types.cuh"

constexpr int GROUP = 128;

// The lanes of this thread's group: the groups of a warp may diverge.
template <int LANES>
DEVICE u32 group_mask() {
    return LANES == 32 ? 0xFFFFFFFFu : ((1u << LANES) - 1) << (threadIdx.x & (32 - LANES));
}

// The largest of the lanes' values, at least 1e-10. fmaxf drops NaN, as the contract wants: a NaN
// element marks itself, not its group.
template <int LANES>
DEVICE float group_amax(float lane_amax) {
    float amax = fmaxf(lane_amax, 1e-10f);
#pragma unroll
    for (int lanes = LANES / 2; lanes; lanes /= 2)
        amax = fmaxf(amax, __shfl_xor_sync(group_mask<LANES>(), amax, lanes));
    return amax;
}

// 2^ceil(log2(s)) of a positive normal number or +inf: round the exponent up where a mantissa bit is set.
DEVICE float ceil_power_of_two(float s) {
    const u32 bits = __float_as_uint(s);
    return __uint_as_float((bits + 0x7FFFFF) & 0x7F800000);
}

template <bool UE8M0>
DEVICE float group_scale(float amax) {
    const float scale = amax / 448.0f;
    return UE8M0 ? ceil_power_of_two(fmaxf(scale, 1e-10f)) : scale;
}

// v / scale for the values of a group.
//
// A power of two has an exact reciprocal. A 16-bit v takes q = v * (1 / scale), corrected once by its
// exact remainder: the correctly rounded quotient wherever it can reach a code other than 0 (tested
// for all pairs of bf16 and of fp16 mantissas). An infinite scale has the reciprocal 0 and is then
// taken as 0 itself, so that finite values become a signed zero, and inf NaN.
template <bool UE8M0, bool FROM_16_BITS>
struct Divider {
    float scale, reciprocal;

    DEVICE explicit Divider(float s) : scale(s), reciprocal(1.0f / s) {
        if (FROM_16_BITS && reciprocal == 0.0f) scale = 0.0f;
    }

    DEVICE float operator()(float v) const {
        const float q = v * reciprocal;
        if constexpr (UE8M0) return q;
        if constexpr (FROM_16_BITS) return fmaf(fmaf(-q, scale, v), reciprocal, q);
        return v / scale;
    }
};

// satfinite clamps to +-448 and maps every NaN to 0x7F. The low byte is the second operand.
DEVICE u32 e4m3x2(float low, float high) {
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}

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

template <bool UE8M0, bool FROM_16_BITS, int VALUES>
DEVICE void quantize_lane(const float (&v)[VALUES], float scale, u32 (&codes)[VALUES / 4]) {
    const Divider<UE8M0, FROM_16_BITS> divide(scale);
#pragma unroll
    for (int i = 0; i < VALUES / 4; i++) {
        codes[i] = e4m3x2(divide(v[4 * i]), divide(v[4 * i + 1])) |
                   e4m3x2(divide(v[4 * i + 2]), divide(v[4 * i + 3])) << 16;
    }
}
