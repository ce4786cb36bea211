"""Tensor maps: what the copy engine must know of an array whose boxes a kernel fetches."""

from __future__ import annotations

from typing import NamedTuple

MAX_STRIDE = 1 << 40
"""In bytes, exclusive (CUDA driver API, cuTensorMapEncodeTiled)."""
ALIGNMENT = 16
"""Of the array and of its strides, in bytes."""


class TensorMap(NamedTuple):
    """An argument of letter T: an array of bytes of two to five dimensions, the innermost first.

    What a box has outside of the array arrives as zeros.
    """

    array: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes, of each dimension but the innermost: its elements lie side by side."""
    box: tuple[int, ...]
    """What one instruction fetches: at most 256 of a dimension, 128 bytes of the innermost."""
    offset: int = 0
    """Where it begins in the array, in bytes."""
    swizzle: int = 128
    """Of the box in shared memory, in bytes: 0, 32, 64 or 128."""
    promotion: int = 128
    """What a miss of L2 fetches at least, in bytes: 0, 64, 128 or 256."""


def is_mappable(dims: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a tensor map can hold these, innermost first; strides in bytes as in `TensorMap`.

    A broadcast dimension or one that runs backwards cannot be in one.
    """
    outer = [s for n, s in zip(dims[1:], strides, strict=True) if n > 1]
    return 0 not in dims and all(0 < s < MAX_STRIDE and s % ALIGNMENT == 0 for s in outer)


def matrices(
    array: str, shape: tuple[int, ...], strides: tuple[int, ...], box_rows: int
) -> TensorMap:
    """[E, rows, columns] bytes with these strides, in boxes of `box_rows` by 128 of one matrix."""
    E, rows, columns = shape
    apart = strides[0] if E > 1 else rows * columns  # of one matrix it says nothing
    return TensorMap(array, (columns, rows, E), (strides[1], apart), (128, box_rows, 1))
