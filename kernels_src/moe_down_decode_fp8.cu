// moe_down_decode_fp8: the second half of the experts for few tokens, at the speed of the weights.
//
//   d[place, k] = bf16( sum over 128-blocks nb of N of q_scale[place, nb] * w_scale[e, k / 128, nb]
//                                                       * (q[place, nb] . w[e, k, nb]) )
//   out[m, k]   = bf16( factor * sum over j, ascending, of weight[m, j] * d[place of slot (m, j), k] )
//
// Output-stationary: in each pass a CTA owns ROWS columns of out, streams those rows of all active experts
// past the slots of each, keeps d, as far as it fits in shared memory, and combines it. Weights are the M
// of wgmma, 64 rows of which the last 64 - ROWS are whatever lies behind and go nowhere. Two warpgroups
// take the chunks in turns, each with its own ring of stages. One warp has the copy engine fill them with
// weights, another with slots, a third fetches scales, a fourth what the combine reads.
// Weights are requested before the predecessor has ended: it does not write them.
#include "common/bf16x2.cuh"
#include "common/decode_tile.cuh"
#include "common/vec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"

static_assert(K % BLOCK_K == 0 && N % (BLOCK_K * STAGE_BLOCKS) == 0, "whole scale blocks and stages");
static_assert(ROWS % 16 == 0 && ROWS <= 64, "whole stripes of a warp");
static_assert(MAX_SLOTS < 0xFFFF, "places are 16-bit numbers");

constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int N_BLOCKS = N / BLOCK_K, STEPS = N_BLOCKS / STAGE_BLOCKS;
constexpr int A_BYTES = ROWS * BLOCK_K, STAGE_BYTES = STAGE_BLOCKS * (A_BYTES + N_TILES * TILE);
constexpr int PITCH = scale_pitch(N_BLOCKS);
constexpr int HEADS = 8;                            // of a warpgroup
constexpr int HEAD_FLOATS = COLUMNS * PITCH + 4 * N_BLOCKS;
constexpr int PAIRS = ROWS / 2;                     // of d: rows r and r + 8 of a stripe
constexpr u16 NOWHERE = 0xFFFF;
constexpr int SLOTS = ceil_div(MAX_SLOTS, 8) * 8;   // rooms: what follows starts at a multiple of 16 bytes

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
    float* heads;                        // [2][HEADS][HEAD_FLOATS]: a chunk's scales, then those of 4 stripes of w
    u32 head_full, head_empty;
    Chunk* chunks;
    float* weights;                      // [SLOTS] of the slots
    u16* places;                         // [SLOTS] of the slots
    u32* d;                              // [SHARED_SLOTS, PAIRS]

    DEVICE explicit Shared(u8* smem) {
        stages = smem_address(smem);
        heads = reinterpret_cast<float*>(smem + 2 * STAGES * STAGE_BYTES);
        u64* barriers = reinterpret_cast<u64*>(heads + 2 * HEADS * HEAD_FLOATS);
        full = smem_address(barriers), empty = full + 2 * STAGES * 8;
        head_full = empty + 2 * STAGES * 8, head_empty = head_full + 2 * HEADS * 8;
        chunks = reinterpret_cast<Chunk*>(barriers + 4 * (STAGES + HEADS));
        weights = reinterpret_cast<float*>(reinterpret_cast<u8*>(chunks) + chunks_bytes<EXPERTS, MAX_SLOTS, COLUMNS>());
        places = reinterpret_cast<u16*>(weights + SLOTS);
        d = reinterpret_cast<u32*>(places + SLOTS);
    }
    DEVICE void init() const {
        for (int s = 0; s < 2 * STAGES; s++) mbarrier_init(full + s * 8, 2), mbarrier_init(empty + s * 8, 4);
        for (int s = 0; s < 2 * HEADS; s++) mbarrier_init(head_full + s * 8, 1 + 32), mbarrier_init(head_empty + s * 8, 4);
        mbarrier_init_fence();
    }
};

// d of a place: the first SHARED_SLOTS lie in shared memory.
struct Sums {
    u32 *shared, *global;

    DEVICE u32* operator[](int place) const {
        if constexpr (SHARED_SLOTS >= MAX_SLOTS) return shared + place * PAIRS;
        return place < SHARED_SLOTS ? shared + place * PAIRS : global + i64(place - SHARED_SLOTS) * PAIRS;
    }
};

// One chunk, by a warpgroup: products, and d to memory.
template <int TILES>
DEVICE void run_chunk(const Chunk& chunk, const Shared& shared, Rings<STAGES>& at, const float* scales, const Sums& d) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float sum[4 * TILES] = {}, acc[STAGE_BLOCKS][4 * TILES] = {};
    const float *column = scales + lane % 4 * 2 * PITCH, *stripe = scales + COLUMNS * PITCH + warp * N_BLOCKS;
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
    if (warp * 16 >= ROWS) return;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int slot = t * 8 + lane % 4 * 2 + c;
            if (slot < chunk.count)
                d[chunk.first + slot][warp * 8 + lane / 4] = round_bf16x2(sum[4 * t + c], sum[4 * t + c + 2]);
        }
    }
}

// The same with the fewest columns, of 8, 16, 32, that hold the chunk.
template <int MOST, class... Rest>
DEVICE void run_chunk_of(const Chunk& chunk, Rest&... rest) {
    if constexpr (MOST > 1) {
        if (tiles_of(chunk) <= MOST / 2) return run_chunk_of<MOST / 2>(chunk, rest...);
    }
    run_chunk<MOST>(chunk, rest...);
}

// Adds up the slots of each token for the columns of a pass, from `first` on: 4 pairs a thread.
DEVICE void combine(const Shared& shared, const Sums& d, int tokens, int first, u16* out, i64 out_row_stride, float factor) {
    constexpr int QUADS = PAIRS / 4, RUN = TOPK < 8 ? TOPK : 8;  // slots whose products are loaded together
    for (int i = threadIdx.x; i < tokens * QUADS; i += CONSUMERS) {
        const int token = i / QUADS, quad = i % QUADS, k = first + quad / 2 * 16 + quad % 2 * 4;
        if (k >= K) continue;
        float low[4] = {}, high[4] = {};
#pragma unroll 1
        for (int run = 0; run < TOPK; run += RUN) {
            const u16* places = shared.places + token * TOPK + run;
            const float* weights = shared.weights + token * TOPK + run;
            uint4 v[RUN];
#pragma unroll
            for (int j = 0; j < RUN; j++)
                if ((TOPK % RUN == 0 || run + j < TOPK) && places[j] != NOWHERE)
                    v[j] = *reinterpret_cast<const uint4*>(d[places[j]] + quad * 4);
#pragma unroll
            for (int j = 0; j < RUN; j++) {
                if (TOPK % RUN && run + j >= TOPK || places[j] == NOWHERE) continue;
                const u32 pairs[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
                for (int c = 0; c < 4; c++)
                    low[c] = low[c] + weights[j] * low_f32(pairs[c]), high[c] = high[c] + weights[j] * high_f32(pairs[c]);
            }
        }
        u16* to = out + token * out_row_stride + k;
#pragma unroll
        for (int c = 0; c < 4; c += 2) {
            const u32 lows[1] = {round_bf16x2(low[c] * factor, low[c + 1] * factor)};
            const u32 highs[1] = {round_bf16x2(high[c] * factor, high[c + 1] * factor)};
            store_bf16x2<ALIGNED>(to + c, lows), store_bf16x2<ALIGNED>(to + c + 8, highs);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_down_decode_fp8(
    const __grid_constant__ TensorMap w_map,    // w [E, N / 128, K, 128] e4m3, boxes of STAGE_BLOCKS by ROWS
    const __grid_constant__ TensorMap q_map,    // q [N / 128, num_slots, 128] e4m3, boxes of STAGE_BLOCKS by 8 slots
    const float* q_scale,           // [num_slots, PITCH]
    const void* topk_ids,           // [M, TOPK] IDS type
    const void* topk_weights,       // [M, TOPK] WEIGHT type, or unused
    const i32* expert_map,          // [num_experts] or unused
    const i32* place_of_slot,       // [num_slots], -1 for none
    const float* w_scale,           // [EXPERTS, K / 128, N / 128], any strides
    i64 w_scale_expert_stride,      // elements
    i64 w_scale_k_stride,           // elements
    i64 w_scale_n_stride,           // elements
    u32* d_memory,                  // [gridDim.x, num_slots - SHARED_SLOTS, PAIRS] if that is positive
    u16* out,                       // [M, K] bf16
    i64 out_row_stride,             // elements
    i64 num_slots,                  // M * TOPK, at most MAX_SLOTS
    i64 num_experts,
    i64 num_local_experts,
    i64 passes,                     // of a CTA
    float factor) {
    extern __shared__ __align__(1024) u8 smem[];
    const Shared shared(smem);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slots = int(num_slots);
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
    if (warp == CONSUMERS / 32 + 2) {  // loads scales
        for (int pass = 0; pass < passes; pass++) {
            for (int c = 0; c < num_chunks; c++, head.mine.advance(), head.next_chunk()) {
                const Chunk chunk = shared.chunks[c];
                const u32 barrier = shared.head_full + head.stage() * 8;
                const u32 to = smem_address(shared.heads + head.stage() * HEAD_FLOATS);
                mbarrier_wait(shared.head_empty + head.stage() * 8, head.mine.parity ^ 1);
                __syncwarp();
                if (lane == 0) {
                    mbarrier_arrive_expect(barrier, chunk.count * PITCH * 4);
                    bulk_copy(to, q_scale + i64(chunk.first) * PITCH, chunk.count * PITCH * 4, barrier);
                }
                for (int i = lane; i < 4 * N_BLOCKS; i += 32) {
                    const int row = min(first_column(pass) + i / N_BLOCKS * 16, K - 1);
                    cp_async_4(to + (COLUMNS * PITCH + i) * 4, w_scale + chunk.expert * w_scale_expert_stride +
                                                                   row / BLOCK_K * w_scale_k_stride + i % N_BLOCKS * w_scale_n_stride);
                }
                mbarrier_arrive_after_copies(barrier);
            }
        }
        cp_async_wait_all();
        return;
    }
    if (warp == CONSUMERS / 32 + 3) {  // loads what the combine reads
        for (int s = lane; s < slots; s += 32) {
            shared.places[s] = u16(place_of_slot[s]);
            if (WEIGHT >= 0) shared.weights[s] = load_float<WEIGHT>(topk_weights, s);
            else shared.weights[s] = 1.0f;
        }
        barrier_arrive<2, CONSUMERS + 32>();
        return;
    }

    const Sums d{shared.d, d_memory + i64(blockIdx.x) * max(slots - SHARED_SLOTS, 0) * PAIRS};
    for (int pass = 0; pass < passes; pass++) {
        for (int c = 0; c < num_chunks; c++, at.next_chunk(), head.next_chunk()) {
            if (at.warpgroup != warp / 4) continue;
            const Chunk chunk = shared.chunks[c];
            const float* scales = shared.heads + head.stage() * HEAD_FLOATS;
            mbarrier_wait(shared.head_full + head.stage() * 8, head.mine.parity);
            run_chunk_of<N_TILES>(chunk, shared, at, scales, d);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(shared.head_empty + head.stage() * 8);
            head.mine.advance();
        }
        if (pass == 0) barrier_sync<2, CONSUMERS + 32>();
        else barrier_sync<1, CONSUMERS>();
        combine(shared, d, slots / TOPK, first_column(pass), out, out_row_stride, factor);
        barrier_sync<1, CONSUMERS>();  // before the next pass writes d
    }
}
