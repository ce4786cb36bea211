// moe_gate_up_tiny_fp8: the first half of the experts for at most 64 slots, at the speed of the weights.
//
//   a, as       = group quantization of x
//   h[slot, n]  = bf16( sum over 128-blocks kb of K of as[token, kb] * w_scale[e, n / 128, kb]
//                                                      * (a[token, kb] . w[e, n, kb]) )
//   y[place, n] = bf16 swiglu of h[slot, n] (gate) and h[slot, N + n] (up)
//
// place is where common/small_table.cuh puts the slot. An item is 8 columns of y, 8 gate and 8 up rows
// of w, for one chunk of an expert's slots; a CTA walks consecutive items. Two warps, the producers, have
// the copy engine fill a ring of stages, one with gate rows, one with up rows, STAGE_BLOCKS 128-blocks of
// K at a time. The others, which quantize all tokens meanwhile, split the blocks of a stage between them
// and add up once per item, in the warps' order. Launched without overlap, so nothing waits.
#include "common/block_mma.cuh"
#include "common/quantize_rows.cuh"
#include "common/small_table.cuh"
#include "common/swiglu.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"

static_assert(K % BLOCK_K == 0 && N % BLOCK_K == 0, "whole scale blocks");
static_assert(MAX_TOKENS * TOPK <= 64, "one or two for each lane");
static_assert(STAGE_BLOCKS % WARPS == 0 && STAGE_BLOCKS <= 32, "as many for each warp; a lane each");

constexpr int CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + 64;
constexpr int K_BLOCKS = K / BLOCK_K;
constexpr int STEPS = ceil_div(K_BLOCKS, STAGE_BLOCKS);    // stages of an item
constexpr int PARTIALS = WARPS < K_BLOCKS ? WARPS : K_BLOCKS;
constexpr int ITEM_N = 8;
constexpr int ITEMS_PER_CHUNK = N / ITEM_N;
constexpr int ROW_STRIDE = STAGE_BLOCKS * BLOCK_K + ROW_PADDING;
constexpr int X_STRIDE = K + ROW_PADDING;

typedef SmallTable<table_slots(MAX_TOKENS * TOPK)> Table;

struct alignas(16) Half {
    u8 rows[ITEM_N * ROW_STRIDE];
    float scales[STAGE_BLOCKS];
};

struct Shared {
    Half stages[STAGES][2];                // gate, up
    float4 parts[2][WARPS][32];            // sums of two items
    u64 full[STAGES], empty[STAGES];
    Table table;
    alignas(16) u8 codes[MAX_TOKENS * X_STRIDE];
    float scales[MAX_TOKENS * K_BLOCKS];
};

struct Weights {
    const u8* w;               // [E, 2N, K] e4m3
    i64 expert_stride, row_stride;
    const float* scale;        // [E, 2N / 128, K / 128]
    i64 scale_expert_stride, scale_n_stride, scale_k_stride;
};

// The first item of a CTA.
DEVICE int first_item(const Table& table, int cta) {
    return table.num_chunks * ITEMS_PER_CHUNK * cta / int(gridDim.x);
}

// Gate's half (side 0) or up's of the stage of an item that begins at 128-block `block` of K, by a warp.
DEVICE void load_half(const Weights& p, const Table& table, int item, int block, int side, Half& to, u32 full) {
    const int expert = table.chunks[item / ITEMS_PER_CHUNK].expert;
    const int row = item % ITEMS_PER_CHUNK * ITEM_N + side * N, lane = lane_id();
    const int blocks = min(STAGE_BLOCKS, K_BLOCKS - block), size = blocks * BLOCK_K;
    if (lane == 0) mbarrier_arrive_expect(full, ITEM_N * size);
    __syncwarp();
    if (lane < ITEM_N)
        bulk_copy(smem_address(to.rows + lane * ROW_STRIDE),
                  p.w + expert * p.expert_stride + (row + lane) * p.row_stride + block * BLOCK_K, size, full);
    if (lane < blocks)
        cp_async_4(smem_address(to.scales + lane), p.scale + expert * p.scale_expert_stride +
                                                       row / BLOCK_K * p.scale_n_stride +
                                                       (block + lane) * p.scale_k_stride);
    mbarrier_arrive_after_copies(full);
}

// The sum over the warps' parts of K, and the activation, by a warp. `y` is that of the chunk's first slot.
DEVICE void finish_item(const float4 (&parts)[WARPS][32], int count, u16* y, Swiglu swiglu) {
    float4 h = parts[0][lane_id()];
#pragma unroll
    for (int w = 1; w < PARTIALS; w++) {
        const float4 v = parts[w][lane_id()];
        h.x += v.x, h.y += v.y, h.z += v.z, h.w += v.w;
    }
    u32 gate[1] = {round_bf16x2(h.x, h.y)}, up[1] = {round_bf16x2(h.z, h.w)}, values[1];
    swiglu_lane<CLAMP, SCALED>(gate, up, swiglu, values);
    const int column = lane_id() % 4 * 2;
    u16* to = y + column * N + lane_row();
    if (column < count) to[0] = u16(values[0]);
    if (column + 1 < count) to[N] = u16(values[0] >> 16);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_gate_up_tiny_fp8(
    const u16* x,                   // [M, K] bf16, rows at multiples of 16 bytes
    i64 x_row_stride,               // elements
    const void* topk_ids,           // [num_slots] IDS type
    const i32* expert_map,          // [num_experts] or unused
    const u8* w,                    // [E, 2N, K] e4m3, K contiguous, gate rows first
    i64 w_expert_stride,            // bytes, a multiple of 16
    i64 w_row_stride,               // bytes, a multiple of 16
    const float* w_scale,           // [E, 2N / 128, K / 128], any strides
    i64 w_scale_expert_stride,      // elements
    i64 w_scale_n_stride,           // elements
    i64 w_scale_k_stride,           // elements
    u16* y,                         // [num_slots, N] bf16
    i64 num_slots,                  // M * TOPK
    i64 num_experts,
    i64 num_local_experts,          // E
    float limit,
    float alpha,
    float beta) {
    extern __shared__ __align__(128) u8 smem[];
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    const Table& table = shared.table;
    const Weights weights{w, w_expert_stride, w_row_stride, w_scale, w_scale_expert_stride, w_scale_n_stride,
                          w_scale_k_stride};
    const int warp = threadIdx.x / 32, side = warp - WARPS;
    const bool produces = side >= 0;
    const u32 full = smem_address(shared.full), empty = smem_address(shared.empty);

    release_successor();  // a short call: the successor starts while this one does
    if (threadIdx.x == CONSUMERS) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(full + s * 8, 2 + 64);  // of the producers: rows; a lane's scales
            mbarrier_init(empty + s * 8, WARPS * 32);
        }
        mbarrier_init_fence();
    }
    const auto load_stage = [&](int first, int s) {
        const int stage = s % STAGES;
        mbarrier_wait(empty + stage * 8, (s / STAGES + 1) % 2);
        load_half(weights, table, first + s / STEPS, s % STEPS * STAGE_BLOCKS, side, shared.stages[stage][side],
                  full + stage * 8);
    };
    int first, last, loads;         // items; stages
    if (produces) {
        if (side == 0)
            make_small_table<IDS, MAP>(shared.table, int(num_slots), topk_ids, expert_map, num_experts,
                                       num_local_experts);
        barrier_sync<1, THREADS - CONSUMERS>();
        first = first_item(table, blockIdx.x), last = first_item(table, blockIdx.x + 1);
        loads = (last - first) * STEPS;
        for (int s = 0; s < min(STAGES, loads); s++) load_stage(first, s);
    } else {
        quantize_rows<CONSUMERS, MAX_TOKENS, K_BLOCKS, X_STRIDE, UE8M0>(
            int(num_slots) / TOPK, [&](int m) { return x + m * x_row_stride; }, shared.codes, shared.scales);
    }
    __syncthreads();
    if (produces) {
        for (int s = STAGES; s < loads; s++) load_stage(first, s);
        cp_async_wait_all();
        return;
    }

    first = first_item(table, blockIdx.x), last = first_item(table, blockIdx.x + 1);
    int stage = 0, parity = 0;
    for (int item = first, turn = 0; item < last; item++, turn++) {
        const Chunk chunk = table.chunks[item / ITEMS_PER_CHUNK];
        const auto token = [&](int column) { return table.slot(chunk, column) / TOPK; };
        const int column = lane_id() % 4 * 2;
        const u8* codes = shared.codes + token(lane_row()) * X_STRIDE + lane_byte();
        const float* scales[2] = {shared.scales + token(column) * K_BLOCKS,
                                  shared.scales + token(column + 1) * K_BLOCKS};
        float sum[4] = {};
        for (int step = 0; step < STEPS; step++) {
            const Half(&at)[2] = shared.stages[stage];
            mbarrier_wait(full + stage * 8, parity);
#pragma unroll
            for (int i = 0; i < STAGE_BLOCKS / WARPS; i++) {
                const int block = warp + i * WARPS, kb = step * STAGE_BLOCKS + block;
                const int offset = lane_row() * ROW_STRIDE + block * BLOCK_K + lane_byte();
                if (K_BLOCKS % STAGE_BLOCKS && kb >= K_BLOCKS) continue;
                float part[4] = {};
                multiply_block(part, at[0].rows + offset, at[1].rows + offset,
                               [&](int half) { return load_codes(codes + kb * BLOCK_K + half * 64); });
#pragma unroll
                for (int j = 0; j < 4; j++)
                    sum[j] = fmaf(scales[j % 2][kb] * at[j / 2].scales[block], part[j], sum[j]);
            }
            mbarrier_arrive(empty + stage * 8);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        float4(&parts)[WARPS][32] = shared.parts[turn % 2];
        parts[warp][lane_id()] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        barrier_sync<2, CONSUMERS>();  // also: the other parts, which come next, have been read
        if (warp == turn % WARPS)
            finish_item(parts, chunk.count, y + i64(chunk.first) * N + item % ITEMS_PER_CHUNK * ITEM_N,
                        Swiglu{limit, alpha, beta});
    }
}
