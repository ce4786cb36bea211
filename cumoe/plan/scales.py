"""Where the scales of a block-quantized matrix lie."""

from __future__ import annotations

from typing import NamedTuple

from cumoe.errors import ArgumentError

GROUP_SIZE = 128
SCALE_FORMATS = ("fp32", "ue8m0")
SCALE_LAYOUTS = ("row", "column", "tma", "packed")


class ScaleLayout(NamedTuple):
    """A scale array: the view that callers see, and the padded storage that kernels fill."""

    dtype: str
    shape: tuple[int, int]
    strides: tuple[int, int]
    """In elements of ``dtype``."""
    rows: int
    """Rows that exist in storage; those past the matrix hold 0."""

    @property
    def is_row_major(self) -> bool:
        """Whether a row's scales lie beside each other."""
        return self.strides[1] == 1


def ceil_to(size: int, multiple: int) -> int:
    """``size`` rounded up to a multiple."""
    return -(-size // multiple) * multiple


def scale_layout(rows: int, columns: int, layout: str, scale_format: str) -> ScaleLayout:
    """The layout of the scales of a [rows, columns] matrix, one per 128 columns.

    ``row``: [rows, G], contiguous. ``column``: strides (1, rows). ``tma``: strides (1, rows rounded
    up to 4), 16 bytes, which a tensor map asks for. ``packed``: four exponent bytes to an int32,
    [rows, ceil(G / 4)] with the strides of ``tma``.
    """
    groups = columns // GROUP_SIZE
    padded = ceil_to(rows, 4)
    if layout == "row":
        return ScaleLayout("fp32", (rows, groups), (groups, 1), rows)
    if layout == "column":
        return ScaleLayout("fp32", (rows, groups), (1, rows), rows)
    if layout == "tma":
        return ScaleLayout("fp32", (rows, groups), (1, padded), padded)
    if scale_format != "ue8m0":
        raise ArgumentError(
            f"scale_layout: 'packed' holds exponents, so it wants scale_format='ue8m0', "
            f"got {scale_format!r}; use 'row', 'column' or 'tma'"
        )
    return ScaleLayout("int32", (rows, -(-groups // 4)), (1, padded), padded)
