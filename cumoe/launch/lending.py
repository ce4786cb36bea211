"""Memory of other frameworks on a GPU: lent on CuPy's stream, given back when that has passed."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from cumoe.arrays.view import ITEM_BYTES, ArrayView
from cumoe.launch import driver
from cumoe.launch.device import cupy, on_device

LEGACY_STREAM = 1
"""cudaStreamLegacy, which CuPy writes 0 and DLPack 1; any other handle is its own number."""

_HOST_TYPES: dict[str, np.dtype[Any]] = {
    "e4m3": np.dtype(np.uint8), "bf16": np.dtype(np.uint16), "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
}  # fmt: skip

_ended: deque[tuple[Any, list[Callable[[], object]]]] = deque()
"""Visits that have ended on the host: an event behind their launches, and what gives back."""


class Visit:
    """The arrays that one call was lent on a stream. It ends with the last of their loans.

    One event for all of them then: it comes after the launches, since the call holds the loans.
    """

    __slots__ = ("__weakref__", "ordinal", "releases", "stream")

    def __init__(self, ordinal: int, stream: Any) -> None:
        self.ordinal, self.stream = ordinal, stream
        self.releases: list[Callable[[], object]] = []

    def __del__(self) -> None:
        if self.releases:
            _after(self.ordinal, self.stream, self.releases)
        sweep()


class _Thread(threading.local):
    """The visit that a further array of this thread may join, if it is still going on."""

    visit: Callable[[], Visit | None] = staticmethod(lambda: None)


_thread = _Thread()


def ask(ordinal: int, export: Callable[[int], Any]) -> tuple[Any, Visit]:
    """``export(stream)`` with CuPy's current stream of a device, and the visit on that stream.

    The device is current meanwhile: stream 1 is another one on each, and torch wants it so.
    """
    with on_device(ordinal):
        stream = cupy().cuda.get_current_stream()
        number = int(stream.ptr) or LEGACY_STREAM
        visit = _thread.visit()
        if visit is None or visit.releases or (visit.ordinal, visit.stream) != (ordinal, stream):
            visit = Visit(ordinal, stream)
            _thread.visit = weakref.ref(visit)
        return export(number), visit


def _after(ordinal: int, stream: Any, releases: list[Callable[[], object]]) -> None:
    with on_device(ordinal):
        if stream.ptr and driver.is_capturing(stream.ptr):
            _call(releases)  # a graph's memory is the caller's to keep
            return
        event = cupy().cuda.Event(disable_timing=True)
        event.record(stream)
    _ended.append((event, releases))


def sweep() -> None:
    """Gives back what the GPU is done with, oldest first."""
    while _ended:
        try:
            event, releases = _ended.popleft()
        except IndexError:  # another thread was faster
            return
        if not event.done:
            _ended.appendleft((event, releases))
            return
        _call(releases)


def _call(releases: list[Callable[[], object]]) -> None:
    for release in releases:
        release()


def to_host(v: ArrayView) -> np.ndarray[Any, Any]:
    """A NumPy copy of lent memory, with its strides; e4m3 and bf16 as bytes."""
    dtype = _HOST_TYPES.get(v.facts.dtype) or np.dtype(v.facts.dtype)
    low, high = v.facts.extent
    memory = np.empty(high - low, np.uint8)
    item = ITEM_BYTES[v.facts.dtype]
    with on_device(v.device.ordinal):
        stream, runtime = cupy().cuda.get_current_stream(), cupy().cuda.runtime
        kind = runtime.memcpyDeviceToHost
        runtime.memcpyAsync(memory.ctypes.data, v.ptr + low, memory.nbytes, kind, stream.ptr)
        stream.synchronize()
    strides = [s * item for s in v.facts.strides]
    return np.ndarray(v.facts.shape, dtype, memory, -low, strides)
