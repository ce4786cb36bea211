// moe_gate_up_decode_fp8: the first half of the experts for few tokens, at the speed of the weights.
//
//   h[place, n] = bf16( sum over 128-blocks kb of K of a_scale[place, kb] * w_scale[e, n / 128, kb]
//                                                       * (a[place, kb] . w[e, n, kb]) )
//   y[place, n] = bf16 swiglu of h[place, n] (gate) and h[place, N + n] (up)
//
// place is that of common/expert_chunks.cuh. Weights are the M of wgmma, slots its N. A group is 8 columns
// of y: 8 gate rows and 8 up rows of w, so that a thread holds both of a value. An item is up to 4 groups
// for one chunk; CTAs claim items from a counter, since SMs do not get equal shares of the memory. One
// warp has the copy engine fill the stages with weights, another with slots, a third fetches an item's
// scales. Two warpgroups take the even and the odd blocks of K and add up once per item.
// Weights are requested before the predecessor has ended: it does not write them.
#include "common/decode_tile.cuh"
#include "common/swiglu.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"

static_assert(K % BLOCK_K == 0 && N % BLOCK_K == 0, "whole scale blocks");

constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 96;
constexpr int K_BLOCKS = K / BLOCK_K, STAGE_BLOCKS = 4, STEPS = ceil_div(K_BLOCKS, STAGE_BLOCKS);
constexpr int GROUPS = N / 8;                       // of a chunk
constexpr int ITEM_GROUPS = 4, GROUP_BYTES = 2 * TILE, A_BYTES = ITEM_GROUPS * GROUP_BYTES;
constexpr int STAGE_BYTES = STAGE_BLOCKS * (A_BYTES + N_TILES * TILE);
constexpr int PITCH = scale_pitch(K_BLOCKS);
constexpr int HEADS = 2, QUEUE = 4;
constexpr int HEAD_FLOATS = COLUMNS * PITCH + ceil_div(2 * K_BLOCKS, 4) * 4;
static_assert(GROUPS % ITEM_GROUPS == 0, "an item has one chunk and one scale block");

// Some groups of one chunk; none behind the last item.
struct Item {
    int group, count;

    DEVICE int chunk() const { return group / GROUPS; }
    DEVICE int first() const { return group % GROUPS; }  // of the chunk
};

// How the groups of a call are cut: most into whole items, the last into smaller ones, so that CTAs end
// together. Where there is less than an item for each CTA all are as small as gives each of them one.
struct Cut {
    int groups, whole, halves;   // items of 4, of 2; the rest are of 1

    DEVICE Cut(int groups, int ctas) : groups(groups) {
        const int share = ceil_div(groups, ctas), tail = groups / 8;
        whole = share > ITEM_GROUPS ? (groups - tail - ctas) / ITEM_GROUPS : share > 2 ? groups / ITEM_GROUPS : 0;
        halves = share > ITEM_GROUPS ? tail / 2 : share == 2 ? groups / 2 : 0;
    }
    DEVICE Item operator[](int i) const {
        if (i < whole) return {i * ITEM_GROUPS, ITEM_GROUPS};
        if (i < whole + halves) return {whole * ITEM_GROUPS + (i - whole) * 2, 2};
        const int group = whole * ITEM_GROUPS + halves * 2 + i - whole - halves;
        return {group, group < groups ? 1 : 0};
    }
};

// Shared memory, and who waits for what in it.
struct Shared {
    u32 stages, full, empty;             // rings of STAGES
    float* heads;                        // [HEADS][HEAD_FLOATS]: a chunk's scales, then gate's and up's
    u32 head_full, head_empty;
    float4* exchange;                    // [2][N_TILES][128] sums of the second warpgroup
    Item* queue;                         // [QUEUE]
    u32 queue_full, queue_empty;
    Chunk* chunks;

    DEVICE explicit Shared(u8* smem) {
        stages = smem_address(smem);
        heads = reinterpret_cast<float*>(smem + STAGES * STAGE_BYTES);
        exchange = reinterpret_cast<float4*>(heads + HEADS * HEAD_FLOATS);
        u64* barriers = reinterpret_cast<u64*>(exchange + 2 * N_TILES * 128);
        full = smem_address(barriers), empty = full + STAGES * 8;
        head_full = empty + STAGES * 8, head_empty = head_full + HEADS * 8;
        queue_full = head_empty + HEADS * 8, queue_empty = queue_full + QUEUE * 8;
        queue = reinterpret_cast<Item*>(barriers + 2 * (STAGES + HEADS + QUEUE));
        chunks = reinterpret_cast<Chunk*>(queue + QUEUE);
    }
    DEVICE void init() const {
        for (int s = 0; s < STAGES; s++) mbarrier_init(full + s * 8, 2), mbarrier_init(empty + s * 8, CONSUMERS / 32);
        for (int s = 0; s < HEADS; s++) mbarrier_init(head_full + s * 8, 1 + 32), mbarrier_init(head_empty + s * 8, CONSUMERS);
        for (int s = 0; s < QUEUE; s++) mbarrier_init(queue_full + s * 8, 1), mbarrier_init(queue_empty + s * 8, 1 + 32 + CONSUMERS);
        mbarrier_init_fence();
    }
    DEVICE u32 stage(int s) const { return stages + s * STAGE_BYTES; }
    DEVICE Item item(const Ring<QUEUE>& at) const {
        mbarrier_wait(queue_full + at.stage * 8, at.parity);
        return queue[at.stage];
    }
    DEVICE void item_done(Ring<QUEUE>& at) const {
        mbarrier_arrive(queue_empty + at.stage * 8);
        at.advance();
    }
};

// The weights of a step of an item. A box costs its time whatever its size: one for each block.
DEVICE void load_weights(u32 smem, const TensorMap& map, const Item& item, int expert, int step, u64 policy, u32 barrier) {
    mbarrier_arrive_expect(barrier, STAGE_BLOCKS * item.count * GROUP_BYTES);
#pragma unroll
    for (int b = 0; b < STAGE_BLOCKS; b++)
        copy_box_5d(smem + b * A_BYTES, map, (step * STAGE_BLOCKS + b) * BLOCK_K, 0, 0, item.first(), expert, barrier, policy);
}

// One item: products, activation and y to memory.
template <int TILES>
DEVICE void run_item(const Chunk& chunk, const Shared& shared, Ring<STAGES>& at, const float* scales, float4* exchange,
                     const Item& item, u16* y, const Swiglu& swiglu) {
    constexpr int BLOCKS = STAGE_BLOCKS / 2;         // of a warpgroup
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float sum[4 * TILES] = {}, acc[BLOCKS][4 * TILES] = {};
    const float *column = scales + lane % 4 * 2 * PITCH, *gate = scales + COLUMNS * PITCH, *up = gate + K_BLOCKS;
    for (int step = 0; step < STEPS; step++, at.advance()) {
        const u32 a = shared.stage(at.stage), b = a + STAGE_BLOCKS * A_BYTES;
        mbarrier_wait(shared.full + at.stage * 8, at.parity);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const int block = 2 * i + warpgroup;
            multiply_block<TILES, STAGE_BLOCKS>(acc[i], a + block * A_BYTES, b + block * TILE);
        }
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) wgmma_wait(acc[i]);
        if (lane == 0) mbarrier_arrive(shared.empty + at.stage * 8);
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const int kb = step * STAGE_BLOCKS + 2 * i + warpgroup;
            if (K_BLOCKS % STAGE_BLOCKS && kb >= K_BLOCKS) continue;
#pragma unroll
            for (int j = 0; j < 4 * TILES; j++)
                sum[j] = fmaf(column[(j / 4 * 8 + j % 2) * PITCH + kb] * (j % 4 < 2 ? gate : up)[kb], acc[i][j], sum[j]);
        }
    }
    exchange += threadIdx.x % 128;
    if (warpgroup == 1) {
#pragma unroll
        for (int t = 0; t < TILES; t++)
            exchange[t * 128] = make_float4(sum[4 * t], sum[4 * t + 1], sum[4 * t + 2], sum[4 * t + 3]);
    }
    barrier_sync<1, CONSUMERS>();  // also: the other buffer, which comes next, has been read
    if (warpgroup == 1 || warp >= item.count) return;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const float4 v = exchange[t * 128];
        u32 gates[1] = {round_bf16x2(sum[4 * t] + v.x, sum[4 * t + 1] + v.y)};
        u32 ups[1] = {round_bf16x2(sum[4 * t + 2] + v.z, sum[4 * t + 3] + v.w)}, values[1];
        swiglu_lane<CLAMP, SCALED>(gates, ups, swiglu, values);
        const int slot = t * 8 + lane % 4 * 2;
        u16* to = y + i64(chunk.first + slot) * N + (item.first() + warp) * 8 + lane / 4;
        if (slot < chunk.count) to[0] = u16(values[0]);
        if (slot + 1 < chunk.count) to[N] = u16(values[0] >> 16);
    }
}

// The same with the fewest columns, of 8, 16, 32, that hold the chunk.
template <int MOST, class... Rest>
DEVICE void run_item_of(const Chunk& chunk, Rest&... rest) {
    if constexpr (MOST > 1) {
        if (tiles_of(chunk) <= MOST / 2) return run_item_of<MOST / 2>(chunk, rest...);
    }
    run_item<MOST>(chunk, rest...);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_gate_up_decode_fp8(
    const __grid_constant__ TensorMap item_map,   // w [E, N / 8, 2, 8, K] e4m3, gate and up of 8 columns; boxes of 4
                                                  // groups by 128
    const __grid_constant__ TensorMap half_map,   // of 2
    const __grid_constant__ TensorMap group_map,  // of 1
    const __grid_constant__ TensorMap a_map,      // a [K / 128, num_slots, 128] e4m3, boxes of STAGE_BLOCKS by 8 slots
    const float* a_scale,           // [num_slots, PITCH]
    const void* topk_ids,           // [num_slots] IDS type
    const i32* expert_map,          // [num_experts] or unused
    const float* w_scale,           // [EXPERTS, 2N / 128, K / 128], any strides
    i64 w_scale_expert_stride,      // elements
    i64 w_scale_n_stride,           // elements
    i64 w_scale_k_stride,           // elements
    u16* y,                         // [num_slots, N] bf16
    i32* counter,                   // [1] 0 once the predecessor has ended
    i64 num_slots,                  // at most MAX_SLOTS
    i64 num_experts,
    i64 num_local_experts,
    float limit,
    float alpha,
    float beta) {
    extern __shared__ __align__(1024) u8 smem[];
    const Shared shared(smem);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) prefetch_tensor_map(item_map), prefetch_tensor_map(a_map), shared.init();
    const int num_chunks = list_chunks<THREADS, EXPERTS, MAX_SLOTS, COLUMNS, IDS, MAP>(
        shared.chunks, topk_ids, int(num_slots), expert_map, num_experts, num_local_experts);
    Ring<STAGES> at;
    Ring<HEADS> head;
    Ring<QUEUE> turn;

    if (warp == CONSUMERS / 32) {  // claims items and loads weights
        if (lane == 0) {
            const Cut cut(num_chunks * GROUPS, gridDim.x);
            const u64 policy = evict_first();
            int next = -1;              // the item after this one
            const auto claim = [&] { next = gridDim.x + atomicAdd(counter, 1); };
            for (int i = blockIdx.x;; i = next, turn.advance()) {
                const Item item = cut[i];
                mbarrier_wait(shared.queue_empty + turn.stage * 8, turn.parity ^ 1);
                shared.queue[turn.stage] = item;
                mbarrier_arrive(shared.queue_full + turn.stage * 8);
                if (!item.count) break;
                const bool is_first = next < 0;
                if (!is_first) claim();
                const int expert = shared.chunks[item.chunk()].expert;
                const TensorMap& map = item.count == ITEM_GROUPS ? item_map : item.count == 2 ? half_map : group_map;
                for (int step = 0; step < STEPS; step++, at.advance()) {
                    if (is_first && step == STAGES) wait_for_predecessor(), claim();
                    mbarrier_wait(shared.empty + at.stage * 8, at.parity ^ 1);
                    load_weights(shared.stage(at.stage), map, item, expert, step, policy, shared.full + at.stage * 8);
                }
                if (next < 0) wait_for_predecessor(), claim();
            }
        }
        release_successor();
        wait_for_predecessor();
        return;
    }
    release_successor();
    wait_for_predecessor();
    if (warp == CONSUMERS / 32 + 1) {  // loads slots
        if (lane) return;
        for (Item item = shared.item(turn); item.count; shared.item_done(turn), item = shared.item(turn)) {
            const Chunk chunk = shared.chunks[item.chunk()];
            for (int step = 0; step < STEPS; step++, at.advance()) {
                mbarrier_wait(shared.empty + at.stage * 8, at.parity ^ 1);
                load_slots<STAGE_BLOCKS>(shared.stage(at.stage) + STAGE_BLOCKS * A_BYTES, a_map, chunk, step * STAGE_BLOCKS,
                                         shared.full + at.stage * 8);
            }
        }
        return;
    }
    if (warp == CONSUMERS / 32 + 2) {  // loads scales
        for (Item item = shared.item(turn); item.count; item = shared.item(turn), head.advance()) {
            const Chunk chunk = shared.chunks[item.chunk()];
            const u32 barrier = shared.head_full + head.stage * 8, to = smem_address(shared.heads + head.stage * HEAD_FLOATS);
            mbarrier_wait(shared.head_empty + head.stage * 8, head.parity ^ 1);
            __syncwarp();
            if (lane == 0) {
                mbarrier_arrive_expect(barrier, chunk.count * PITCH * 4);
                bulk_copy(to, a_scale + i64(chunk.first) * PITCH, chunk.count * PITCH * 4, barrier);
            }
            const float* gate = w_scale + chunk.expert * w_scale_expert_stride + item.first() * 8 / BLOCK_K * w_scale_n_stride;
            const float* up = gate + N / BLOCK_K * w_scale_n_stride;
            for (int kb = lane; kb < K_BLOCKS; kb += 32) {
                cp_async_4(to + (COLUMNS * PITCH + kb) * 4, gate + kb * w_scale_k_stride);
                cp_async_4(to + (COLUMNS * PITCH + K_BLOCKS + kb) * 4, up + kb * w_scale_k_stride);
            }
            mbarrier_arrive_after_copies(barrier);
            shared.item_done(turn);
        }
        cp_async_wait_all();
        return;
    }

    const Swiglu swiglu{limit, alpha, beta};
    int buffer = 0;
    for (Item item = shared.item(turn); item.count; item = shared.item(turn), head.advance(), buffer ^= 1) {
        const Chunk chunk = shared.chunks[item.chunk()];
        const float* scales = shared.heads + head.stage * HEAD_FLOATS;
        float4* exchange = shared.exchange + buffer * N_TILES * 128;
        mbarrier_wait(shared.head_full + head.stage * 8, head.parity);
        run_item_of<N_TILES>(chunk, shared, at, scales, exchange, item, y, swiglu);
        mbarrier_arrive(shared.head_empty + head.stage * 8);
        shared.item_done(turn);
    }
}
