"""What comes in and goes out: values of input arrays, and the arrays that results go to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cumoe.errors import ArgumentError, DTypeError
from cumoe.reference.e4m3 import BF16, E4M3, F32, Array


def bf16_values(name: str, array: Array) -> F32:
    """The values of a bf16 array (ml_dtypes.bfloat16, or its bits as uint16) as float32."""
    if array.dtype == np.uint16:
        array = array.view(BF16)
    if array.dtype != BF16:
        raise DTypeError(f"{name} must be bfloat16 (or its bits as uint16), got {array.dtype}")
    return array.astype(np.float32)


def float_values(name: str, array: Array) -> F32:
    """The values of a bf16, fp16 or fp32 array as float32."""
    if array.dtype in (np.float16, np.float32):
        return array.astype(np.float32)
    if array.dtype in (BF16, np.uint16):
        return bf16_values(name, array)
    raise DTypeError(f"{name} must be bfloat16, float16 or float32, got {array.dtype}")


def e4m3_values(name: str, array: Array) -> Array:
    """An e4m3 array (ml_dtypes.float8_e4m3fn, or its bytes as uint8), as float8_e4m3fn."""
    if array.dtype not in (E4M3, np.uint8):
        raise DTypeError(f"{name} must be float8_e4m3fn (or its bytes as uint8), got {array.dtype}")
    return array.view(E4M3)


def require_float32(name: str, array: Array) -> F32:
    if array.dtype != np.float32:
        raise DTypeError(f"{name} must be float32, got {array.dtype}: convert it first")
    return array


def require_shape(name: str, array: Array, *shape: int) -> None:
    if array.shape != shape:
        raise ArgumentError(f"{name} must have shape {list(shape)}, got {list(array.shape)}")


def require_ndim(name: str, array: Array, ndim: int, dims: str) -> None:
    if array.ndim != ndim:
        raise ArgumentError(f"{name} must be {dims}, got shape {list(array.shape)}")


def num_groups(name: str, size: int, group_size: int) -> int:
    """How many groups of ``group_size`` make up ``size`` elements."""
    if group_size < 1:
        raise ArgumentError(f"group_size must be positive, got {group_size}")
    if size % group_size:
        raise ArgumentError(
            f"{name} is {size}, which is not a multiple of {group_size}: pad it with zeros"
        )
    return size // group_size


def e4m3_output(name: str, out: Array | None, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """The array to return and its float8_e4m3fn view; a new one, of zeros, where none is given."""
    if out is None:
        out = np.zeros(shape, E4M3)
    require_shape(name, out, *shape)
    return out, e4m3_values(name, out)


def bf16_output(name: str, out: Array | None, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """The array to return and its bfloat16 view; a new one where none is given."""
    if out is None:
        out = np.zeros(shape, BF16)
    require_shape(name, out, *shape)
    if out.dtype not in (BF16, np.uint16):
        raise DTypeError(f"{name} must be bfloat16 (or its bits as uint16), got {out.dtype}")
    return out, out.view(BF16)


def integer_ids(name: str, array: Array) -> NDArray[np.int64]:
    """int32 or int64 ids, widened: a range test must never see a narrowed id."""
    if array.dtype not in (np.int32, np.int64):
        raise DTypeError(f"{name} must be int32 or int64, got {array.dtype}")
    return array.astype(np.int64)
