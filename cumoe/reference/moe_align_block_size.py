"""The expert sort: slots grouped by local expert, each group padded to whole blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cumoe.errors import ArgumentError
from cumoe.reference.arrays import require_ndim
from cumoe.reference.e4m3 import Array
from cumoe.reference.routing import local_experts


def moe_align_block_size(
    topk_ids: Array, block_size: int, num_experts: int, expert_map: Array | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Group the slots (token * topk + j) by local expert, ascending, in blocks of one expert.

    Args:
        topk_ids: [M, topk] int32 or int64; ids outside [0, num_experts) take no slot.
        num_experts: size of the global id space.
        expert_map: [num_experts] int32, global id to local, -1 for an expert that is elsewhere.

    Returns:
        sorted_token_ids [bound] int32, padded with the sentinel M * topk; expert_ids
        [bound / block_size] int32, the local expert of a block, -1 for an unused one;
        num_tokens_post_padded [1] int32, the used part of sorted_token_ids.
        ``bound`` is that of ``padded_bound``.

    Raises:
        ArgumentError: block_size or num_experts below 1; a map of another length than num_experts.
        DTypeError: ids that are not int32 or int64.
    """
    require_ndim("topk_ids", topk_ids, 2, "[M, topk]")
    if block_size < 1:
        raise ArgumentError(f"block_size must be positive, got {block_size}")
    local = local_experts(topk_ids, num_experts, expert_map).ravel()
    bound = padded_bound(local.size, num_experts, block_size)
    sorted_token_ids = np.full(bound, local.size, np.int32)
    expert_ids = np.full(bound // block_size, -1, np.int32)
    experts, counts = np.unique(local[local >= 0], return_counts=True)
    slots = np.argsort(local, kind="stable")[np.count_nonzero(local < 0) :]
    end = 0
    for expert, run in zip(experts, np.split(slots, np.cumsum(counts)[:-1]), strict=False):
        first_block, num_blocks = end // block_size, -(-len(run) // block_size)
        sorted_token_ids[end : end + len(run)] = run
        expert_ids[first_block : first_block + num_blocks] = expert
        end += num_blocks * block_size
    return sorted_token_ids, expert_ids, np.array([end], np.int32)


def padded_bound(num_slots: int, num_experts: int, block_size: int) -> int:
    """The longest that the sorted slots can be: a slot opens at most one partial block."""
    bound = min(num_slots + num_experts * (block_size - 1), num_slots * block_size)
    return -(-bound // block_size) * block_size
