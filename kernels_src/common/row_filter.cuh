// Which rows a warp or a CTA computes: those whose id names an expert of this rank, and all that lie
// below the last one (they are padding).
#pragma once
#include "common/routing.cuh"

constexpr u32 ALL_LANES = 0xFFFFFFFFu;

template <int IDS>
struct IdOf {
    typedef i32 Type;
};
template <>
struct IdOf<INT64_IDS> {
    typedef i64 Type;
};

// bits |= bit where a < b. The compiler takes four instructions for a comparison, a shift and an or.
DEVICE void set_bit_if_below(u32& bits, u32 bit, u32 a, u32 b) {
    asm("{.reg .pred p; setp.lt.u32 p, %1, %2; @p or.b32 %0, %0, %3;}"
        : "+r"(bits) : "r"(a), "r"(b), "r"(bit));
}

// Tests ids, by whole warps. Of a map of HELD experts a warp holds a bit for each: bit i of lane l is
// expert 32 i + l. Ids and map are then read in one round trip to the L2 cache, not one after another.
// A map that is longer than a warp can hold stays in memory: HELD is 0.
template <int IDS, bool MAP, int HELD>
struct RowFilter {
    static_assert(HELD <= 1024 && (MAP || HELD == 0), "one word a lane, of a map");
    typedef typename IdOf<IDS>::Type Id;
    static constexpr int WORDS = ceil_div(HELD, 32);

    const void* topk_ids;     // [R]
    const i32* expert_map;    // [num_experts]
    const i32* lanes_entry;   // the first that this lane holds
    i64 num_experts, num_local;
    u32 bound;                // of local experts; a negative entry, unsigned, is above it
    u32 local = 0;

    DEVICE RowFilter(const void* topk_ids, const i32* expert_map, i64 num_experts, i64 num_local)
        : topk_ids(topk_ids), expert_map(expert_map), lanes_entry(expert_map + threadIdx.x % 32),
          num_experts(num_experts), num_local(num_local),
          bound(u32(min(num_local, 0x7FFFFFFFll))) {}

    // After the first ids were asked for: these are on their way meanwhile.
    DEVICE void read_map() {
        if constexpr (HELD > 0) {
            i32 entries[WORDS];
#pragma unroll
            for (int i = 0; i < WORDS; i++)
                entries[i] = 32 * i + threadIdx.x % 32 < HELD ? lanes_entry[32 * i] : -1;
#pragma unroll
            for (int i = 0; i < WORDS; i++)
                set_bit_if_below(local, 1u << i, u32(entries[i]), bound);
        }
    }

    DEVICE const Id* address(u32 row) const { return static_cast<const Id*>(topk_ids) + row; }

    // What decides about a row: its id; where the map stays in memory, its local expert. Or -1.
    DEVICE Id read(const Id* address, bool exists) const {
        if (IDS == NO_IDS || !exists) return -1;
        if constexpr (MAP && HELD == 0)
            return local_expert<IDS, MAP>(address, 0, expert_map, num_experts, num_local);
        else
            return *address;
    }

    // Whether the row of which `read` gave this is computed.
    DEVICE bool takes(Id id) const {
        if constexpr (IDS == NO_IDS) {
            return true;
        } else if constexpr (HELD > 0) {
            const u32 word = __shfl_sync(ALL_LANES, local, u32(id) % 32);
            return (word >> (u32(id) / 32 % 32) & 1) && u64(id) < HELD;
        } else {
            return id >= 0 && (MAP || u64(id) < u64(num_experts));  // -1 is no bound
        }
    }
};

// Lists the rows of a chunk that a filter takes: each warp for itself (LISTERS = 32), or the first
// LISTERS threads for the CTA. Whoever lists the same chunk gets the same list.
template <class Filter, int THREADS, int LISTERS, int SCAN>
struct RowList {
    static constexpr int WARPS = LISTERS / 32;
    static_assert(LISTERS * SCAN <= 65536, "rows of a chunk are listed as u16");

    struct Shared {
        u16 rows[LISTERS * SCAN];
        u32 counts[WARPS];
    };

    Shared& shared;
    typename Filter::Id ids[SCAN];

    DEVICE explicit RowList(Shared& shared) : shared(shared) {}

    // The number of this thread's first row in the chunk; the others follow LISTERS apart.
    DEVICE static u32 row() { return WARPS == 1 ? threadIdx.x % 32 : threadIdx.x; }
    DEVICE static bool lists() { return WARPS == 1 || THREADS == LISTERS || threadIdx.x < LISTERS; }

    DEVICE static void synchronize() {
        if constexpr (WARPS == 1)
            __syncwarp();
        else
            __syncthreads();
    }

    // Asks for the ids of `rows` rows, from the address of this thread's first one.
    DEVICE void read(const Filter& filter, const typename Filter::Id* first, i32 rows) {
        const i32 left = lists() ? rows - i32(row()) : 0;
#pragma unroll
        for (int i = 0; i < SCAN; i++) ids[i] = filter.read(first + i * LISTERS, left > i * LISTERS);
    }

    // Lists those that are taken, by their numbers in the chunk, and `padding` rows from `end` on.
    // How many these are.
    DEVICE u32 fill(const Filter& filter, u32 end, u32 padding) {
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, below = (1u << lane) - 1;
        u32 taken[SCAN], at = 0, total = 0;
        if (lists()) {
#pragma unroll
            for (int i = 0; i < SCAN; i++) {
                taken[i] = __ballot_sync(ALL_LANES, filter.takes(ids[i]));
                total += __popc(taken[i]);
            }
        }
        if constexpr (WARPS > 1) {
            if (lists() && lane == 0) shared.counts[warp] = total;
            __syncthreads();
            const u32 count = lane < WARPS ? shared.counts[lane] : 0;
            total = __reduce_add_sync(ALL_LANES, count);
            at = __reduce_add_sync(ALL_LANES, lane < warp ? count : 0);
        }
        if (lists()) {
#pragma unroll
            for (int i = 0; i < SCAN; i++) {
                const u32 place = at + __popc(taken[i] & below);
                if (taken[i] >> lane & 1) shared.rows[place] = u16(i * LISTERS + row());
                at += __popc(taken[i]);
            }
        }
        if (row() < padding) shared.rows[total + row()] = u16(end + row());
        synchronize();
        return total + padding;
    }
};
