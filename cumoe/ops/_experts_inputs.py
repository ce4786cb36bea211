"""The checked inputs of fused_experts_fp8."""

from __future__ import annotations

from typing import Any, NamedTuple

from cumoe.arrays.check import (
    contiguous_copy_of,
    require_choice,
    require_contiguous,
    require_dtype,
    require_ndim,
    require_same_device,
    require_shape,
    require_writeable,
)
from cumoe.arrays.view import Device, Facts
from cumoe.errors import ArgumentError, DTypeError
from cumoe.ops import _inputs
from cumoe.ops.moe_align_block_size import require_topk_ids
from cumoe.plan.fused_experts_fp8 import Problem
from cumoe.plan.moe_align_block_size import padded_bound
from cumoe.plan.moe_gemm_fp8 import BLOCKS_M
from cumoe.plan.scales import GROUP_SIZE
from cumoe.plan.silu_and_mul_quant_fp8 import clamp_kind
from cumoe.plan.tensor_map import is_mappable
from cumoe.plan.workspace import ALIGNMENT

ARRAYS = (
    "x", "w1", "w2", "topk_weights", "topk_ids", "w1_scale", "w2_scale", "expert_map",
    "out", "workspace",
)  # fmt: skip


class Scalars(NamedTuple):
    """The arguments that are no arrays, as plain Python values: a key that equals by value."""

    block_shape: tuple[object, ...]
    scale_format: str
    limit: float | None
    alpha: float
    beta: float
    num_experts: int | None
    weight_on_input: bool
    factor: float
    max_workspace_bytes: int | None


def scalars(
    block_shape: Any,
    scale_format: Any,
    swiglu_limit: Any,
    swiglu_alpha: Any,
    swiglu_beta: Any,
    num_experts: Any,
    apply_router_weight_on_input: Any,
    routed_scaling_factor: Any,
    max_workspace_bytes: Any,
) -> Scalars:
    """The scalars of a call, each of the type that it must have."""
    number, whole_number = _inputs.number, _inputs.whole_number
    return Scalars(
        _block_shape(block_shape),
        _inputs.word(scale_format, "scale_format"),
        None if swiglu_limit is None else number(swiglu_limit, "swiglu_limit"),
        number(swiglu_alpha, "swiglu_alpha"),
        number(swiglu_beta, "swiglu_beta") + 0.0,  # -0 would be another key and another kernel
        None if num_experts is None else whole_number(num_experts, "num_experts"),
        _inputs.truth(apply_router_weight_on_input, "apply_router_weight_on_input"),
        number(routed_scaling_factor, "routed_scaling_factor") + 0.0,
        None
        if max_workspace_bytes is None
        else whole_number(max_workspace_bytes, "max_workspace_bytes"),
    )


def _block_shape(value: Any) -> tuple[object, ...]:
    if isinstance(value, tuple | list):
        require_choice(tuple(value), "block_shape", [(GROUP_SIZE, GROUP_SIZE)])
        return tuple(value)
    raise DTypeError(f"block_shape: want (128, 128), got {value!r}")


class Checked(NamedTuple):
    """What the facts of a call's arrays and its scalars say."""

    problem: Problem
    device: Device
    x_row_stride: int
    out_row_stride: int
    given: dict[str, Facts]
    """By name, those that are not None."""
    scalars: Scalars

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the reference."""
        s = self.scalars
        return {
            "scale_format": s.scale_format,
            "swiglu_limit": s.limit,
            "swiglu_alpha": s.alpha,
            "swiglu_beta": s.beta,
            "num_experts": self.problem.num_experts,
            "apply_router_weight_on_input": s.weight_on_input,
            "routed_scaling_factor": s.factor,
        }


def checked(*facts_starts_scalars: Any) -> Checked:
    """Every check that needs no address, of the facts of `ARRAYS`, where they start, scalars."""
    *facts, starts, plain = facts_starts_scalars
    where = require_same_device(zip(ARRAYS, facts, strict=True))
    given = {name: f for name, f in zip(ARRAYS, facts, strict=True) if f is not None}
    start = dict(zip(ARRAYS, starts, strict=True))
    plain = _checked_scalars(plain)
    E, N, K = _require_weights(given, start)
    M, topk, id_type = require_topk_ids(given["topk_ids"])
    weight_type = _require_tokens(given, M, K, topk)
    if "workspace" in given:
        _require_workspace(given["workspace"], start["workspace"])
    if plain.weight_on_input and topk != 1:
        raise ArgumentError(
            f"apply_router_weight_on_input: wants topk 1, got {topk}; weight the output instead"
        )
    experts = _id_space(plain.num_experts, given.get("expert_map"), E)
    _require_slots(M * topk, experts)
    x_row_stride = _inputs.require_rows(given["x"], "x")[2]
    out_row_stride = _require_out(given["out"], M, K) if "out" in given else K
    problem = Problem(
        M=M,
        K=K,
        N=N,
        num_experts=experts,
        num_local_experts=E,
        topk=topk,
        ids=id_type,
        weight=weight_type,
        has_map="expert_map" in given,
        scale_format=plain.scale_format,
        clamp=clamp_kind(plain.limit),
        scaled=(plain.alpha, plain.beta) != (1.0, 0.0),
        weight_on_input=plain.weight_on_input,
        x_aligned=_inputs.is_aligned(start["x"], x_row_stride, 2, 16),
        out_aligned=_inputs.is_aligned(start["out"], out_row_stride, 2, 16),
        down_contiguous=given["w2"].strides[1] == N,
        weights_mappable=all(_is_mappable(given[name]) for name in ("w1", "w2")),
    )
    return Checked(problem, where, x_row_stride, out_row_stride, given, plain)


def _checked_scalars(plain: Scalars) -> Scalars:
    _inputs.require_scale(plain.scale_format)
    _inputs.require_alpha_beta(plain.alpha, plain.beta, "swiglu_")
    _inputs.require_finite(plain.factor, "routed_scaling_factor")
    return plain._replace(limit=_inputs.require_limit(plain.limit, "swiglu_limit"))


def _require_tokens(given: dict[str, Facts], M: int, K: int, topk: int) -> str:
    """The type of the router's weights."""
    x, weights = given["x"], given["topk_weights"]
    require_dtype(x, "x", "bf16")
    require_shape(x, "x", M, K, means="[M, K] of topk_ids and w1")
    weight_type = require_dtype(weights, "topk_weights", "fp32", "bf16", "fp16")
    require_shape(weights, "topk_weights", M, topk, means="[M, topk] of topk_ids")
    require_contiguous(weights, "topk_weights")
    _inputs.require_expert_map(given.get("expert_map"))
    return weight_type


def _require_workspace(workspace: Facts, start: int) -> None:
    require_dtype(workspace, "workspace", "uint8")
    require_contiguous(workspace, "workspace")
    require_writeable(workspace, "workspace")
    # The reference uses none, so that any address will do.
    if start % ALIGNMENT and workspace.device.kind == "cuda":
        raise ArgumentError(
            f"workspace: want an address that is a multiple of {ALIGNMENT}, got one {start} bytes "
            f"past it; pass a whole allocation, not a slice of one"
        )


def _require_weights(given: dict[str, Facts], start: dict[str, int]) -> tuple[int, int, int]:
    """E, N, K."""
    w1, w2, w1_scale, w2_scale = (given[n] for n in ("w1", "w2", "w1_scale", "w2_scale"))
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
    if stride != 1 or expert_stride % 16 or row_stride % 16 or start % 16:
        raise ArgumentError(
            f"{name}: want rows that are contiguous and start at multiples of 16 bytes, got "
            f"strides {list(v.strides)}, {start % 16} bytes past one; "
            f"pass {contiguous_copy_of(v, name)}"
        )


def _is_mappable(v: Facts) -> bool:
    return is_mappable(v.shape[::-1], v.strides[1::-1])


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


def _require_out(out: Facts, M: int, K: int) -> int:
    """The row stride of out."""
    require_writeable(out, "out")
    require_dtype(out, "out", "bf16")
    require_shape(out, "out", M, K, means="the shape of x")
    row_stride = _inputs.require_rows(out, "out")[2]
    if M > 1 and abs(row_stride) < K:
        raise ArgumentError(
            f"out: want rows of {K} elements that do not overlap each other, got row stride "
            f"{row_stride}; pass a buffer of its own"
        )
    return row_stride
