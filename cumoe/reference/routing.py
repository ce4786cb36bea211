"""Which local expert computes a slot, if any: one rule for filter, sort and experts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cumoe.errors import ArgumentError
from cumoe.reference.arrays import integer_ids, require_ndim
from cumoe.reference.e4m3 import Array

NOT_HERE = -1


def local_experts(
    topk_ids: Array,
    num_experts: int | None,
    expert_map: Array | None,
    num_local_experts: int | None = None,
) -> NDArray[np.int64]:
    """The local expert of every id, -1 where there is none.

    An id counts if it lies in [0, num_experts) and its map entry in [0, num_local_experts), or
    within the length of the map where that number is not known. With neither ``num_experts`` nor a
    map every id from 0 on counts.
    """
    ids = integer_ids("topk_ids", topk_ids)
    table = None if expert_map is None else _local_table(expert_map, num_experts, num_local_experts)
    bound = num_experts if table is None else len(table)
    if bound is not None and bound < 1:
        raise ArgumentError(f"num_experts must be positive, got {bound}")
    valid = (ids >= 0) if bound is None else (ids >= 0) & (ids < bound)
    ids = np.where(valid, ids, 0)
    return np.where(valid, ids if table is None else table[ids], NOT_HERE)


def local_experts_of_weights(
    topk_ids: Array, num_experts: int | None, expert_map: Array | None, num_local_experts: int
) -> NDArray[np.int64]:
    """The same where weights give the number of local experts and, without a map, of all ids."""
    if expert_map is None:
        num_experts = num_local_experts if num_experts is None else num_experts
        if num_experts > num_local_experts:
            raise ArgumentError(
                f"num_experts is {num_experts}, but the weights hold {num_local_experts} experts: "
                f"pass the expert_map that says which ones"
            )
    return local_experts(topk_ids, num_experts, expert_map, num_local_experts)


def _local_table(
    expert_map: Array, num_experts: int | None, num_local_experts: int | None
) -> NDArray[np.int64]:
    table = integer_ids("expert_map", expert_map)
    require_ndim("expert_map", table, 1, "[num_experts]")
    if num_experts is not None and num_experts != len(table):
        raise ArgumentError(
            f"expert_map must have one entry for each of the num_experts = {num_experts} ids, "
            f"got {len(table)}"
        )
    bound = len(table) if num_local_experts is None else num_local_experts
    return np.where((table >= 0) & (table < bound), table, NOT_HERE)
