"""moe_align_block_size: the expert sort."""

from __future__ import annotations

from typing import Any

from cumoe import reference
from cumoe.arrays.check import (
    require_contiguous,
    require_dtype,
    require_ndim,
    require_same_device,
)
from cumoe.arrays.exchange import host_result, optional_view, to_numpy, view
from cumoe.arrays.view import ArrayView, Facts
from cumoe.errors import ArgumentError
from cumoe.launch import device, memory, module, run
from cumoe.ops import _inputs, _outputs
from cumoe.plan import moe_align_block_size as planning


def moe_align_block_size(
    topk_ids: Any, block_size: int, num_experts: int, expert_map: Any = None
) -> tuple[Any, Any, Any]:
    """Groups slots by expert, each expert's run padded to a multiple of block_size.

    Slot s = token * topk + j. Slots keep their order inside an expert; the result is a function of
    the ids alone. Ids outside [0, num_experts), and ids that expert_map does not map to a local
    expert, take no slot; a 64-bit id is tested before it is narrowed.

    Args:
        topk_ids: [M, topk] int32 or int64, contiguous; topk from 1 to 64.
        block_size: positive.
        num_experts: size of the id space, up to 4096.
        expert_map: [num_experts] int32, global to local expert, -1 where not on this rank.

    Returns:
        sorted_token_ids: [capacity] int32, slots by local expert; unused entries hold M * topk.
        expert_ids: [capacity / block_size] int32, the local expert of each block, -1 where unused.
        num_tokens_post_padded: [1] int32, on the device: the part of the capacity that is in use.
        capacity = min(M topk + num_experts (block_size - 1), M topk block_size), rounded up.

    Raises:
        ArgumentError, DTypeError, DeviceMismatchError.

    Example:
        >>> import numpy as np, cumoe
        >>> ids = np.array([[2, 0], [2, 1]], np.int32)
        >>> slots, experts, used = cumoe.moe_align_block_size(ids, 2, 3)
        >>> slots.tolist(), experts.tolist(), used.tolist()
        ([1, 4, 3, 4, 0, 2, 4, 4], [0, 1, 2, -1], [6])
    """
    block_size = _inputs.whole_number(block_size, "block_size")
    num_experts = _inputs.whole_number(num_experts, "num_experts")
    ids, map_view = view(topk_ids, "topk_ids"), optional_view(expert_map, "expert_map")
    map_facts = _inputs.facts_of(map_view)
    M, topk, id_type = require_topk_ids(ids.facts)
    _inputs.require_expert_map(map_facts)
    experts = _inputs.id_space(num_experts, map_facts, default=num_experts)
    _inputs.require_expert_count(experts)
    if block_size < 1:
        raise ArgumentError(f"block_size: want a positive number, got {block_size}")
    where = require_same_device([("topk_ids", ids.facts), ("expert_map", map_facts)])
    problem = planning.Problem(
        M * topk, block_size, experts, experts, id_type, map_view is not None
    )
    if planning.padded_bound(M * topk, experts, block_size) > _inputs.INT32_MAX:
        raise ArgumentError(
            f"topk_ids: {M} tokens times topk {topk}, padded to blocks of {block_size}, want more "
            f"than 2^31 - 1 slots; split the tokens"
        )
    if where.kind == "cpu":
        results = reference.moe_align_block_size(
            to_numpy(ids), block_size, num_experts, _outputs.optional_host(map_view)
        )
        sorted_token_ids, expert_ids, used = (host_result(r, ids) for r in results)
        return sorted_token_ids, expert_ids, used
    with device.on_device(where.ordinal):
        return _run(ids, map_view, problem, where.ordinal)


def _run(
    ids: ArrayView, map_view: ArrayView | None, problem: planning.Problem, ordinal: int
) -> tuple[Any, Any, Any]:
    plan = planning.plan(problem, device.info(ordinal).arch)
    experts = problem.num_local_experts
    results = (
        _outputs.new_output(ids, (plan.capacity,), "int32"),
        _outputs.new_output(ids, (plan.max_blocks,), "int32"),
        _outputs.new_output(ids, (1,), "int32"),
    )
    scratch = view(_outputs.new_output(ids, ((plan.chunks + 1) * experts,), "int32"), "scratch")
    pointers = [view(r, "output").ptr for r in results]
    stream = memory.current_stream(ids)
    module.require_loaded((plan.count_slots, plan.scan_counts, plan.scatter_slots), ordinal, stream)
    launch_align(
        plan, problem, ordinal, stream,
        ids.ptr, 0 if map_view is None else map_view.ptr,
        scratch.ptr, scratch.ptr + plan.chunks * experts * 4, *pointers,
    )  # fmt: skip
    sorted_token_ids, expert_ids, used = (_outputs.delivered(r) for r in results)
    return sorted_token_ids, expert_ids, used


def launch_align(
    plan: planning.Plan,
    problem: planning.Problem,
    ordinal: int,
    stream: int,
    topk_ids: int,
    expert_map: int,
    counts: int,
    bases: int,
    sorted_token_ids: int,
    expert_ids: int,
    num_tokens_post_padded: int,
) -> None:
    """The three launches of the sort, on pointers."""
    p = problem
    run.run(
        plan.count_slots, ordinal, stream,
        topk_ids, expert_map, counts, sorted_token_ids, expert_ids,
        p.num_slots, plan.chunk_slots, p.num_experts, plan.capacity, plan.max_blocks,
    )  # fmt: skip
    run.run(
        plan.scan_counts, ordinal, stream,
        counts, bases, num_tokens_post_padded, plan.chunks, p.block_size,
    )  # fmt: skip
    run.run(
        plan.scatter_slots, ordinal, stream,
        topk_ids, expert_map, counts, bases, sorted_token_ids, expert_ids,
        p.num_slots, plan.chunk_slots, p.num_experts, p.block_size,
    )  # fmt: skip


def require_topk_ids(ids: Facts) -> tuple[int, int, str]:
    """M, topk and the type of the ids."""
    id_type = require_dtype(ids, "topk_ids", "int32", "int64")
    require_ndim(ids, "topk_ids", 2, "[M, topk]")
    require_contiguous(ids, "topk_ids")
    M, topk = ids.shape
    if not 1 <= topk <= planning.MAX_TOPK:
        raise ArgumentError(f"topk_ids: want topk from 1 to {planning.MAX_TOPK}, got {topk}")
    return M, topk, id_type
