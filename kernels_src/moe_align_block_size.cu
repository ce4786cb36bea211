// moe_align_block_size: a stable counting sort of slots by local expert, runs padded to blocks.
//
//   count    one warp a chunk of slots: counts[chunk, expert]; fills the outputs with "unused"
//   scan     one CTA: counts become first positions inside an expert, bases the runs' starts
//   scatter  one warp a chunk: slot -> bases[expert] + counts[chunk, expert] + rank in the chunk
//
// Slots keep their order inside an expert (ranks come from lane order), so the result is a function
// of the ids alone. A chunk is a multiple of 32 slots, chosen so that there are few hundred chunks.
// Each of the last two may be scheduled while its predecessor runs: no __restrict__ there, since a load
// marked as invariant could be moved above the wait.
#include "common/routing.cuh"
#include "ptx/pdl.cuh"

static_assert(NUM_LOCAL_EXPERTS >= 1 && NUM_LOCAL_EXPERTS <= 4096, "the histogram fits in 16 KiB");
static_assert(IDS == INT32_IDS || IDS == INT64_IDS, "topk_ids is int32 or int64");

constexpr int EXPERTS = NUM_LOCAL_EXPERTS;
constexpr u32 ALL_LANES = 0xFFFFFFFFu;

extern "C" __global__ void __launch_bounds__(32) moe_align_block_size_count(
    const void* __restrict__ topk_ids,      // [num_slots] IDS type
    const i32* __restrict__ expert_map,     // [num_experts] or unused
    i32* __restrict__ counts,               // [chunks, EXPERTS]
    i32* __restrict__ sorted_token_ids,     // [capacity]
    i32* __restrict__ expert_ids,           // [max_blocks]
    i64 num_slots,
    i64 chunk_slots,
    i64 num_experts,
    i64 capacity,
    i64 max_blocks) {
    __shared__ i32 histogram[EXPERTS];
    release_successor();
    const int lane = threadIdx.x;
    for (int e = lane; e < EXPERTS; e += 32) histogram[e] = 0;
    __syncwarp();
    const i64 first = blockIdx.x * chunk_slots;
    const i64 last = min(first + chunk_slots, num_slots);
    for (i64 slot = first + lane; slot < last; slot += 32) {
        const i32 e = local_expert<IDS, MAP>(topk_ids, slot, expert_map, num_experts, EXPERTS);
        if (e >= 0) atomicAdd(&histogram[e], 1);
    }
    __syncwarp();
    for (int e = lane; e < EXPERTS; e += 32) counts[i64(blockIdx.x) * EXPERTS + e] = histogram[e];

    const i64 threads = i64(gridDim.x) * 32, thread = i64(blockIdx.x) * 32 + lane;
    for (i64 i = thread; i < capacity; i += threads) sorted_token_ids[i] = i32(num_slots);
    for (i64 i = thread; i < max_blocks; i += threads) expert_ids[i] = -1;
}

// Exclusive sum over the 1024 threads of the CTA; `total` is the sum over all.
DEVICE i32 block_exclusive_sum(i32 value, i32& total) {
    __shared__ i32 warp_sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i32 sum = value;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const i32 left = __shfl_up_sync(ALL_LANES, sum, d);
        if (lane >= d) sum += left;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    i32 before = 0;
    total = 0;
    for (int w = 0; w < 32; w++) {
        if (w == warp) before = total;
        total += warp_sums[w];
    }
    __syncthreads();  // warp_sums is reused by the next call
    return before + sum - value;
}

extern "C" __global__ void __launch_bounds__(1024) moe_align_block_size_scan(
    i32* counts,                    // [chunks, EXPERTS], in place
    i32* bases,                     // [EXPERTS]
    i32* num_tokens_post_padded,    // [1]
    i64 chunks,
    i64 block_size) {
    release_successor();
    wait_for_predecessor();
    i32 base = 0;
    for (int first = 0; first < EXPERTS; first += 1024) {
        const int e = first + threadIdx.x;
        i32 slots = 0;
        if (e < EXPERTS) {
            for (i64 c = 0; c < chunks; c++) {
                const i32 n = counts[c * EXPERTS + e];
                counts[c * EXPERTS + e] = slots;
                slots += n;
            }
        }
        const i32 block = i32(block_size);
        const i32 padded = (slots + block - 1) / block * block;
        i32 total;
        const i32 start = base + block_exclusive_sum(padded, total);
        if (e < EXPERTS) bases[e] = start;
        base += total;
    }
    if (threadIdx.x == 0) num_tokens_post_padded[0] = base;
}

extern "C" __global__ void __launch_bounds__(32) moe_align_block_size_scatter(
    const void* topk_ids,      // [num_slots] IDS type
    const i32* expert_map,     // [num_experts] or unused
    const i32* counts,         // [chunks, EXPERTS] first position inside the expert
    const i32* bases,          // [EXPERTS]
    i32* sorted_token_ids,     // [capacity]
    i32* expert_ids,           // [max_blocks]
    i64 num_slots,
    i64 chunk_slots,
    i64 num_experts,
    i64 block_size) {
    __shared__ i32 next[EXPERTS];
    release_successor();
    wait_for_predecessor();
    const int lane = threadIdx.x;
    for (int e = lane; e < EXPERTS; e += 32) next[e] = counts[i64(blockIdx.x) * EXPERTS + e];
    __syncwarp();
    const i64 first = blockIdx.x * chunk_slots;
    const i64 last = min(first + chunk_slots, num_slots);
    for (i64 step = first; step < last; step += 32) {
        const i64 slot = step + lane;
        const i32 e = slot < last ? local_expert<IDS, MAP>(topk_ids, slot, expert_map, num_experts,
                                                           EXPERTS)
                                  : -1;
        const u32 peers = __match_any_sync(ALL_LANES, e);
        const int rank = __popc(peers & ((1u << lane) - 1));
        const i32 position = e >= 0 ? next[e] + rank : 0;
        __syncwarp();  // all have read `next` before it moves on
        if (e >= 0 && rank == 0) next[e] += __popc(peers);
        __syncwarp();
        if (e < 0) continue;
        const i64 at = i64(bases[e]) + position;
        sorted_token_ids[at] = i32(slot);
        if (position % block_size == 0) expert_ids[at / block_size] = e;
    }
}
