"""silu_and_mul_quant_fp8: clamped SwiGLU fused with block quantization and an expert filter."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from cumoe import reference
from cumoe._settings import settings
from cumoe.arrays.check import (
    require_contiguous,
    require_dtype,
    require_multiple,
    require_no_overlap,
    require_same_device,
)
from cumoe.arrays.exchange import optional_view, to_numpy, view
from cumoe.arrays.view import ArrayView, Facts
from cumoe.errors import ArgumentError
from cumoe.launch import device, memory, run
from cumoe.ops import _inputs, _outputs
from cumoe.plan import silu_and_mul_quant_fp8 as planning
from cumoe.plan.scales import GROUP_SIZE, ScaleLayout
from cumoe.plan.scales import scale_layout as layout_of


def silu_and_mul_quant_fp8(
    gate_up: Any,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    group_size: int = 128,
    scale_format: str = "fp32",
    scale_layout: str = "row",
    topk_ids: Any = None,
    expert_map: Any = None,
    num_experts: int | None = None,
    out: Any = None,
    out_scale: Any = None,
) -> tuple[Any, Any]:
    """SwiGLU of gate | up, quantized to e4m3 in groups of 128.

        g = bf16(min(gate, limit))       u = clamp(up, -limit, limit)      only with a limit
        s = bf16(g / (1 + exp(-alpha g)))
        y = bf16(s (u + beta))           the one place where the activation becomes bf16
        q, scale = per_token_group_quant_fp8(y)

    The gate is clamped from above only; NaN stays NaN; a gate of -inf gives s = -0. These are, bit
    for bit on finite input, the bytes of a clamped activation kernel followed by a quantizer.

    Args:
        gate_up: [R, 2H] bf16, first half gate, second half up; H a multiple of 128. R rows are
            (token, slot) pairs in row-major order, and may lie apart.
        limit: clamp, > 0; None or inf for none.
        alpha, beta: 1.702 and 1 in SwiGLU-OAI style models.
        group_size: 128.
        scale_format, scale_layout: as in `per_token_group_quant_fp8`.
        topk_ids: int32 or int64 with R elements, contiguous. Row r is computed only if its id is in
            [0, num_experts) and expert_map, if given, maps it to a local expert; the other rows of
            both outputs keep the bytes they had.
        expert_map: [num_experts] int32, global to local expert, -1 where not on this rank.
        num_experts: size of the id space; by default the length of expert_map. Without either,
            only negative ids are invalid.
        out: [R, H] e4m3 (or uint8), contiguous; allocated if None, then skipped rows hold anything.
        out_scale: an array of the chosen layout, whose padding is left alone; allocated if None.

    Returns:
        (q, scale) in the framework and on the device of gate_up.

    Raises:
        ArgumentError: a shape, limit, alpha, beta, format or layout that is not one of these.
        DTypeError: gate_up is not bf16, topk_ids not int32 or int64, expert_map not int32.
        DeviceMismatchError: the arrays are on different devices.

    Example:
        >>> import ml_dtypes, numpy as np, cumoe
        >>> gate_up = np.ones((1, 256), ml_dtypes.bfloat16)
        >>> q, scale = cumoe.silu_and_mul_quant_fp8(gate_up, limit=10.0)
        >>> round(float(q[0, 0]) * float(scale[0, 0]), 3)
        0.73
    """
    x, ids = view(gate_up, "gate_up"), optional_view(topk_ids, "topk_ids")
    map_view = optional_view(expert_map, "expert_map")
    out_view, scale_view = optional_view(out, "out"), optional_view(out_scale, "out_scale")
    call = _checked(
        x.facts,
        _inputs.facts_of(ids),
        _inputs.facts_of(map_view),
        _inputs.facts_of(out_view),
        _inputs.facts_of(scale_view),
        _inputs.start_of(x),
        _inputs.start_of(out_view),
        None if limit is None else _inputs.number(limit, "limit"),
        _inputs.number(alpha, "alpha"),
        _inputs.number(beta, "beta") + 0.0,  # -0 would be another key and another kernel
        _inputs.whole_number(group_size, "group_size"),
        _inputs.word(scale_format, "scale_format"),
        _inputs.word(scale_layout, "scale_layout"),
        None if num_experts is None else _inputs.whole_number(num_experts, "num_experts"),
    )
    inputs = (("gate_up", x), ("topk_ids", ids), ("expert_map", map_view))
    require_no_overlap(out_view, "out", inputs)
    require_no_overlap(scale_view, "out_scale", (*inputs, ("out", out_view)))
    if not call.plans:
        q, scale = reference.silu_and_mul_quant_fp8(
            to_numpy(x),
            limit=call.limit,
            alpha=call.alpha,
            beta=call.beta,
            scale_format=scale_format,
            scale_layout=scale_layout,
            topk_ids=_outputs.optional_host(ids),
            expert_map=_outputs.optional_host(map_view),
            num_experts=num_experts,
            out=_outputs.optional_host(out_view),
            out_scale=_outputs.optional_host(scale_view),
        )
        return (
            _outputs.deliver(out_view, q, x),
            _outputs.deliver(scale_view, scale, x),
        )

    ordinal, layout = x.device.ordinal, call.layout
    with device.on_device(ordinal):
        made = _outputs.quantizer_outputs(x, call.out_shape, layout, out_view, scale_view)
        y = 0 if len(call.plans) == 1 else _scratch(x, call)
        for plan in call.plans:
            run.run(
                plan.step, ordinal, memory.current_stream(x),
                x.ptr, call.row_stride, _inputs.pointer_of(ids), _inputs.pointer_of(map_view), y,
                made.q_pointer, made.scale_pointer, *layout.strides, call.R, call.rows,
                call.num_experts, call.num_experts, plan.chunk_rows,
                call.limit or 0.0, call.alpha, call.beta,
            )  # fmt: skip
        return _outputs.delivered(made.q), _outputs.delivered(made.scale)


class _Call(NamedTuple):
    """All that a call needs besides pointers."""

    R: int
    rows: int
    row_stride: int
    num_experts: int
    limit: float | None
    alpha: float
    beta: float
    out_shape: tuple[int, ...]
    layout: ScaleLayout
    plans: tuple[planning.Plan, ...]
    """One launch; two with CUMOE_FUSED_ACT_QUANT=0; none where the reference computes."""


@lru_cache(4096)
def _checked(
    x: Facts,
    ids: Facts | None,
    expert_map: Facts | None,
    out: Facts | None,
    out_scale: Facts | None,
    x_start: int,
    out_start: int,
    limit: float | None,
    alpha: float,
    beta: float,
    group_size: int,
    scale_format: str,
    scale_layout: str,
    num_experts: int | None,
) -> _Call:
    _inputs.require_group_size(group_size)
    _inputs.require_scale(scale_format, scale_layout)
    limit = _inputs.require_limit(limit, "limit")
    _inputs.require_alpha_beta(alpha, beta)
    R, H, row_stride = _require_gate_up(x)
    _inputs.require_expert_map(expert_map)
    id_type = _require_ids(ids, expert_map, R)
    experts = _inputs.id_space(num_experts, expert_map, default=_inputs.UNBOUNDED)
    layout = layout_of(R, H, scale_layout, scale_format)
    where = require_same_device(
        (("gate_up", x), ("topk_ids", ids), ("expert_map", expert_map),
         ("out", out), ("out_scale", out_scale))
    )  # fmt: skip
    out_shape = (*x.shape[:-1], H)
    if out is not None:
        _inputs.require_output(out, "out", out_shape, "e4m3")
    if out_scale is not None:
        _inputs.require_scale_output(out_scale, layout)
    rows = layout.rows if out_scale is None else R  # a caller's padding may not exist
    plans: tuple[planning.Plan, ...] = ()
    if where.kind == "cuda":
        problem = planning.Problem(
            rows=rows,
            H=H,
            scale_format=scale_format,
            packed=scale_layout == "packed",
            clamp=planning.clamp_kind(limit),
            scaled=(alpha, beta) != (1.0, 0.0),
            ids=id_type,
            has_map=expert_map is not None,
            aligned=_inputs.is_aligned(x_start, row_stride, 2, 16) and out_start % 8 == 0,
        )
        halves = (planning.ACTIVATE, planning.QUANTIZE)
        steps = (planning.BOTH,) if settings().fused_act_quant else halves
        info = device.info(where.ordinal)
        plans = tuple(planning.plan(problem._replace(step=step), info) for step in steps)
    return _Call(R, rows, row_stride, experts, limit, alpha, beta, out_shape, layout, plans)


def _scratch(x: ArrayView, call: _Call) -> int:
    """Memory for the activation between two launches: freed to the caller's allocator on return."""
    return view(_outputs.new_output(x, call.out_shape, "bf16"), "scratch").ptr


def _require_gate_up(x: Facts) -> tuple[int, int, int]:
    require_dtype(x, "gate_up", "bf16")
    R, columns, row_stride = _inputs.require_rows(x, "gate_up")
    require_multiple(
        columns,
        "gate_up",
        "the last dimension (2H, with H a multiple of 128)",
        2 * GROUP_SIZE,
        "pad both halves with zeros to the next multiple",
    )
    return R, columns // 2, row_stride


def _require_ids(ids: Facts | None, expert_map: Facts | None, R: int) -> str | None:
    if ids is None:
        if expert_map is not None:
            raise ArgumentError("expert_map: has no ids to map; pass topk_ids too")
        return None
    dtype = require_dtype(ids, "topk_ids", "int32", "int64")
    require_contiguous(ids, "topk_ids")
    if prod(ids.shape) != R:
        raise ArgumentError(
            f"topk_ids: want one id per row of gate_up, {R}, got shape {list(ids.shape)}"
        )
    return dtype
