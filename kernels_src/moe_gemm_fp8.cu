// moe_gemm_fp8: grouped GEMM of e4m3 operands with block scales, the experts' tokens gathered.
//
//   out[slot, n] = bf16( sum over 128-blocks kb of K of
//                        a_scale[row, kb] * w_scale[e, n / 128, kb] * (a[row, kb] . w[e, n, kb]) )
//
// with row = slot / SLOTS_PER_ROW and e the expert of the slot's block. A CTA computes BLOCK_M slots
// of one expert by 128 columns: 4 warps side by side, each 32 columns; for 64 slots two such rows of
// warps, each 32 slots. Within a
// 128-block the dot product is exact products in an fp32 accumulator; the block's sum is promoted
// once, by the scales, to a second fp32 accumulator. Sentinel slots are neither read nor written.
#include "common/types.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"

constexpr int BLOCK_N = 128;
constexpr int BLOCK_K = 128;
static_assert(BLOCK_M == 16 || BLOCK_M == 64, "the warps' layout is made for these heights");
static_assert(N % BLOCK_N == 0, "a column tile has one weight scale per k-block");
static_assert(K % BLOCK_K == 0, "K is a whole number of scale blocks");
static_assert(STAGES >= 2, "loads run at least one stage ahead");
static_assert(SLOTS_PER_ROW >= 1, "a row of a serves at least one slot");

constexpr int WARPS_N = 4;
constexpr int WARPS_M = BLOCK_M / 16 >= 4 ? 2 : 1;
constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int WARP_M = BLOCK_M / WARPS_M;
constexpr int WARP_N = BLOCK_N / WARPS_N;
constexpr int M_TILES = WARP_M / 16;
constexpr int N_TILES = WARP_N / 8;
constexpr int K_BLOCKS = K / BLOCK_K;
constexpr int N_BLOCKS = N / BLOCK_N;
constexpr int A_STAGE_BYTES = BLOCK_M * BLOCK_K;
constexpr int STAGE_BYTES = A_STAGE_BYTES + BLOCK_N * BLOCK_K;

// Rows are 128 bytes; the 16-byte chunks of a row are permuted by its number so that the 8 rows of
// one ldmatrix lie in different banks.
DEVICE u32 swizzled(int row, int chunk) { return row * BLOCK_K + ((chunk ^ (row & 7)) << 4); }

struct Tile {
    const u8* a;             // [rows, K] e4m3
    const u8* w;             // first row of this tile's 128 rows of w
    i64 w_row_stride;        // bytes
    const i32* rows;         // [BLOCK_M] row of a per slot, or -1, in shared memory
};

DEVICE void load_stage(const Tile& tile, u32 smem, int k_block) {
    const i64 k = i64(k_block) * BLOCK_K;
#pragma unroll
    for (int i = threadIdx.x; i < BLOCK_M * 8; i += THREADS) {
        const int r = i / 8, chunk = i % 8;
        const i64 row = tile.rows[r];
        cp_async_16(smem + swizzled(r, chunk), tile.a + max(row, 0ll) * K + k + chunk * 16, row >= 0);
    }
#pragma unroll
    for (int i = threadIdx.x; i < BLOCK_N * 8; i += THREADS) {
        const int n = i / 8, chunk = i % 8;
        cp_async_16(smem + A_STAGE_BYTES + swizzled(n, chunk),
                    tile.w + n * tile.w_row_stride + k + chunk * 16, true);
    }
}

// part[m_tile][n_tile] = a . w over one 128-block.
DEVICE void multiply_stage(u32 smem, float (&part)[M_TILES][N_TILES][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_m = warp / WARPS_N * WARP_M, warp_n = warp % WARPS_N * WARP_N;
    const u32 smem_w = smem + A_STAGE_BYTES;
#pragma unroll
    for (int k = 0; k < BLOCK_K / 32; k++) {
        u32 b[N_TILES / 2][4];
#pragma unroll
        for (int t = 0; t < N_TILES / 2; t++) {
            // Matrices: (n 0-7, k low), (n 0-7, k high), (n 8-15, k low), (n 8-15, k high).
            const int n = warp_n + t * 16 + (lane / 16) * 8 + lane % 8;
            ldmatrix_x4(b[t], smem_w + swizzled(n, k * 2 + (lane / 8) % 2));
        }
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            // Matrices: (m 0-7, k low), (m 8-15, k low), (m 0-7, k high), (m 8-15, k high).
            u32 a[4];
            ldmatrix_x4(a, smem + swizzled(warp_m + m * 16 + lane % 16, k * 2 + lane / 16));
#pragma unroll
            for (int t = 0; t < N_TILES; t++)
                mma_m16n8k32_e4m3(part[m][t], a, b[t / 2][t % 2 * 2], b[t / 2][t % 2 * 2 + 1]);
        }
    }
}

DEVICE void store_pair(u16* out, float low, float high) {
    *reinterpret_cast<u32*>(out) = u32(f32_to_bf16(low)) | u32(f32_to_bf16(high)) << 16;
}

extern "C" __global__ void __launch_bounds__(THREADS) moe_gemm_fp8(
    const u8* __restrict__ a,                             // [rows, K] e4m3
    const float* __restrict__ a_scale,                    // [rows, K / 128]
    const u8* __restrict__ w,                             // [E, N, K] e4m3, K contiguous
    i64 w_expert_stride,                                  // bytes
    i64 w_row_stride,                                     // bytes
    const float* __restrict__ w_scale,                    // [E, N / 128, K / 128], any strides
    i64 w_scale_expert_stride,                            // elements
    i64 w_scale_n_stride,                                 // elements
    i64 w_scale_k_stride,                                 // elements
    const i32* __restrict__ sorted_token_ids,             // [capacity]
    const i32* __restrict__ expert_ids,                   // [capacity / BLOCK_M]
    const i32* __restrict__ num_tokens_post_padded,       // [1]
    u16* __restrict__ out,                                // [slots, N] bf16
    i64 num_slots) {
    extern __shared__ __align__(128) u8 smem_stages[];
    __shared__ i32 slots[BLOCK_M];
    __shared__ i32 rows[BLOCK_M];
    const i64 m_block = blockIdx.x / N_BLOCKS;
    const int n_block = blockIdx.x % N_BLOCKS;
    if (m_block * BLOCK_M >= num_tokens_post_padded[0]) return;
    for (int r = threadIdx.x; r < BLOCK_M; r += THREADS) {
        const i32 slot = sorted_token_ids[m_block * BLOCK_M + r];
        slots[r] = slot < num_slots ? slot : -1;
        rows[r] = slot < num_slots ? slot / SLOTS_PER_ROW : -1;
    }
    __syncthreads();

    const i64 expert = expert_ids[m_block];
    const Tile tile{a, w + expert * w_expert_stride + i64(n_block) * BLOCK_N * w_row_stride,
                    w_row_stride, rows};
    const float* tile_w_scale =
        w_scale + expert * w_scale_expert_stride + n_block * w_scale_n_stride;
    const u32 smem = smem_address(smem_stages);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_m = warp / WARPS_N * WARP_M, warp_n = warp % WARPS_N * WARP_N;

#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < K_BLOCKS) load_stage(tile, smem + s * STAGE_BYTES, s);
        cp_async_commit();
    }
    float sum[M_TILES][N_TILES][4] = {};
    for (int kb = 0; kb < K_BLOCKS; kb++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // stage kb has arrived for all; stage kb - 1 is free
        const int ahead = kb + STAGES - 1;
        if (ahead < K_BLOCKS) load_stage(tile, smem + ahead % STAGES * STAGE_BYTES, ahead);
        cp_async_commit();

        float part[M_TILES][N_TILES][4] = {};
        multiply_stage(smem + kb % STAGES * STAGE_BYTES, part);
        const float ws = tile_w_scale[kb * w_scale_k_stride];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const i64 row = rows[warp_m + m * 16 + half * 8 + lane / 4];
                const float s = row >= 0 ? a_scale[row * K_BLOCKS + kb] * ws : 0.0f;
#pragma unroll
                for (int t = 0; t < N_TILES; t++) {
                    sum[m][t][half * 2] = fmaf(s, part[m][t][half * 2], sum[m][t][half * 2]);
                    sum[m][t][half * 2 + 1] =
                        fmaf(s, part[m][t][half * 2 + 1], sum[m][t][half * 2 + 1]);
                }
            }
        }
    }

#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const i64 slot = slots[warp_m + m * 16 + half * 8 + lane / 4];
            if (slot < 0) continue;
            u16* to = out + slot * N + n_block * BLOCK_N + warp_n + lane % 4 * 2;
#pragma unroll
            for (int t = 0; t < N_TILES; t++)
                store_pair(to + t * 8, sum[m][t][half * 2], sum[m][t][half * 2 + 1]);
        }
    }
}
