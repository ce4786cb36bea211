// Warp-level matrix instructions on e4m3 operands (sm_89 and newer; on sm_90a the compiler unpacks
// to f16 and issues HMMA, which is exact: every e4m3 value is an f16 value).
#pragma once
#include "common/types.cuh"

// Four 8-row x 16-byte matrices; lane i names row i % 8 of matrix i / 8.
DEVICE void ldmatrix_x4(u32 (&r)[4], u32 smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem)
                 : "memory");
}

// d[16, 8] += a[16, 32] @ b[8, 32]^T. Lane l holds d at rows l / 4 and l / 4 + 8, columns
// 2 (l % 4) and the next.
DEVICE void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d[16, 8] += a[16, 16] @ b[8, 16]^T on f16 pairs. Lane l holds a at rows l / 4 and l / 4 + 8.
DEVICE void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four e4m3 codes as f16, which holds each of their values.
DEVICE void f16x2_of_e4m3(u32 codes, u32& low, u32& high) {
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\n"
        "cvt.rn.f16x2.e4m3x2 %1, b;\n}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
}
