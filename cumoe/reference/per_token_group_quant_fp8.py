"""Quantization of activations to e4m3 in groups along the last dimension."""

from __future__ import annotations

import numpy as np

from cumoe.errors import ArgumentError
from cumoe.reference.arrays import e4m3_output, float_values, num_groups
from cumoe.reference.e4m3 import F32, Array, fp32_scale, group_amax, to_e4m3, ue8m0_scale
from cumoe.reference.scales import encode, require_layout, scale_output


@np.errstate(all="ignore")
def per_token_group_quant_fp8(
    x: Array,
    group_size: int = 128,
    *,
    scale_format: str = "fp32",
    scale_layout: str = "row",
    out: Array | None = None,
    out_scale: Array | None = None,
) -> tuple[Array, Array]:
    """Quantize each group of ``group_size`` values to e4m3 with one scale.

    ``q = e4m3(x / scale)``, ``scale = amax / 448`` ("fp32") or the next power of two ("ue8m0").

    Args:
        x: [..., K] bf16, fp16 or fp32; K a multiple of ``group_size``. Leading dimensions flatten
            to M.
        scale_layout: "row", "column", "tma", and for ue8m0 "packed".
        out: [..., K] e4m3 to write to.
        out_scale: [M, K / group_size] float32, or [M, ceil(K / group_size / 4)] int32 ("packed").

    Returns:
        q [..., K] e4m3, and the scales. "column" and "tma" have strides of (1, M) and (1, M rounded
        up to 4) elements; "packed" holds four biased exponents to an int32, strides as "tma".

    Raises:
        ArgumentError: K is no multiple of ``group_size``; an unknown format or layout.
        DTypeError: an element type that is none of the above.

    NaN takes no part in amax and gets code 0x7F; an infinity makes the scale +inf.
    """
    require_layout(scale_layout, scale_format)
    if x.ndim < 1:
        raise ArgumentError("x must be [..., K], got a scalar")
    num_columns = num_groups("the last dimension of x", x.shape[-1], group_size)
    values = float_values("x", x).reshape(int(np.prod(x.shape[:-1])), x.shape[-1])
    out, codes = e4m3_output("out", out, x.shape)
    out_scale = scale_output(out_scale, len(values), num_columns, scale_layout)
    q, scale = quantize_groups(values, group_size, scale_format)
    codes[...] = q.reshape(x.shape)
    out_scale[...] = encode(scale, scale_layout)
    return out, out_scale


def quantize_groups(values: F32, group_size: int, scale_format: str) -> tuple[Array, F32]:
    """e4m3 values [M, K] and fp32 scales [M, K / group_size] of float32 values [M, K]."""
    num_rows, size = values.shape
    groups = values.reshape(num_rows, size // group_size, group_size)
    amax = group_amax(groups)
    scale = fp32_scale(amax) if scale_format == "fp32" else ue8m0_scale(amax)
    return to_e4m3(groups / scale[..., None]).reshape(values.shape), scale
