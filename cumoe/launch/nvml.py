"""The GPUs of this machine by NVML, which leaves CUDA alone: who only looked may fork later."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

_NAME_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE


class Gpu(NamedTuple):
    """One GPU. CUDA_VISIBLE_DEVICES is not looked at."""

    name: str
    capability: tuple[int, int]
    """Major and minor."""


class Machine(NamedTuple):
    """What the driver says."""

    driver: str
    """As ``580.159.04``."""
    cuda: int
    """The newest CUDA that the driver supports, as 13000."""
    gpus: tuple[Gpu, ...]


def machine() -> Machine | None:
    """The driver and its GPUs; None where there is no driver, or it does not answer."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        return Machine(_driver(nvml), _cuda(nvml), _gpus(nvml))
    finally:
        nvml.nvmlShutdown()


def _driver(nvml: ctypes.CDLL) -> str:
    text = ctypes.create_string_buffer(_NAME_BYTES)
    nvml.nvmlSystemGetDriverVersion(text, len(text))
    return text.value.decode()


def _cuda(nvml: ctypes.CDLL) -> int:
    version = ctypes.c_int(0)
    nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version))
    return version.value


def _gpus(nvml: ctypes.CDLL) -> tuple[Gpu, ...]:
    count = ctypes.c_uint(0)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return tuple(_gpu(nvml, index) for index in range(count.value))


def _gpu(nvml: ctypes.CDLL, index: int) -> Gpu:
    handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    nvml.nvmlDeviceGetName(handle, name, len(name))
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return Gpu(name.value.decode(), (major.value, minor.value))
