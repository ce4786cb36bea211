// Eight consecutive elements per lane: 16-byte accesses where the plan found all rows aligned.
#pragma once
#include "common/types.cuh"

DEVICE void unpack_bf16x2(u32 word, float& low, float& high) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xFFFF0000u);
}

template <int TYPE, bool ALIGNED>
DEVICE void load8(const void* p, i64 offset, float (&v)[8]) {
    if constexpr (ALIGNED && TYPE != FP32) {
        const uint4 w = *reinterpret_cast<const uint4*>(static_cast<const u16*>(p) + offset);
        const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (TYPE == BF16) {
                unpack_bf16x2(words[i], v[2 * i], v[2 * i + 1]);
            } else {
                v[2 * i] = f16_to_f32(u16(words[i]));
                v[2 * i + 1] = f16_to_f32(u16(words[i] >> 16));
            }
        }
    } else if constexpr (ALIGNED) {
        const float4* q = reinterpret_cast<const float4*>(static_cast<const float*>(p) + offset);
        const float4 a = q[0], b = q[1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = load_float<TYPE>(p, offset + i);
    }
}

template <bool ALIGNED>
DEVICE void store8(u8* p, uint2 codes) {
    if constexpr (ALIGNED) {
        *reinterpret_cast<uint2*>(p) = codes;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            p[i] = u8(codes.x >> (8 * i));
            p[4 + i] = u8(codes.y >> (8 * i));
        }
    }
}
