"""The CUDA driver by ctypes: launches with attributes, which CuPy's launcher cannot carry.

Layouts are those of cuda.h, the same in CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial

from cumoe.errors import CumoeError, UnsupportedDeviceError
from cumoe.plan.spec import LaunchSpec

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""

CAPTURE_MODE_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""


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


class relaxed_capture:
    """Lets this thread load modules while another one captures a stream in CUDA's global mode.

    In that mode, torch's, a call that may allocate fails in every thread and ends the capture.
    """

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        self._mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
        self._exchange()

    def __exit__(self, *error: object) -> None:
        self._exchange()

    def _exchange(self) -> None:
        code = library().cuThreadExchangeStreamCaptureMode(ctypes.byref(self._mode))
        check(code, "capture mode")


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, with the first word of its 64-byte value."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


PROGRAMMATIC_STREAM_SERIALIZATION = 6
_OVERLAP = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1, b"")


Storage = ctypes.c_uint64 | ctypes.c_int64 | ctypes.c_float | ctypes.Array[ctypes.c_ubyte]
"""Memory of one argument."""


class Launcher:
    """One launch again and again. The driver copies the arguments; one thread at a time.

    What the driver reads is made once: a call sets the stream in ``config``, changes what it wants
    in the memory of its arguments, and calls ``fire``, which returns the driver's answer.
    """

    __slots__ = ("_arguments", "_places", "config", "fire")

    def __init__(self, function: int, launch: LaunchSpec, arguments: Sequence[Storage]) -> None:
        self._arguments = arguments
        self._places = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self.config = LaunchConfig(
            launch.grid, 1, 1, launch.block, 1, 1, launch.smem_bytes, None, None, 0
        )
        if launch.overlap:
            self.config.attributes = ctypes.addressof(_OVERLAP)
            self.config.num_attributes = 1
        self.fire: Callable[[], int] = partial(
            library().cuLaunchKernelEx,
            ctypes.byref(self.config),
            ctypes.c_void_p(function),
            self._places,
            None,
        )
