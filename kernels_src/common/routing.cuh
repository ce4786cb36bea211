// From a slot of topk_ids to the expert of this rank that computes it.
#pragma once
#include "common/types.cuh"

// Type of topk_ids, a compile-time constant of the kernel.
enum IdType { NO_IDS = 0, INT32_IDS = 1, INT64_IDS = 2 };

// The local expert of a slot, or -1 where the slot is not computed here: an id outside
// [0, num_experts) (tested at 64 bits, before it is narrowed; -1 is no bound), or mapped outside
// [0, num_local).
template <int IDS, bool MAP>
DEVICE i32 local_expert(const void* topk_ids, i64 slot, const i32* expert_map, i64 num_experts,
                        i64 num_local) {
    const i64 id = IDS == INT64_IDS ? static_cast<const i64*>(topk_ids)[slot]
                                    : i64(static_cast<const i32*>(topk_ids)[slot]);
    if (id < 0 || u64(id) >= u64(num_experts)) return -1;
    if constexpr (!MAP) return i32(min(id, 0x7FFFFFFFll));  // an id space may have no bound
    const i32 local = expert_map[id];
    return local >= 0 && local < num_local ? local : -1;
}
