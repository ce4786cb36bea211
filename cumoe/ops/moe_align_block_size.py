"""moe_align_block_size: the expert sort."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from cumoe import reference
from cumoe.arrays.check import (
    require_contiguous,
    require_dtype,
    require_ndim,
    require_same_device,
)
from cumoe.arrays.view import Facts
from cumoe.errors import ArgumentError
from cumoe.launch import device
from cumoe.launch.memory import Output
from cumoe.launch.run import At, Launch
from cumoe.ops import _inputs
from cumoe.ops._inputs import at
from cumoe.ops._op import Call, Op, Starts
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
        ArgumentError: a shape, topk, block_size or num_experts that is not one of these, or so many
            that padded slots reach 2^31.
        DTypeError: topk_ids is not int32 or int64, expert_map not int32, or a scalar argument no
            whole number.
        DeviceMismatchError: topk_ids and expert_map are on different devices.
        UnsupportedDeviceError: no kernel for this GPU, no usable CUDA installation, or a tensor on
            neither the CPU nor an NVIDIA GPU.
        KernelNotBuiltError: a kernel is not loaded and the stream is being captured, or it is in no
            cache and CUMOE_DISABLE_JIT=1. `cumoe.warmup` loads it, `cumoe prebuild` builds it.
        CompileError: NVRTC refused a kernel.
        CumoeError: the driver refused a launch.

    Example:
        >>> import numpy as np, cumoe
        >>> ids = np.array([[2, 0], [2, 1]], np.int32)
        >>> slots, experts, used = cumoe.moe_align_block_size(ids, 2, 3)
        >>> slots.tolist(), experts.tolist(), used.tolist()
        ([1, 4, 3, 4, 0, 2, 4, 4], [0, 1, 2, -1], [6])
    """
    result: tuple[Any, Any, Any] = _op((topk_ids, expert_map), (block_size, num_experts))
    return result


class _Scalars(NamedTuple):
    """The arguments that are no arrays, as plain Python values."""

    block_size: int
    num_experts: int


def _scalars(block_size: Any, num_experts: Any) -> _Scalars:
    return _Scalars(
        _inputs.whole_number(block_size, "block_size"),
        _inputs.whole_number(num_experts, "num_experts"),
    )


@lru_cache(4096)
def _checked(ids: Facts, expert_map: Facts | None, starts: Starts, plain: _Scalars) -> Call:
    M, topk, id_type = require_topk_ids(ids)
    _inputs.require_expert_map(expert_map)
    block_size = plain.block_size
    experts = _inputs.id_space(plain.num_experts, expert_map, default=plain.num_experts)
    _inputs.require_expert_count(experts)
    if block_size < 1:
        raise ArgumentError(f"block_size: want a positive number, got {block_size}")
    where = require_same_device([("topk_ids", ids), ("expert_map", expert_map)])
    if planning.padded_bound(M * topk, experts, block_size) > _inputs.INT32_MAX:
        raise ArgumentError(
            f"topk_ids: {M} tokens times topk {topk}, padded to blocks of {block_size}, want more "
            f"than 2^31 - 1 slots; split the tokens"
        )
    if where.kind == "cpu":
        return Call(plain._asdict())
    problem = planning.Problem(
        M * topk, block_size, experts, experts, id_type, expert_map is not None
    )
    plan = planning.plan(problem, device.info(where.ordinal))
    made = {
        "sorted_token_ids": Output((plan.capacity,), "int32"),
        "expert_ids": Output((plan.max_blocks,), "int32"),
        "num_tokens_post_padded": Output((1,), "int32"),
    }
    counts, bases = planning.counts_bytes(plan, experts)
    if counts:
        made["counts"] = Output(((counts + bases) // 4,), "int32")
    launches = align_launches(
        plan, problem, At("topk_ids"), at("expert_map", expert_map),
        At("counts"), At("counts", counts), *map(At, RESULTS),
    )  # fmt: skip
    return Call(plain._asdict(), launches, made)


def align_launches(
    plan: planning.Plan,
    problem: planning.Problem,
    topk_ids: At,
    expert_map: At | int,
    counts: At,
    bases: At,
    sorted_token_ids: At,
    expert_ids: At,
    num_tokens_post_padded: At,
) -> tuple[Launch, ...]:
    """The launches of the sort; one alone takes neither counts nor bases."""
    p = problem
    if len(plan.steps) == 1:
        sizes = p.num_slots, plan.chunk_slots, p.num_experts, p.block_size
        given = topk_ids, expert_map, sorted_token_ids, expert_ids, num_tokens_post_padded
        return (Launch(plan.steps[0], (*given, *sizes, plan.capacity, plan.max_blocks)),)
    count, scan, scatter = plan.steps
    return (
        Launch(
            count,
            (topk_ids, expert_map, counts, sorted_token_ids, expert_ids,
             p.num_slots, plan.chunk_slots, p.num_experts, plan.capacity, plan.max_blocks),
        ),
        Launch(
            scan,
            (counts, bases, num_tokens_post_padded, plan.chunks, p.block_size),
        ),
        Launch(
            scatter,
            (topk_ids, expert_map, counts, bases, sorted_token_ids, expert_ids,
             p.num_slots, plan.chunk_slots, p.num_experts, p.block_size),
        ),
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


RESULTS = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
_op = Op(
    ("topk_ids", "expert_map"),
    required=1,
    inputs=2,
    results=RESULTS,
    scalars=_scalars,
    check=_checked,
    reference=reference.moe_align_block_size,
)
