"""per_token_group_quant_fp8: activations to e4m3, one scale per 128 values of a row."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from cumoe import reference
from cumoe.arrays.check import (
    require_dtype,
    require_multiple,
    require_no_overlap,
    require_same_device,
)
from cumoe.arrays.exchange import optional_view, to_numpy, view
from cumoe.arrays.view import ITEM_BYTES, Facts
from cumoe.launch import device, memory, run
from cumoe.ops import _inputs, _outputs
from cumoe.plan import per_token_group_quant_fp8 as planning
from cumoe.plan.scales import GROUP_SIZE, ScaleLayout
from cumoe.plan.scales import scale_layout as layout_of
from cumoe.plan.spec import Step


def per_token_group_quant_fp8(
    x: Any,
    group_size: int = 128,
    *,
    scale_format: str = "fp32",
    scale_layout: str = "row",
    out: Any = None,
    out_scale: Any = None,
) -> tuple[Any, Any]:
    """Quantizes each group of 128 values of a row to e4m3 with a scale of its own.

        scale = max(|x|, 1e-10) / 448           or, for "ue8m0", the power of two at or above it
        q     = e4m3(x / scale)                 to nearest, ties to even, saturating at 448

    x is about q * scale. NaN is ignored by the maximum and becomes code 0x7F; an infinity makes its
    group's scale +inf.

    Args:
        x: [..., K] bf16, fp16 or fp32; K a multiple of 128 and contiguous; leading dimensions
            flatten to M rows, which may lie apart.
        group_size: 128.
        scale_format: "fp32" or "ue8m0" (powers of two).
        scale_layout: "row" [M, K/128]; "column" [M, K/128] with strides (1, M); "tma" the same
            with M rounded up to 4 in the strides; for ue8m0 also "packed" [M, ceil(K/512)] int32,
            four exponent bytes each, strides as "tma". Padding is 0.
        out: [..., K] e4m3 (or uint8), contiguous; allocated if None.
        out_scale: an array of exactly that layout, whose padding is left alone; allocated if None.

    Returns:
        (q, scale) in the framework and on the device of x.

    Raises:
        ArgumentError: K is no multiple of 128, an unknown format or layout, strides that do not
            flatten, an output of another shape or one that overlaps x.
        DTypeError: x is not a bf16, fp16 or fp32 array.
        DeviceMismatchError: x and an output are on different devices.

    Example:
        >>> import numpy as np, cumoe
        >>> q, scale = cumoe.per_token_group_quant_fp8(np.full((1, 128), 448, np.float32))
        >>> float(q[0, 0]), float(scale[0, 0])
        (448.0, 1.0)
    """
    x_view, out_view = view(x, "x"), optional_view(out, "out")
    scale_view = optional_view(out_scale, "out_scale")
    call = _checked(
        x_view.facts,
        _inputs.facts_of(out_view),
        _inputs.facts_of(scale_view),
        _inputs.start_of(x_view),
        _inputs.start_of(out_view),
        _inputs.whole_number(group_size, "group_size"),
        _inputs.word(scale_format, "scale_format"),
        _inputs.word(scale_layout, "scale_layout"),
    )
    require_no_overlap(out_view, "out", (("x", x_view),))
    require_no_overlap(scale_view, "out_scale", (("x", x_view), ("out", out_view)))
    if call.step is None:
        q, scale = reference.per_token_group_quant_fp8(
            to_numpy(x_view),
            scale_format=scale_format,
            scale_layout=scale_layout,
            out=_outputs.optional_host(out_view),
            out_scale=_outputs.optional_host(scale_view),
        )
        return (
            _outputs.deliver(out_view, q, x_view),
            _outputs.deliver(scale_view, scale, x_view),
        )

    ordinal, layout = x_view.device.ordinal, call.layout
    with device.on_device(ordinal):
        made = _outputs.quantizer_outputs(x_view, x_view.facts.shape, layout, out_view, scale_view)
        run.run(
            call.step, ordinal, memory.current_stream(x_view),
            x_view.ptr, call.row_stride, 0, made.q_pointer, made.scale_pointer,
            *layout.strides, call.M, call.rows,
        )  # fmt: skip
        return _outputs.delivered(made.q), _outputs.delivered(made.scale)


class _Call(NamedTuple):
    """All that a call needs besides pointers."""

    M: int
    rows: int
    row_stride: int
    layout: ScaleLayout
    step: Step | None
    """None where the reference computes."""


@lru_cache(4096)
def _checked(
    x: Facts,
    out: Facts | None,
    out_scale: Facts | None,
    x_start: int,
    out_start: int,
    group_size: int,
    scale_format: str,
    scale_layout: str,
) -> _Call:
    _inputs.require_group_size(group_size)
    _inputs.require_scale(scale_format, scale_layout)
    x_type = require_dtype(x, "x", "bf16", "fp16", "fp32")
    M, K, row_stride = _inputs.require_rows(x, "x")
    require_multiple(
        K, "x", "the last dimension", GROUP_SIZE, "pad it with zeros to the next multiple"
    )
    layout = layout_of(M, K, scale_layout, scale_format)
    where = require_same_device((("x", x), ("out", out), ("out_scale", out_scale)))
    if out is not None:
        _inputs.require_output(out, "out", x.shape, "e4m3")
    if out_scale is not None:
        _inputs.require_scale_output(out_scale, layout)
    rows = layout.rows if out_scale is None else M  # a caller's padding may not exist
    if where.kind == "cpu":
        return _Call(M, rows, row_stride, layout, None)
    problem = planning.Problem(
        rows=rows,
        K=K,
        x_type=x_type,
        scale_format=scale_format,
        packed=scale_layout == "packed",
        aligned=_inputs.is_aligned(x_start, row_stride, ITEM_BYTES[x_type], 16)
        and out_start % 8 == 0,
    )
    step = planning.plan(problem, device.info(where.ordinal).arch)
    return _Call(M, rows, row_stride, layout, step)
