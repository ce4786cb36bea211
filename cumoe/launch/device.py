"""Which GPUs there are, and the one that a call runs on."""

from __future__ import annotations

import os
import threading
from functools import cache
from types import TracebackType
from typing import Any

from cumoe._settings import make_room_for_cupy
from cumoe.errors import UnsupportedDeviceError
from cumoe.plan.device import DeviceInfo, architecture

_cuda_is_up = False
"""Whether this process has initialised CUDA through this module."""
_forked_after_cuda = False


def _after_fork() -> None:
    global _forked_after_cuda
    if _cuda_is_up:
        _forked_after_cuda = True
        cupy.cache_clear()  # so that every path, the warm ones too, comes by its refusal


os.register_at_fork(after_in_child=_after_fork)


@cache
def cupy() -> Any:
    """CuPy, which only this room and NVRTC's caller import."""
    _refuse_after_fork()
    make_room_for_cupy()
    try:
        import cupy
    except ImportError as error:
        raise UnsupportedDeviceError(
            f"CuPy: want cupy-cuda12x or cupy-cuda13x to run kernels, it did not import ({error}); "
            f"pip install 'cumoe[cuda12]'"
        ) from error
    except OSError as error:
        raise UnsupportedDeviceError(
            f"CuPy: want a writable folder when it is imported, got {error}; name one in "
            f"CUPY_CACHE_DIR"
        ) from error
    return cupy


def _refuse_after_fork() -> None:
    if _forked_after_cuda:
        raise UnsupportedDeviceError(
            "CUDA: was initialised before this process was forked, and cannot be used in it; "
            "start workers with multiprocessing's 'spawn' method, or fork before the first use of "
            "a GPU (cumoe.prebuild is none)"
        )


def device_count() -> int:
    """Number of GPUs that kernels could run on; 0 without a driver or without CuPy."""
    global _cuda_is_up
    _refuse_after_fork()
    try:
        runtime = cupy().cuda.runtime
        count: int = runtime.getDeviceCount()
    except UnsupportedDeviceError:
        return 0
    except runtime.CUDARuntimeError:  # no driver, or no device
        return 0
    _cuda_is_up = True
    return count


@cache
def info(ordinal: int) -> DeviceInfo:
    """The facts of one GPU; raises UnsupportedDeviceError where no kernel can run on it."""
    global _cuda_is_up
    from cumoe.store.nvrtc import require_driver_supports

    runtime = cupy().cuda.runtime
    _cuda_is_up = True
    require_driver_supports(runtime.driverGetVersion())
    p = runtime.getDeviceProperties(ordinal)
    return DeviceInfo(
        arch=architecture(p["major"], p["minor"]),
        num_sms=p["multiProcessorCount"],
        smem_optin_bytes=p["sharedMemPerBlockOptin"],
    )


class _Thread(threading.local):
    """Whether this thread has made a device current, which gives it that device's context."""

    has_context = False


_thread = _Thread()


class on_device:
    """Makes a device current for a block, and the caller's device current again after it.

    Setting it also gives a thread that has never called CUDA the device's context.
    """

    __slots__ = ("ordinal", "previous")

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal

    def __enter__(self) -> None:
        runtime = cupy().cuda.runtime
        self.previous = runtime.getDevice()
        if self.previous != self.ordinal or not _thread.has_context:
            runtime.setDevice(self.ordinal)
            _thread.has_context = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.previous != self.ordinal:
            cupy().cuda.runtime.setDevice(self.previous)
