"""silu_and_mul_quant_fp8: clamped SwiGLU fused with block quantization and an expert filter."""

from __future__ import annotations

from typing import Any

from cumoe import reference
from cumoe.arrays.check import (
    require_contiguous,
    require_dtype,
    require_multiple,
    require_no_overlap,
    require_same_device,
)
from cumoe.arrays.exchange import optional_view, to_numpy, view
from cumoe.arrays.view import ArrayView
from cumoe.errors import ArgumentError
from cumoe.launch import device, memory, run
from cumoe.ops import _inputs, _outputs
from cumoe.plan import silu_and_mul_quant_fp8 as planning
from cumoe.plan.scales import GROUP_SIZE
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
        out_scale: an array of the chosen layout; allocated if None.

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
    _inputs.require_group_size(group_size)
    _inputs.require_scale(scale_format, scale_layout)
    limit = _inputs.require_limit(limit, "limit")
    _inputs.require_alpha_beta(alpha, beta)
    x, ids = view(gate_up, "gate_up"), optional_view(topk_ids, "topk_ids")
    map_view = _inputs.expert_map_view(expert_map)
    out_view, scale_view = optional_view(out, "out"), optional_view(out_scale, "out_scale")
    R, H, row_stride = _require_gate_up(x)
    id_type = _require_ids(ids, map_view, R)
    experts = _inputs.id_space(num_experts, map_view, default=_inputs.INT64_MAX)
    layout = layout_of(R, H, scale_layout, scale_format)
    named = [("gate_up", x), ("topk_ids", ids), ("expert_map", map_view)]
    where = require_same_device([*named, ("out", out_view), ("out_scale", scale_view)])
    inputs = [(name, v) for name, v in named if v is not None]
    out_shape = (*x.shape[:-1], H)
    if out_view is not None:
        _inputs.require_output(out_view, "out", out_shape, "e4m3")
        require_no_overlap(out_view, "out", inputs)
    if scale_view is not None:
        _inputs.require_scale_output(scale_view, layout)
        require_no_overlap(scale_view, "out_scale", inputs)

    if where.kind == "cpu":
        q, scale = reference.silu_and_mul_quant_fp8(
            to_numpy(x),
            limit=limit,
            alpha=alpha,
            beta=beta,
            scale_format=scale_format,
            scale_layout=scale_layout,
            topk_ids=_outputs.optional_host(ids),
            expert_map=_outputs.optional_host(map_view),
            num_experts=num_experts,
            out=_outputs.optional_host(out_view),
            out_scale=_outputs.optional_host(scale_view),
        )
        return (
            _outputs.deliver(out_view, q, x.framework),
            _outputs.deliver(scale_view, scale, x.framework),
        )

    with device.on_device(where.ordinal):
        if out_view is None:
            out = _outputs.new_output(x, out_shape, "e4m3")
            out_view = view(out, "out")
        if scale_view is None:
            out_scale = _outputs.new_scale(x, layout)
            scale_view = view(out_scale, "out_scale")
        problem = planning.Problem(
            rows=layout.rows,
            H=H,
            scale_format=scale_format,
            packed=scale_layout == "packed",
            clamp=planning.clamp_kind(limit),
            scaled=(alpha, beta) != (1.0, 0.0),
            ids=id_type,
            has_map=map_view is not None,
            aligned=_inputs.is_aligned(x.ptr, row_stride, 2, 16) and out_view.ptr % 8 == 0,
        )
        plan = planning.plan(problem, device.info(where.ordinal))
        run.run(
            plan.step, where.ordinal, memory.current_stream(x),
            x.ptr, row_stride, _pointer(ids), _pointer(map_view), out_view.ptr, scale_view.ptr,
            *layout.strides, R, layout.rows, experts, experts, plan.chunk_rows,
            limit or 0.0, alpha, beta,
        )  # fmt: skip
    return out, out_scale


def _require_gate_up(x: ArrayView) -> tuple[int, int, int]:
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


def _require_ids(ids: ArrayView | None, expert_map: ArrayView | None, R: int) -> str | None:
    if ids is None:
        if expert_map is not None:
            raise ArgumentError("expert_map: has no ids to map; pass topk_ids too")
        return None
    dtype = require_dtype(ids, "topk_ids", "int32", "int64")
    require_contiguous(ids, "topk_ids")
    count = 1
    for size in ids.shape:
        count *= size
    if count != R:
        raise ArgumentError(
            f"topk_ids: want one id per row of gate_up, {R}, got shape {list(ids.shape)}"
        )
    return dtype


def _pointer(v: ArrayView | None) -> int:
    return 0 if v is None else v.ptr
