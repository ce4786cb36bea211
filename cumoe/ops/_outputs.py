"""Outputs that an op allocates, and reference results in the caller's arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cumoe.arrays.dlpack import Loan
from cumoe.arrays.exchange import host_result, to_numpy, view
from cumoe.arrays.export import Export
from cumoe.arrays.view import ArrayView
from cumoe.launch import memory
from cumoe.plan.scales import ScaleLayout


def new_output(like: ArrayView, shape: tuple[int, ...], dtype: str) -> Any:
    """A contiguous output in the framework and on the device of ``like``; see `delivered`."""
    made = memory.empty(like.framework, like.device, shape, dtype)
    return Export(made, dtype, like.owner.array) if like.framework == "dlpack" else made


def delivered(owner: Any) -> Any:
    """An output as its caller gets it, after the launches that fill it, on its device."""
    return owner.delivered() if type(owner) in (Loan, Export) else owner


def new_scale(like: ArrayView, layout: ScaleLayout) -> Any:
    """A scale array of this layout: its view of storage that may have padding rows."""
    if layout.is_row_major:
        return new_output(like, layout.shape, layout.dtype)
    storage = new_output(like, (layout.shape[1], layout.rows), layout.dtype)
    return storage[:, : layout.shape[0]].T


class QuantizerOutputs(NamedTuple):
    """The two outputs of a quantizer, `delivered` after the launch, and their addresses."""

    q: Any
    scale: Any
    q_pointer: int
    scale_pointer: int


def quantizer_outputs(
    like: ArrayView,
    shape: tuple[int, ...],
    layout: ScaleLayout,
    out: ArrayView | None,
    out_scale: ArrayView | None,
) -> QuantizerOutputs:
    """The caller's arrays, or new ones, on the current device."""
    if out is None:
        out = view(new_output(like, shape, "e4m3"), "out")
    if out_scale is None:
        out_scale = view(new_scale(like, layout), "out_scale")
    return QuantizerOutputs(out.owner, out_scale.owner, out.ptr, out_scale.ptr)


def optional_host(v: ArrayView | None) -> np.ndarray[Any, Any] | None:
    """`to_numpy`, or None for None."""
    return None if v is None else to_numpy(v)


def deliver(v: ArrayView | None, result: np.ndarray[Any, Any], like: ArrayView) -> Any:
    """The caller's own output, which the reference has filled, or a new one like ``like``."""
    return host_result(result, like) if v is None else delivered(v.owner)
