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
// products of a chunk are added to them at once.
//
// Weights are the M of wgmma, slots its N. The 64 rows of an instruction are those of a group of chunks, ROWS
// each, and its columns the slots of all of them, which lie one after the other; a warp takes those of its rows'
// chunk. Rows that are left are whatever lies behind, and go nowhere.
//
// Two warpgroups multiply every other group each, and their warps add in turns, chunk by chunk. Each has its
// own ring of stages, which one warp has the copy engine fill with weights, and another with slots, besides
// fetching their scales and routes: a box takes time of the thread that asks for it.
// Weights are requested before the predecessor has ended: it does not write them.
#include "common/bf16x2.cuh"
#include "common/decode_tile.cuh"
#include "common/route.cuh"
#include "common/vec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"

static_assert(K % BLOCK_K == 0 && N % (BLOCK_K * STAGE_BLOCKS) == 0, "whole scale blocks and stages");
static_assert(ROWS % 16 == 0 && ROWS <= 64, "whole stripes of a warp");
static_assert(MAX_SLOTS < 0xFFFF, "places and tokens are 16-bit numbers");

constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int N_BLOCKS = N / BLOCK_K, STEPS = N_BLOCKS / STAGE_BLOCKS;
constexpr int STRIPES = ROWS / 16;                  // of a chunk: each is a warp's
constexpr int GROUP = 64 / ROWS * N_TILES > 8 ? 8 / N_TILES : 64 / ROWS;  // chunks at a time
constexpr int GROUP_TILES = GROUP * N_TILES, GROUP_COLUMNS = 8 * GROUP_TILES;
constexpr int A_BYTES = STAGE_BLOCKS * ROWS * BLOCK_K;  // of a chunk
constexpr int EIGHT_ROWS = STAGE_BLOCKS * TILE;     // a stage has eight rows of each of its blocks, then the next
constexpr int STAGE_BYTES = GROUP * A_BYTES + GROUP_TILES * EIGHT_ROWS;
constexpr int PITCH = scale_pitch(N_BLOCKS);
constexpr int HEADS = GROUP == 1 ? 8 : 4;           // of a ring
constexpr int BARRIERS = 2 * (STAGES + HEADS);      // of a ring
constexpr int CYCLE = 2 * GROUP;                    // chunks that are added one after the other, by a warp each
constexpr int PAIRS = ROWS / 2;                     // of sums: rows r and r + 8 of a stripe
constexpr int MAX_TOKENS = MAX_SLOTS / TOPK;

// What a group has besides codes.
struct alignas(16) Head {
    float columns[GROUP_COLUMNS * PITCH];  // scales of the slots
    Route routes[GROUP_COLUMNS];
    float stripes[4 * N_BLOCKS];           // scales of w
};

// The chunks, GROUP at a time. The last group may have fewer, followed by empty ones.
struct Groups {
    const Chunk* chunks;
    int num_chunks;

    DEVICE int count() const { return ceil_div(num_chunks, GROUP); }
    DEVICE Chunk chunk(int g, int i) const { return g * GROUP + i < num_chunks ? chunks[g * GROUP + i] : Chunk{}; }
    // All slots of a group.
    DEVICE Chunk whole(int g) const {
        Chunk sum = chunk(g, 0);
#pragma unroll
        for (int i = 1; i < GROUP; i++) sum.count += chunk(g, i).count;
        return sum;
    }
};

// Shared memory; of the rings a thread sees its own.
struct Shared {
    u32 stages, full, empty;             // [STAGES]
    Head* heads;                         // [HEADS]
    u32 head_full, head_empty;
    u32 turns;                           // [CYCLE, STRIPES], of both rings
    Chunk* chunks;
    float2* sums;                        // [SHARED_TOKENS, PAIRS]

    DEVICE Shared(u8* smem, int ring) {
        stages = smem_address(smem) + ring * STAGES * STAGE_BYTES;
        heads = reinterpret_cast<Head*>(smem + 2 * STAGES * STAGE_BYTES) + ring * HEADS;
        u64* barriers = reinterpret_cast<u64*>(heads + (2 - ring) * HEADS);
        full = smem_address(barriers + ring * BARRIERS), empty = full + STAGES * 8;
        head_full = empty + STAGES * 8, head_empty = head_full + HEADS * 8;
        turns = smem_address(barriers + 2 * BARRIERS);
        chunks = reinterpret_cast<Chunk*>(barriers + 2 * BARRIERS + CYCLE * STRIPES);
        sums = reinterpret_cast<float2*>(reinterpret_cast<u8*>(chunks) + chunks_bytes<EXPERTS, MAX_SLOTS, COLUMNS>());
    }
    DEVICE void init(int ring) const {
        for (int i = 0; i < GROUP * STRIPES; i++) mbarrier_init(turns + (ring * GROUP * STRIPES + i) * 8, 32);
        for (int s = 0; s < STAGES; s++) mbarrier_init(full + s * 8, GROUP + 1), mbarrier_init(empty + s * 8, 4);
        for (int s = 0; s < HEADS; s++) mbarrier_init(head_full + s * 8, 32), mbarrier_init(head_empty + s * 8, GROUP * STRIPES * 32);
        mbarrier_init_fence();
    }
    DEVICE u32 stage(const Ring<STAGES>& at) const { return stages + at.stage * STAGE_BYTES; }
};

// fp32 sums of the tokens for the columns of a pass; those of the first SHARED_TOKENS lie in shared memory.
struct Sums {
    static constexpr int QUADS = PAIRS / 2;  // of a token: two pairs each
    float2 *shared, *global;

    // Sum i of all, PAIRS of a token.
    DEVICE float2& operator[](int i) const {
        if constexpr (SHARED_TOKENS >= MAX_TOKENS) return shared[i];
        return i < SHARED_TOKENS * PAIRS ? shared[i] : global[i - SHARED_TOKENS * PAIRS];
    }
    // Where a pair lies, and which lies there. A warp adds to 4 tokens at a time, which so have their own
    // banks if they differ modulo 4.
    DEVICE static int swizzled(int token, int pair) {
        return pair ^ (ROWS % 32 ? (token & 2) * 2 : (token & 3) * 4);
    }
    DEVICE float4& quad(int i) const { return reinterpret_cast<float4&>((*this)[i * 2]); }

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

// What a warp multiplies: 16 rows of one chunk of each of its warpgroup's groups, or nothing. The warps of a
// stripe add in turns, chunk by chunk, those of both warpgroups; who has added tells the next one.
struct Role {
    int ring, chunk, stripe;
    u32 mine, next;                      // barriers
    int parity;

    DEVICE Role(int warp, u32 turns) : ring(warp / 4), chunk(warp % 4 / STRIPES), stripe(warp % 4 % STRIPES) {
        const int place = ring * GROUP + chunk;
        mine = turns + (place * STRIPES + stripe) * 8, next = turns + ((place + 1) % CYCLE * STRIPES + stripe) * 8;
        parity = place == 0;             // its first turn comes at once
    }
    DEVICE bool adds() const { return GROUP * STRIPES == 4 || chunk < GROUP; }
    DEVICE void await_turn() const { mbarrier_wait(mine, parity); }
    DEVICE void pass_turn() { mbarrier_arrive(next), parity ^= 1; }
};

// Adds the products of a chunk, the columns from `begin` to `end`, to the sums of its tokens, when it is this
// warp's turn. A token that names the expert twice has two slots here, one after the other, with the same
// product: whoever has the first adds for all of them, so that no two lanes have a sum in common.
template <int TILES>
DEVICE void add(const float (&product)[4 * TILES], const Route* routes, int begin, int end, Role& role, const Sums& sums) {
    constexpr int PART = TILES < 4 ? TILES : 4;  // what fits into registers
    const int lane = threadIdx.x % 32, pair = role.stripe * 8 + lane / 4;
#pragma unroll
    for (int first = 0; first < TILES; first += PART) {
        const int behind = (first + PART) * 8;   // may follow the last of this part
        int at[2 * PART];                        // -1: not this lane's
        bool repeated = PART < TILES && begin < behind && behind < end && routes[behind].repeat;
        float2 addend[2 * PART], sum[2 * PART];
#pragma unroll
        for (int i = 0; i < 2 * PART; i++) {
            const int slot = (first + i / 2) * 8 + lane % 4 * 2 + i % 2, j = (first + i / 2) * 4 + i % 2;
            const Route route = routes[slot];
            const bool is_here = begin <= slot && slot < end, leads = slot == begin || route.repeat == 0;
            const u32 d = round_bf16x2(product[j], product[j + 2]);
            addend[i] = make_float2(route.weight * low_f32(d), route.weight * high_f32(d));
            at[i] = is_here && leads ? route.token * PAIRS + Sums::swizzled(route.token, pair) : -1;
            repeated |= is_here && !leads;
        }
        repeated = __any_sync(0xFFFFFFFFu, repeated);
        if (first == 0) role.await_turn();
#pragma unroll
        for (int i = 0; i < 2 * PART; i++)
            if (at[i] >= 0) sum[i] = sums[at[i]];
#pragma unroll
        for (int i = 0; i < 2 * PART; i++) sum[i] = make_float2(sum[i].x + addend[i].x, sum[i].y + addend[i].y);
        if (repeated) {
#pragma unroll
            for (int i = 0; i < 2 * PART; i++) {
                const int slot = (first + i / 2) * 8 + lane % 4 * 2 + i % 2, j = (first + i / 2) * 4 + i % 2;
                const u32 d = round_bf16x2(product[j], product[j + 2]);
                for (int next = slot + 1; at[i] >= 0 && next < end && routes[next].repeat; next++) {
                    const float weight = routes[next].weight;
                    sum[i] = make_float2(sum[i].x + weight * low_f32(d), sum[i].y + weight * high_f32(d));
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * PART; i++)
            if (at[i] >= 0) sums[at[i]] = sum[i];
    }
    role.pass_turn();
}

// One group, of up to 8 TILES slots, by a warpgroup.
template <int TILES>
DEVICE void run_group(const Groups& groups, int g, const Shared& shared, Ring<STAGES>& at, const Head& head, Role& role,
                      const Sums& sums) {
    constexpr int MOST = TILES < 8 ? 16 / TILES : 1, BATCH = STAGE_BLOCKS < MOST ? STAGE_BLOCKS : MOST;  // blocks at a time
    const int lane = threadIdx.x % 32;
    const Chunk chunk = groups.chunk(g, role.chunk);
    const int begin = chunk.first - groups.chunk(g, 0).first, end = begin + chunk.count;
    float sum[4 * TILES] = {};
    const float *column = head.columns + lane % 4 * 2 * PITCH, *stripe = head.stripes + threadIdx.x / 32 % 4 * N_BLOCKS;
    for (int step = 0; step < STEPS; step++, at.advance()) {
        const u32 a = shared.stage(at), b = a + GROUP * A_BYTES;
        mbarrier_wait(shared.full + at.stage * 8, at.parity);
#pragma unroll
        for (int first = 0; first < STAGE_BLOCKS; first += BATCH) {
            float acc[BATCH][4 * TILES] = {};
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < BATCH && first + i < STAGE_BLOCKS; i++)
                wgmma_m64k128_e4m3<TILES>(acc[i], wgmma_operand(a + (first + i) * TILE, EIGHT_ROWS),
                                          wgmma_operand(b + (first + i) * TILE, EIGHT_ROWS));
            wgmma_commit();
#pragma unroll
            for (int i = 0; i < BATCH; i++) wgmma_wait(acc[i]);
            if (first + BATCH >= STAGE_BLOCKS && lane == 0) mbarrier_arrive(shared.empty + at.stage * 8);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                if (!role.adds() || GROUP > 1 && TILES > 1 && (t * 8 + 8 <= begin || end <= t * 8)) continue;
#pragma unroll
                for (int i = 0; i < BATCH && first + i < STAGE_BLOCKS; i++) {
                    const int nb = step * STAGE_BLOCKS + first + i;
#pragma unroll
                    for (int j = t * 4; j < t * 4 + 4; j++)
                        sum[j] = fmaf(column[(t * 8 + j % 2) * PITCH + nb] * stripe[nb], acc[i][j], sum[j]);
                }
            }
        }
    }
    if (role.adds()) add<TILES>(sum, head.routes, begin, end, role, sums);
}

// The same with the fewest columns, of 8, 16, 32, 64, that hold the group.
template <int MOST, class... Rest>
DEVICE void run_group_of(const Groups& groups, int g, Rest&... rest) {
    if constexpr (MOST > 1) {
        if (tiles_of(groups.whole(g)) <= MOST / 2) return run_group_of<MOST / 2>(groups, g, rest...);
    }
    run_group<MOST>(groups, g, rest...);
}

// w_scale [EXPERTS, K / 128, N / 128]
struct ScalesOfW {
    const float* w_scale;
    i64 expert_stride, k_stride, n_stride;

    DEVICE const float* at(int expert, int k, int nb) const {
        return w_scale + expert * expert_stride + k / BLOCK_K * k_stride + nb * n_stride;
    }
};

// Every other group's weights, by one thread.
DEVICE void load_weights(const Shared& shared, const Groups& groups, int ring, const TensorMap& w_map, int first_column, int passes) {
    const u64 policy = evict_first();
    Ring<STAGES> at;
    for (int pass = 0; pass < passes; pass++) {
        for (int g = ring; g < groups.count(); g += 2) {
            for (int step = 0; step < STEPS; step++, at.advance()) {
                const u32 barrier = shared.full + at.stage * 8;
                mbarrier_wait(shared.empty + at.stage * 8, at.parity ^ 1);
#pragma unroll
                for (int i = 0; i < GROUP; i++) {
                    const Chunk chunk = groups.chunk(g, i);
                    mbarrier_arrive_expect(barrier, chunk.count ? A_BYTES : 0);
                    if (chunk.count)
                        copy_box_5d(shared.stage(at) + i * A_BYTES, w_map, 0, 0, step * STAGE_BLOCKS,
                                    (first_column + pass * ROWS) / 8, chunk.expert, barrier, policy);
                }
            }
        }
    }
}

// What group g, of these slots, has besides codes, by a warp.
DEVICE void load_head(Head& to, u32 barrier, const Groups& groups, int g, const Chunk& slots, const float* q_scale,
                      const Route* routes, const ScalesOfW& scales, int first_column) {
    const float* columns = q_scale + i64(slots.first) * PITCH;
    const int lane = threadIdx.x % 32;
    for (int i = lane * 4; i < slots.count * PITCH; i += 128) cp_async_16(smem_address(to.columns + i), columns + i, true);
    for (int i = lane; i < slots.count; i += 32) cp_async_8(smem_address(to.routes + i), routes + slots.first + i);
    for (int i = lane; i < GROUP * STRIPES * N_BLOCKS; i += 32) {
        const int row = i / N_BLOCKS, k = min(first_column + row % STRIPES * 16, K - 1);
        cp_async_4(smem_address(to.stripes + i), scales.at(groups.chunk(g, row / STRIPES).expert, k, i % N_BLOCKS));
    }
    mbarrier_arrive_after_copies(barrier);
}

// Every other group's slots, by a warp.
DEVICE void load_slots_and_heads(const Shared& shared, const Groups& groups, int ring, const TensorMap& q_map, const float* q_scale,
                                 const Route* routes, const ScalesOfW& scales, int first_column, int passes) {
    Ring<STAGES> at;
    Ring<HEADS> head;
    for (int pass = 0; pass < passes; pass++) {
        for (int g = ring; g < groups.count(); g += 2, head.advance()) {
            const Chunk slots = groups.whole(g);
            mbarrier_wait(shared.head_empty + head.stage * 8, head.parity ^ 1);
            __syncwarp();
            load_head(shared.heads[head.stage], shared.head_full + head.stage * 8, groups, g, slots, q_scale, routes, scales,
                      first_column + pass * ROWS);
            for (int step = 0; step < STEPS; step++, at.advance()) {
                if (threadIdx.x % 32) continue;
                mbarrier_wait(shared.empty + at.stage * 8, at.parity ^ 1);
                load_slots<STAGE_BLOCKS>(shared.stage(at) + GROUP * A_BYTES, q_map, slots, step * STAGE_BLOCKS,
                                         shared.full + at.stage * 8);
            }
        }
    }
    cp_async_wait_all();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_down_decode_fp8(
    const __grid_constant__ TensorMap w_map,    // w [E, K / 8, N / 128, 8, 128] e4m3, boxes of ROWS / 8 by STAGE_BLOCKS by 8 rows
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
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int loader = warp / 2 - CONSUMERS / 64;  // negative: multiplies; 0: weights; 1: slots
    const int ring = loader < 0 ? warp / 4 : warp % 2, slots = int(num_slots), tokens = slots / TOPK;
    const Shared shared(smem, ring);
    if (loader == 0 && lane == 0) prefetch_tensor_map(w_map), prefetch_tensor_map(q_map), shared.init(ring);
    release_successor();
    const int num_chunks = list_chunks<THREADS, EXPERTS, MAX_SLOTS, COLUMNS, IDS, MAP>(
        shared.chunks, topk_ids, slots, expert_map, num_experts, num_local_experts);
    const Groups groups{shared.chunks, num_chunks};
    const int first_column = int(blockIdx.x) * int(passes) * ROWS;

    if (loader == 0) {
        if (lane == 0) load_weights(shared, groups, ring, w_map, first_column, int(passes));
        wait_for_predecessor();
        return;
    }
    const Sums sums{shared.sums, sums_memory + i64(blockIdx.x) * max(tokens - SHARED_TOKENS, 0) * PAIRS};
    if (loader < 0) sums.clear(tokens);  // nobody else uses that memory
    wait_for_predecessor();
    if (loader == 1) {
        const ScalesOfW scales{w_scale, w_scale_expert_stride, w_scale_k_stride, w_scale_n_stride};
        load_slots_and_heads(shared, groups, ring, q_map, q_scale, routes, scales, first_column, int(passes));
        return;
    }
    Role role(warp, shared.turns);
    Ring<STAGES> at;
    Ring<HEADS> head;
    for (int pass = 0; pass < passes; pass++) {
        barrier_sync<1, CONSUMERS>();  // all sums are clear
        for (int g = ring; g < groups.count(); g += 2, head.advance()) {
            if (role.adds()) mbarrier_wait(shared.head_full + head.stage * 8, head.parity);  // the others free none
            run_group_of<GROUP_TILES>(groups, g, shared, at, shared.heads[head.stage], role, sums);
            if (role.adds()) mbarrier_arrive(shared.head_empty + head.stage * 8);
        }
        if (ring == 1 && groups.count() % 2 && role.adds()) role.await_turn(), role.pass_turn();  // the cycle is whole
        barrier_sync<1, CONSUMERS>();
        sums.finish(tokens, first_column + pass * ROWS, out, out_row_stride, factor);
    }
}
