"""Outputs that an op allocates."""

from __future__ import annotations

from cumoe.arrays.view import Facts
from cumoe.launch.memory import Output
from cumoe.ops import _inputs
from cumoe.plan.scales import ScaleLayout


def quantizer_outputs(
    shape: tuple[int, ...], layout: ScaleLayout, out: Facts | None, out_scale: Facts | None
) -> dict[str, Output]:
    """Those of the codes and scales that the caller has not given; what he has is checked."""
    made = {}
    if out is None:
        made["out"] = Output(shape, "e4m3")
    else:
        _inputs.require_output(out, "out", shape, "e4m3")
    if out_scale is None:  # a view of storage that may have padding rows
        rows = 0 if layout.is_row_major else layout.rows
        made["out_scale"] = Output(layout.shape, layout.dtype, rows)
    else:
        _inputs.require_scale_output(out_scale, layout)
    return made
