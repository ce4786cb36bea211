// moe_down_decode_fp8: the second half of the experts for few tokens, at the speed of the weights.
//
//   d[place, k] = bf16( sum over 128-blocks nb of N of q_scale[place, nb] * w_scale[e, k / 128, nb]
//                                                       * (q[place, nb] . w[e, k, nb]) )
//   out[m, k]   = bf16( factor * sum over the places of m, ascending, of weight[place] * d[place, k] )
//
// Places are ordered by (local expert, slot), so a token's sum starts at its lowest local expert, whatever
// other tokens there are. Product and sum are rounded to fp32 each.
//
// Output-stationary: in each pass a CTA owns ROWS columns of out and streams those rows of all active
// experts past the slots of each. The tokens' sums wait in shared memory, as far as they fit there: the
// products of a chunk are added to them at once. Weights are the M of wgmma, 64 rows of which the last
// 64 - ROWS are whatever lies behind and go nowhere. Two warpgroups multiply the chunks in turns, each with
// its own ring of stages, and add in turns. One warp has the copy engine fill the rings with weights, another
// with slots, a third fetches scales and routes.
// Weights are requested before the predecessor has ended: it does not write them.
#include "common/bf16x2.cuh"
#include "common/decode_tile.cuh"
#include "common/route.cuh"
#include "common/vec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"

static_assert(K % BLOCK_K == 0 && N % (BLOCK_K * STAGE_BLOCKS) == 0, "whole scale blocks and stages");
static_assert(ROWS % 16 == 0 && ROWS <= 64, "whole stripes of a warp");
static_assert(MAX_SLOTS < 0xFFFF, "places and tokens are 16-bit numbers");

constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 96;
constexpr int N_BLOCKS = N / BLOCK_K, STEPS = N_BLOCKS / STAGE_BLOCKS;
constexpr int A_BYTES = ROWS * BLOCK_K, STAGE_BYTES = STAGE_BLOCKS * (A_BYTES + N_TILES * TILE);
constexpr int PITCH = scale_pitch(N_BLOCKS);
constexpr int HEADS = 8;                            // of a warpgroup
constexpr int PAIRS = ROWS / 2;                     // of sums: rows r and r + 8 of a stripe
constexpr int MAX_TOKENS = MAX_SLOTS / TOPK;

// What a chunk has besides codes.
struct alignas(16) Head {
    float columns[COLUMNS * PITCH];      // scales of the slots
    Route routes[COLUMNS];
    float stripes[4 * N_BLOCKS];         // scales of w
};

// The two warpgroups' places in their rings, of which `mine` is that of the current chunk.
template <int COUNT>
struct Rings {
    Ring<COUNT> mine, other;
    int warpgroup = 0;

    DEVICE int stage() const { return warpgroup * COUNT + mine.stage; }
    DEVICE void next_chunk() {
        const Ring<COUNT> was = mine;
        mine = other, other = was, warpgroup ^= 1;
    }
};

struct Shared {
    u32 stages, full, empty;             // [2][STAGES]
    Head* heads;                         // [2][HEADS]
    u32 head_full, head_empty;
    Chunk* chunks;
    float2* sums;                        // [SHARED_TOKENS, PAIRS]

    DEVICE explicit Shared(u8* smem) {
        stages = smem_address(smem);
        heads = reinterpret_cast<Head*>(smem + 2 * STAGES * STAGE_BYTES);
        u64* barriers = reinterpret_cast<u64*>(heads + 2 * HEADS);
        full = smem_address(barriers), empty = full + 2 * STAGES * 8;
        head_full = empty + 2 * STAGES * 8, head_empty = head_full + 2 * HEADS * 8;
        chunks = reinterpret_cast<Chunk*>(barriers + 4 * (STAGES + HEADS));
        sums = reinterpret_cast<float2*>(reinterpret_cast<u8*>(chunks) + chunks_bytes<EXPERTS, MAX_SLOTS, COLUMNS>());
    }
    DEVICE void init() const {
        for (int s = 0; s < 2 * STAGES; s++) mbarrier_init(full + s * 8, 2), mbarrier_init(empty + s * 8, 4);
        for (int s = 0; s < 2 * HEADS; s++) mbarrier_init(head_full + s * 8, 1 + 32), mbarrier_init(head_empty + s * 8, 4);
        mbarrier_init_fence();
    }
};

// fp32 sums of the tokens for the columns of a pass; those of the first SHARED_TOKENS lie in shared memory.
struct Sums {
    static constexpr int QUADS = PAIRS / 2;  // of a token: two pairs each
    float2 *shared, *global;

    DEVICE float2* operator[](int token) const {
        if constexpr (SHARED_TOKENS >= MAX_TOKENS) return shared + token * PAIRS;
        return token < SHARED_TOKENS ? shared + token * PAIRS : global + i64(token - SHARED_TOKENS) * PAIRS;
    }
    // Where a pair lies, and which lies there. A warp adds to 4 tokens at a time, which so have their own
    // banks if they differ modulo 4.
    DEVICE static int swizzled(int token, int pair) {
        return pair ^ (ROWS % 32 ? (token & 2) * 2 : (token & 3) * 4);
    }
    DEVICE float4& quad(int i) const { return *reinterpret_cast<float4*>((*this)[i / QUADS] + i % QUADS * 2); }

    DEVICE void clear(int tokens) const {
        for (int i = threadIdx.x; i < tokens * QUADS; i += CONSUMERS) quad(i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    // Writes the columns from `first` on, and clears.
    DEVICE void finish(int tokens, int first, u16* out, i64 out_row_stride, float factor) const {
        for (int i = threadIdx.x; i < tokens * QUADS; i += CONSUMERS) {
            const float4 sum = quad(i);
            quad(i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            const int token = i / QUADS, pair = swizzled(token, i % QUADS * 2), k = first + pair / 8 * 16 + pair % 8;
            if (k >= K) continue;
            u16* to = out + token * out_row_stride + k;
            const u32 low[1] = {round_bf16x2(sum.x * factor, sum.z * factor)};
            const u32 high[1] = {round_bf16x2(sum.y * factor, sum.w * factor)};
            store_bf16x2<ALIGNED>(to, low), store_bf16x2<ALIGNED>(to + 8, high);
        }
    }
};

// The two warps that have the same rows add in turns, chunk by chunk. A turn that is passed is awaited.
DEVICE void await_turn() { barrier_sync_of<64>(2 + threadIdx.x / 32); }
DEVICE void pass_turn() { barrier_arrive_of<64>(2 + (threadIdx.x / 32 ^ CONSUMERS / 64)); }

// Adds the products of a chunk to the sums of its tokens, when it is this warp's turn. Slots of one token lie
// one after the other; another lane may have the next.
template <int TILES>
DEVICE void add(const float (&product)[4 * TILES], const Route* routes, int count, const Sums& sums) {
    const int lane = threadIdx.x % 32, pair = threadIdx.x / 32 % 4 * 8 + lane / 4;
    int repeat[2 * TILES], last = 0;
    float2 addend[2 * TILES], *at[2 * TILES];
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        const int slot = i / 2 * 8 + lane % 4 * 2 + i % 2, j = i / 2 * 4 + i % 2;
        const Route route = routes[slot];
        const u32 d = round_bf16x2(product[j], product[j + 2]);
        repeat[i] = slot < count ? route.repeat : -1;
        addend[i] = make_float2(route.weight * low_f32(d), route.weight * high_f32(d));
        at[i] = sums[route.token] + Sums::swizzled(route.token, pair);
        last = max(last, repeat[i]);
    }
    last = __reduce_max_sync(0xFFFFFFFFu, last);
    await_turn();
#pragma unroll 1
    for (int now = 0; now <= last; now++) {
        float2 sum[2 * TILES];
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++)
            if (repeat[i] == now) sum[i] = *at[i];
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++)
            if (repeat[i] == now) *at[i] = make_float2(sum[i].x + addend[i].x, sum[i].y + addend[i].y);
        __syncwarp();
    }
    pass_turn();
}

// One chunk, by a warpgroup.
template <int TILES>
DEVICE void run_chunk(const Chunk& chunk, const Shared& shared, Rings<STAGES>& at, const Head& head, const Sums& sums) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float sum[4 * TILES] = {}, acc[STAGE_BLOCKS][4 * TILES] = {};
    const float *column = head.columns + lane % 4 * 2 * PITCH, *stripe = head.stripes + warp * N_BLOCKS;
    for (int step = 0; step < STEPS; step++, at.mine.advance()) {
        const u32 a = shared.stages + at.stage() * STAGE_BYTES, b = a + STAGE_BLOCKS * A_BYTES;
        mbarrier_wait(shared.full + at.stage() * 8, at.mine.parity);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < STAGE_BLOCKS; i++) multiply_block<TILES, STAGE_BLOCKS>(acc[i], a + i * A_BYTES, b + i * TILE);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < STAGE_BLOCKS; i++) wgmma_wait(acc[i]);
        if (lane == 0) mbarrier_arrive(shared.empty + at.stage() * 8);
#pragma unroll
        for (int i = 0; i < STAGE_BLOCKS; i++) {
            const int nb = step * STAGE_BLOCKS + i;
#pragma unroll
            for (int j = 0; j < 4 * TILES; j++)
                sum[j] = fmaf(column[(j / 4 * 8 + j % 2) * PITCH + nb] * stripe[nb], acc[i][j], sum[j]);
        }
    }
    add<TILES>(sum, head.routes, warp * 16 < ROWS ? chunk.count : 0, sums);
}

// The same with the fewest columns, of 8, 16, 32, that hold the chunk.
template <int MOST, class... Rest>
DEVICE void run_chunk_of(const Chunk& chunk, Rest&... rest) {
    if constexpr (MOST > 1) {
        if (tiles_of(chunk) <= MOST / 2) return run_chunk_of<MOST / 2>(chunk, rest...);
    }
    run_chunk<MOST>(chunk, rest...);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_down_decode_fp8(
    const __grid_constant__ TensorMap w_map,    // w [E, N / 128, K, 128] e4m3, boxes of STAGE_BLOCKS by ROWS
    const __grid_constant__ TensorMap q_map,    // q [N / 128, num_slots, 128] e4m3, boxes of STAGE_BLOCKS by 8 slots
    const float* q_scale,           // [num_slots, PITCH]
    const void* topk_ids,           // [M, TOPK] IDS type
    const i32* expert_map,          // [num_experts] or unused
    const Route* routes,            // [num_slots] by place
    const float* w_scale,           // [EXPERTS, K / 128, N / 128], any strides
    i64 w_scale_expert_stride,      // elements
    i64 w_scale_k_stride,           // elements
    i64 w_scale_n_stride,           // elements
    float2* sums_memory,            // [gridDim.x, num_tokens - SHARED_TOKENS, PAIRS] if that is positive
    u16* out,                       // [M, K] bf16
    i64 out_row_stride,             // elements
    i64 num_slots,                  // M * TOPK, at most MAX_SLOTS
    i64 num_experts,
    i64 num_local_experts,
    i64 passes,                     // of a CTA
    float factor) {
    extern __shared__ __align__(1024) u8 smem[];
    const Shared shared(smem);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slots = int(num_slots), tokens = slots / TOPK;
    if (threadIdx.x == 0) prefetch_tensor_map(w_map), prefetch_tensor_map(q_map), shared.init();
    release_successor();
    const int num_chunks = list_chunks<THREADS, EXPERTS, MAX_SLOTS, COLUMNS, IDS, MAP>(
        shared.chunks, topk_ids, slots, expert_map, num_experts, num_local_experts);
    const auto first_column = [&](int pass) { return (int(blockIdx.x) * int(passes) + pass) * ROWS; };
    Rings<STAGES> at;
    Rings<HEADS> head;

    if (warp == CONSUMERS / 32) {  // loads weights
        if (lane == 0) {
            const u64 policy = evict_first();
            for (int pass = 0; pass < passes; pass++) {
                for (int c = 0; c < num_chunks; c++, at.next_chunk()) {
                    for (int step = 0; step < STEPS; step++, at.mine.advance()) {
                        const u32 barrier = shared.full + at.stage() * 8;
                        mbarrier_wait(shared.empty + at.stage() * 8, at.mine.parity ^ 1);
                        mbarrier_arrive_expect(barrier, STAGE_BLOCKS * A_BYTES);
                        copy_box_4d(shared.stages + at.stage() * STAGE_BYTES, w_map, 0, first_column(pass), step * STAGE_BLOCKS,
                                    shared.chunks[c].expert, barrier, policy);
                    }
                }
            }
        }
        wait_for_predecessor();
        return;
    }
    const Sums sums{shared.sums, sums_memory + i64(blockIdx.x) * max(tokens - SHARED_TOKENS, 0) * PAIRS};
    if (warp < CONSUMERS / 32) sums.clear(tokens);  // nobody else uses that memory
    wait_for_predecessor();
    if (warp == CONSUMERS / 32 + 1) {  // loads slots
        if (lane) return;
        for (int pass = 0; pass < passes; pass++) {
            for (int c = 0; c < num_chunks; c++, at.next_chunk()) {
                for (int step = 0; step < STEPS; step++, at.mine.advance()) {
                    mbarrier_wait(shared.empty + at.stage() * 8, at.mine.parity ^ 1);
                    load_slots<STAGE_BLOCKS>(shared.stages + at.stage() * STAGE_BYTES + STAGE_BLOCKS * A_BYTES, q_map,
                                             shared.chunks[c], step * STAGE_BLOCKS, shared.full + at.stage() * 8);
                }
            }
        }
        return;
    }
    if (warp == CONSUMERS / 32 + 2) {  // loads heads
        for (int pass = 0; pass < passes; pass++) {
            for (int c = 0; c < num_chunks; c++, head.mine.advance(), head.next_chunk()) {
                const Chunk chunk = shared.chunks[c];
                const u32 barrier = shared.head_full + head.stage() * 8;
                Head& to = shared.heads[head.stage()];
                mbarrier_wait(shared.head_empty + head.stage() * 8, head.mine.parity ^ 1);
                __syncwarp();
                if (lane == 0) {
                    mbarrier_arrive_expect(barrier, chunk.count * PITCH * 4);
                    bulk_copy(smem_address(to.columns), q_scale + i64(chunk.first) * PITCH, chunk.count * PITCH * 4, barrier);
                }
                if (lane < chunk.count) cp_async_8(smem_address(to.routes + lane), routes + chunk.first + lane);
                for (int i = lane; i < 4 * N_BLOCKS; i += 32) {
                    const int row = min(first_column(pass) + i / N_BLOCKS * 16, K - 1);
                    cp_async_4(smem_address(to.stripes + i), w_scale + chunk.expert * w_scale_expert_stride +
                                                                 row / BLOCK_K * w_scale_k_stride + i % N_BLOCKS * w_scale_n_stride);
                }
                mbarrier_arrive_after_copies(barrier);
            }
        }
        cp_async_wait_all();
        return;
    }
    if (warp >= CONSUMERS / 64) pass_turn();  // the first chunk is the first warpgroup's
    for (int pass = 0; pass < passes; pass++) {
        barrier_sync<1, CONSUMERS>();  // all sums are clear
        for (int c = 0; c < num_chunks; c++, at.next_chunk(), head.next_chunk()) {
            if (at.warpgroup != warp / 4) continue;
            const Chunk chunk = shared.chunks[c];
            mbarrier_wait(shared.head_full + head.stage() * 8, head.mine.parity);
            run_chunk_of<N_TILES>(chunk, shared, at, shared.heads[head.stage()], sums);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(shared.head_empty + head.stage() * 8);
            head.mine.advance();
        }
        barrier_sync<1, CONSUMERS>();
        sums.finish(tokens, first_column(pass), out, out_row_stride, factor);
    }
    if (at.warpgroup == warp / 4) await_turn();  // one that no chunk takes
}
