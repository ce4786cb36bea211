"""fused_experts_fp8: the routed experts of a block-FP8 MoE layer, from tokens to their outputs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from cumoe import reference
from cumoe.arrays.view import ITEM_BYTES
from cumoe.errors import ArgumentError
from cumoe.launch import device
from cumoe.launch.memory import Output
from cumoe.launch.run import At, Launch
from cumoe.ops._experts_inputs import ARRAYS, Checked, checked, scalars
from cumoe.ops._op import Call, Op
from cumoe.ops.moe_align_block_size import align_launches
from cumoe.plan import experts_decode, experts_prefill, experts_tiny, moe_align_block_size
from cumoe.plan import fused_experts_fp8 as planning
from cumoe.plan import moe_down_prefill_fp8 as down_prefill
from cumoe.plan import moe_gate_up_decode_fp8 as gate_up_decode
from cumoe.plan import moe_gate_up_prefill_fp8 as gate_up_prefill
from cumoe.plan.decode_tile import scale_pitch
from cumoe.plan.device import DeviceInfo
from cumoe.plan.scales import GROUP_SIZE
from cumoe.plan.spec import Step


def fused_experts_fp8(
    x: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    *,
    w1_scale: Any,
    w2_scale: Any,
    block_shape: tuple[int, int] = (128, 128),
    scale_format: str = "fp32",
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    num_experts: int | None = None,
    expert_map: Any = None,
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float = 1.0,
    workspace: Any = None,
    max_workspace_bytes: int | None = None,
    out: Any = None,
) -> Any:
    """The routed experts of a block-FP8 MoE layer.

        a, as = per_token_group_quant_fp8(x)
        h     = bf16(sum over k-blocks of as * w1_scale * (a . w1))       products exact, sum fp32
        q, qs = silu_and_mul_quant_fp8(h, swiglu_limit, ...)
        d     = bf16(sum over n-blocks of qs * w2_scale * (q . w2))       one row per slot
        out   = bf16(routed_scaling_factor * sum over j of topk_weights[:, j] * d_j)

    Deterministic: the same inputs give the same bytes. A token's bytes do not depend on the other
    tokens of the call, only on whether there are very few (up to 32 or 64 slots), few (8
    for each of num_experts, less with N above 8704), or more: their kernels add up otherwise
    (docs/numerics.md).

    Nothing synchronizes with the host, so a call can be captured in a CUDA graph once its kernels
    are loaded (run it once before). For inference: no gradient.

    Args:
        x: [M, K] bf16, rows may lie apart. Not written, unless it is also `out`.
        w1: [E, 2N, K] e4m3 (or uint8), gate rows first. K and N multiples of 128.
        w2: [E, K, N] e4m3.
        topk_weights: [M, topk] fp32, bf16 or fp16.
        topk_ids: [M, topk] int32 or int64. Ids outside [0, num_experts) are skipped.
        w1_scale, w2_scale: [E, 2N/128, K/128] and [E, K/128, N/128] fp32, any strides; a weight is
            about code * scale (`weight_scale_inv` of checkpoints).
        block_shape: (128, 128).
        scale_format: of the activations' scales, "fp32" or "ue8m0".
        swiglu_limit, swiglu_alpha, swiglu_beta: see `silu_and_mul_quant_fp8`.
        num_experts: size of the id space; by default the length of expert_map, else E.
        expert_map: [num_experts] int32, global expert to row of w1 and w2; entries outside [0, E)
            are not on this rank. A token without a local expert gets exact zeros.
        apply_router_weight_on_input: x becomes bf16(x * bf16(weight)) before quantization and the
            combine does not weight; topk must be 1.
        workspace: contiguous uint8, at an address that is a multiple of 256; allocated if None.
            An ArgumentError tells how many bytes a call wants.
        max_workspace_bytes: at most this much is used: tokens are then run in several parts.
            The reference uses neither.
        out: [M, K] bf16; may be x itself, must not overlap another input. Allocated if None.

    Returns:
        out, in the framework and on the device of x.

    Raises:
        ArgumentError: a shape or value that is not one of these; N or K not a multiple of 128 (see
            `pad_experts`); a workspace that is too small; an output that is read-only or overlaps
            an input other than x.
        DTypeError: an array not of its type, or a scalar argument of another type.
        DeviceMismatchError: the arrays are on different devices.
        UnsupportedDeviceError: no kernel for this GPU, no usable CUDA installation, or a tensor on
            neither the CPU nor an NVIDIA GPU.
        KernelNotBuiltError: a kernel is not loaded and the stream is being captured, or it is in no
            cache and CUMOE_DISABLE_JIT=1. `cumoe.warmup` loads it, `cumoe prebuild` builds it.
        CompileError: NVRTC refused a kernel.
        CumoeError: the driver refused a launch.
    """
    return _op(
        (
            x, w1, w2, topk_weights, topk_ids, w1_scale, w2_scale, expert_map, out, workspace,
        ),
        (
            block_shape, scale_format, swiglu_limit, swiglu_alpha, swiglu_beta, num_experts,
            apply_router_weight_on_input, routed_scaling_factor, max_workspace_bytes,
        ),
    )  # fmt: skip


@lru_cache(4096)
def _checked(*facts_starts_scalars: Any) -> Call:
    c = checked(*facts_starts_scalars)
    if c.device.kind == "cpu":
        return Call(c.options)
    parts = _parts(c.problem, device.info(c.device.ordinal), c.scalars.max_workspace_bytes)
    made = {} if "out" in c.given else {"out": Output(c.given["x"].shape, "bf16")}
    needed = parts[0][2].workspace.total
    if "workspace" in c.given:
        _require_room(c.given["workspace"].extent[1], needed)
    else:
        made["workspace"] = Output((needed,), "uint8")
    launches = [launch for first, p, plan in parts for launch in _launches(p, plan, c, first)]
    return Call(c.options, tuple(launches), made)


def _require_room(size: int, needed: int) -> None:
    if size < needed:
        raise ArgumentError(
            f"workspace: this call wants {needed} bytes, got {size}; pass a larger one, or "
            f"max_workspace_bytes={size} to run in parts"
        )


class _Arguments(NamedTuple):
    """What the launches of all chains take of a call, from its token ``first`` on."""

    x: tuple[float | At, ...]
    """And its row stride."""
    ids: At
    weights: At
    expert_map: int | At
    out: tuple[float | At, ...]
    """And its row stride."""
    activation: tuple[float, float, float]


def _arguments(p: planning.Problem, c: Checked, first: int) -> _Arguments:
    s = c.scalars
    return _Arguments(
        (At("x", first * c.x_row_stride * 2), c.x_row_stride),
        At("topk_ids", first * p.topk * ITEM_BYTES[p.ids]),
        At("topk_weights", first * p.topk * ITEM_BYTES[p.weight]),
        At("expert_map") if p.has_map else 0,
        (At("out", first * c.out_row_stride * 2), c.out_row_stride),
        (s.limit or 0.0, s.alpha, s.beta),
    )


def _weight(c: Checked, name: str, strides: int) -> tuple[float | At, ...]:
    """A weight with its first strides, and its scale with all."""
    return At(name), *c.given[name].strides[:strides], *_scale(c, name)


def _scale(c: Checked, name: str) -> tuple[float | At, ...]:
    """The scale of a weight with its strides."""
    return At(f"{name}_scale"), *c.given[f"{name}_scale"].strides


def _launches(p: planning.Problem, plan: planning.AnyPlan, c: Checked, first: int) -> list[Launch]:
    """The launches for tokens first ... first + p.M, in order."""
    given = _arguments(p, c, first)
    if isinstance(plan, experts_tiny.Plan):
        return _launches_of_fewest(p, plan, c, given)
    if isinstance(plan, experts_decode.Plan):
        return _launches_of_few(p, plan, c, given)
    if isinstance(plan, experts_prefill.Plan):
        return _launches_of_many(p, plan, c, given)
    return _launches_of_any(p, plan, c, given)


def _launches_of_fewest(
    p: planning.Problem, plan: experts_tiny.Plan, c: Checked, given: _Arguments
) -> list[Launch]:
    y, size = At("workspace", plan.workspace.y), (p.M * p.topk, p.num_experts, p.num_local_experts)
    return [
        Launch(
            plan.gate_up,
            (*given.x, given.ids, given.expert_map, *_weight(c, "w1", 2), y, *size,
             *given.activation),
        ),
        Launch(
            plan.down,
            (y, given.ids, given.weights, given.expert_map, *_weight(c, "w2", 1), *given.out,
             *size, c.scalars.factor),
        ),
    ]  # fmt: skip


def _launches_of_few(
    p: planning.Problem, plan: experts_decode.Plan, c: Checked, given: _Arguments
) -> list[Launch]:
    at = {name: At("workspace", offset) for name, offset in plan.workspace._asdict().items()}
    slots, size = p.M * p.topk, (p.M * p.topk, p.num_experts, p.num_local_experts)
    w1, w2, down = c.given["w1"], c.given["w2"], plan.down
    routes, counter = at["routes"], at["counter"]
    codes = at["q"], at["q_scale"], scale_pitch(p.N), 1, slots, slots, 0
    return [
        Launch(
            plan.permute,
            (*given.x, given.weights, given.ids, given.expert_map, at["a"], at["a_scale"], routes,
             counter, *size),
        ),
        Launch(
            plan.gate_up,
            (*gate_up_decode.weights(w1.shape, w1.strides),
             gate_up_decode.tokens("workspace", plan.workspace.a, slots, p.K), at["a_scale"],
             given.ids, given.expert_map, *_scale(c, "w1"), at["y"], counter, *size,
             *given.activation),
        ),
        Launch(plan.quantize_y, (at["y"], p.N, 0, *codes)),
        Launch(
            down.step,
            (down.weights(w2.shape, w2.strides),
             down.codes("workspace", plan.workspace.q, slots, p.N), at["q_scale"], given.ids,
             given.expert_map, routes, *_scale(c, "w2"), at["sums"], *given.out, *size,
             down.passes, c.scalars.factor),
        ),
    ]  # fmt: skip


def _launches_of_many(
    p: planning.Problem, plan: experts_prefill.Plan, c: Checked, given: _Arguments
) -> list[Launch]:
    num_slots, w1, w2 = p.M * p.topk, c.given["w1"], c.given["w2"]
    at = {name: At("workspace", offset) for name, offset in plan.workspace._asdict().items()}
    blocks = at["sorted_token_ids"], at["expert_ids"], at["num_tokens_post_padded"]
    codes = down_prefill.codes("workspace", plan.workspace.q, plan.align.max_blocks, p.N)
    return [
        *_sort(plan.align, plan.align_problem, given, at),
        _quantize_x(plan.quantize_x, p, given, at, late=True),
        Launch(
            plan.gate_up,
            (gate_up_prefill.weights(w1.shape, w1.strides), at["a"], at["a_scale"],
             *_scale(c, "w1"), *blocks, at["q"], at["q_scale"], num_slots, *given.activation),
        ),
        Launch(
            plan.down,
            (down_prefill.weights(w2.shape, w2.strides), codes, at["q_scale"], *_scale(c, "w2"),
             *blocks, at["d"], num_slots),
        ),
        _combine(plan.combine, p, c, given, at["d"]),
    ]  # fmt: skip


def _launches_of_any(
    p: planning.Problem, plan: planning.Plan, c: Checked, given: _Arguments
) -> list[Launch]:
    num_slots, (ids, expert_map) = p.M * p.topk, (given.ids, given.expert_map)
    at = {name: At("workspace", offset) for name, offset in plan.workspace._asdict().items()}
    slots, q, q_scale = at["slots"], at["q"], at["q_scale"]
    tiles = at["sorted_token_ids"], at["expert_ids"], at["num_tokens_post_padded"]
    return [
        _quantize_x(plan.quantize, p, given, at),
        *_sort(plan.align, plan.align_problem, given, at),
        Launch(
            plan.gemm1,
            (at["a"], at["a_scale"], *_weight(c, "w1", 2), *tiles, slots, num_slots),
        ),
        Launch(
            plan.activate.step,
            (slots, 2 * p.N, ids, expert_map, 0, q, q_scale, p.N // GROUP_SIZE, 1,
             num_slots, num_slots, p.num_experts, p.num_local_experts, *plan.activate.walk,
             *given.activation),
        ),
        Launch(plan.gemm2, (q, q_scale, *_weight(c, "w2", 2), *tiles, slots, num_slots)),
        _combine(plan.combine, p, c, given, slots),
    ]  # fmt: skip


def _quantize_x(
    step: Step, p: planning.Problem, given: _Arguments, at: dict[str, At], late: bool = False
) -> Launch:
    codes = at["a"], at["a_scale"], p.K // GROUP_SIZE, 1, p.M, p.M, int(late)
    return Launch(step, (*given.x, given.weights, *codes))


def _sort(
    plan: moe_align_block_size.Plan,
    problem: moe_align_block_size.Problem,
    given: _Arguments,
    at: dict[str, At],
) -> tuple[Launch, ...]:
    names = "counts", "bases", "sorted_token_ids", "expert_ids", "num_tokens_post_padded"
    return align_launches(plan, problem, given.ids, given.expert_map, *(at[name] for name in names))


def _combine(step: Step, p: planning.Problem, c: Checked, given: _Arguments, slots: At) -> Launch:
    return Launch(
        step,
        (slots, given.weights, given.ids, given.expert_map, *given.out, p.M, p.num_experts,
         p.num_local_experts, c.scalars.factor),
    )  # fmt: skip


def _parts(
    problem: planning.Problem, info: DeviceInfo, max_workspace_bytes: int | None
) -> list[tuple[int, planning.Problem, planning.AnyPlan]]:
    """First token, problem and plan of each part of a call; one part where memory allows it."""
    tokens = planning.tokens_per_call(problem, info, max_workspace_bytes)
    starts = range(0, max(1, problem.M), max(1, tokens))
    problems = [planning.part(problem, min(tokens, problem.M - first)) for first in starts]
    return [(first, p, planning.plan(p, info)) for first, p in zip(starts, problems, strict=True)]


_op = Op(
    ARRAYS,
    required=7,
    inputs=8,
    results=("out",),
    scalars=scalars,
    check=_checked,
    reference=reference.fused_experts_fp8,
    in_place=True,
)
