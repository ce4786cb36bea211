"""Outputs that an op allocates, and results in the caller's framework."""

from __future__ import annotations

from typing import Any

from cumoe.arrays.dlpack import Loan
from cumoe.arrays.export import Export
from cumoe.launch.memory import Output
from cumoe.plan.scales import ScaleLayout


def scale_output(layout: ScaleLayout) -> Output:
    """A scale array of this layout: its view of storage that may have padding rows."""
    return Output(layout.shape, layout.dtype, 0 if layout.is_row_major else layout.rows)


def delivered(array: Any, like: Any = None, made: Output | None = None) -> Any:
    """An output as its caller gets it, after the launches that fill it, on its device.

    ``made``: what it is, where it is new and to be in the framework of ``like``, if that is lent.
    """
    if type(array) is Loan:
        return array.array
    if made is not None and type(like) is Loan:
        return Export(array, made.dtype, like.array).delivered()
    return array
