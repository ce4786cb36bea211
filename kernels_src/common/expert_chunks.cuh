// The slots of a call counted by local expert, and cut into chunks: every CTA makes the same list.
//
// A chunk is up to COLUMNS slots of one expert: the slots that one pass over its weights serves. Their
// place is where they lie in the order (expert, slot).
#pragma once
#include "common/routing.cuh"

struct Chunk {
    u16 expert, first, count, unused;   // places first ... first + count
};

// At most so many, of up to MAX_SLOTS slots.
template <int EXPERTS, int MAX_SLOTS, int COLUMNS>
DEVICE constexpr int most_chunks() {
    return MAX_SLOTS < EXPERTS + MAX_SLOTS / COLUMNS ? MAX_SLOTS : EXPERTS + MAX_SLOTS / COLUMNS;
}

// Shared memory of list_chunks, in bytes. Multiple of 16.
template <int EXPERTS, int MAX_SLOTS, int COLUMNS>
DEVICE constexpr int chunks_bytes() {
    return (most_chunks<EXPERTS, MAX_SLOTS, COLUMNS>() * int(sizeof(Chunk)) + (EXPERTS + 32) * 4 + 15) / 16 * 16;
}

// The exclusive prefix sum of `value` over a warp, and the sum of all.
DEVICE u32 exclusive_scan_warp(u32 value, u32& total) {
    u32 sum = value;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const u32 other = __shfl_up_sync(0xFFFFFFFFu, sum, d);
        if (threadIdx.x % 32 >= d) sum += other;
    }
    total = __shfl_sync(0xFFFFFFFFu, sum, 31);
    return sum - value;
}

// Lists the chunks at `smem`, by the CTA, and returns their number.
template <int THREADS, int EXPERTS, int MAX_SLOTS, int COLUMNS, int IDS, bool MAP>
DEVICE int list_chunks(Chunk* smem, const void* topk_ids, int num_slots, const i32* expert_map, i64 num_experts,
                       i64 num_local) {
    constexpr int PER_THREAD = ceil_div(EXPERTS, THREADS);
    u32* counts = reinterpret_cast<u32*>(smem + most_chunks<EXPERTS, MAX_SLOTS, COLUMNS>());
    u32* warp_sums = counts + EXPERTS;
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) counts[e] = 0;
    __syncthreads();
    for (int s = threadIdx.x; s < num_slots; s += THREADS) {
        const i32 e = local_expert<IDS, MAP>(topk_ids, s, expert_map, num_experts, num_local);
        if (e >= 0) atomicAdd(&counts[e], 1);
    }
    __syncthreads();
    u32 count[PER_THREAD], mine = 0;  // chunks in the high half, slots in the low one
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int e = threadIdx.x * PER_THREAD + i;
        count[i] = e < EXPERTS ? counts[e] : 0;
        mine += (count[i] + COLUMNS - 1) / COLUMNS << 16 | count[i];
    }
    u32 of_warp, before = exclusive_scan_warp(mine, of_warp), total = 0;
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = of_warp;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) {
        if (w == threadIdx.x / 32) before += total;
        total += warp_sums[w];
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        Chunk* to = smem + (before >> 16);
        for (int left = count[i], first = before & 0xFFFF; left > 0; left -= COLUMNS, first += COLUMNS)
            *to++ = Chunk{u16(threadIdx.x * PER_THREAD + i), u16(first), u16(min(left, COLUMNS)), 0};
        before += (count[i] + COLUMNS - 1) / COLUMNS << 16 | count[i];
    }
    __syncthreads();
    return total >> 16;
}
