"""The checked inputs of fused_experts_fp8."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from cumoe.arrays.check import (
    require_choice,
    require_contiguous,
    require_dtype,
    require_ndim,
    require_no_overlap,
    require_same_device,
    require_shape,
)
from cumoe.arrays.exchange import optional_view, view
from cumoe.arrays.view import ArrayView, Facts
from cumoe.errors import ArgumentError
from cumoe.ops import _inputs
from cumoe.ops.moe_align_block_size import require_topk_ids
from cumoe.plan.fused_experts_fp8 import ALIGNMENT, Problem
from cumoe.plan.moe_align_block_size import padded_bound
from cumoe.plan.moe_gemm_fp8 import BLOCKS_M
from cumoe.plan.scales import GROUP_SIZE
from cumoe.plan.silu_and_mul_quant_fp8 import clamp_kind

ARRAYS = (
    "x", "w1", "w2", "topk_weights", "topk_ids", "w1_scale", "w2_scale", "expert_map",
    "workspace", "out",
)  # fmt: skip


class Checked(NamedTuple):
    """What the facts of a call's arrays and its scalars say."""

    problem: Problem
    x_row_stride: int
    out_row_stride: int
    limit: float | None
    alpha: float
    beta: float
    factor: float


class Inputs(NamedTuple):
    """One call: its arrays, and what was found out about them."""

    x: ArrayView
    w1: ArrayView
    w2: ArrayView
    topk_weights: ArrayView
    topk_ids: ArrayView
    w1_scale: ArrayView
    w2_scale: ArrayView
    expert_map: ArrayView | None
    workspace: ArrayView | None
    out: ArrayView | None
    checked: Checked


def checked_inputs(
    x: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    *,
    w1_scale: Any,
    w2_scale: Any,
    block_shape: tuple[int, int],
    scale_format: str,
    swiglu_limit: float | None,
    swiglu_alpha: float,
    swiglu_beta: float,
    num_experts: int | None,
    expert_map: Any,
    apply_router_weight_on_input: bool,
    routed_scaling_factor: float,
    workspace: Any,
    out: Any,
) -> Inputs:
    """Views of all arrays, after every check that needs no value of theirs."""
    arrays = (
        view(x, "x"),
        view(w1, "w1"),
        view(w2, "w2"),
        view(topk_weights, "topk_weights"),
        view(topk_ids, "topk_ids"),
        view(w1_scale, "w1_scale"),
        view(w2_scale, "w2_scale"),
        optional_view(expert_map, "expert_map"),
        optional_view(workspace, "workspace"),
        optional_view(out, "out"),
    )
    checked = _checked(
        *(_inputs.facts_of(v) for v in arrays),
        tuple(_inputs.start_of(v) for v in arrays),
        block_shape=tuple(block_shape),
        scale_format=scale_format,
        swiglu_limit=swiglu_limit,
        swiglu_alpha=swiglu_alpha,
        swiglu_beta=swiglu_beta,
        num_experts=num_experts,
        apply_router_weight_on_input=apply_router_weight_on_input,
        routed_scaling_factor=routed_scaling_factor,
    )
    inputs = Inputs(*arrays, checked)
    _require_own_memory(inputs)
    return inputs


@lru_cache(4096)
def _checked(
    x: Facts,
    w1: Facts,
    w2: Facts,
    topk_weights: Facts,
    topk_ids: Facts,
    w1_scale: Facts,
    w2_scale: Facts,
    expert_map: Facts | None,
    workspace: Facts | None,
    out: Facts | None,
    starts: tuple[int, ...],
    *,
    block_shape: tuple[int, ...],
    scale_format: str,
    swiglu_limit: float | None,
    swiglu_alpha: float,
    swiglu_beta: float,
    num_experts: int | None,
    apply_router_weight_on_input: bool,
    routed_scaling_factor: float,
) -> Checked:
    require_choice(block_shape, "block_shape", [(GROUP_SIZE, GROUP_SIZE)])
    _inputs.require_scale(scale_format)
    limit = _inputs.require_limit(swiglu_limit, "swiglu_limit")
    _inputs.require_alpha_beta(swiglu_alpha, swiglu_beta, "swiglu_")
    _inputs.require_finite(routed_scaling_factor, "routed_scaling_factor")
    _inputs.require_expert_map(expert_map)
    start = dict(zip(ARRAYS, starts, strict=True))

    E, N, K = _require_weights(w1, w2, w1_scale, w2_scale, start)
    M, topk, id_type = require_topk_ids(topk_ids)
    require_dtype(x, "x", "bf16")
    require_shape(x, "x", M, K, means="[M, K] of topk_ids and w1")
    x_row_stride = _inputs.require_rows(x, "x")[2]
    weight_type = require_dtype(topk_weights, "topk_weights", "fp32", "bf16", "fp16")
    require_shape(topk_weights, "topk_weights", M, topk, means="[M, topk] of topk_ids")
    require_contiguous(topk_weights, "topk_weights")
    if apply_router_weight_on_input and topk != 1:
        raise ArgumentError(
            f"apply_router_weight_on_input: wants topk 1, got {topk}; weight the output instead"
        )
    experts = _id_space(num_experts, expert_map, E)
    _require_slots(M * topk, experts)
    out_row_stride = K if out is None else _require_out(out, x)
    if workspace is not None:
        require_dtype(workspace, "workspace", "uint8")
        require_contiguous(workspace, "workspace")
    arrays = (x, w1, w2, topk_weights, topk_ids, w1_scale, w2_scale, expert_map, workspace, out)
    require_same_device(zip(ARRAYS, arrays, strict=True))
    problem = Problem(
        M=M,
        K=K,
        N=N,
        num_experts=experts,
        num_local_experts=E,
        topk=topk,
        ids=id_type,
        weight=weight_type,
        has_map=expert_map is not None,
        scale_format=scale_format,
        clamp=clamp_kind(limit),
        scaled=(swiglu_alpha, swiglu_beta) != (1.0, 0.0),
        weight_on_input=apply_router_weight_on_input,
        x_aligned=_inputs.is_aligned(start["x"], x_row_stride, 2, 16),
        out_aligned=_inputs.is_aligned(start["out"], out_row_stride, 2, 16),
    )
    return Checked(
        problem, x_row_stride, out_row_stride, limit, swiglu_alpha, swiglu_beta,
        routed_scaling_factor,
    )  # fmt: skip


def _require_weights(
    w1: Facts, w2: Facts, w1_scale: Facts, w2_scale: Facts, start: dict[str, int]
) -> tuple[int, int, int]:
    """E, N, K."""
    require_ndim(w1, "w1", 3, "[E, 2N, K]")
    require_ndim(w2, "w2", 3, "[E, K, N]")
    E, K, N = w2.shape
    for size, name in ((K, "K"), (N, "N")):
        if size % GROUP_SIZE or size == 0:
            raise ArgumentError(
                f"w2: want {name} a multiple of {GROUP_SIZE}, got {size} in [E, K, N] = "
                f"{list(w2.shape)}; cumoe.pad_experts pads weights and scales with zeros"
            )
    require_shape(w1, "w1", E, 2 * N, K, means="[E, 2N, K] of w2")
    _inputs.require_expert_count(E, "w1")
    for v, name in ((w1, "w1"), (w2, "w2")):
        require_dtype(v, name, "e4m3")
        _require_loadable(v, name, start[name])
    blocks = GROUP_SIZE
    require_shape(w1_scale, "w1_scale", E, 2 * N // blocks, K // blocks, means="blocks of w1")
    require_shape(w2_scale, "w2_scale", E, K // blocks, N // blocks, means="blocks of w2")
    require_dtype(w1_scale, "w1_scale", "fp32")
    require_dtype(w2_scale, "w2_scale", "fp32")
    return E, N, K


def _require_loadable(v: Facts, name: str, start: int) -> None:
    """Rows that can be copied 16 bytes at a time."""
    expert_stride, row_stride, stride = v.strides
    if stride != 1 or expert_stride % 16 or row_stride % 16 or start:
        raise ArgumentError(
            f"{name}: want rows that are contiguous and start at multiples of 16 bytes, got "
            f"strides {list(v.strides)}, {start} bytes past one; pass {name}.contiguous()"
        )


def _id_space(num_experts: int | None, expert_map: Facts | None, E: int) -> int:
    experts = _inputs.id_space(num_experts, expert_map, default=E)
    if expert_map is None and experts > E:
        raise ArgumentError(
            f"num_experts: want at most {E}, the experts in w1, got {experts}; "
            f"pass an expert_map where the others are on other ranks"
        )
    return experts


def _require_slots(num_slots: int, num_experts: int) -> None:
    if padded_bound(num_slots, num_experts, max(BLOCKS_M)) > _inputs.INT32_MAX:
        raise ArgumentError(
            f"topk_ids: want fewer than 2^31 padded slots, got {num_slots} slots; split the tokens"
        )


def _require_out(out: Facts, x: Facts) -> int:
    """The row stride of out."""
    require_dtype(out, "out", "bf16")
    require_shape(out, "out", *x.shape, means="the shape of x")
    return _inputs.require_rows(out, "out")[2]


def _require_own_memory(i: Inputs) -> None:
    """Outputs overlap nothing, but for an out that is x; the workspace lies where it may."""
    inputs = tuple(zip(ARRAYS, i[:8], strict=False))  # x first, then all that is only read
    if i.out is not None:
        in_place = (i.out.ptr, i.out.facts.strides) == (i.x.ptr, i.x.facts.strides)
        require_no_overlap(i.out, "out", inputs[in_place:])
    if i.workspace is not None:
        if i.workspace.ptr % ALIGNMENT:
            raise ArgumentError(
                f"workspace: want an address that is a multiple of {ALIGNMENT}, got "
                f"{i.workspace.ptr:#x}; pass a whole allocation, not a slice of one"
            )
        require_no_overlap(i.workspace, "workspace", (*inputs, ("out", i.out)))
