// moe_down_decode_fp8: the second half of the experts for few tokens, at the speed of the weights.
//
//   q, qs      = group quantization of y (QUANTIZE), or given; both in the order of the experts
//   d[slot, k] = bf16( sum over 128-blocks nb of N of qs[place, nb] * w_scale[e, k / 128, nb]
//                                                     * (q[place, nb] . w[e, k, nb]) )
//   out[m, k]  = bf16( factor * sum over j, ascending, of weight[m, j] * d[m * TOPK + j, k] )
//
// Output-stationary: a CTA owns some columns k of out, streams those rows of all active experts past the
// slots of each, keeps d in shared memory and combines it there, in passes of 16 PASS_TILES columns so
// that d fits. Within a pass a warp takes every WARPS-th item, 16 ITEM_TILES
// rows for one chunk of an expert's slots, STAGE_BLOCKS 128-blocks of N at a time, and streams its own
// weights ahead of itself. Weights are requested before the predecessor has ended: it does not write them.
#include "common/block_mma.cuh"
#include "common/quantize_rows.cuh"
#include "common/slot_table.cuh"
#include "common/weight_ring.cuh"
#include "ptx/pdl.cuh"

static_assert(K % BLOCK_K == 0 && N % (BLOCK_K * STAGE_BLOCKS) == 0, "whole scale blocks and stages");
static_assert(PASS_TILES % ITEM_TILES == 0, "whole items");
static_assert(EXPERTS < NO_EXPERT && MAX_SLOTS < 1 << 16, "experts and slots are 16-bit numbers");
static_assert(MAX_SLOTS % TOPK == 0, "room for whole tokens");

constexpr int THREADS = 32 * WARPS;
constexpr int COLUMNS = 8 * N_TILES;
constexpr int N_BLOCKS = N / BLOCK_K;
constexpr int STEPS = N_BLOCKS / STAGE_BLOCKS;
constexpr int PASS_ROWS = 16 * PASS_TILES;
constexpr int ITEMS_PER_CHUNK = PASS_TILES / ITEM_TILES;   // within a pass
constexpr int ITEM_ROWS = 16 * ITEM_TILES;
constexpr int ROW_BYTES = STAGE_BLOCKS * BLOCK_K;   // of a stage
constexpr int Q_STRIDE = N + ROW_PADDING;

typedef WeightRing<STAGES, ITEM_ROWS * ROW_BYTES> Ring;

struct Arguments {
    const u8* w;               // [EXPERTS, K, N] e4m3
    i64 w_expert_stride;
    const float* w_scale;      // [EXPERTS, K / 128, N / 128]
    i64 w_scale_expert_stride, w_scale_k_stride, w_scale_n_stride;
    const void* topk_weights;  // [M, TOPK]
    u16* out;                  // [M, K] bf16
    i64 out_row_stride;
    float factor;
};

// The first column of a CTA's pass. The last CTAs may have passes beyond K.
DEVICE int first_column(int passes, int pass) { return (int(blockIdx.x) * passes + pass) * PASS_ROWS; }

// Where a warp is: its stages of a pass in order, pass after pass.
struct Cursor {
    int items, passes;         // of a pass; of the CTA
    int pass, item, step;

    DEVICE Cursor(int items, int passes)
        : items(items), passes(int(threadIdx.x / 32) < items ? passes : 0), pass(0), item(threadIdx.x / 32), step(0) {}
    DEVICE void advance() {
        if (++step < STEPS) return;
        step = 0, item += WARPS;
        if (item >= items) item = threadIdx.x / 32, pass++;
    }
    DEVICE bool more() const { return pass < passes; }
    DEVICE int chunk() const { return item / ITEMS_PER_CHUNK; }
    DEVICE int tile() const { return item % ITEMS_PER_CHUNK * ITEM_TILES; }  // of the pass
    DEVICE int row() const { return first_column(passes, pass) + tile() * 16; }
};

// The slots' codes and all scales of a stage, as this lane needs them.
struct Operands {
    uint4 codes[STAGE_BLOCKS][N_TILES][2];
    float slot_scale[STAGE_BLOCKS][N_TILES][2];
    float w_scale[STAGE_BLOCKS][ITEM_TILES];

    // Codes and scales from the place of the chunk's first slot on, CODE_STRIDE bytes a slot.
    template <int CODE_STRIDE>
    DEVICE void load_slots(const Chunk& chunk, const Cursor& at, const u8* from, const float* scales) {
#pragma unroll
        for (int i = 0; i < STAGE_BLOCKS; i++) {
            const int nb = at.step * STAGE_BLOCKS + i;
#pragma unroll
            for (int t = 0; t < N_TILES; t++) {
                const int row = t * 8 + lane_row(), column = t * 8 + lane_id() % 4 * 2;
#pragma unroll
                for (int half = 0; half < 2; half++)
                    if (row < chunk.count)
                        codes[i][t][half] = load_codes(from + row * CODE_STRIDE + nb * BLOCK_K + half * 64 + lane_byte());
#pragma unroll
                for (int c = 0; c < 2; c++)
                    slot_scale[i][t][c] = scales[min(column + c, chunk.count - 1) * N_BLOCKS + nb];
            }
        }
    }

    DEVICE void load_weight_scales(const Arguments& p, const Chunk& chunk, const Cursor& at) {
        const float* from = p.w_scale + chunk.expert * p.w_scale_expert_stride;
#pragma unroll
        for (int m = 0; m < ITEM_TILES; m++) {
            const float* row = from + min(at.row() + m * 16, K - 1) / BLOCK_K * p.w_scale_k_stride;
#pragma unroll
            for (int i = 0; i < STAGE_BLOCKS; i++)
                w_scale[i][m] = row[(at.step * STAGE_BLOCKS + i) * p.w_scale_n_stride];
        }
    }
};

// Adds up the slots of each token for the columns of a pass, from `first` on: two columns a thread.
DEVICE void combine(const Arguments& p, const SlotTable& table, const u32* d, int first) {
    constexpr int PAIRS = PASS_ROWS / 2;
    for (int i = threadIdx.x; i < table.num_slots / TOPK * PAIRS; i += THREADS) {
        const int token = i / PAIRS, pair = i % PAIRS, column = first + pair * 2;
        if (column >= K) continue;
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int j = 0; j < TOPK; j++) {
            const int slot = token * TOPK + j;
            if (table.expert_of[slot] == NO_EXPERT) continue;
            const float w = WEIGHT >= 0 ? load_float<WEIGHT>(p.topk_weights, slot) : 1.0f;
            const u32 v = d[slot * PAIRS + pair];
            low = low + w * low_f32(v), high = high + w * high_f32(v);
        }
        const u32 v[1] = {round_bf16x2(low * p.factor, high * p.factor)};
        store_bf16x2<ALIGNED>(p.out + token * p.out_row_stride + column, v);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) moe_down_decode_fp8(
    const u16* y,                   // [num_slots, N] bf16, if QUANTIZE
    const u8* q,                    // [num_slots, N] e4m3, else
    const float* q_scale,           // [num_slots, N / 128]
    const void* topk_ids,           // [M, TOPK] IDS type
    const void* topk_weights,       // [M, TOPK] WEIGHT type, or unused
    const i32* expert_map,          // [num_experts] or unused
    const u8* w,                    // [EXPERTS, K, N] e4m3, [K, N] contiguous
    i64 w_expert_stride,            // bytes, a multiple of 16
    const float* w_scale,           // [EXPERTS, K / 128, N / 128], any strides
    i64 w_scale_expert_stride,      // elements
    i64 w_scale_k_stride,           // elements
    i64 w_scale_n_stride,           // elements
    u16* out,                       // [M, K] bf16
    i64 out_row_stride,             // elements
    i64 num_slots,                  // M * TOPK, at most MAX_SLOTS
    i64 num_experts,
    i64 num_local_experts,
    i64 passes,                     // of a CTA
    float factor) {
    extern __shared__ __align__(128) u8 smem[];
    const Arguments p{w, w_expert_stride, w_scale, w_scale_expert_stride, w_scale_k_stride, w_scale_n_stride, topk_weights, out,
                      out_row_stride, factor};
    const int warp = threadIdx.x / 32, slots = int(num_slots);
    u64* barriers = reinterpret_cast<u64*>(smem + WARPS * Ring::BYTES);
    u8* d = reinterpret_cast<u8*>(barriers + ceil_div(WARPS * STAGES, 2) * 2);  // [num_slots, PASS_ROWS] bf16
    u8* table_at = d + MAX_SLOTS * PASS_ROWS * 2;
    const SlotTable table = slot_table_at<EXPERTS, MAX_SLOTS>(table_at, slots);
    u8* codes = table_at + slot_table_bytes<EXPERTS, MAX_SLOTS>();
    float* scales = reinterpret_cast<float*>(codes + MAX_SLOTS * Q_STRIDE);

    release_successor();
    Ring ring(smem, barriers);
    const bool few = slots <= FEW_SLOTS;
    if (few) {
        if (warp == 0) make_small_table<COLUMNS, IDS, MAP>(table, topk_ids, expert_map, num_experts, num_local_experts);
        __syncthreads();
    } else {
        list_chunks<THREADS, EXPERTS, COLUMNS, IDS, MAP>(table, topk_ids, expert_map, num_experts, num_local_experts);
    }
    const int num_chunks = *table.num_chunks, items = num_chunks * ITEMS_PER_CHUNK;
    const auto fill = [&](const Cursor& at, int stage) {
        const int rows = max(0, min(ITEM_ROWS, K - at.row()));
        const u8* from = p.w + table.chunks[at.chunk()].expert * p.w_expert_stride + i64(at.row()) * N;
        if constexpr (STEPS == 1) {
            ring.fill(stage, rows * N, from);
        } else {
            ring.fill_rows(stage, rows, ROW_BYTES, from + at.step * ROW_BYTES, N);
        }
    };
    Cursor ahead(items, int(passes)), soon = ahead;
    for (int s = 0; s < STAGES && ahead.more(); s++) fill(ahead, s), ahead.advance();
    Operands next;
    if (soon.more()) next.load_weight_scales(p, table.chunks[soon.chunk()], soon);
    if (!few) group_slots<THREADS>(table);
    wait_for_predecessor();
    if constexpr (QUANTIZE) {
        const Chunk last = table.chunks[max(0, num_chunks - 1)];
        quantize_rows<THREADS, N_BLOCKS, Q_STRIDE, UE8M0>(
            num_chunks ? last.first + last.count : 0, [&](int i) { return y + i64(i) * N; }, codes, scales);
        __syncthreads();
    }

    const auto load_slots = [&](const Cursor& at, Operands& to) {
        const Chunk chunk = table.chunks[at.chunk()];
        if constexpr (QUANTIZE) {
            to.load_slots<Q_STRIDE>(chunk, at, codes + chunk.first * Q_STRIDE, scales + chunk.first * N_BLOCKS);
        } else {
            to.load_slots<N>(chunk, at, q + i64(chunk.first) * N, q_scale + chunk.first * N_BLOCKS);
        }
    };
    Operands now;
    if (soon.more()) load_slots(soon, next);
    for (int pass = 0; pass < passes; pass++) {
        for (int item = warp; item < items; item += WARPS) {
            const int tile = item % ITEMS_PER_CHUNK * ITEM_TILES;
            const Chunk chunk = table.chunks[item / ITEMS_PER_CHUNK];
            const int n_tiles = (chunk.count + 7) / 8, column = lane_id() % 4 * 2;
            float sum[ITEM_TILES][N_TILES][4] = {};
            for (int step = 0; step < STEPS; step++) {
                now = next;
                soon.advance();
                if (soon.more()) {
                    next.load_weight_scales(p, table.chunks[soon.chunk()], soon);
                    load_slots(soon, next);
                }
                const u8* rows = ring.wait();
#pragma unroll
                for (int i = 0; i < STAGE_BLOCKS; i++) {
                    float part[ITEM_TILES][N_TILES][4] = {};
                    const u8* row = rows + lane_row() * ROW_BYTES + i * BLOCK_K + lane_byte();
                    multiply_block(
                        part, [&](int m) { return row + m * 16 * ROW_BYTES; },
                        [&](int m) { return row + (m * 16 + 8) * ROW_BYTES; },
                        [&](int t, int half) { return now.codes[i][t][half]; }, n_tiles);
#pragma unroll
                    for (int t = 0; t < N_TILES; t++) {
                        if (N_TILES > 1 && t >= n_tiles) continue;
#pragma unroll
                        for (int m = 0; m < ITEM_TILES; m++) {
#pragma unroll
                            for (int j = 0; j < 4; j++)
                                sum[m][t][j] = fmaf(now.slot_scale[i][t][j % 2] * now.w_scale[i][m], part[m][t][j], sum[m][t][j]);
                        }
                    }
                }
                __syncwarp();
                if (ahead.more()) fill(ahead, ring.stage), ahead.advance();
                ring.advance();
            }
            u16* to = reinterpret_cast<u16*>(d) + tile * 16 + lane_row();
#pragma unroll
            for (int t = 0; t < N_TILES; t++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int c = t * 8 + column + i;
                    if (c >= chunk.count) continue;
                    u16* row = to + table.slots[chunk.first + c] * PASS_ROWS;
#pragma unroll
                    for (int m = 0; m < ITEM_TILES; m++) {
                        row[m * 16] = f32_to_bf16(sum[m][t][i]);
                        row[m * 16 + 8] = f32_to_bf16(sum[m][t][i + 2]);
                    }
                }
            }
        }
        __syncthreads();
        combine(p, table, reinterpret_cast<const u32*>(d), first_column(int(passes), pass));
        if (pass + 1 < passes) __syncthreads();
    }
}
