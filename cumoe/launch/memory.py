"""Arrays made by the allocator of the caller's framework, on the caller's device and stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from cumoe.arrays import dlpack
from cumoe.arrays.exchange import host_result, to_numpy
from cumoe.arrays.export import Export
from cumoe.arrays.view import ArrayView, Device
from cumoe.errors import UnsupportedDeviceError
from cumoe.launch import lending
from cumoe.launch.device import cupy, device_count, on_device

_CUPY_DTYPE = {
    "e4m3": "uint8", "uint8": "uint8", "bf16": "uint16", "fp32": "float32", "int32": "int32",
}  # fmt: skip
"""CuPy allocates for the frameworks of DLPack too: `arrays.export` hands the array over."""

dlpack.gpu = lending


class Output(NamedTuple):
    """An array that a call makes: contiguous, or with its columns contiguous."""

    shape: tuple[int, ...]
    dtype: str
    column_rows: int = 0
    """Rows of storage in each column, padding included; 0 where rows are contiguous."""


def maker(framework: str, device: Device, output: Output) -> Callable[[], Any]:
    """What makes an uninitialised output, again and again, with that device current."""
    if framework == "torch":
        return _torch_maker(device.ordinal, output)
    shape, name, rows = output
    make, dtype = cupy().empty, np.dtype(_CUPY_DTYPE[name])
    if not rows:
        return partial(make, shape, dtype)
    return lambda: make((shape[1], rows), dtype)[:, : shape[0]].T


def _torch_maker(ordinal: int, output: Output) -> Callable[[], Any]:
    import torch

    shape, dtype, rows = output
    options = {"dtype": _torch_dtype(dtype), "device": torch.device("cuda", ordinal)}
    if not rows:  # empty_strided takes less of the host's time than empty
        strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        return partial(torch.empty_strided, shape, strides, **options)
    padded = partial(torch.empty_strided, (rows, shape[1]), (1, rows), **options)
    return padded if rows == shape[0] else lambda: padded()[: shape[0]]


@cache
def _torch_dtype(dtype: str) -> Any:
    import torch

    names = {"e4m3": "float8_e4m3fn", "bf16": "bfloat16", "fp32": "float32"}
    return getattr(torch, names.get(dtype, dtype))


class Ways(NamedTuple):
    """What a call asks of a framework each time."""

    current_device: Callable[[], int]
    current_stream: Callable[[int], int]
    """Of a device; with CuPy, of the current one."""
    address: Callable[[Any], int]


@cache
def ways(framework: str) -> Ways:
    """torch's own where its arrays come, CuPy's for all others."""
    if framework != "torch":
        cuda = cupy().cuda
        stream = cuda.get_current_stream
        return Ways(cuda.runtime.getDevice, lambda _: stream().ptr, attrgetter("data.ptr"))
    import torch

    # The raw getters where this torch has them: the public ones look at more, or make a Stream.
    device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
    stream = getattr(torch._C, "_cuda_getCurrentRawStream", _torch_stream)
    return Ways(device, stream, torch.Tensor.data_ptr)


def _torch_stream(ordinal: int) -> int:
    import torch

    return int(torch.cuda.current_stream(ordinal).cuda_stream)


def to_device(a: np.ndarray[Any, Any], ordinal: int) -> Any:
    """A CuPy copy of a host array on one GPU; e4m3 and bf16 become bytes."""
    if not 0 <= ordinal < device_count():
        raise UnsupportedDeviceError(
            f"cuda:{ordinal}: want one of the {device_count()} CUDA devices of this machine"
        )
    bits = {"float8_e4m3fn": "uint8", "bfloat16": "uint16"}.get(a.dtype.name)
    with on_device(ordinal):
        return cupy().asarray(a if bits is None else a.view(bits))


def to_host(a: Any) -> np.ndarray[Any, Any]:
    """A NumPy copy of a CuPy array."""
    host: np.ndarray[Any, Any] = cupy().asnumpy(a)
    return host


def host_copy(v: ArrayView) -> np.ndarray[Any, Any]:
    """The elements of any array on the host; e4m3 and bf16 as bytes where they come from a GPU."""
    if v.framework == "cupy":
        return to_host(v.owner)
    if v.device.kind == "cpu":
        return to_numpy(v)
    if v.framework == "dlpack":
        return lending.to_host(v)
    import torch

    bits = {"e4m3": torch.uint8, "bf16": torch.int16}.get(v.facts.dtype, v.owner.dtype)
    host: np.ndarray[Any, Any] = v.owner.detach().view(bits).cpu().numpy()
    return host


def from_host(a: np.ndarray[Any, Any], like: ArrayView, dtype: str) -> Any:
    """A host array in the framework and on the device of ``like``; no copy on the CPU."""
    device = like.device
    if like.framework == "dlpack" and device.kind == "cuda":
        return Export(to_device(a, device.ordinal), dtype, like.owner.array).delivered()
    if like.framework == "cupy":
        return to_device(a, device.ordinal)
    made = host_result(a, like)
    return made.to(f"cuda:{device.ordinal}") if device.kind == "cuda" else made


def embed(
    v: ArrayView,
    like: ArrayView,
    shape: tuple[int, int, int],
    moves: list[tuple[slice, slice, slice]],
) -> Any:
    """Zeros of ``shape`` with parts of ``v`` copied in: rows from, rows to, columns of each matrix.

    In the framework of ``like``, which is on the same device.
    torch does it where ``v`` lies. Other arrays go by way of the host: a strided copy in CuPy would
    compile a kernel of its own.
    """
    if like.framework == v.framework == "torch":
        import torch

        out = torch.zeros(shape, dtype=v.owner.dtype, device=v.owner.device)
        return _copy_parts(out, v.owner, moves)
    source = host_copy(v)
    out = _copy_parts(np.zeros(shape, source.dtype), source, moves)
    return from_host(out, like, v.facts.dtype)


def _copy_parts(out: Any, source: Any, moves: list[tuple[slice, slice, slice]]) -> Any:
    for rows_from, rows_to, columns in moves:
        out[:, rows_to, columns] = source[:, rows_from, columns]
    return out
