// moe_gate_up_decode_fp8: the first half of the experts for few tokens, at the speed of the weights.
//
//   a, as       = group quantization of x (QUANTIZE), or given
//   h[slot, n]  = bf16( sum over 128-blocks kb of K of as[token, kb] * w_scale[e, n / 128, kb]
//                                                      * (a[token, kb] . w[e, n, kb]) )
//   y[place, n] = bf16 swiglu of h[slot, n] (gate) and h[slot, N + n] (up)
//
// y is in the order of the experts: place is where common/slot_table.cuh puts the slot.
// An item is 8 M_TILES columns of y (as many gate and up rows of w) for one chunk of an expert's slots;
// a CTA walks consecutive items. Three warps, the producers, have the copy engine fill a ring of stages
// with the item's gate rows, up rows, and tokens and scales, STAGE_BLOCKS 128-blocks of K at a time. The
// other warps split the blocks of a stage between them and add up once per item, in the warps' order.
// Weights are requested before the predecessor has ended: it does not write them.
#include "common/block_mma.cuh"
#include "common/quantize_rows.cuh"
#include "common/slot_table.cuh"
#include "common/swiglu.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"

static_assert(K % BLOCK_K == 0 && N % BLOCK_K == 0, "whole scale blocks");
static_assert(M_TILES >= 1 && 16 % M_TILES == 0, "the rows of an item lie in one scale block");
static_assert(EXPERTS < NO_EXPERT && MAX_SLOTS < 1 << 16, "experts and slots are 16-bit numbers");
static_assert(MAX_SLOTS % TOPK == 0, "room for whole tokens");

constexpr int CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + 96;
constexpr int COLUMNS = 8 * N_TILES;
constexpr int K_BLOCKS = K / BLOCK_K;
constexpr int STEPS = ceil_div(K_BLOCKS, STAGE_BLOCKS);
constexpr int WARP_BLOCKS = ceil_div(STAGE_BLOCKS, WARPS);
constexpr int PARTIALS = WARPS < K_BLOCKS ? WARPS : K_BLOCKS;
constexpr int ITEM_N = 8 * M_TILES;
constexpr int ITEMS_PER_CHUNK = N / ITEM_N;
constexpr int TILES = M_TILES * N_TILES;
constexpr int X_STRIDE = K + ROW_PADDING;

constexpr int ROW_STRIDE = STAGE_BLOCKS * BLOCK_K + ROW_PADDING;
constexpr int HALF_BYTES = ITEM_N * ROW_STRIDE;                     // gate's rows of a stage, or up's
constexpr int B_BYTES = QUANTIZE ? 0 : COLUMNS * ROW_STRIDE;
constexpr int B_SCALES = QUANTIZE ? 0 : COLUMNS * STAGE_BLOCKS;
constexpr int STAGE_BYTES = (2 * HALF_BYTES + B_BYTES + (2 * STAGE_BLOCKS + B_SCALES) * 4 + 15) / 16 * 16;

struct Arguments {
    const u8* a;               // [M, K] e4m3
    const float* a_scale;      // [M, K / 128]
    const u8* w;               // [EXPERTS, 2N, K] e4m3
    i64 w_expert_stride, w_row_stride;
    const float* w_scale;      // [EXPERTS, 2N / 128, K / 128]
    i64 w_scale_expert_stride, w_scale_n_stride, w_scale_k_stride;
};

// A stage in shared memory.
struct Stage {
    u8* smem;
    DEVICE u8* gate() const { return smem; }
    DEVICE u8* up() const { return smem + HALF_BYTES; }
    DEVICE u8* tokens() const { return smem + 2 * HALF_BYTES; }
    DEVICE float* gate_scales() const { return reinterpret_cast<float*>(smem + 2 * HALF_BYTES + B_BYTES); }
    DEVICE float* up_scales() const { return gate_scales() + STAGE_BLOCKS; }
    DEVICE float* token_scales() const { return up_scales() + STAGE_BLOCKS; }  // [blocks][COLUMNS]
};

// The s-th stage of a CTA.
struct Place {
    int chunk, n, block;       // column of y; 128-block of K

    DEVICE Place(int first_item, int s) {
        const int item = first_item + s / STEPS;
        chunk = item / ITEMS_PER_CHUNK, n = item % ITEMS_PER_CHUNK * ITEM_N, block = s % STEPS * STAGE_BLOCKS;
    }
    DEVICE int blocks() const {
        return K_BLOCKS % STAGE_BLOCKS ? min(STAGE_BLOCKS, K_BLOCKS - block) : STAGE_BLOCKS;
    }
};

// ITEM_N rows from row n on, by a warp.
DEVICE void load_rows(const Arguments& p, int expert, int n, const Place& at, u8* to, u32 barrier) {
    const int size = at.blocks() * BLOCK_K;
    if (lane_id() == 0) mbarrier_arrive_expect(barrier, ITEM_N * size);
    __syncwarp();
    const u8* from = p.w + expert * p.w_expert_stride + n * p.w_row_stride + at.block * BLOCK_K;
    for (int r = lane_id(); r < ITEM_N; r += 32)
        bulk_copy(smem_address(to + r * ROW_STRIDE), from + r * p.w_row_stride, size, barrier);
}

// By a warp. Tokens are what the predecessor wrote.
DEVICE void load_tokens(const Arguments& p, const SlotTable& table, const Chunk& chunk, const Place& at, Stage to,
                        u32 barrier) {
    if constexpr (!QUANTIZE) {
        const int size = at.blocks() * BLOCK_K;
        if (lane_id() == 0) mbarrier_arrive_expect(barrier, size * chunk.count);
        __syncwarp();
        if (lane_id() < chunk.count) {
            const i64 token = table.slots[chunk.first + lane_id()] / TOPK;
            bulk_copy(smem_address(to.tokens() + lane_id() * ROW_STRIDE), p.a + token * K + at.block * BLOCK_K,
                      size, barrier);
        }
        for (int i = lane_id(); i < at.blocks() * COLUMNS; i += 32) {
            if (i % COLUMNS >= chunk.count) continue;
            const i64 token = table.slots[chunk.first + i % COLUMNS] / TOPK;
            cp_async_4(smem_address(to.token_scales() + i), p.a_scale + token * K_BLOCKS + at.block + i / COLUMNS);
        }
    }
    const float* scale = p.w_scale + chunk.expert * p.w_scale_expert_stride +
                         at.n / BLOCK_K * p.w_scale_n_stride + at.block * p.w_scale_k_stride;
    for (int i = lane_id(); i < at.blocks(); i += 32) {
        cp_async_4(smem_address(to.gate_scales() + i), scale + i * p.w_scale_k_stride);
        cp_async_4(smem_address(to.up_scales() + i),
                   scale + N / BLOCK_K * p.w_scale_n_stride + i * p.w_scale_k_stride);
    }
    mbarrier_arrive_after_copies(barrier);
}

// The sum over the warps' parts of K, and the activation: one warp, one tile of 8 x 8 values of y.
DEVICE void finish_tile(const float4* parts, const Chunk& chunk, int column, u16* y, Swiglu swiglu) {
    float4 h = parts[lane_id()];
#pragma unroll
    for (int w = 1; w < PARTIALS; w++) {
        const float4 v = parts[w * TILES * 32 + lane_id()];
        h.x += v.x, h.y += v.y, h.z += v.z, h.w += v.w;
    }
    u32 gate[1] = {round_bf16x2(h.x, h.y)}, up[1] = {round_bf16x2(h.z, h.w)}, values[1];
    swiglu_lane<CLAMP, SCALED>(gate, up, swiglu, values);
    column += lane_id() % 4 * 2;
    u16* to = y + i64(chunk.first + column) * N + lane_row();
    if (column < chunk.count) to[0] = u16(values[0]);
    if (column + 1 < chunk.count) to[N] = u16(values[0] >> 16);
}

extern "C" __global__ void __launch_bounds__(THREADS) moe_gate_up_decode_fp8(
    const u16* x,                   // [M, K] bf16, if QUANTIZE
    i64 x_row_stride,               // elements
    const u8* a,                    // [M, K] e4m3, else
    const float* a_scale,           // [M, K / 128]
    const void* topk_ids,           // [num_slots] IDS type
    const i32* expert_map,          // [num_experts] or unused
    const u8* w,                    // [EXPERTS, 2N, K] e4m3, K contiguous, gate rows first
    i64 w_expert_stride,            // bytes, a multiple of 16
    i64 w_row_stride,               // bytes, a multiple of 16
    const float* w_scale,           // [EXPERTS, 2N / 128, K / 128], any strides
    i64 w_scale_expert_stride,      // elements
    i64 w_scale_n_stride,           // elements
    i64 w_scale_k_stride,           // elements
    u16* y,                         // [num_slots, N] bf16
    i64 num_slots,                  // M * TOPK, at most MAX_SLOTS
    i64 num_experts,
    i64 num_local_experts,
    float limit,
    float alpha,
    float beta) {
    extern __shared__ __align__(128) u8 smem[];
    const Arguments p{a, a_scale, w, w_expert_stride, w_row_stride, w_scale, w_scale_expert_stride,
                      w_scale_n_stride, w_scale_k_stride};
    const int warp = threadIdx.x / 32, slots = int(num_slots);
    float4* reduction = reinterpret_cast<float4*>(smem + STAGES * STAGE_BYTES);
    u64* barriers = reinterpret_cast<u64*>(reduction + 2 * WARPS * TILES * 32);
    u8* table_at = reinterpret_cast<u8*>(barriers + 2 * STAGES);
    const SlotTable table = slot_table_at<EXPERTS, MAX_SLOTS>(table_at, slots);
    u8* codes = table_at + slot_table_bytes<EXPERTS, MAX_SLOTS>();
    float* scales = reinterpret_cast<float*>(codes + MAX_SLOTS / TOPK * X_STRIDE);
    const u32 full = smem_address(barriers), empty = full + STAGES * 8;

    if (QUANTIZE) release_successor();  // a short call: the successor starts while this one does
    if (threadIdx.x == CONSUMERS) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(full + s * 8, 2 + (QUANTIZE ? 0 : 1) + 32);
            mbarrier_init(empty + s * 8, WARPS);
        }
        mbarrier_init_fence();
    }
    const bool few = slots <= FEW_SLOTS;
    const auto quantize = [&] {
        quantize_rows<CONSUMERS, K_BLOCKS, X_STRIDE, UE8M0>(
            slots / TOPK, [&](int m) { return x + m * x_row_stride; }, codes, scales);
    };
    if (few) {
        if (warp == WARPS)
            make_small_table<COLUMNS, IDS, MAP>(table, topk_ids, expert_map, num_experts, num_local_experts);
        if (warp >= WARPS) barrier_sync<1, THREADS - CONSUMERS>();  // for the producers the table is there
    } else {
        list_chunks<THREADS, EXPERTS, COLUMNS, IDS, MAP>(table, topk_ids, expert_map, num_experts, num_local_experts);
    }
    int first, last, total;
    const auto share_items = [&] {
        const i64 items = i64(*table.num_chunks) * ITEMS_PER_CHUNK;
        first = int(items * blockIdx.x / gridDim.x), last = int(items * (blockIdx.x + 1) / gridDim.x);
        total = (last - first) * STEPS;
    };
    const auto load_half = [&](int s, int stage) {
        const Place at(first, s);
        const Stage to{smem + stage * STAGE_BYTES};
        const bool gate = warp == WARPS;
        load_rows(p, table.chunks[at.chunk].expert, gate ? at.n : at.n + N, at, gate ? to.gate() : to.up(), full + stage * 8);
    };
    if (warp == WARPS || warp == WARPS + 1) {
        share_items();
        for (int s = 0; s < min(STAGES, total); s++) load_half(s, s);
    }
    if (QUANTIZE && few && warp < WARPS) quantize();
    if (few) {
        __syncthreads();
    } else {
        group_slots<THREADS>(table);
    }
    share_items();
    if (warp == WARPS || warp == WARPS + 1) {
        int stage = 0, parity = 0;
        for (int s = STAGES; s < total; s++) {
            mbarrier_wait(empty + stage * 8, parity);
            load_half(s, stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        release_successor();
        wait_for_predecessor();
        return;
    }
    wait_for_predecessor();
    if (warp == WARPS + 2) {
        int stage = 0, parity = 1;
        for (int s = 0; s < total; s++) {
            const Place at(first, s);
            mbarrier_wait(empty + stage * 8, parity);
            load_tokens(p, table, table.chunks[at.chunk], at, Stage{smem + stage * STAGE_BYTES}, full + stage * 8);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        cp_async_wait_all();
        return;
    }
    if (QUANTIZE && !few) {
        quantize();
        barrier_sync<2, CONSUMERS>();
    }

    int stage = 0, parity = 0;
    for (int item = first, turn = 0; item < last; item++, turn++) {
        const Chunk chunk = table.chunks[item / ITEMS_PER_CHUNK];
        const int n_tiles = (chunk.count + 7) / 8, column = lane_id() % 4 * 2;
        const u8* b[N_TILES];
        const float* b_scale[N_TILES][2];
        if constexpr (QUANTIZE) {
            const auto token = [&](int c) { return table.slots[chunk.first + min(c, chunk.count - 1)] / TOPK; };
#pragma unroll
            for (int t = 0; t < N_TILES; t++) {
                b[t] = codes + token(t * 8 + lane_row()) * X_STRIDE + lane_byte();
                b_scale[t][0] = scales + token(t * 8 + column) * K_BLOCKS;
                b_scale[t][1] = scales + token(t * 8 + column + 1) * K_BLOCKS;
            }
        }
        float sum[M_TILES][N_TILES][4] = {};
        for (int step = 0; step < STEPS; step++) {
            const Stage at{smem + stage * STAGE_BYTES};
            if constexpr (!QUANTIZE) {
#pragma unroll
                for (int t = 0; t < N_TILES; t++)
                    b[t] = at.tokens() + (t * 8 + lane_row()) * ROW_STRIDE + lane_byte();
            }
            mbarrier_wait(full + stage * 8, parity);
#pragma unroll
            for (int i = 0; i < WARP_BLOCKS; i++) {
                const int block = warp + i * WARPS, kb = step * STAGE_BLOCKS + block;
                if (STAGE_BLOCKS % WARPS && block >= STAGE_BLOCKS || K_BLOCKS % STAGE_BLOCKS && kb >= K_BLOCKS) continue;
                float part[M_TILES][N_TILES][4] = {};
                const int offset = lane_row() * ROW_STRIDE + block * BLOCK_K + lane_byte();
                multiply_block(
                    part, [&](int m) { return at.gate() + m * 8 * ROW_STRIDE + offset; },
                    [&](int m) { return at.up() + m * 8 * ROW_STRIDE + offset; },
                    [&](int t, int half) { return load_codes(b[t] + (QUANTIZE ? kb : block) * BLOCK_K + half * 64); },
                    n_tiles);
                const float gate = at.gate_scales()[block], up = at.up_scales()[block];
#pragma unroll
                for (int t = 0; t < N_TILES; t++) {
                    if (N_TILES > 1 && t >= n_tiles) continue;
                    const float* given = at.token_scales() + block * COLUMNS + t * 8 + column;
                    const float s[2] = {QUANTIZE ? b_scale[t][0][kb] : given[0],
                                        QUANTIZE ? b_scale[t][1][kb] : given[1]};
#pragma unroll
                    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
                        for (int j = 0; j < 4; j++)
                            sum[m][t][j] = fmaf(s[j % 2] * (j < 2 ? gate : up), part[m][t][j], sum[m][t][j]);
                    }
                }
            }
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive(empty + stage * 8);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        float4* buffer = reduction + turn % 2 * WARPS * TILES * 32;
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
#pragma unroll
            for (int t = 0; t < N_TILES; t++) {
                const float(&v)[4] = sum[m][t];
                buffer[(warp * TILES + m * N_TILES + t) * 32 + lane_id()] = make_float4(v[0], v[1], v[2], v[3]);
            }
        }
        barrier_sync<2, CONSUMERS>();  // also: the other buffer, which comes next, has been read
        const int n = item % ITEMS_PER_CHUNK * ITEM_N;
        for (int i = (warp + WARPS - turn * TILES % WARPS) % WARPS; i < TILES; i += WARPS) {
            if (i % N_TILES < n_tiles)
                finish_tile(buffer + i * 32, chunk, i % N_TILES * 8, y + n + i / N_TILES * 8,
                            Swiglu{limit, alpha, beta});
        }
    }
}
