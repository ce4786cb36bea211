// moe_down_prefill_fp8: the down product for many tokens, on wgmma.
//
//   d[slot, k] = bf16( sum over 128-blocks nb of N of q_scale[place, nb] * w_scale[e, k / 128, nb]
//                                                     * (q[place, nb] . w[e, k, nb]) )
//
// place is the position of the slot in sorted_token_ids, e the expert of its block. A tile is BLOCK_M
// places by BLOCK_N columns; an item ITEM_TILES neighbouring tiles of one block of places. CTAs take
// items in turns. Where N is small (RESIDENT) the codes of an item are fetched once, beside the ring.
#include "common/vec.cuh"
#include "common/wgmma_tile.cuh"
#include "ptx/pdl.cuh"

constexpr int N_BLOCKS = N / BLOCK_K;
constexpr int ROW_TILES = ceil_div(K, BLOCK_N);          // of the last one, half may lie outside
constexpr int ROW_ITEMS = ROW_TILES / ITEM_TILES;
constexpr int VECTOR = vector_of(N_BLOCKS);
constexpr int CHUNKS = N_BLOCKS / VECTOR;
constexpr int STAGE_BYTES = B_BYTES + (RESIDENT ? 0 : A_BYTES);
constexpr int CODES_BYTES = N_BLOCKS * A_BYTES;          // of an item, if RESIDENT
constexpr int BUFFERS = 2;

static_assert(N % BLOCK_K == 0 && K % BLOCK_K == 0, "whole scale blocks");
static_assert(ROW_TILES % ITEM_TILES == 0, "whole items");

// The u-th tile of this CTA.
struct Place {
    int block, column;         // block of BLOCK_M places; first column of d
    bool first, last;          // of its item

    DEVICE Place(int u) {
        const int item = blockIdx.x + u / ITEM_TILES * gridDim.x, tile = u % ITEM_TILES;
        block = item / ROW_ITEMS, column = (item % ROW_ITEMS * ITEM_TILES + tile) * BLOCK_N;
        first = tile == 0, last = tile == ITEM_TILES - 1;
    }
};

// Where in the two buffers for codes a thread is.
struct Buffer {
    int index = 0, parity = 0;
    DEVICE void advance() {
        if (++index == BUFFERS) index = 0, parity ^= 1;
    }
};

struct Scales {
    float row[2][VECTOR], weight[VECTOR];
};

struct Source {
    const float* row;          // of the first of a thread's two rows, which are 8 apart
    const float* weight;
};

DEVICE void load_scales(const Source& from, i64 w_scale_n_stride, int chunk, Scales& to) {
    load_now(from.row + chunk * VECTOR, to.row[0]);
    load_now(from.row + 8 * N_BLOCKS + chunk * VECTOR, to.row[1]);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        float v[1];
        load_now(from.weight + (chunk * VECTOR + i) * w_scale_n_stride, v), to.weight[i] = v[0];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_down_prefill_fp8(
    const __grid_constant__ TensorMap w,       // [E, K, N] e4m3, boxes of 128 rows by 128
    const __grid_constant__ TensorMap q,       // [capacity, N] e4m3, boxes of BLOCK_M rows by 128
    const float* q_scale,                      // [capacity, N / 128]
    const float* w_scale,                      // [E, K / 128, N / 128], any strides
    i64 w_scale_expert_stride,                 // elements
    i64 w_scale_k_stride,                      // elements
    i64 w_scale_n_stride,                      // elements
    const i32* sorted_token_ids,               // [capacity]
    const i32* expert_ids,                     // [capacity / BLOCK_M]
    const i32* num_tokens_post_padded,         // [1]
    u16* d,                                    // [num_slots, K] bf16
    i64 num_slots) {
    extern __shared__ __align__(1024) u8 smem[];
    const u32 stages = smem_address(smem), codes = stages + STAGES * STAGE_BYTES;
    const u32 staging = codes + (RESIDENT ? BUFFERS * CODES_BYTES : 0);
    const u32 full = staging + CONSUMER_WARPS * STAGING_BYTES, empty = full + STAGES * 8;
    const u32 codes_full = empty + STAGES * 8, codes_empty = codes_full + BUFFERS * 8;
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        prefetch_tensor_map(w);
        prefetch_tensor_map(q);
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(full + s * 8, 1);
            mbarrier_init(empty + s * 8, CONSUMER_WARPS);
        }
        for (int b = 0; b < BUFFERS; b++) {
            mbarrier_init(codes_full + b * 8, 1);
            mbarrier_init(codes_empty + b * 8, CONSUMER_WARPS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    release_successor();
    wait_for_predecessor();

    const int num_items = num_tokens_post_padded[0] / BLOCK_M * ROW_ITEMS;
    const int own_items = int(blockIdx.x) < num_items ? (num_items - 1 - blockIdx.x) / gridDim.x + 1 : 0;
    const int num_tiles = own_items * ITEM_TILES;
    Buffer buffer;
    Ring<STAGES> at;

    if (warp >= CONSUMER_WARPS) {
        give_registers_back<PRODUCER_REGISTERS>();
        if (threadIdx.x != CONSUMERS) return;
        int expert = num_tiles ? expert_ids[Place(0).block] : 0;
        for (int u = 0; u < num_tiles; u++) {
            const Place here(u);
            const int expert_after = expert_ids[Place(u + 1 < num_tiles ? u + 1 : u).block];
            if (RESIDENT && here.first) {
                const u32 barrier = codes_full + buffer.index * 8, to = codes + buffer.index * CODES_BYTES;
                mbarrier_wait(codes_empty + buffer.index * 8, buffer.parity ^ 1);
                mbarrier_arrive_expect(barrier, CODES_BYTES);
                for (int nb = 0; nb < N_BLOCKS; nb++)
                    copy_box_2d(to + nb * A_BYTES, q, nb * BLOCK_K, here.block * BLOCK_M, barrier);
                buffer.advance();
            }
            for (int nb = 0; nb < N_BLOCKS; nb++, at.advance()) {
                const u32 barrier = full + at.stage * 8, to = stages + at.stage * STAGE_BYTES;
                mbarrier_wait(empty + at.stage * 8, at.parity ^ 1);
                mbarrier_arrive_expect(barrier, STAGE_BYTES);
#pragma unroll
                for (int i = 0; i < BLOCK_N / 128; i++)
                    copy_box_3d(to + i * 128 * BLOCK_K, w, nb * BLOCK_K, here.column + i * 128, expert, barrier);
                if (!RESIDENT) copy_box_2d(to + B_BYTES, q, nb * BLOCK_K, here.block * BLOCK_M, barrier);
            }
            expert = expert_after;
        }
        return;
    }

    take_registers<CONSUMER_REGISTERS>();
    const int warpgroup = warp / 4, top = warp % 4 * 16;  // of this warp's 16 rows
    const u32 own_staging = staging + warp * STAGING_BYTES, b_offset = warpgroup * 128 * BLOCK_K;
    const auto own_column = [&](const Place& p) { return p.column + warpgroup * 128; };
    const auto source = [&](int u) {  // past the last tile: of the last
        const Place there(u < num_tiles ? u : num_tiles - 1);
        const int column = min(own_column(there), K - 128);
        return Source{q_scale + (i64(there.block) * BLOCK_M + top + lane / 4) * N_BLOCKS,
                      w_scale + expert_ids[there.block] * w_scale_expert_stride + column / BLOCK_K * w_scale_k_stride};
    };

    Source from, then;
    Scales next;
    if (num_tiles) {
        from = source(0), then = source(1);
        load_scales(from, w_scale_n_stride, 0, next);
    }
    float acc[64] = {};
    for (int u = 0; u < num_tiles; u++) {
        const Place here(u);
        const Source after = source(u + 2);
        const i32 slot = sorted_token_ids[i64(here.block) * BLOCK_M + top + lane % 16];
        if (RESIDENT && here.first) mbarrier_wait(codes_full + buffer.index * 8, buffer.parity);
        float sum[64] = {};
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            const Scales now = next;
            const bool last = chunk + 1 == CHUNKS;
            load_scales({last ? then.row : from.row, last ? then.weight : from.weight}, w_scale_n_stride,
                        last ? 0 : chunk + 1, next);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const u32 stage = stages + at.stage * STAGE_BYTES;
                const u32 a = RESIDENT ? codes + buffer.index * CODES_BYTES + (chunk * VECTOR + i) * A_BYTES : stage + B_BYTES;
                mbarrier_wait(full + at.stage * 8, at.parity);
                multiply_block(acc, a, stage + b_offset);
                if (lane == 0) mbarrier_arrive(empty + at.stage * 8);
                at.advance();
                const float s0 = now.row[0][i] * now.weight[i], s1 = now.row[1][i] * now.weight[i];
                promote(sum, acc, s0, s1, s0, s1);
            }
        }
        if (RESIDENT && here.last) {
            if (lane == 0) mbarrier_arrive(codes_empty + buffer.index * 8);
            buffer.advance();
        }
        from = then, then = after;
        if (own_column(here) >= K) continue;

        stage_rows(own_staging, sum);
        const u8* staged = smem + (own_staging - stages);
        const int chunk = lane % 16;
        u16* to = d + own_column(here) + chunk * 8;
        u32 values[8][4];
#pragma unroll
        for (int i = 0; i < 8; i++)
            load_words(staged + (i * 2 + lane / 16) * STAGING_ROW + chunk * 16, values[i]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const i32 target = __shfl_sync(0xFFFFFFFFu, slot, i * 2 + lane / 16);
            if (target < num_slots) store_words(to + i64(target) * K, values[i]);
        }
    }
}
