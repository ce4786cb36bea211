"""From a cubin to a function that a device can launch."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any

from cumoe.errors import KernelNotBuiltError
from cumoe.launch import driver
from cumoe.launch.device import cupy, on_device
from cumoe.plan.spec import KernelSpec, Step
from cumoe.store import store
from cumoe.store.missing import prebuild_command
from cumoe.store.store import Cubin

_functions: dict[tuple[KernelSpec, str, int], int] = {}
_modules: dict[tuple[KernelSpec, int], Any] = {}
"""Kept for the life of the process: a function lives as long as its module."""
_lock = threading.Lock()


def _renew_lock() -> None:
    """A fork while another thread loads hands the child a lock that nobody there releases."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def function(step: Step, device: int, stream: int) -> int:
    """The CUfunction of a step on the current device, loaded on first use."""
    try:
        return _functions[step.kernel, step.entry, device]
    except KeyError:
        _refuse_in_capture(step, device, stream)
        return _load(step, device)


def load(steps: Iterable[Step], device: int) -> int:
    """Makes steps launchable on a GPU, so that they can be captured; how many were not before."""
    cold = [s for s in steps if (s.kernel, s.entry, device) not in _functions]
    with on_device(device):
        for step in cold:
            _load(step, device)
    return len(cold)


def _refuse_in_capture(step: Step, device: int, stream: int) -> None:
    # Loading a module inside a capture would invalidate the caller's graph: refuse before that.
    if driver.is_capturing(stream):
        raise KernelNotBuiltError(
            f"{step.kernel.text}: not loaded on cuda:{device}, and the stream is being captured; "
            f"before the capture call cumoe.warmup for the layer, or the op once with this shape. "
            f"To have it compiled before the process starts:\n    {prebuild_command([step.kernel])}"
        )


def _load(step: Step, device: int) -> int:
    with _lock, driver.relaxed_capture():
        if (step.kernel, device) not in _modules:
            _modules[step.kernel, device] = _load_module(store.get(step.kernel))
        pointer: int = _modules[step.kernel, device].get_function(step.entry).ptr
        if step.launch.smem_bytes:
            driver.set_shared_memory(pointer, step.launch.smem_bytes, step.kernel.text)
        return _functions.setdefault((step.kernel, step.entry, device), pointer)


def _load_module(cubin: Cubin) -> Any:
    """By path where the verified entry can be read, from the verified bytes elsewhere."""
    cuda = cupy().cuda
    if cubin.path is not None:
        try:
            if cubin.path.read_bytes() == cubin.data:
                return cupy().RawModule(path=str(cubin.path)).module
        except (OSError, cuda.driver.CUDADriverError):
            pass  # the entry was evicted or is unreadable by now; its verified bytes are at hand
    module = cuda.function.Module()
    module.load(cubin.data)
    return module
