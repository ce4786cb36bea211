// What the two products for many tokens share: a tile of BLOCK_M slots by BLOCK_N rows of the weights,
// of which each of two consumer warpgroups computes all slots by 128 rows, and a ring of stages that a
// third warpgroup fills. A stage holds one 128-block of the depth.
#pragma once
#include "common/bf16x2.cuh"
#include "common/ring.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tensor_map.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

static_assert(STAGES >= 2, "loads run ahead");

constexpr int BLOCK_M = 64, BLOCK_N = 256, BLOCK_K = 128;
constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int CONSUMER_WARPS = CONSUMERS / 32;
constexpr int A_BYTES = BLOCK_M * BLOCK_K, B_BYTES = BLOCK_N * BLOCK_K;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

// A warp's 16 rows by 128 columns of results, on their way to global memory.
constexpr int STAGING_ROW = 128 * 2 + 16, STAGING_BYTES = 16 * STAGING_ROW;

// Scales of several 128-blocks are loaded together, as many as divide those of a row.
DEVICE constexpr int vector_of(int blocks) { return blocks % 4 == 0 ? 4 : blocks % 2 == 0 ? 2 : 1; }

// acc = a . b over a stage's 128-block; b of this warpgroup, both in shared memory.
DEVICE void multiply_block(float (&acc)[64], u32 a, u32 b) {
    wgmma_fence();
    wgmma_m64k128_e4m3<16>(acc, wgmma_operand(a), wgmma_operand(b));
    wgmma_commit();
    wgmma_wait(acc);
}

// sum += s * acc: s[i] of this thread's row i, low columns (the first 64), t[i] of the high ones.
DEVICE void promote(float (&sum)[64], const float (&acc)[64], float s0, float s1, float t0, float t1) {
#pragma unroll
    for (int i = 0; i < 64; i++) {
        const float s = i < 32 ? (i / 2 % 2 ? s1 : s0) : (i / 2 % 2 ? t1 : t0);
        sum[i] = fmaf(s, acc[i], sum[i]);
    }
}

// This warp's sums as bf16, row by row, to its part of shared memory.
DEVICE void stage_rows(u32 smem, const float (&sum)[64]) {
    const int lane = threadIdx.x % 32;
    const u32 to = smem + (lane % 16) * STAGING_ROW + lane / 16 * 16;
    __syncwarp();  // what was there before has been read
#pragma unroll
    for (int i = 0; i < 64; i += 8) {
        store_matrices_x4(to + i * 4, round_bf16x2(sum[i], sum[i + 1]), round_bf16x2(sum[i + 2], sum[i + 3]),
                          round_bf16x2(sum[i + 4], sum[i + 5]), round_bf16x2(sum[i + 6], sum[i + 7]));
    }
    __syncwarp();
}
