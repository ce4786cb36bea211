// Fixed-width names (NVRTC finds no <stdint.h>) and the bf16/fp16 storage conversions.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define DEVICE __device__ __forceinline__

// The address of shared memory in its own space.
DEVICE u32 smem_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

DEVICE float bf16_to_f32(u16 v) { return __uint_as_float(u32(v) << 16); }

// Round to nearest, ties to even; every NaN becomes 0x7FFF.
DEVICE u16 f32_to_bf16(float v) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
}

DEVICE float round_bf16(float v) { return bf16_to_f32(f32_to_bf16(v)); }

DEVICE float f16_to_f32(u16 v) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
    return r;
}

// Element types of a pointer whose type is a compile-time constant of the kernel.
enum FloatType { BF16 = 0, FP16 = 1, FP32 = 2 };

template <int TYPE>
DEVICE float load_float(const void* p, i64 i) {
    if constexpr (TYPE == FP32) {
        return static_cast<const float*>(p)[i];
    } else {
        const u16 bits = static_cast<const u16*>(p)[i];
        return TYPE == BF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
    }
}
