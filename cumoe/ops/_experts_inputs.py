"""The checked inputs of fused_experts_fp8."""

from __future__ import annotations

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
from cumoe.arrays.view import ArrayView
from cumoe.errors import ArgumentError
from cumoe.ops import _inputs
from cumoe.ops.moe_align_block_size import require_topk_ids
from cumoe.plan.fused_experts_fp8 import ALIGNMENT, Problem
from cumoe.plan.moe_align_block_size import padded_bound
from cumoe.plan.moe_gemm_fp8 import BLOCKS_M
from cumoe.plan.scales import GROUP_SIZE
from cumoe.plan.silu_and_mul_quant_fp8 import clamp_kind


class Inputs(NamedTuple):
    """One call: its arrays, its scalars, and the problem that they pose."""

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
    x_row_stride: int
    out_row_stride: int
    limit: float | None
    alpha: float
    beta: float
    factor: float
    problem: Problem


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
    require_choice(tuple(block_shape), "block_shape", [(GROUP_SIZE, GROUP_SIZE)])
    _inputs.require_scale(scale_format)
    limit = _inputs.require_limit(swiglu_limit, "swiglu_limit")
    _inputs.require_alpha_beta(swiglu_alpha, swiglu_beta, "swiglu_")
    _inputs.require_finite(routed_scaling_factor, "routed_scaling_factor")

    x_view, ids, weights = (
        view(x, "x"),
        view(topk_ids, "topk_ids"),
        view(topk_weights, "topk_weights"),
    )
    w1_view, w2_view = view(w1, "w1"), view(w2, "w2")
    s1, s2 = view(w1_scale, "w1_scale"), view(w2_scale, "w2_scale")
    map_view = _inputs.expert_map_view(expert_map)
    workspace_view, out_view = optional_view(workspace, "workspace"), optional_view(out, "out")

    E, N, K = _require_weights(w1_view, w2_view, s1, s2)
    M, topk, id_type = require_topk_ids(ids)
    require_dtype(x_view, "x", "bf16")
    require_shape(x_view, "x", M, K, means="[M, K] of topk_ids and w1")
    x_row_stride = _inputs.require_rows(x_view, "x")[2]
    weight_type = require_dtype(weights, "topk_weights", "fp32", "bf16", "fp16")
    require_shape(weights, "topk_weights", M, topk, means="[M, topk] of topk_ids")
    require_contiguous(weights, "topk_weights")
    if apply_router_weight_on_input and topk != 1:
        raise ArgumentError(
            f"apply_router_weight_on_input: wants topk 1, got {topk}; weight the output instead"
        )
    experts = _id_space(num_experts, map_view, E)
    _require_slots(M * topk, experts)

    named = [
        ("x", x_view), ("w1", w1_view), ("w2", w2_view), ("topk_weights", weights),
        ("topk_ids", ids), ("w1_scale", s1), ("w2_scale", s2), ("expert_map", map_view),
    ]  # fmt: skip
    require_same_device([*named, ("workspace", workspace_view), ("out", out_view)])
    inputs = [(name, v) for name, v in named if v is not None]
    out_row_stride = K
    if out_view is not None:
        out_row_stride = _require_out(out_view, x_view, inputs)
    if workspace_view is not None:
        _require_workspace(workspace_view, out_view, inputs)
    problem = Problem(
        M=M,
        K=K,
        N=N,
        num_experts=experts,
        num_local_experts=E,
        topk=topk,
        ids=id_type,
        weight=weight_type,
        has_map=map_view is not None,
        scale_format=scale_format,
        clamp=clamp_kind(limit),
        scaled=(swiglu_alpha, swiglu_beta) != (1.0, 0.0),
        weight_on_input=apply_router_weight_on_input,
        x_aligned=_inputs.is_aligned(x_view.ptr, x_row_stride, 2, 16),
        out_aligned=out_view is None or _inputs.is_aligned(out_view.ptr, out_row_stride, 2, 16),
    )
    return Inputs(
        x_view, w1_view, w2_view, weights, ids, s1, s2, map_view, workspace_view, out_view,
        x_row_stride, out_row_stride, limit, swiglu_alpha, swiglu_beta, routed_scaling_factor,
        problem,
    )  # fmt: skip


def _require_weights(
    w1: ArrayView, w2: ArrayView, w1_scale: ArrayView, w2_scale: ArrayView
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
        _require_loadable(v, name)
    blocks = GROUP_SIZE
    require_shape(w1_scale, "w1_scale", E, 2 * N // blocks, K // blocks, means="blocks of w1")
    require_shape(w2_scale, "w2_scale", E, K // blocks, N // blocks, means="blocks of w2")
    require_dtype(w1_scale, "w1_scale", "fp32")
    require_dtype(w2_scale, "w2_scale", "fp32")
    return E, N, K


def _require_loadable(v: ArrayView, name: str) -> None:
    """Rows that can be copied 16 bytes at a time."""
    expert_stride, row_stride, stride = v.strides
    if stride != 1 or expert_stride % 16 or row_stride % 16 or v.ptr % 16:
        raise ArgumentError(
            f"{name}: want rows that are contiguous and start at multiples of 16 bytes, got "
            f"strides {list(v.strides)} at address {v.ptr:#x}; pass {name}.contiguous()"
        )


def _id_space(num_experts: int | None, expert_map: ArrayView | None, E: int) -> int:
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


def _require_out(out: ArrayView, x: ArrayView, inputs: list[tuple[str, ArrayView]]) -> int:
    """The row stride of out."""
    require_dtype(out, "out", "bf16")
    require_shape(out, "out", *x.shape, means="the shape of x")
    row_stride = _inputs.require_rows(out, "out")[2]
    in_place = (out.ptr, out.strides) == (x.ptr, x.strides)
    require_no_overlap(out, "out", [(n, v) for n, v in inputs if not (in_place and n == "x")])
    return row_stride


def _require_workspace(
    workspace: ArrayView, out: ArrayView | None, inputs: list[tuple[str, ArrayView]]
) -> None:
    require_dtype(workspace, "workspace", "uint8")
    require_contiguous(workspace, "workspace")
    if workspace.ptr % ALIGNMENT:
        raise ArgumentError(
            f"workspace: want an address that is a multiple of {ALIGNMENT}, got "
            f"{workspace.ptr:#x}; pass a whole allocation, not a slice of one"
        )
    others = inputs if out is None else [*inputs, ("out", out)]
    require_no_overlap(workspace, "workspace", others)
