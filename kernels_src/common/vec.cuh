// Consecutive elements of a lane: one wide access where the plan found all rows aligned.
#pragma once
#include "common/bf16x2.cuh"

// WORDS 32-bit words from an address that is aligned to all of them (at most 16 bytes at a time).
template <int WORDS>
DEVICE void load_words(const void* p, u32 (&w)[WORDS]) {
    if constexpr (WORDS == 1) {
        w[0] = *static_cast<const u32*>(p);
    } else if constexpr (WORDS == 2) {
        const uint2 v = *static_cast<const uint2*>(p);
        w[0] = v.x, w[1] = v.y;
    } else {
        static_assert(WORDS % 4 == 0, "whole vectors");
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            const uint4 v = *reinterpret_cast<const uint4*>(static_cast<const u32*>(p) + i);
            w[i] = v.x, w[i + 1] = v.y, w[i + 2] = v.z, w[i + 3] = v.w;
        }
    }
}

template <int WORDS>
DEVICE void store_words(void* p, const u32 (&w)[WORDS]) {
    static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "one store");
    if constexpr (WORDS == 1) *static_cast<u32*>(p) = w[0];
    if constexpr (WORDS == 2) *static_cast<uint2*>(p) = make_uint2(w[0], w[1]);
    if constexpr (WORDS == 4) *static_cast<uint4*>(p) = make_uint4(w[0], w[1], w[2], w[3]);
}

// bf16 pairs from element `offset` of p.
template <bool ALIGNED, int PAIRS>
DEVICE void load_bf16x2(const u16* p, i64 offset, u32 (&v)[PAIRS]) {
    if constexpr (ALIGNED) {
        load_words(p + offset, v);
    } else {
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
            v[i] = bf16x2(p[offset + 2 * i], p[offset + 2 * i + 1]);
    }
}

// Values of any float type from element `offset` of p, as fp32.
template <int TYPE, bool ALIGNED, int VALUES>
DEVICE void load_f32(const void* p, i64 offset, float (&v)[VALUES]) {
    if constexpr (!ALIGNED) {
#pragma unroll
        for (int i = 0; i < VALUES; i++) v[i] = load_float<TYPE>(p, offset + i);
    } else if constexpr (TYPE == FP32) {
        u32 w[VALUES];
        load_words(static_cast<const float*>(p) + offset, w);
#pragma unroll
        for (int i = 0; i < VALUES; i++) v[i] = __uint_as_float(w[i]);
    } else {
        u32 w[VALUES / 2];
        load_words(static_cast<const u16*>(p) + offset, w);
#pragma unroll
        for (int i = 0; i < VALUES / 2; i++) {
            v[2 * i] = TYPE == BF16 ? low_f32(w[i]) : f16_to_f32(u16(w[i]));
            v[2 * i + 1] = TYPE == BF16 ? high_f32(w[i]) : f16_to_f32(u16(w[i] >> 16));
        }
    }
}

// bf16 pairs to p.
template <bool ALIGNED, int PAIRS>
DEVICE void store_bf16x2(u16* p, const u32 (&v)[PAIRS]) {
    if constexpr (ALIGNED) {
        store_words(p, v);
    } else {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) p[2 * i] = u16(v[i]), p[2 * i + 1] = u16(v[i] >> 16);
    }
}

// Codes, four to a word, to p.
template <bool ALIGNED, int WORDS>
DEVICE void store_codes(u8* p, const u32 (&codes)[WORDS]) {
    if constexpr (ALIGNED) {
        store_words(p, codes);
    } else {
#pragma unroll
        for (int i = 0; i < 4 * WORDS; i++) p[i] = u8(codes[i / 4] >> (8 * (i % 4)));
    }
}
