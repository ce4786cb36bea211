"""How the scales of [M, G] groups lie in memory: ``row``, ``column``, ``tma`` and ``packed``."""

from __future__ import annotations

import numpy as np

from cumoe.errors import ArgumentError, DTypeError
from cumoe.reference.arrays import require_shape
from cumoe.reference.e4m3 import F32, Array, ue8m0_bytes

FORMATS = ("fp32", "ue8m0")
LAYOUTS = ("row", "column", "tma", "packed")
TMA_ROWS = 4
"""Leading dimensions are a multiple of 16 bytes: four fp32 or four int32."""
PACKED_GROUPS = 4
"""Exponent bytes to an int32, the first group in the lowest byte."""


def require_format(scale_format: str) -> None:
    if scale_format not in FORMATS:
        raise ArgumentError(f"scale_format must be one of {FORMATS}, got {scale_format!r}")


def require_layout(scale_layout: str, scale_format: str) -> None:
    require_format(scale_format)
    if scale_layout not in LAYOUTS:
        raise ArgumentError(f"scale_layout must be one of {LAYOUTS}, got {scale_layout!r}")
    if scale_layout == "packed" and scale_format != "ue8m0":
        raise ArgumentError(
            f"scale_layout 'packed' holds exponents: it needs scale_format 'ue8m0', "
            f"got {scale_format!r}"
        )


def scale_output(out: Array | None, num_rows: int, num_groups: int, layout: str) -> Array:
    """The array for the scales: the caller's, or a new one of zeros in the given layout."""
    if out is None:
        return _zeros(num_rows, num_groups, layout)
    like = _zeros(0, num_groups, layout)
    require_shape("out_scale", out, num_rows, like.shape[1])
    if out.dtype != like.dtype:
        raise DTypeError(f"out_scale must be {like.dtype}, got {out.dtype}")
    return out


def encode(scale: F32, layout: str) -> Array:
    """The elements that the layout stores for fp32 scales [M, G]."""
    return _pack(scale) if layout == "packed" else scale


def _zeros(num_rows: int, num_groups: int, layout: str) -> Array:
    padded_rows = _round_up(num_rows, TMA_ROWS)
    if layout == "row":
        return np.zeros((num_rows, num_groups), np.float32)
    if layout == "column":
        return np.zeros((num_groups, num_rows), np.float32).T
    if layout == "tma":
        return np.zeros((num_groups, padded_rows), np.float32).T[:num_rows]
    num_words = _round_up(num_groups, PACKED_GROUPS) // PACKED_GROUPS
    return np.zeros((num_words, padded_rows), np.int32).T[:num_rows]


def _pack(scale: F32) -> Array:
    num_rows, num_groups = scale.shape
    padded = np.zeros((num_rows, _round_up(num_groups, PACKED_GROUPS)), np.uint8)
    padded[:, :num_groups] = ue8m0_bytes(scale)
    return padded.view("<i4")


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
