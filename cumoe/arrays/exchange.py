"""Arrays of NumPy, torch and CuPy to views, and host results back to the caller's framework.

Frameworks without fp8 or bf16 hold them as bytes (``uint8``, ``uint16``): an op that wants e4m3 or
bf16 takes those bytes as such (`check.require_dtype`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from cumoe.arrays.view import CPU, ArrayView, Device, Facts, facts
from cumoe.errors import DTypeError, UnsupportedDeviceError

_NAMES = {"float8_e4m3fn": "e4m3", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_NUMPY = {
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}

_viewers: dict[type, Callable[[Any], ArrayView]] = {}


def view(array: Any, name: str) -> ArrayView:
    """The facts of ``array``; ``name`` is the argument's name for the error message."""
    try:
        viewer = _viewers[type(array)]
    except KeyError:
        viewer = _viewers[type(array)] = _find_viewer(array, name)
    return viewer(array)


def optional_view(array: Any, name: str) -> ArrayView | None:
    """`view`, or None for None."""
    return None if array is None else view(array, name)


def _find_viewer(array: Any, name: str) -> Callable[[Any], ArrayView]:
    if isinstance(array, np.ndarray):
        return _view_numpy
    if _is_of(array, "torch", "Tensor"):
        return _view_torch
    if _is_of(array, "cupy", "ndarray"):
        return _view_cupy
    raise DTypeError(
        f"{name}: want a NumPy, torch or CuPy array, got {type(array).__module__}."
        f"{type(array).__qualname__}; convert it first (torch.from_dlpack takes most arrays)"
    )


def _is_of(array: Any, module: str, cls: str) -> bool:
    # A framework that was never imported cannot have made the array: nothing is imported here.
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(array, getattr(loaded, cls))


def _strides(a: Any) -> tuple[int, ...]:
    return tuple(s // a.itemsize for s in a.strides)


def _view_numpy(a: Any) -> ArrayView:
    name = a.dtype.name
    made = facts(a.shape, _strides(a), _NAMES.get(name, name), CPU, "numpy")
    return ArrayView(a.ctypes.data, made, a)


def _view_cupy(a: Any) -> ArrayView:
    name = a.dtype.name
    device = Device("cuda", a.device.id)
    made = facts(a.shape, _strides(a), _NAMES.get(name, name), device, "cupy")
    return ArrayView(a.data.ptr, made, a)


_new_view: Callable[..., ArrayView] = tuple.__new__
"""Half the time of calling the NamedTuple: a call on the GPU views three to ten arrays."""


def _view_torch(a: Any) -> ArrayView:
    made = _torch_facts(a.shape, a.stride(), a.dtype, a.device)
    return _new_view(ArrayView, (a.data_ptr(), made, a))


@lru_cache(1 << 16)
def _torch_facts(shape: Any, strides: tuple[int, ...], dtype: Any, device: Any) -> Facts:
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedDeviceError(
            f"want a tensor on cpu or cuda, got one on {device}; move it with .to('cuda')"
        )
    name = str(dtype).removeprefix("torch.")
    where = CPU if device.type == "cpu" else Device("cuda", device.index)
    return facts(tuple(shape), strides, _NAMES.get(name, name), where, "torch")


def to_numpy(v: ArrayView) -> np.ndarray[Any, Any]:
    """A host array as NumPy, without a copy; e4m3 and bf16 with their ml_dtypes types."""
    if v.framework == "numpy":
        return v.owner  # type: ignore[no-any-return]
    import torch

    bits = {"e4m3": torch.uint8, "bf16": torch.int16}.get(v.facts.dtype)
    plain = v.owner.detach() if bits is None else v.owner.detach().view(bits)
    out: np.ndarray[Any, Any] = plain.numpy()
    return out.view(_NUMPY[v.facts.dtype]) if v.facts.dtype in _NUMPY else out


def from_numpy(a: np.ndarray[Any, Any], framework: str) -> Any:
    """A host result in the caller's framework, without a copy."""
    if framework == "numpy":
        return a
    import torch

    special = {"float8_e4m3fn": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}.get(a.dtype.name)
    if special is None:
        return torch.from_numpy(a)
    return torch.from_numpy(a.view({1: np.uint8, 2: np.int16}[a.itemsize])).view(special)
