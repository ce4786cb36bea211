"""Arrays of NumPy, torch, CuPy and DLPack to views, host results back to the caller's framework.

Frameworks without fp8 or bf16 hold them as bytes (``uint8``, ``uint16``): an op that wants e4m3 or
bf16 takes those bytes as such (`check.require_dtype`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from cumoe.arrays import dlpack
from cumoe.arrays.export import Export
from cumoe.arrays.view import CPU, LINE, ArrayView, Device, Facts, facts
from cumoe.errors import ArgumentError, CumoeError, DTypeError, UnsupportedDeviceError

_NAMES = {"float8_e4m3fn": "e4m3", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_NUMPY = {
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}

_BITS = {"e4m3": np.uint8, "bf16": np.uint16}
_NUMPY_NAMES = {"fp16": "float16", "fp32": "float32"}

_new_view: Callable[..., ArrayView] = tuple.__new__
"""Faster than calling the NamedTuple: a call on the GPU views three to ten arrays."""
Viewer = Callable[[Any, dlpack.Visits], ArrayView]
_viewers: dict[type, Viewer] = {}


def view(array: Any, name: str) -> ArrayView:
    """The facts of ``array``; ``name`` is the argument's name for the error message."""
    return view_all((array,), (name,))[0]


def optional_view(array: Any, name: str) -> ArrayView | None:
    """`view`, or None for None."""
    return None if array is None else view(array, name)


def view_all(arrays: Iterable[Any], names: Sequence[str]) -> list[ArrayView]:
    """The facts of the arrays of one call, which is one visit to those of other frameworks."""
    found: list[ArrayView] = []
    visits: dlpack.Visits = {}
    try:
        for array in arrays:
            viewer = _viewers.get(type(array)) or _find_viewer(array)
            found.append(viewer(array, visits))
    except CumoeError as error:  # raised below, where the name is not known
        raise type(error)(f"{names[len(found)]}: {error}") from error.__cause__
    return found


def _find_viewer(array: Any) -> Viewer:
    viewer = _viewers[type(array)] = _choose_viewer(array)
    return viewer


def _choose_viewer(array: Any) -> Viewer:
    cls = type(array)
    if isinstance(array, np.ndarray):
        if cls not in (
            np.ndarray,
            np.memmap,
        ):  # a mask would be lost, a matrix keeps two dimensions
            raise DTypeError(
                f"want a plain NumPy array, got {cls.__module__}.{cls.__qualname__}; convert it "
                f"with np.asarray(), a masked one with .filled()"
            )
        return _view_numpy
    if _is_of(array, "torch", "Tensor"):
        if cls.__torch_dispatch__ is not sys.modules["torch"].Tensor.__torch_dispatch__:
            raise DTypeError(
                f"want a torch tensor with memory of its own, got {cls.__module__}."
                f"{cls.__qualname__}; pass the tensor that it stands for or wraps"
            )
        return _view_torch
    if _is_of(array, "cupy", "ndarray"):
        return _view_cupy
    if cls is Export:
        return _view_export
    if (viewer := dlpack.find_viewer(array)) is not None:
        return viewer
    raise DTypeError(
        f"want a NumPy, torch or CuPy array, or one with __dlpack__, got {cls.__module__}."
        f"{cls.__qualname__}; convert it first"
    )


def _is_of(array: Any, module: str, cls: str) -> bool:
    # A framework that was never imported cannot have made the array: nothing is imported here.
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(array, getattr(loaded, cls))


def _view_numpy(a: Any, visits: dlpack.Visits) -> ArrayView:
    made = _numpy_facts(a.shape, a.strides, a.dtype, CPU, "numpy", a.flags.writeable)
    return ArrayView(a.ctypes.data, made, a)


def _view_cupy(a: Any, visits: dlpack.Visits) -> ArrayView:
    made = _cupy_facts(a.shape, a.strides, a.dtype, a.device.id)
    return _new_view(ArrayView, (a.data.ptr, made, a))


@lru_cache(1 << 16)
def _cupy_facts(
    shape: tuple[int, ...], byte_strides: tuple[int, ...], dtype: np.dtype[Any], ordinal: int
) -> Facts:
    return _numpy_facts(shape, byte_strides, dtype, Device("cuda", ordinal), "cupy", True)


def _view_export(a: Any, visits: dlpack.Visits) -> ArrayView:
    return _view_cupy(a.array, visits)._replace(owner=a)


@lru_cache(1 << 16)
def _numpy_facts(
    shape: tuple[int, ...],
    byte_strides: tuple[int, ...],
    dtype: np.dtype[Any],
    device: Device,
    framework: str,
    writeable: bool,
) -> Facts:
    item_bytes = dtype.itemsize
    if item_bytes == 0:
        raise DTypeError(f"want elements of at least a byte, got {dtype}; convert it first")
    if not dtype.isnative:
        raise DTypeError(
            f"want the byte order of this machine, got {dtype.str}; "
            f"convert it with .astype({dtype.newbyteorder('=').name!r})"
        )
    if any(n > 1 and s % item_bytes for n, s in zip(shape, byte_strides, strict=True)):
        raise ArgumentError(
            f"want strides of whole elements of {item_bytes} bytes, got {list(byte_strides)} "
            f"bytes (a field of a structured array?); pass a copy"
        )
    strides = tuple(s // item_bytes for s in byte_strides)
    name = dtype.name
    return facts(shape, strides, _NAMES.get(name, name), device, framework, writeable)


def _view_torch(a: Any, visits: dlpack.Visits) -> ArrayView:
    try:
        made, may_be_lazy = _torch_facts(a.shape, a.stride(), a.dtype, a.device)
        if may_be_lazy and (a.is_neg() or a.is_conj()):
            raise DTypeError(
                "want the values in memory, got a tensor with its negative or conjugate bit set; "
                "pass .resolve_neg().resolve_conj()"
            )
        return _new_view(ArrayView, (a.data_ptr() or _null(a), made, a))
    except RuntimeError as error:  # sparse, nested, vmap: no strides or no pointer
        raise _not_dense(a) from error


def _null(a: Any) -> int:
    # Only an empty tensor has no memory; another one is a stand-in, as in torch.func.functionalize.
    if a.numel():
        raise _not_dense(a)
    return 0


def _not_dense(a: Any) -> DTypeError:
    return DTypeError(
        f"want a dense torch tensor with memory of its own, got one of layout {a.layout} without; "
        f"convert it with .to_dense(), and call outside of torch.func transforms such as vmap"
    )


@lru_cache(1 << 16)
def _torch_facts(
    shape: Any, strides: tuple[int, ...], dtype: Any, device: Any
) -> tuple[Facts, bool]:
    """The facts, and whether to ask the tensor for its negative and conjugate bits.

    Asking costs as much as a tenth of a view, so a real tensor on a GPU whose strides are the
    row-major ones is not asked: torch sets the bit of a real tensor only in ``conj().imag``, whose
    strides are even, also those of dimensions of size 1. Without dimensions there are none to see.
    """
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedDeviceError(
            f"want a tensor on cpu or cuda, got one on {device}; move it with .to('cuda')"
        )
    where = CPU if device.type == "cpu" else Device("cuda", device.index)
    made = facts(tuple(shape), strides, torch_dtype_name(dtype), where, "torch")
    is_plain = made.is_row_major and shape and not dtype.is_complex
    return made, device.type == "cpu" or not is_plain


def torch_dtype_name(dtype: Any) -> str:
    """The name of a torch element type in `Facts`."""
    name = str(dtype).removeprefix("torch.")
    return _NAMES.get(name, name)


def facts_of(views: Iterable[ArrayView]) -> tuple[tuple[Any, ...], list[int]]:
    """All that decides what a call is but addresses, as a key, and the addresses."""
    key: list[Any] = []
    addresses = []
    for address, made, _ in views:
        key += (made, address % LINE)
        addresses.append(address)
    return tuple(key), addresses


def torch_facts(tensors: Iterable[Any]) -> tuple[tuple[Any, ...], list[int]]:
    """`facts_of` torch tensors, whose views it does not make.

    Of each tensor what its view would tell: tensors with equal keys have equal facts and starts.

    Raises: RuntimeError for a tensor without strides or memory, which `view` tells by its name.
    """
    key: list[Any] = []
    addresses = []
    for a in tensors:
        address = a.data_ptr()
        key += (a.dtype, a.shape, a.stride(), a.device, address % LINE)
        addresses.append(address)
    return tuple(key), addresses


def is_torch(array: Any) -> bool:
    """Whether arrays of this class are viewed as torch tensors; False before the first of them."""
    return _viewers.get(type(array)) is _view_torch


def to_numpy(v: ArrayView) -> np.ndarray[Any, Any]:
    """A host array as NumPy, without a copy; e4m3 and bf16 with their ml_dtypes types."""
    if v.framework == "numpy":
        return v.owner  # type: ignore[no-any-return]
    if v.framework == "dlpack":
        return _lent_numpy(v)
    import torch

    bits = {"e4m3": torch.uint8, "bf16": torch.int16}.get(v.facts.dtype)
    plain = v.owner.detach() if bits is None else v.owner.detach().view(bits)
    out: np.ndarray[Any, Any] = plain.numpy()
    return out.view(_NUMPY[v.facts.dtype]) if v.facts.dtype in _NUMPY else out


def _lent_numpy(v: ArrayView) -> np.ndarray[Any, Any]:
    dtype = _NUMPY.get(v.facts.dtype) or np.dtype(_NUMPY_NAMES.get(v.facts.dtype, v.facts.dtype))
    plain = np.asarray(_Memory(v, _BITS.get(v.facts.dtype, dtype)))
    return plain.view(dtype)


class _Memory:
    """What NumPy makes an array of, and keeps as its base: so the loan lasts as long."""

    def __init__(self, v: ArrayView, dtype: Any) -> None:
        self.loan = v.owner
        self.__array_interface__ = {
            "version": 3,
            "shape": v.facts.shape,
            "typestr": np.dtype(dtype).str,
            "strides": tuple(s * np.dtype(dtype).itemsize for s in v.facts.strides),
            "data": (v.ptr, not v.facts.writeable),
        }


def host_result(a: np.ndarray[Any, Any], like: ArrayView) -> Any:
    """A host result in the framework of ``like``; with DLPack, a copy where that cannot share."""
    if like.framework == "dlpack":
        name = a.dtype.name
        return Export(a, _NAMES.get(name, name), like.owner.array).delivered()
    return from_numpy(a, like.framework)


def from_numpy(a: np.ndarray[Any, Any], framework: str) -> Any:
    """A host result in the caller's framework, without a copy."""
    if framework == "numpy":
        return a
    import torch

    special = {"float8_e4m3fn": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}.get(a.dtype.name)
    if special is None:
        return torch.from_numpy(a)
    return torch.from_numpy(a.view({1: np.uint8, 2: np.int16}[a.itemsize])).view(special)
