"""The CUDA driver by ctypes: launches with attributes, which CuPy's launcher cannot carry.

Layouts are those of cuda.h, the same in CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from cumoe.errors import CumoeError, UnsupportedDeviceError

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""

CAPTURE_MODE_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""

_END = ctypes.c_void_p(0)
_BUFFER_POINTER = ctypes.c_void_p(1)
_BUFFER_SIZE = ctypes.c_void_p(2)
_Extra = ctypes.c_void_p * 5


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


@cache
def library() -> ctypes.CDLL:
    """libcuda, which the driver installs."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedDeviceError(
            f"GPU: want the NVIDIA driver's libcuda.so.1, it did not load ({error}); "
            f"install the driver, or move the arrays to the CPU"
        ) from error


def check(code: int, what: str) -> None:
    """Raises where a driver call did not succeed."""
    if code:
        name = ctypes.c_char_p()
        library().cuGetErrorName(code, ctypes.byref(name))
        text = (name.value or b"unknown error").decode()
        raise CumoeError(
            f"{what}: want success, the CUDA driver answered {text} ({code}); if an earlier kernel "
            f"failed, CUDA_LAUNCH_BLOCKING=1 shows which"
        )


def set_shared_memory(function: int, smem_bytes: int, what: str) -> None:
    """Lets a kernel ask for more than the 48 KiB of dynamic shared memory that all may."""
    attribute = ctypes.c_int(MAX_DYNAMIC_SHARED_SIZE_BYTES)
    code = library().cuFuncSetAttribute(
        ctypes.c_void_p(function), attribute, ctypes.c_int(smem_bytes)
    )
    check(code, f"shared memory of {what}")


def is_capturing(stream: int) -> bool:
    """Whether work on this stream is being recorded into a graph."""
    status = ctypes.c_int(0)
    code = library().cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
    check(code, "stream capture query")
    return status.value != 0


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Lets this thread load modules while another one captures a stream in CUDA's global mode.

    In that mode, torch's, a call that may allocate fails in every thread and ends the capture.
    """
    mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
    check(library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "capture mode")
    try:
        yield
    finally:
        check(library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "capture mode")


def launch(
    function: int, grid: int, block: int, smem_bytes: int, stream: int, arguments: bytes
) -> int:
    """Launches; the driver copies the arguments. Returns its answer."""
    config = LaunchConfig(grid, 1, 1, block, 1, 1, smem_bytes, stream, None, 0)
    size = ctypes.c_size_t(len(arguments))
    extra = _Extra(
        _BUFFER_POINTER.value,
        ctypes.cast(ctypes.c_char_p(arguments), ctypes.c_void_p).value,
        _BUFFER_SIZE.value,
        ctypes.addressof(size),
        _END.value,
    )
    code: int = library().cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(function), None, extra
    )
    return code
