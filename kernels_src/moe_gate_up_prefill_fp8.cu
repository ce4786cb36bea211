// moe_gate_up_prefill_fp8: gate and up products and the activation for many tokens, on wgmma.
//
//   h[n]         = bf16( sum over 128-blocks kb of K of a_scale[token, kb] * w_scale[e, n / 128, kb]
//                                                      * (a[token, kb] . w[e, n, kb]) )
//   y[place, n]  = bf16 swiglu of h[n] (gate) and h[N + n] (up)
//   q, q_scale   = group quantization of y
//
// place is the position in sorted_token_ids, token the slot there / TOPK, e the expert of its block.
// Positions that hold no slot get codes that mean nothing. A tile is BLOCK_M places by COLUMNS of y, a
// group of the quantization; CTAs take tiles in turns, those of one block first, so that what runs at a
// time shares weights and tokens in L2. Of the 128 weight rows of a consumer the first 64 are gate, the
// others up, of the same 64 columns: it learns the largest y of the other 64 from the other consumer.
#include "common/group_quant.cuh"
#include "common/swiglu.cuh"
#include "common/vec.cuh"
#include "common/wgmma_tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"

static_assert(K % BLOCK_K == 0 && N % BLOCK_K == 0, "whole scale blocks");
static_assert(TOPK >= 1 && TOPK <= 64, "topk is 1 to 64");
static_assert(CLAMP >= NO_CLAMP && CLAMP <= FP32_CLAMP, "a Clamp");

constexpr int LAG = STAGES >= 4 ? 2 : 1;  // stages that a producer's cp.async runs ahead of its fence
constexpr int COLUMNS = BLOCK_N / 2;
static_assert(COLUMNS == GROUP, "a tile is a group of the quantization");
constexpr int N_TILES = N / COLUMNS;
constexpr int K_BLOCKS = K / BLOCK_K;
constexpr int VECTOR = vector_of(K_BLOCKS);
constexpr int CHUNKS = K_BLOCKS / VECTOR;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int MAXIMA = 2 * CONSUMER_WARPS * 16;  // of each warp's rows, of this tile and the last
constexpr u32 ALL_LANES = 0xFFFFFFFFu;

struct Tiles {
    const i32* sorted_token_ids;
    const i32* expert_ids;
    i64 num_slots;

    DEVICE int slot(int tile, int row) const {  // -1 where there is none
        const i32 slot = sorted_token_ids[i64(tile / N_TILES) * BLOCK_M + row];
        return slot < num_slots ? slot : -1;
    }
    DEVICE int expert(int tile) const { return expert_ids[tile / N_TILES]; }
};

DEVICE int first_column_of(int tile) { return tile % N_TILES * COLUMNS; }

// The weight rows of a stage, by one thread.
DEVICE void load_weights(const TensorMap& w, u32 smem, int expert, int column, int kb, u32 barrier) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 64; i++)
        copy_box_3d(smem + i * 64 * BLOCK_K, w, kb * BLOCK_K, column + i / 2 * 64 + i % 2 * N, expert, barrier);
}

// Scales: where a thread's two rows and its columns have theirs, and those of VECTOR blocks.
struct Source {
    const float *row0, *row1, *gate;
};

struct Scales {
    float row[2][VECTOR], gate[VECTOR], up[VECTOR];
};

struct WeightScale {
    const float* p;            // [E, 2N / 128, K / 128]
    i64 expert_stride, n_stride, k_stride;
};

DEVICE Source source_of(const Tiles& tiles, const float* a_scale, const WeightScale& w, int tile, int row) {
    const auto scales = [&](int row) {
        return a_scale + i64(max(tiles.slot(tile, row), 0) / TOPK) * K_BLOCKS;
    };
    return {scales(row), scales(row + 8),
            w.p + tiles.expert(tile) * w.expert_stride + first_column_of(tile) / BLOCK_K * w.n_stride};
}

DEVICE void load_scales(const Source& from, const WeightScale& w, int chunk, Scales& to) {
    load_now(from.row0 + chunk * VECTOR, to.row[0]);
    load_now(from.row1 + chunk * VECTOR, to.row[1]);
    const float* p = from.gate + chunk * VECTOR * w.k_stride;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        float v[1];
        load_now(p + i * w.k_stride, v), to.gate[i] = v[0];
        load_now(p + i * w.k_stride + N / BLOCK_K * w.n_stride, v), to.up[i] = v[0];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_gate_up_prefill_fp8(
    const __grid_constant__ TensorMap w,       // [E, 2N, K] e4m3, boxes of 64 rows by 128
    const u8* a,                               // [M, K] e4m3
    const float* a_scale,                      // [M, K / 128]
    const float* w_scale,                      // [E, 2N / 128, K / 128], any strides
    i64 w_scale_expert_stride,                 // elements
    i64 w_scale_n_stride,                      // elements
    i64 w_scale_k_stride,                      // elements
    const i32* sorted_token_ids,               // [capacity]
    const i32* expert_ids,                     // [capacity / BLOCK_M]
    const i32* num_tokens_post_padded,         // [1]
    u8* q,                                     // [capacity, N] e4m3
    float* q_scale,                            // [capacity, N / 128]
    i64 num_slots,
    float limit,
    float alpha,
    float beta) {
    extern __shared__ __align__(1024) u8 smem[];
    const u32 stages = smem_address(smem), staging = stages + STAGES * STAGE_BYTES;
    const u32 maxima = staging + CONSUMER_WARPS * STAGING_BYTES, full = maxima + MAXIMA * 4, empty = full + STAGES * 8;
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        prefetch_tensor_map(w);
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(full + s * 8, 1 + 128);
            mbarrier_init(empty + s * 8, CONSUMER_WARPS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    release_successor();
    wait_for_predecessor();

    const Tiles tiles{sorted_token_ids, expert_ids, num_slots};
    const int num_tiles = num_tokens_post_padded[0] / BLOCK_M * N_TILES;
    Ring<STAGES> at;

    if (warp >= CONSUMER_WARPS) {
        give_registers_back<PRODUCER_REGISTERS>();
        // 8 threads a row, a chunk of 16 bytes each; row % 8 is the same for all rows of a thread.
        constexpr int ROWS = BLOCK_M / 16;
        const int thread = threadIdx.x - CONSUMERS, first = thread / 8, chunk = thread % 8;
        const u32 to = stages + first * BLOCK_K + ((chunk ^ (first & 7)) << 4);
        int in_flight = 0;
        Ring<STAGES> done;  // follows `at`
        const auto hand_over = [&] {
            fence_async_proxy();
            mbarrier_arrive(full + done.stage * 8);
            done.advance(), in_flight--;
        };
        for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
            const int expert = tiles.expert(tile), column = first_column_of(tile);
            i32 rows[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const int slot = tiles.slot(tile, first + i * 16);
                rows[i] = slot < 0 ? -1 : slot / TOPK;
            }
            for (int kb = 0; kb < K_BLOCKS; kb++, at.advance()) {
                const u32 barrier = full + at.stage * 8, offset = at.stage * STAGE_BYTES;
                mbarrier_wait(empty + at.stage * 8, at.parity ^ 1);
                if (thread == 0) {
                    mbarrier_arrive_expect(barrier, B_BYTES);
                    load_weights(w, stages + offset + A_BYTES, expert, column, kb, barrier);
                }
                const u8* from = a + kb * BLOCK_K + chunk * 16;
#pragma unroll
                for (int i = 0; i < ROWS; i++)
                    cp_async_16(to + offset + i * 16 * BLOCK_K, from + i64(max(rows[i], 0)) * K, rows[i] >= 0);
                cp_async_commit();
                if (++in_flight > LAG) cp_async_wait<LAG>(), hand_over();
            }
        }
        cp_async_wait_all();
        while (in_flight) hand_over();
        return;
    }

    take_registers<CONSUMER_REGISTERS>();
    const int warpgroup = warp / 4, top = warp % 4 * 16;  // of this warp's 16 rows
    const u32 b_offset = A_BYTES + warpgroup * 128 * BLOCK_K;
    const u32 own_staging = staging + warp * STAGING_BYTES;
    const WeightScale scale{w_scale, w_scale_expert_stride, w_scale_n_stride, w_scale_k_stride};
    const auto source = [&](int tile) { return source_of(tiles, a_scale, scale, tile, top + lane / 4); };

    Source from;
    Scales next;
    if (int(blockIdx.x) < num_tiles) {
        from = source(blockIdx.x);
        load_scales(from, scale, 0, next);
    }
    int turn = 0;
    float acc[64] = {};
    for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        const Source then = source(tile + gridDim.x < num_tiles ? tile + gridDim.x : tile);
        float sum[64] = {};
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            const Scales now = next;
            const bool last = chunk + 1 == CHUNKS;
            load_scales({last ? then.row0 : from.row0, last ? then.row1 : from.row1, last ? then.gate : from.gate},
                        scale, last ? 0 : chunk + 1, next);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const u32 stage = stages + at.stage * STAGE_BYTES;
                mbarrier_wait(full + at.stage * 8, at.parity);
                multiply_block(acc, stage, stage + b_offset);
                if (lane == 0) mbarrier_arrive(empty + at.stage * 8);
                at.advance();
                promote(sum, acc, now.row[0][i] * now.gate[i], now.row[1][i] * now.gate[i],
                        now.row[0][i] * now.up[i], now.row[1][i] * now.up[i]);
            }
        }
        from = then;

        stage_rows(own_staging, sum);
        const u8* staged = smem + (own_staging - stages);
        const int chunk = lane % 8;  // of the 64 columns; rows are lane / 8, and each fourth after it
        u32 y[4][4];
        float amax[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u8* row = staged + (i * 4 + lane / 8) * STAGING_ROW + chunk * 16;
            u32 gate[4], up[4];
            load_words(row, gate), load_words(row + 128, up);
            swiglu_lane<CLAMP, SCALED>(gate, up, Swiglu{limit, alpha, beta}, y[i]);
            amax[i] = group_amax<8>(amax_bf16x2(y[i]), ALL_LANES);
        }
        // The same rows of the two consumers are those of warps 4 apart. What they exchange is kept for a
        // tile more: the other one may still read it.
        float* exchanged = reinterpret_cast<float*>(smem + (maxima - stages)) + turn * (MAXIMA / 2);
        turn ^= 1;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (chunk == 0) exchanged[warp * 16 + i * 4 + lane / 8] = amax[i];
        barrier_sync_of<64>(1 + warp % 4);
        const i64 first = i64(tile / N_TILES) * BLOCK_M + top;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = i * 4 + lane / 8;
            const float s = group_scale<UE8M0, true>(fmaxf(amax[i], exchanged[(warp ^ 4) * 16 + row]));
            const Divider<UE8M0, true> divide(s);
            u32 codes[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const u32 low = y[i][2 * j], high = y[i][2 * j + 1];
                codes[j] = e4m3x4(divide(low_f32(low)), divide(high_f32(low)), divide(low_f32(high)), divide(high_f32(high)));
            }
            store_words(q + (first + row) * N + first_column_of(tile) + warpgroup * 64 + chunk * 8, codes);
            if (warpgroup == 0 && chunk == 0) q_scale[(first + row) * N_TILES + tile % N_TILES] = s;
        }
    }
}
