// moe_align_block_size: a stable counting sort of slots by local expert, runs padded to blocks.
//
//   at_once  few slots. Every CTA counts all of them, and places a chunk of its own
//
//   count    more slots. One warp a chunk: counts[chunk, expert]; fills the outputs with "unused"
//   scan     one CTA: counts become first positions inside an expert, bases the runs' starts
//   scatter  one warp a chunk: slot -> bases[expert] + counts[chunk, expert] + rank in the chunk
//
// Slots keep their order inside an expert (ranks come from lane order), so the result is a function
// of the ids alone. A chunk is a multiple of 32 slots, chosen so that there are few hundred chunks.
// Each of the last two may be scheduled while its predecessor runs: no __restrict__ there, since a load
// marked as invariant could be moved above the wait.
#include "common/routing.cuh"
#include "ptx/pdl.cuh"

static_assert(NUM_LOCAL_EXPERTS >= 1 && NUM_LOCAL_EXPERTS <= 4096, "two counters each fit in 32 KiB");
static_assert(IDS == INT32_IDS || IDS == INT64_IDS, "topk_ids is int32 or int64");

constexpr int EXPERTS = NUM_LOCAL_EXPERTS;
constexpr int THREADS = 1024;    // of at_once and scan
constexpr int WARPS = THREADS / 32;
constexpr int BATCH = 8;         // ids that a thread has in flight
constexpr u32 ALL_LANES = 0xFFFFFFFFu;

template <int IDS>
struct IdOf {
    typedef i32 type;
};
template <>
struct IdOf<INT64_IDS> {
    typedef i64 type;
};
typedef IdOf<IDS>::type Id;

DEVICE i32 ceil_to(i32 n, u32 block) { return i32((u32(n) + block - 1) / block * block); }

// Exclusive sum over the THREADS threads of the CTA; `total` is the sum over all.
DEVICE i32 block_exclusive_sum(i32 value, i32& total) {
    static_assert(WARPS == 32, "each lane takes the sum of one warp");
    __shared__ i32 warp_sums[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i32 sum = value;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const i32 left = __shfl_up_sync(ALL_LANES, sum, d);
        if (lane >= d) sum += left;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    const i32 of_warp = warp_sums[lane];
    const i32 before = __reduce_add_sync(ALL_LANES, lane < warp ? of_warp : 0);
    total = __reduce_add_sync(ALL_LANES, of_warp);
    __syncthreads();  // warp_sums is reused by the next call
    return before + sum - value;
}

// Adds the slots before `first` to `before`, all others to `rest`, by expert.
DEVICE void count_slots(const void* topk_ids, const i32* expert_map, i64 num_experts, i32 slots,
                        i32 first, i32* before, i32* rest) {
    for (i32 start = 0; start < slots; start += BATCH * THREADS) {
        Id ids[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const i32 slot = start + i * THREADS + i32(threadIdx.x);
            ids[i] = slot < slots ? static_cast<const Id*>(topk_ids)[slot] : -1;
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const i32 slot = start + i * THREADS + i32(threadIdx.x);
            if (start + i * THREADS >= slots) break;
            const i32 e = local_expert<IDS, MAP>(ids, i, expert_map, num_experts, EXPERTS);
            // The hardware adds up lanes that increment one counter: a hot expert costs no more.
            if (e >= 0) atomicAdd(&(slot < first ? before : rest)[e], 1);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) moe_align_block_size_at_once(
    const void* __restrict__ topk_ids,           // [num_slots] IDS type
    const i32* __restrict__ expert_map,          // [num_experts] or unused
    i32* __restrict__ sorted_token_ids,          // [capacity]
    i32* __restrict__ expert_ids,                // [max_blocks]
    i32* __restrict__ num_tokens_post_padded,    // [1]
    i64 num_slots,
    i64 chunk_slots,                             // at most THREADS
    i64 num_experts,
    i64 block_size,
    i64 capacity,
    i64 max_blocks) {
    __shared__ i32 next[EXPERTS];    // slots before the chunk; then the next one's place
    __shared__ i32 ends[EXPERTS];    // slots from there on; then where those of the expert end
    release_successor();
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const i32 slots = i32(num_slots);
    const u32 block = u32(block_size);
    const i32 first = i32(blockIdx.x * chunk_slots), last = min(first + i32(chunk_slots), slots);
    for (int e = thread; e < EXPERTS; e += THREADS) next[e] = ends[e] = 0;
    __syncthreads();
    count_slots(topk_ids, expert_map, num_experts, slots, first, next, ends);
    const i32 slot = first + thread;
    const i32 expert =
        slot < last ? local_expert<IDS, MAP>(topk_ids, slot, expert_map, num_experts, EXPERTS) : -1;
    __syncthreads();

    i32 used = 0;
    for (int e = thread; e - thread < EXPERTS; e += THREADS) {
        const i32 before = e < EXPERTS ? next[e] : 0;
        const i32 all = e < EXPERTS ? before + ends[e] : 0;
        i32 total;
        const i32 start = used + block_exclusive_sum(ceil_to(all, block), total);
        if (e < EXPERTS) {
            next[e] = start + before;
            ends[e] = start + all;
        }
        used += total;
    }
    __syncthreads();

    for (int e = blockIdx.x + warp * gridDim.x; e < EXPERTS; e += WARPS * gridDim.x) {
        const i32 end = ends[e], padded = ceil_to(end, block);
#pragma unroll 1
        for (i32 i = end + lane; i < padded; i += 32) sorted_token_ids[i] = slots;
    }
    const u32 threads = gridDim.x * THREADS, beyond = blockIdx.x * THREADS + thread;
#pragma unroll 1
    for (u32 i = used + beyond; i < u32(capacity); i += threads) sorted_token_ids[i] = slots;
#pragma unroll 1
    for (u32 i = u32(used) / block + beyond; i < u32(max_blocks); i += threads) expert_ids[i] = -1;
    if (beyond == 0) num_tokens_post_padded[0] = used;

    // The chunk's slots take their places warp by warp.
    const u32 peers = __match_any_sync(ALL_LANES, expert);
    const int rank = __popc(peers & ((1u << lane) - 1));
    i32 at = 0;
    for (int turn = 0; turn * 32 < last - first; turn++) {
        if (turn == warp && rank == 0 && expert >= 0) {
            at = next[expert];
            next[expert] = at + __popc(peers);
        }
        __syncthreads();
    }
    at = __shfl_sync(ALL_LANES, at, __ffs(peers) - 1) + rank;
    if (expert < 0) return;
    sorted_token_ids[at] = slot;
    if (u32(at) % block == 0) expert_ids[u32(at) / block] = expert;
}

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

extern "C" __global__ void __launch_bounds__(THREADS) moe_align_block_size_scan(
    i32* counts,                    // [chunks, EXPERTS], in place
    i32* bases,                     // [EXPERTS]
    i32* num_tokens_post_padded,    // [1]
    i64 chunks,
    i64 block_size) {
    release_successor();
    wait_for_predecessor();
    i32 base = 0;
    for (int first = 0; first < EXPERTS; first += THREADS) {
        const int e = first + threadIdx.x;
        i32 slots = 0;
        if (e < EXPERTS) {
            for (i64 c = 0; c < chunks; c++) {
                const i32 n = counts[c * EXPERTS + e];
                counts[c * EXPERTS + e] = slots;
                slots += n;
            }
        }
        i32 total;
        const i32 start = base + block_exclusive_sum(ceil_to(slots, u32(block_size)), total);
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
