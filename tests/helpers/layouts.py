"""Arrays inside larger allocations: odd addresses, gaps between rows, padded columns.

A view is cut on the backend, so that its address and strides are those that the caller would have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.helpers.backends import NumpyBackend
from tests.helpers.cases import BF16, POISON_SCALE, POISON_WORD

GUARD = 0xFF
"""The byte around an embedded array: NaN in every float type, -1 in every integer type."""


class Embedded(NamedTuple):
    """[M, K] rows of a larger allocation that otherwise holds GUARD bytes."""

    view: Any
    base: Any
    """The allocation, one-dimensional."""
    offset: int
    """Elements before the first row."""
    gap: int
    """Elements between two rows."""

    def guard(self, backend: NumpyBackend) -> np.ndarray:
        """The bytes outside the rows."""
        raw = backend.raw(self.base)
        rows, columns = self.view.shape
        outside = np.ones(raw.shape, bool)
        outside[self.offset :].reshape(rows, columns + self.gap)[:, :columns] = False
        return raw[outside].view(np.uint8)


def embedded(backend: NumpyBackend, rows: np.ndarray, *, offset: int = 0, gap: int = 0) -> Embedded:
    """The [M, K] array on the backend, ``offset`` and ``gap`` elements away from being aligned."""
    (num_rows, columns), width = rows.shape, rows.shape[1] + gap
    size = offset + num_rows * width
    base = np.full(size * rows.itemsize, GUARD, np.uint8).view(rows.dtype)
    base[offset:].reshape(num_rows, width)[:, :columns] = rows
    placed = backend.put(base)
    view = placed[offset:].reshape(num_rows, width)[:, :columns]
    return Embedded(view, placed, offset, gap)


class ScaleBuffer(NamedTuple):
    view: Any
    """What a caller passes as ``out_scale``."""
    storage: Any
    """The same with its padding rows: [M, G], or [G, rows] where columns are contiguous."""


def scale_buffer(
    backend: NumpyBackend, num_rows: int, num_groups: int, layout: str = "row"
) -> ScaleBuffer:
    """A poisoned buffer for the scales of [M, G] groups, with the strides of the layout."""
    if layout == "row":
        storage = backend.put(np.full((num_rows, num_groups), POISON_SCALE))
        return ScaleBuffer(storage, storage)
    padded = num_rows if layout == "column" else -(-num_rows // 4) * 4
    if layout == "packed":
        words = np.full((-(-num_groups // 4), padded), POISON_WORD, np.int32)
    else:
        words = np.full((num_groups, padded), POISON_SCALE)
    storage = backend.put(words)
    return ScaleBuffer(storage[:, :num_rows].T, storage)


def strides_of(a: Any) -> tuple[int, ...]:
    """Strides in elements, whatever the framework."""
    stride = getattr(a, "stride", None)
    return tuple(stride()) if stride else tuple(s // a.itemsize for s in a.strides)


def address_of(a: Any) -> int:
    """Address of the first element, whatever the framework."""
    if hasattr(a, "data_ptr"):
        return int(a.data_ptr())
    return int(a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr)


def aligned_bytes(backend: NumpyBackend, size: int) -> Any:
    """``size`` bytes of 0xFF that start at a multiple of 256."""
    if backend.is_gpu:
        return backend.put(np.full(size, 0xFF, np.uint8))
    buffer = np.full(size + 256, 0xFF, np.uint8)
    whole = backend.put(buffer)
    first = -address_of(whole) % 256
    return whole[first : first + size]


def reinterpreted(a: Any, dtype: str) -> Any:
    """The memory of a contiguous array as elements of another type; bf16 is uint16 in CuPy."""
    if hasattr(a, "data_ptr"):
        import torch

        return a.view(getattr(torch, dtype))
    if dtype == "bfloat16":
        return a.view(BF16 if isinstance(a, np.ndarray) else np.uint16)
    return a.view(dtype)


def padded_columns(backend: NumpyBackend, scale: Any) -> np.ndarray:
    """All columns but the last of new "tma" or "packed" scales, one a row, with their padding.

    The padding of the last column may lie outside what the view covers.
    """
    columns, padded = scale.shape[1] - 1, -(-scale.shape[0] // 4) * 4
    if hasattr(scale, "as_strided"):
        return backend.raw(scale.as_strided((columns, padded), (padded, 1)))
    storage = backend.raw(scale.base)
    assert storage.shape == (columns + 1, padded)
    return storage[:-1]
