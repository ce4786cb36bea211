// The slots of a call of at most 32, or 64, grouped by local expert: every CTA makes the same table.
//
// A chunk is up to 8 slots of one expert: those that one pass over its weights serves. Experts are in
// the order of their first slots, the slots of an expert ascend.
#pragma once
#include "common/routing.cuh"

constexpr int COLUMNS = 8;         // slots of a chunk, at most

struct Chunk {
    i32 expert;
    u16 first, count;              // of SmallTable::slots
};

// A set of slots, bit s for slot s.
template <int SLOTS>
struct SlotSet {
    static_assert(SLOTS == 32 || SLOTS == 64, "one or two for each lane");
    typedef u32 Bits;
};

template <>
struct SlotSet<64> {
    typedef u64 Bits;
};

DEVICE int set_size(u32 set) { return __popc(set); }
DEVICE int set_size(u64 set) { return __popcll(set); }
DEVICE int first_of(u32 set) { return __ffs(set) - 1; }
DEVICE int first_of(u64 set) { return __ffsll(set) - 1; }

template <int SLOTS>
struct alignas(16) SmallTable {
    typedef typename SlotSet<SLOTS>::Bits Set;

    Chunk chunks[SLOTS];           // [num_chunks]
    u8 slots[SLOTS];               // [places used] grouped by expert
    Set local;                     // those that an expert of this rank computes
    i32 num_chunks;

    DEVICE bool has(int slot) const { return local >> slot & 1; }
    DEVICE int places() const { return set_size(local); }

    // The slot of a chunk's c-th column. Columns that it lacks repeat its last one.
    DEVICE int slot(const Chunk& chunk, int c) const { return slots[place(chunk, c)]; }
    DEVICE static int place(const Chunk& chunk, int c) { return chunk.first + min(c, chunk.count - 1); }
};

DEVICE constexpr int table_slots(int most) { return most <= 32 ? 32 : 64; }

// The sum of the values of the lanes below.
DEVICE int sum_below(int value) {
    const int lane = threadIdx.x % 32;
    int sum = value;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, sum, d);
        if (lane >= d) sum += other;
    }
    return sum - value;
}

// Of one slot of each lane, or of two, lane and 32 + lane.
DEVICE u32 slots_where(const bool (&holds)[1]) { return __ballot_sync(0xFFFFFFFFu, holds[0]); }

DEVICE u64 slots_where(const bool (&holds)[2]) {
    const u32 low = __ballot_sync(0xFFFFFFFFu, holds[0]), high = __ballot_sync(0xFFFFFFFFu, holds[1]);
    return u64(high) << 32 | low;
}

// The slots with the expert of each. What a slot without one gets is of no use.
DEVICE void find_same(const i32 (&expert)[1], u32, u32 (&same)[1]) {
    same[0] = __match_any_sync(0xFFFFFFFFu, expert[0]);
}

// Those of `local` that agree with it in every bit.
DEVICE void find_same(const i32 (&expert)[2], u64 local, u64 (&same)[2]) {
    const u32 highest = u32(max(__reduce_max_sync(0xFFFFFFFFu, max(expert[0], expert[1])), 0));
    same[0] = same[1] = local;
#pragma unroll 4
    for (u32 bit = 1; bit <= highest; bit *= 2) {
        const bool has[2] = {(expert[0] & bit) != 0, (expert[1] & bit) != 0};
        const u64 set = slots_where(has);
        same[0] &= has[0] ? set : ~set, same[1] &= has[1] ? set : ~set;
    }
}

// By one warp.
template <int IDS, bool MAP, int SLOTS>
DEVICE void make_small_table(SmallTable<SLOTS>& t, int num_slots, const void* topk_ids, const i32* expert_map,
                             i64 num_experts, i64 num_local) {
    typedef typename SmallTable<SLOTS>::Set Set;
    constexpr int EACH = SLOTS / 32;   // slots of a lane
    const int lane = threadIdx.x % 32;
    i32 expert[EACH];
    bool local[EACH], begins[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int slot = lane + 32 * i;
        expert[i] = slot < num_slots ? local_expert<IDS, MAP>(topk_ids, slot, expert_map, num_experts, num_local) : -1;
        local[i] = expert[i] >= 0;
    }
    const Set locals = slots_where(local);
    Set same[EACH], below[EACH];
    find_same(expert, locals, same);
    int rank[EACH], count[EACH], counts = 0;   // counts: of the experts that begin in a lane, 16 bits each
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        below[i] = (Set(1) << (lane + 32 * i)) - 1;
        rank[i] = set_size(same[i] & below[i]), count[i] = set_size(same[i]);
        if (local[i] && rank[i] == 0) counts |= count[i] << 16 * i;
        begins[i] = local[i] && rank[i] % COLUMNS == 0;
    }
    int firsts = sum_below(counts);            // places of the experts that begin in a lane
    if constexpr (EACH == 2) firsts += __shfl_sync(0xFFFFFFFFu, firsts + counts, 31) << 16;
    const Set chunks = slots_where(begins);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int leader = first_of(same[i]);
        int first = __shfl_sync(0xFFFFFFFFu, firsts, leader);  // modulo 32
        if constexpr (EACH == 2) first = leader < 32 ? first & 0xFFFF : first >> 16;
        if (begins[i])
            t.chunks[set_size(chunks & below[i])] =
                Chunk{expert[i], u16(first + rank[i]), u16(min(count[i] - rank[i], COLUMNS))};
        if (local[i]) t.slots[first + rank[i]] = u8(lane + 32 * i);
    }
    if (lane == 0) t.local = locals, t.num_chunks = set_size(chunks);
}
