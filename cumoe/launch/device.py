"""Which GPUs there are, and the one that a call runs on."""

from __future__ import annotations

from functools import cache
from types import TracebackType
from typing import Any

from cumoe.errors import UnsupportedDeviceError
from cumoe.plan.device import DeviceInfo, architecture


@cache
def cupy() -> Any:
    """CuPy, which only this room and NVRTC's caller import."""
    try:
        import cupy
    except ImportError as error:
        raise UnsupportedDeviceError(
            f"CuPy: want cupy-cuda12x or cupy-cuda13x to run kernels, it did not import ({error}); "
            f"pip install 'cumoe[cuda12]'"
        ) from error
    return cupy


def device_count() -> int:
    """Number of GPUs that kernels could run on; 0 without a driver or without CuPy."""
    try:
        runtime = cupy().cuda.runtime
        count: int = runtime.getDeviceCount()
    except UnsupportedDeviceError:
        return 0
    except runtime.CUDARuntimeError:  # no driver, or no device
        return 0
    return count


@cache
def info(ordinal: int) -> DeviceInfo:
    """The facts of one GPU; raises UnsupportedDeviceError where no kernel can run on it."""
    from cumoe.store.nvrtc import require_driver_supports

    runtime = cupy().cuda.runtime
    require_driver_supports(runtime.driverGetVersion())
    p = runtime.getDeviceProperties(ordinal)
    return DeviceInfo(
        arch=architecture(p["major"], p["minor"]),
        num_sms=p["multiProcessorCount"],
        smem_optin_bytes=p["sharedMemPerBlockOptin"],
    )


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
        runtime.setDevice(self.ordinal)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.previous != self.ordinal:
            cupy().cuda.runtime.setDevice(self.previous)
