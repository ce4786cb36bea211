"""per_token_group_quant_fp8: activations to e4m3, one scale per 128 values of a row."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from cumoe import reference
from cumoe.arrays.check import require_dtype, require_multiple, require_same_device
from cumoe.arrays.view import ITEM_BYTES, Facts
from cumoe.launch import device
from cumoe.launch.run import At, Launch
from cumoe.ops import _inputs
from cumoe.ops._op import Call, Op, Starts
from cumoe.ops._outputs import quantizer_outputs
from cumoe.plan import per_token_group_quant_fp8 as planning
from cumoe.plan.scales import GROUP_SIZE
from cumoe.plan.scales import scale_layout as layout_of


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
        ArgumentError: K is no multiple of 128, an unknown group size, format or layout, strides
            that do not flatten, an output of another shape, read-only, or one that overlaps x.
        DTypeError: x is not a bf16, fp16 or fp32 array, an output not of its type, or a scalar
            argument of another type.
        DeviceMismatchError: x and an output are on different devices.
        UnsupportedDeviceError: no kernel for this GPU, no usable CUDA installation, or a tensor on
            neither the CPU nor an NVIDIA GPU.
        KernelNotBuiltError: a kernel is not loaded and the stream is being captured, or it is in no
            cache and CUMOE_DISABLE_JIT=1. `cumoe.warmup` loads it, `cumoe prebuild` builds it.
        CompileError: NVRTC refused a kernel.
        CumoeError: the driver refused a launch.

    Example:
        >>> import numpy as np, cumoe
        >>> q, scale = cumoe.per_token_group_quant_fp8(np.full((1, 128), 448, np.float32))
        >>> float(q[0, 0]), float(scale[0, 0])
        (448.0, 1.0)
    """
    result: tuple[Any, Any] = _op((x, out, out_scale), (group_size, scale_format, scale_layout))
    return result


class _Scalars(NamedTuple):
    """The arguments that are no arrays, as plain Python values."""

    group_size: int
    scale_format: str
    scale_layout: str


def _scalars(group_size: Any, scale_format: Any, scale_layout: Any) -> _Scalars:
    return _Scalars(
        _inputs.whole_number(group_size, "group_size"),
        _inputs.word(scale_format, "scale_format"),
        _inputs.word(scale_layout, "scale_layout"),
    )


@lru_cache(4096)
def _checked(
    x: Facts, out: Facts | None, out_scale: Facts | None, starts: Starts, plain: _Scalars
) -> Call:
    _inputs.require_group_size(plain.group_size)
    _inputs.require_scale(plain.scale_format, plain.scale_layout)
    x_type = require_dtype(x, "x", "bf16", "fp16", "fp32")
    M, K, row_stride = _inputs.require_rows(x, "x")
    require_multiple(
        K, "x", "the last dimension", GROUP_SIZE, "pad it with zeros to the next multiple"
    )
    layout = layout_of(M, K, plain.scale_layout, plain.scale_format)
    where = require_same_device(zip(ARRAYS, (x, out, out_scale), strict=True))
    made = quantizer_outputs(x.shape, layout, out, out_scale)
    rows = layout.rows if out_scale is None else M  # a caller's padding may not exist
    if where.kind == "cpu":
        return Call(plain._asdict())
    problem = planning.Problem(
        rows=rows,
        K=K,
        x_type=x_type,
        scale_format=plain.scale_format,
        packed=plain.scale_layout == "packed",
        aligned=_inputs.is_aligned(starts[0], row_stride, ITEM_BYTES[x_type], 16)
        and starts[1] % 8 == 0,
    )
    step = planning.plan(problem, device.info(where.ordinal).arch)
    arguments = At("x"), row_stride, 0, At("out"), At("out_scale"), *layout.strides, M, rows, 0
    return Call(plain._asdict(), (Launch(step, arguments),), made)


ARRAYS = ("x", "out", "out_scale")
_op = Op(
    ARRAYS,
    required=1,
    inputs=1,
    results=("out", "out_scale"),
    scalars=_scalars,
    check=_checked,
    reference=reference.per_token_group_quant_fp8,
)
