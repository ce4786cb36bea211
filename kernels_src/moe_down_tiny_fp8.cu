// moe_down_tiny_fp8: the second half of the experts for at most 64 slots, at the speed of the weights.
//
//   q, qs      = group quantization of y, which is in the order of common/small_table.cuh
//   d[slot, k] = bf16( sum over 128-blocks nb of N of qs[place, nb] * w_scale[e, k / 128, nb]
//                                                     * (q[place, nb] . w[e, k, nb]) )
//   out[m, k]  = bf16( factor * sum over j, ascending, of weight[m, j] * d[m * TOPK + j, k] )
//
// Output-stationary: a CTA owns 16 TILES columns k of out, streams those rows of all active experts past
// the slots of each, keeps d in shared memory and combines it there. A warp takes every WARPS-th item, 16
// rows for one chunk of an expert's slots, STAGE_BLOCKS 128-blocks of N at a time, and streams its own
// weights ahead of itself. Weights are requested before the predecessor has ended: it does not write them.
#include "common/block_mma.cuh"
#include "common/quantize_rows.cuh"
#include "common/small_table.cuh"
#include "common/weight_ring.cuh"
#include "ptx/pdl.cuh"

static_assert(K % BLOCK_K == 0 && N % (BLOCK_K * STAGE_BLOCKS) == 0, "whole scale blocks and stages");
static_assert(MAX_TOKENS * TOPK <= 64, "one or two for each lane");

constexpr int THREADS = 32 * WARPS;
constexpr int MAX_SLOTS = MAX_TOKENS * TOPK;
constexpr int N_BLOCKS = N / BLOCK_K;
constexpr int STEPS = N_BLOCKS / STAGE_BLOCKS;      // stages of an item
constexpr int ITEM_ROWS = 16;
constexpr int CTA_ROWS = ITEM_ROWS * TILES;
constexpr int ROW_BYTES = STAGE_BLOCKS * BLOCK_K;   // of a stage
constexpr int Q_STRIDE = N + ROW_PADDING;

typedef WeightRing<STAGES, ITEM_ROWS * ROW_BYTES> Ring;
typedef SmallTable<table_slots(MAX_SLOTS)> Table;

struct Shared {
    u8 ring[WARPS * Ring::BYTES];
    u64 barriers[WARPS * STAGES];
    Table table;
    float weights[table_slots(MAX_SLOTS)]; // of the router
    u16 d[MAX_SLOTS * CTA_ROWS];           // bf16
    alignas(16) u8 codes[MAX_SLOTS * Q_STRIDE];
    float scales[MAX_SLOTS * N_BLOCKS];
};

struct Weights {
    const u8* w;               // [E, K, N] e4m3
    i64 expert_stride;
    const float* scale;        // [E, K / 128, N / 128]
    i64 scale_expert_stride, scale_k_stride, scale_n_stride;
};

// The s-th stage of a warp.
struct Place {
    Chunk chunk;
    int tile, row, block;      // of the CTA; row of w; 128-block of N

    DEVICE Place(const Table& table, int s) {
        const int item = threadIdx.x / 32 + s / STEPS * WARPS;
        chunk = table.chunks[item / TILES], tile = item % TILES, block = s % STEPS * STAGE_BLOCKS;
        // Tiles of the last CTA may lie beyond K: they repeat the last one, and nobody reads the result.
        row = min(int(blockIdx.x) * CTA_ROWS + tile * ITEM_ROWS, K - ITEM_ROWS);
    }
};

DEVICE void load_rows(const Weights& p, const Place& at, const Ring& ring, int stage) {
    const u8* from = p.w + at.chunk.expert * p.expert_stride + i64(at.row) * N;
    if constexpr (STEPS == 1) {
        ring.fill(stage, ITEM_ROWS * N, from);
    } else {
        ring.fill_rows(stage, ITEM_ROWS, ROW_BYTES, from + at.block * BLOCK_K, N);
    }
}

DEVICE void load_scales(const Weights& p, const Place& at, float (&to)[STAGE_BLOCKS]) {
    const float* from = p.scale + at.chunk.expert * p.scale_expert_stride + at.row / BLOCK_K * p.scale_k_stride +
                        at.block * p.scale_n_stride;
#pragma unroll
    for (int i = 0; i < STAGE_BLOCKS; i++) to[i] = from[i * p.scale_n_stride];
}

// What a lane needs of a stage's slots.
struct Operands {
    uint4 codes[STAGE_BLOCKS][2];
    float scales[STAGE_BLOCKS][2];

    DEVICE Operands(const Shared& shared, const Place& at) {
        const int column = lane_id() % 4 * 2;
        const u8* row = shared.codes + Table::place(at.chunk, lane_row()) * Q_STRIDE + lane_byte();
        const float* low = shared.scales + Table::place(at.chunk, column) * N_BLOCKS;
        const float* high = shared.scales + Table::place(at.chunk, column + 1) * N_BLOCKS;
#pragma unroll
        for (int i = 0; i < STAGE_BLOCKS; i++) {
            const int nb = at.block + i;
            codes[i][0] = load_codes(row + nb * BLOCK_K), codes[i][1] = load_codes(row + nb * BLOCK_K + 64);
            scales[i][0] = low[nb], scales[i][1] = high[nb];
        }
    }
};

DEVICE void store_tile(const float (&sum)[4], const Place& at, Shared& shared) {
    u16* to = shared.d + at.tile * ITEM_ROWS + lane_row();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int column = lane_id() % 4 * 2 + i;
        if (column >= at.chunk.count) continue;
        u16* row = to + shared.table.slot(at.chunk, column) * CTA_ROWS;
        row[0] = f32_to_bf16(sum[i]), row[8] = f32_to_bf16(sum[i + 2]);
    }
}

// Adds up the slots of each token: two columns a thread.
DEVICE void combine(const Shared& shared, int tokens, u16* out, i64 out_row_stride, float factor) {
    constexpr int PAIRS = CTA_ROWS / 2;
    const u32* d = reinterpret_cast<const u32*>(shared.d);
    for (int i = threadIdx.x; i < tokens * PAIRS; i += THREADS) {
        const int token = i / PAIRS, pair = i % PAIRS, column = blockIdx.x * CTA_ROWS + pair * 2;
        if (column >= K) continue;
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int j = 0; j < TOPK; j++) {
            const int slot = token * TOPK + j;
            if (!shared.table.has(slot)) continue;
            const float w = shared.weights[slot];
            const u32 v = d[slot * PAIRS + pair];
            low = low + w * low_f32(v), high = high + w * high_f32(v);
        }
        const u32 v[1] = {round_bf16x2(low * factor, high * factor)};
        store_bf16x2<ALIGNED>(out + token * out_row_stride + column, v);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_down_tiny_fp8(
    const u16* y,                   // [num_slots, N] bf16
    const void* topk_ids,           // [M, TOPK] IDS type
    const void* topk_weights,       // [M, TOPK] WEIGHT type
    const i32* expert_map,          // [num_experts] or unused
    const u8* w,                    // [E, K, N] e4m3, [K, N] contiguous
    i64 w_expert_stride,            // bytes, a multiple of 16
    const float* w_scale,           // [E, K / 128, N / 128], any strides
    i64 w_scale_expert_stride,      // elements
    i64 w_scale_k_stride,           // elements
    i64 w_scale_n_stride,           // elements
    u16* out,                       // [M, K] bf16
    i64 out_row_stride,             // elements
    i64 num_slots,                  // M * TOPK
    i64 num_experts,
    i64 num_local_experts,          // E
    float factor) {
    extern __shared__ __align__(128) u8 smem[];
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    const Table& table = shared.table;
    const Weights weights{w, w_expert_stride, w_scale, w_scale_expert_stride, w_scale_k_stride, w_scale_n_stride};
    const int warp = threadIdx.x / 32, slots = int(num_slots);

    release_successor();
    Ring ring(shared.ring, shared.barriers);
    if (warp == 0)
        make_small_table<IDS, MAP>(shared.table, slots, topk_ids, expert_map, num_experts, num_local_experts);
    const int slot = int(threadIdx.x) - 32;  // by the warps beside it
    if (slot >= 0 && slot < slots) shared.weights[slot] = load_float<WEIGHT>(topk_weights, slot);
    __syncthreads();
    const int items = table.num_chunks * TILES;
    const int loads = (max(0, items - warp) + WARPS - 1) / WARPS * STEPS;
    for (int s = 0; s < min(STAGES, loads); s++) load_rows(weights, Place(table, s), ring, s);
    float next[STAGE_BLOCKS];
    if (loads) load_scales(weights, Place(table, 0), next);
    wait_for_predecessor();
    quantize_rows<THREADS, MAX_SLOTS, N_BLOCKS, Q_STRIDE, UE8M0>(
        table.places(), [&](int i) { return y + i64(i) * N; }, shared.codes, shared.scales);
    __syncthreads();

    float sum[4];
    for (int s = 0; s < loads; s++) {
        const Place at(table, s);
        const Operands slots_at(shared, at);
        float w_scales[STAGE_BLOCKS];
#pragma unroll
        for (int i = 0; i < STAGE_BLOCKS; i++) w_scales[i] = next[i];
        if (s + 1 < loads) load_scales(weights, Place(table, s + 1), next);
        if (s % STEPS == 0) sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
        const u8* rows = ring.wait() + lane_row() * ROW_BYTES + lane_byte();
#pragma unroll
        for (int i = 0; i < STAGE_BLOCKS; i++) {
            float part[4] = {};
            multiply_block(part, rows + i * BLOCK_K, rows + 8 * ROW_BYTES + i * BLOCK_K,
                           [&](int half) { return slots_at.codes[i][half]; });
#pragma unroll
            for (int j = 0; j < 4; j++) sum[j] = fmaf(slots_at.scales[i][j % 2] * w_scales[i], part[j], sum[j]);
        }
        __syncwarp();
        if (s + STAGES < loads) load_rows(weights, Place(table, s + STAGES), ring, ring.stage);
        ring.advance();
        if (s % STEPS == STEPS - 1) store_tile(sum, at, shared);
    }
    __syncthreads();
    combine(shared, slots / TOPK, out, out_row_stride, factor);
}
