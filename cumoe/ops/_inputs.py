"""Checks that several ops share."""

from __future__ import annotations

import math
from numbers import Integral, Real
from struct import Struct

from cumoe.arrays.check import (
    contiguous_copy_of,
    require_choice,
    require_contiguous,
    require_dtype,
    require_ndim,
    require_shape,
    require_writeable,
)
from cumoe.arrays.view import Facts
from cumoe.errors import ArgumentError, DTypeError
from cumoe.launch.run import At
from cumoe.plan.moe_align_block_size import MAX_EXPERTS
from cumoe.plan.scales import GROUP_SIZE, SCALE_FORMATS, SCALE_LAYOUTS, ScaleLayout

_FLOAT = Struct("f")

INT32_MAX = 2**31 - 1
UNBOUNDED = -1
"""As num_experts of a kernel: only negative ids are invalid."""


def number(value: object, name: str) -> float:
    """A scalar argument as a float. An array is none: its value may be on a device, or change."""
    if type(value) is float:
        return value
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf  # type: ignore[operator]
    raise DTypeError(f"{name}: want a number, got {value!r}; pass a Python int or float")


def whole_number(value: object, name: str) -> int:
    """A scalar argument as an int."""
    if type(value) is int:
        return value
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    raise DTypeError(f"{name}: want a whole number, got {value!r}; pass a Python int")


def word(value: object, name: str) -> str:
    """A scalar argument that is one of some strings."""
    if isinstance(value, str):
        return value
    raise DTypeError(f"{name}: want a string, got {value!r}")


def truth(value: object, name: str) -> bool:
    """A scalar argument that is True or False."""
    if isinstance(value, bool):
        return value
    raise DTypeError(f"{name}: want True or False, got {value!r}")


def require_group_size(group_size: int) -> None:
    """Groups of 128, the block of block-FP8 checkpoints, are what there is."""
    require_choice(group_size, "group_size", [GROUP_SIZE])


def require_scale(scale_format: str, scale_layout: str = "row") -> None:
    """Names of a scale format and a scale layout."""
    require_choice(scale_format, "scale_format", SCALE_FORMATS)
    require_choice(scale_layout, "scale_layout", SCALE_LAYOUTS)


def require_rows(v: Facts, name: str) -> tuple[int, int, int]:
    """Rows, columns and row stride of an array whose leading dimensions flatten to rows."""
    if not v.shape:
        raise ArgumentError(f"{name}: want at least 1 dimension, got a scalar")
    *leading, columns = v.shape
    rows = math.prod(leading)
    if columns > 1 and v.strides[-1] != 1 and rows:
        raise ArgumentError(
            f"{name}: want its last dimension contiguous, got strides {list(v.strides)}; "
            f"pass {contiguous_copy_of(v, name)}"
        )
    return rows, columns, _row_stride(v, name, columns)


def _row_stride(v: Facts, name: str, columns: int) -> int:
    stride, expected = columns, None
    for size, step in zip(reversed(v.shape[:-1]), reversed(v.strides[:-1]), strict=True):
        if size == 1:
            continue
        if expected is None:
            stride = step
        elif step != expected:
            raise ArgumentError(
                f"{name}: want leading dimensions that flatten to rows, got shape "
                f"{list(v.shape)} with strides {list(v.strides)}; "
                f"pass {contiguous_copy_of(v, name)}"
            )
        expected = step * size
    return stride


def require_limit(limit: float | None, name: str) -> float | None:
    """The clamp's bound, None where there is none."""
    if limit is None:
        return None
    rounded = float32(limit)
    if not rounded > 0:
        raise ArgumentError(f"{name}: want a positive fp32 number, None or inf, got {limit!r}")
    return None if rounded == math.inf else rounded


def float32(value: float) -> float:
    """The nearest fp32 number, which is what a kernel gets; inf or NaN where there is none."""
    try:
        return float(_FLOAT.unpack(_FLOAT.pack(value))[0])
    except OverflowError:
        return math.inf


def require_alpha_beta(alpha: float, beta: float, prefix: str = "") -> None:
    """The two scalars of the activation."""
    if not 0 < float32(alpha) < math.inf:
        raise ArgumentError(f"{prefix}alpha: want a finite positive fp32 number, got {alpha!r}")
    require_finite(beta, f"{prefix}beta")


def require_finite(value: float, name: str) -> None:
    """A scalar is a finite number in fp32."""
    if not math.isfinite(float32(value)):
        raise ArgumentError(f"{name}: want a finite fp32 number, got {value!r}")


def require_expert_map(v: Facts | None) -> None:
    """An expert_map, if there is one: [num_experts] int32."""
    if v is not None:
        require_dtype(v, "expert_map", "int32")
        require_ndim(v, "expert_map", 1, "[num_experts]")
        require_contiguous(v, "expert_map")


def id_space(num_experts: int | None, expert_map: Facts | None, default: int) -> int:
    """Size of the space of topk_ids; ``default`` where nothing gives it."""
    if expert_map is None:
        if num_experts is None:
            return default
        size = num_experts
    else:
        size = expert_map.shape[0]
        if num_experts is not None and num_experts != size:
            raise ArgumentError(
                f"num_experts: want {size}, the length of expert_map, got {num_experts}"
            )
    if size < 1:
        raise ArgumentError(f"num_experts: want at least 1, got {size}")
    return size


def require_expert_count(num_experts: int, name: str = "num_experts") -> None:
    """The expert sort keeps a counter per expert in shared memory."""
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ArgumentError(
            f"{name}: want at least 1 and at most {MAX_EXPERTS} experts, got {num_experts}"
        )


def require_output(v: Facts, name: str, shape: tuple[int, ...], dtype: str) -> None:
    """A caller's output: exactly this shape and dtype, contiguous."""
    require_writeable(v, name)
    require_dtype(v, name, dtype)
    require_shape(v, name, *shape)
    require_contiguous(v, name)


def require_scale_output(v: Facts, layout: ScaleLayout) -> None:
    """A caller's out_scale: the shape and the strides of its layout."""
    require_writeable(v, "out_scale")
    require_dtype(v, "out_scale", layout.dtype)
    require_shape(v, "out_scale", *layout.shape)
    for size, stride, wanted in zip(v.shape, v.strides, layout.strides, strict=True):
        if size > 1 and 0 not in v.shape and stride != wanted:
            raise ArgumentError(
                f"out_scale: want strides {list(layout.strides)} for this scale_layout, "
                f"got {list(v.strides)}; leave out_scale out to see the layout"
            )


def is_aligned(start: int, stride: int, item_bytes: int, to: int) -> bool:
    """Whether every row of a matrix starts at a multiple of ``to`` bytes, as its first one does."""
    return start % to == 0 and (stride * item_bytes) % to == 0


def at(name: str, v: Facts | None) -> At | int:
    """The address of an array as an argument of a launch, 0 for None."""
    return 0 if v is None else At(name)
