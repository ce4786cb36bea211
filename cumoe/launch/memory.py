"""Arrays made by the allocator of the caller's framework, on the caller's device and stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from cumoe.arrays.view import ArrayView, Device
from cumoe.errors import UnsupportedDeviceError
from cumoe.launch.device import cupy, device_count, on_device

_CUPY_DTYPE = {
    "e4m3": "uint8", "uint8": "uint8", "bf16": "uint16", "fp32": "float32", "int32": "int32",
}  # fmt: skip


def empty(framework: str, device: Device, shape: tuple[int, ...], dtype: str) -> Any:
    """An uninitialised contiguous array; e4m3 and bf16 are bytes in CuPy."""
    if framework == "torch":
        return _torch_empty(shape, dtype, device.ordinal)
    return cupy().empty(shape, _CUPY_DTYPE[dtype])


def _torch_empty(shape: tuple[int, ...], dtype: str, ordinal: int) -> Any:
    import torch

    names = {"e4m3": "float8_e4m3fn", "bf16": "bfloat16", "fp32": "float32"}
    return torch.empty(
        shape, dtype=getattr(torch, names.get(dtype, dtype)), device=f"cuda:{ordinal}"
    )


def current_stream(v: ArrayView) -> int:
    """The caller's current stream, in the framework of this array (on the current device)."""
    if v.framework == "torch":
        return _torch_stream_getter()(v.device.ordinal)
    return int(cupy().cuda.get_current_stream().ptr)


@cache
def _torch_stream_getter() -> Callable[[int], int]:
    """torch's raw getter (0.2 us a call) where this torch has it, else the public one (7.5 us)."""
    import torch

    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda ordinal: int(torch.cuda.current_stream(ordinal).cuda_stream))


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


def embed(
    v: ArrayView, shape: tuple[int, int, int], moves: list[tuple[slice, slice, slice]]
) -> Any:
    """Zeros of ``shape`` with parts of ``v`` copied in: rows from, rows to, columns of each matrix.

    CuPy arrays go by way of the host: a strided copy in CuPy would compile a kernel of its own.
    """
    if v.framework == "torch":
        import torch

        out = torch.zeros(shape, dtype=v.owner.dtype, device=v.owner.device)
    else:
        out = np.zeros(shape, v.owner.dtype)
    source = to_host(v.owner) if v.framework == "cupy" else v.owner
    for rows_from, rows_to, columns in moves:
        out[:, rows_to, columns] = source[:, rows_from, columns]
    return to_device(out, v.device.ordinal) if v.framework == "cupy" else out
