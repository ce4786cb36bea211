// Block quantization of one group of 128 values, held by 16 lanes of a warp, 8 values each.
//
//   amax  = max(|v|, 1e-10), NaN ignored      scale = amax / 448, or the power of two above it
//   code  = e4m3(v / scale), saturating; every NaN becomes 0x7F
#pragma once
#include "common/types.cuh"

constexpr int GROUP = 128;
constexpr int GROUP_LANES = 16;
constexpr int LANE_VALUES = GROUP / GROUP_LANES;

// The lanes of this thread's half-warp: the two groups of a warp may diverge.
DEVICE u32 group_mask() { return 0xFFFFu << (threadIdx.x & 16); }

// fmaxf drops NaN, as the contract wants: a NaN element marks itself, not its group.
DEVICE float group_amax(const float (&v)[LANE_VALUES]) {
    float amax = 1e-10f;
#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++) amax = fmaxf(amax, fabsf(v[i]));
#pragma unroll
    for (int lanes = GROUP_LANES / 2; lanes; lanes /= 2)
        amax = fmaxf(amax, __shfl_xor_sync(group_mask(), amax, lanes));
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

// satfinite clamps to +-448 and maps every NaN to 0x7F. The low byte is the second operand.
DEVICE u16 e4m3x2(float low, float high) {
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}

DEVICE uint2 quantize_lane(const float (&v)[LANE_VALUES], float scale) {
    u32 pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++) pair[i] = e4m3x2(v[2 * i] / scale, v[2 * i + 1] / scale);
    return make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
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
