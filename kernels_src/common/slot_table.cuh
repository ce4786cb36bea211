// The slots of a call grouped by local expert, in shared memory: every CTA makes the same table.
//
// A chunk is up to COLUMNS slots of one expert: the tokens that one pass over its weights serves.
// Chunks are in the order of the experts, the slots of an expert ascend.
#pragma once
#include "common/routing.cuh"

struct Chunk {
    u16 expert, first, count, unused;   // slots first ... first + count of SlotTable::slots
};

constexpr u16 NO_EXPERT = 0xFFFF;

struct SlotTable {
    Chunk* chunks;      // [num_chunks]
    u16* slots;         // [num_slots] grouped by expert
    u16* expert_of;     // [num_slots] local expert or NO_EXPERT
    u16* unordered;     // [num_slots] scratch
    u32* counts;        // [EXPERTS] scratch: slots of an expert, then one past its last place
    u32* starts;        // [EXPERTS] scratch: its first place
    u32* warp_sums;     // [32] scratch
    u32* num_chunks;    // [1]
    int num_slots;
};

// Of a table of up to MAX_SLOTS slots. Multiple of 16.
template <int EXPERTS, int MAX_SLOTS>
DEVICE constexpr int slot_table_bytes() {
    return (MAX_SLOTS * int(sizeof(Chunk) + 3 * sizeof(u16)) + (2 * EXPERTS + 36) * 4 + 15) / 16 * 16;
}

template <int EXPERTS, int MAX_SLOTS>
DEVICE SlotTable slot_table_at(u8* smem, int num_slots) {
    SlotTable t;
    t.chunks = reinterpret_cast<Chunk*>(smem);
    t.counts = reinterpret_cast<u32*>(t.chunks + MAX_SLOTS);
    t.starts = t.counts + EXPERTS;
    t.warp_sums = t.starts + EXPERTS;
    t.num_chunks = t.warp_sums + 32;
    t.slots = reinterpret_cast<u16*>(t.num_chunks + 4);
    t.expert_of = t.slots + MAX_SLOTS;
    t.unordered = t.expert_of + MAX_SLOTS;
    t.num_slots = num_slots;
    return t;
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

// The same over the CTA.
template <int THREADS>
DEVICE u32 exclusive_scan(u32 value, u32* warp_sums, u32& total) {
    const int warp = threadIdx.x / 32;
    u32 of_warp, before = exclusive_scan_warp(value, of_warp);
    if (threadIdx.x % 32 == 0) warp_sums[warp] = of_warp;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) {
        if (w == warp) before += total;
        total += warp_sums[w];
    }
    return before;
}

// Lists the chunks of `count` slots from `first` on.
template <int COLUMNS>
DEVICE void write_chunks(Chunk* to, int expert, int first, int count) {
    for (; count > 0; count -= COLUMNS, first += COLUMNS)
        *to++ = Chunk{u16(expert), u16(first), u16(min(count, COLUMNS)), 0};
}

constexpr int FEW_SLOTS = 32;

// The whole table of at most FEW_SLOTS slots, by one warp. Here experts are in the order of their first slots.
template <int COLUMNS, int IDS, bool MAP>
DEVICE void make_small_table(const SlotTable& t, const void* topk_ids, const i32* expert_map, i64 num_experts,
                             i64 num_local) {
    const int slot = threadIdx.x % 32;
    i32 expert = -1;
    if (slot < t.num_slots)
        expert = local_expert<IDS, MAP>(topk_ids, slot, expert_map, num_experts, num_local);
    const u32 same = __match_any_sync(0xFFFFFFFFu, expert);
    const int rank = __popc(same & ((1u << slot) - 1)), count = __popc(same);
    const bool leads = expert >= 0 && rank == 0;
    u32 total, before = exclusive_scan_warp(leads ? (count + COLUMNS - 1) / COLUMNS << 16 | count : 0, total);
    const int first = __shfl_sync(0xFFFFFFFFu, before & 0xFFFF, __ffs(same) - 1);
    if (leads) write_chunks<COLUMNS>(t.chunks + (before >> 16), expert, first, count);
    if (slot < t.num_slots) t.expert_of[slot] = expert < 0 ? NO_EXPERT : u16(expert);
    if (expert >= 0) t.slots[first + rank] = u16(slot);
    if (slot == 0) *t.num_chunks = total >> 16;
}

// Counts the slots of each expert and lists the chunks, by the CTA: enough to know which weights to load.
template <int THREADS, int EXPERTS, int COLUMNS, int IDS, bool MAP>
DEVICE void list_chunks(const SlotTable& t, const void* topk_ids, const i32* expert_map, i64 num_experts,
                        i64 num_local) {
    constexpr int PER_THREAD = ceil_div(EXPERTS, THREADS);
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) t.counts[e] = 0;
    __syncthreads();
    for (int s = threadIdx.x; s < t.num_slots; s += THREADS) {
        const i32 e = local_expert<IDS, MAP>(topk_ids, s, expert_map, num_experts, num_local);
        t.expert_of[s] = e < 0 ? NO_EXPERT : u16(e);
        if (e >= 0) atomicAdd(&t.counts[e], 1);
    }
    __syncthreads();
    u32 count[PER_THREAD], mine = 0;  // chunks in the high half, slots in the low one
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int e = threadIdx.x * PER_THREAD + i;
        count[i] = e < EXPERTS ? t.counts[e] : 0;
        mine += (count[i] + COLUMNS - 1) / COLUMNS << 16 | count[i];
    }
    u32 total, before = exclusive_scan<THREADS>(mine, t.warp_sums, total);
    if (threadIdx.x == 0) *t.num_chunks = total >> 16;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int e = threadIdx.x * PER_THREAD + i;
        if (count[i]) t.counts[e] = t.starts[e] = before & 0xFFFF;
        write_chunks<COLUMNS>(t.chunks + (before >> 16), e, before & 0xFFFF, count[i]);
        before += (count[i] + COLUMNS - 1) / COLUMNS << 16 | count[i];
    }
    __syncthreads();
}

// Groups the slots by expert. After it every thread may read all of the table.
template <int THREADS>
DEVICE void group_slots(const SlotTable& t) {
    for (int s = threadIdx.x; s < t.num_slots; s += THREADS) {
        const u16 e = t.expert_of[s];
        if (e != NO_EXPERT) t.unordered[atomicAdd(&t.counts[e], 1)] = u16(s);
    }
    __syncthreads();
    for (int s = threadIdx.x; s < t.num_slots; s += THREADS) {
        const u16 e = t.expert_of[s];
        if (e == NO_EXPERT) continue;
        int place = t.starts[e];
        for (int i = t.starts[e]; i < t.counts[e]; i++) place += t.unordered[i] < s;
        t.slots[place] = u16(s);
    }
    __syncthreads();
}
