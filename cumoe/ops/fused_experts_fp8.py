"""fused_experts_fp8: the routed experts of a block-FP8 MoE layer, from tokens to their outputs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cumoe import reference
from cumoe.arrays.exchange import to_numpy, view
from cumoe.arrays.view import ITEM_BYTES, ArrayView
from cumoe.errors import ArgumentError
from cumoe.launch import device, memory, module
from cumoe.launch.run import run
from cumoe.ops import _inputs, _outputs
from cumoe.ops._experts_inputs import Inputs, checked_inputs, scalars
from cumoe.ops.moe_align_block_size import launch_align
from cumoe.plan import fused_experts_fp8 as planning
from cumoe.plan.device import DeviceInfo
from cumoe.plan.scales import GROUP_SIZE


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
        out   = bf16(routed_scaling_factor * sum over j, ascending, of topk_weights[:, j] * d_j)

    Deterministic: the same inputs give the same bytes, and a token's bytes do not depend on the
    other tokens of the call. Nothing synchronizes with the host, so a call can be captured in a
    CUDA graph once its kernels are loaded (run it once before). For inference: no gradient.

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
            `pad_experts`).
        DTypeError, DeviceMismatchError, UnsupportedDeviceError.
        KernelNotBuiltError: a kernel is not loaded yet and the stream is being captured.
    """
    plain = scalars(
        block_shape,
        scale_format,
        swiglu_limit,
        swiglu_alpha,
        swiglu_beta,
        num_experts,
        apply_router_weight_on_input,
        routed_scaling_factor,
    )
    if max_workspace_bytes is not None:
        max_workspace_bytes = _inputs.whole_number(max_workspace_bytes, "max_workspace_bytes")
    inputs = checked_inputs(
        x, w1, w2, topk_weights, topk_ids, w1_scale, w2_scale, expert_map, workspace, out, plain
    )
    if inputs.x.device.kind == "cpu":
        return _run_reference(inputs)
    with device.on_device(inputs.x.device.ordinal):
        return _run(inputs, max_workspace_bytes)


def _run_reference(i: Inputs) -> Any:
    c, p = i.checked.scalars, i.checked.problem
    result = reference.fused_experts_fp8(
        to_numpy(i.x),
        to_numpy(i.w1),
        to_numpy(i.w2),
        to_numpy(i.topk_weights),
        to_numpy(i.topk_ids),
        w1_scale=to_numpy(i.w1_scale),
        w2_scale=to_numpy(i.w2_scale),
        scale_format=p.scale_format,
        swiglu_limit=c.limit,
        swiglu_alpha=c.alpha,
        swiglu_beta=c.beta,
        num_experts=p.num_experts,
        expert_map=_outputs.optional_host(i.expert_map),
        apply_router_weight_on_input=p.weight_on_input,
        routed_scaling_factor=c.factor,
        out=_outputs.optional_host(i.out),
    )
    return _outputs.deliver(i.out, result, i.x)


def _run(i: Inputs, max_workspace_bytes: int | None) -> Any:
    ordinal, stream = i.x.device.ordinal, memory.current_stream(i.x)
    parts = _parts(i.checked.problem, device.info(ordinal), max_workspace_bytes)
    if i.out is None:
        i = i._replace(out=view(_outputs.new_output(i.x, i.x.facts.shape, "bf16"), "out"))
    workspace = _workspace(i, parts[0][2].workspace.total)
    for plan in {id(plan): plan for _, _, plan in parts}.values():  # all but the last are alike
        module.require_loaded(plan.steps, ordinal, stream)
    for first, problem, plan in parts:
        _launch(plan, problem, i, first, workspace.ptr, stream)
    return _outputs.delivered(i.out.owner) if i.out else None


@lru_cache(4096)
def _parts(
    problem: planning.Problem, info: DeviceInfo, max_workspace_bytes: int | None
) -> tuple[tuple[int, planning.Problem, planning.Plan], ...]:
    """First token, problem and plan of each part of a call; one part where memory allows it."""
    tokens = planning.tokens_per_call(problem, info, max_workspace_bytes)
    starts = range(0, max(1, problem.M), max(1, tokens))
    problems = [problem._replace(M=min(tokens, problem.M - first)) for first in starts]
    return tuple(
        (first, p, planning.plan(p, info)) for first, p in zip(starts, problems, strict=True)
    )


def _workspace(i: Inputs, needed: int) -> ArrayView:
    if i.workspace is None:
        return view(_outputs.new_output(i.x, (needed,), "uint8"), "workspace")
    size = i.workspace.facts.extent[1]
    if size < needed:
        raise ArgumentError(
            f"workspace: this call wants {needed} bytes, got {size}; pass a larger one, or "
            f"max_workspace_bytes={size} to run in parts"
        )
    return i.workspace


def _launch(
    plan: planning.Plan,
    p: planning.Problem,
    i: Inputs,
    first: int,
    workspace: int,
    stream: int,
) -> None:
    """The launches for tokens first ... first + p.M, in order."""
    c, where, at = i.checked, i.x.device.ordinal, plan.workspace
    plain = c.scalars
    a, a_scale, slots = workspace + at.a, workspace + at.a_scale, workspace + at.slots
    q, q_scale = workspace + at.q, workspace + at.q_scale
    num_slots = p.M * p.topk
    ids = i.topk_ids.ptr + first * p.topk * ITEM_BYTES[p.ids]
    weights = i.topk_weights.ptr + first * p.topk * ITEM_BYTES[p.weight]
    expert_map, out = _inputs.pointer_of(i.expert_map), _inputs.pointer_of(i.out)
    tiles = (
        workspace + at.sorted_token_ids,
        workspace + at.expert_ids,
        workspace + at.num_tokens_post_padded,
    )

    x = i.x.ptr + first * c.x_row_stride * 2
    run(
        plan.quantize, where, stream,
        x, c.x_row_stride, weights, a, a_scale, p.K // GROUP_SIZE, 1, p.M, p.M,
    )  # fmt: skip
    launch_align(
        plan.align, plan.align_problem, where, stream,
        ids, expert_map, workspace + at.counts, workspace + at.bases, *tiles,
    )  # fmt: skip
    run(
        plan.gemm1, where, stream,
        a, a_scale, i.w1.ptr, *i.w1.facts.strides[:2], i.w1_scale.ptr, *i.w1_scale.facts.strides,
        *tiles, slots, num_slots,
    )  # fmt: skip
    run(
        plan.activate.step, where, stream,
        slots, 2 * p.N, ids, expert_map, 0, q, q_scale, p.N // GROUP_SIZE, 1,
        num_slots, num_slots, p.num_experts, p.num_local_experts, plan.activate.chunk_rows,
        plain.limit or 0.0, plain.alpha, plain.beta,
    )  # fmt: skip
    run(
        plan.gemm2, where, stream,
        q, q_scale, i.w2.ptr, *i.w2.facts.strides[:2], i.w2_scale.ptr, *i.w2_scale.facts.strides,
        *tiles, slots, num_slots,
    )  # fmt: skip
    run(
        plan.combine, where, stream,
        slots, weights, ids, expert_map, out + first * c.out_row_stride * 2, c.out_row_stride,
        p.M, p.num_experts, p.num_local_experts, plain.factor,
    )  # fmt: skip
