// The slots of a call of at most 32, grouped by local expert: every CTA makes the same table.
//
// A chunk is up to 8 slots of one expert: those that one pass over its weights serves. Experts are in
// the order of their first slots, the slots of an expert ascend.
#pragma once
#include "common/routing.cuh"

constexpr int TABLE_SLOTS = 32;
constexpr int COLUMNS = 8;         // slots of a chunk, at most

struct Chunk {
    i32 expert;
    u16 first, count;              // of SmallTable::slots
};

struct alignas(16) SmallTable {
    Chunk chunks[TABLE_SLOTS];     // [num_chunks]
    u8 slots[TABLE_SLOTS];         // [places used] grouped by expert
    u32 local;                     // bit s: an expert of this rank computes slot s
    i32 num_chunks;

    DEVICE bool has(int slot) const { return local >> slot & 1; }
    DEVICE int places() const { return __popc(local); }

    // The slot of a chunk's c-th column. Columns that it lacks repeat its last one.
    DEVICE int slot(const Chunk& chunk, int c) const { return slots[place(chunk, c)]; }
    DEVICE static int place(const Chunk& chunk, int c) { return chunk.first + min(c, chunk.count - 1); }
};

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

// By one warp.
template <int IDS, bool MAP>
DEVICE void make_small_table(SmallTable& t, int num_slots, const void* topk_ids, const i32* expert_map,
                             i64 num_experts, i64 num_local) {
    const int slot = threadIdx.x % 32;
    i32 expert = -1;
    if (slot < num_slots) expert = local_expert<IDS, MAP>(topk_ids, slot, expert_map, num_experts, num_local);
    const bool local = expert >= 0;
    const u32 same = __match_any_sync(0xFFFFFFFFu, expert), below = (1u << slot) - 1;
    const int rank = __popc(same & below), count = __popc(same);
    const int first = __shfl_sync(0xFFFFFFFFu, sum_below(local && rank == 0 ? count : 0), __ffs(same) - 1);
    const bool begins = local && rank % COLUMNS == 0;
    const u32 chunks = __ballot_sync(0xFFFFFFFFu, begins), locals = __ballot_sync(0xFFFFFFFFu, local);
    if (begins)
        t.chunks[__popc(chunks & below)] = Chunk{expert, u16(first + rank), u16(min(count - rank, COLUMNS))};
    if (local) t.slots[first + rank] = u8(slot);
    if (slot == 0) t.local = locals, t.num_chunks = __popc(chunks);
}
