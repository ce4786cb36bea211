"""Memory of other frameworks on a GPU: lent on CuPy's stream, given back when that has passed."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from cumoe.arrays.view import ITEM_BYTES, ArrayView
from cumoe.launch.device import cupy, on_device

LEGACY_STREAM = 1
"""cudaStreamLegacy, which CuPy writes 0 and DLPack 1; any other handle is its own number."""

_HOST_TYPES: dict[str, np.dtype[Any]] = {
    "e4m3": np.dtype(np.uint8), "bf16": np.dtype(np.uint16), "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
}  # fmt: skip

MOST_LENT = 16
"""Arrays of a visit, more than those of a call: if something keeps an old loan, as the traceback of
an error does, not all later calls are to join its visit, which would keep theirs too."""

_ended: deque[tuple[int, Any, list[Any]]] = deque()
"""Visits that have ended on the host: device, an event behind their launches, what goes back."""
_idle: defaultdict[int, list[Any]] = defaultdict(list)
"""Events of each device to be used again."""


class Visit:
    """The arrays that one call was lent on a stream. It ends with the last of their loans.

    One event for all of them then: it comes after the launches, since the call holds the loans.
    """

    __slots__ = ("__weakref__", "lent", "ordinal", "stream")

    def __init__(self, ordinal: int, stream: Any) -> None:
        self.ordinal, self.stream = ordinal, stream
        self.lent: list[Any] = []

    def __del__(self) -> None:
        if self.lent:
            _after(self.ordinal, self.stream, self.lent)
        sweep()


class _Thread(threading.local):
    """The visit that a further array of this thread may join, if it is still going on."""

    visit: Callable[[], Visit | None] = staticmethod(lambda: None)


_thread = _Thread()


def ask(ordinal: int, export: Callable[[Any, int], Any], array: Any) -> tuple[Any, Visit]:
    """``export(array, stream)`` with CuPy's current stream of a device, and the visit on it.

    The device is current meanwhile: stream 1 is another one on each, and torch wants it so.
    """
    cuda = cupy().cuda
    if cuda.runtime.getDevice() != ordinal:
        with on_device(ordinal):
            return ask(ordinal, export, array)
    stream = cuda.get_current_stream()
    visit = _thread.visit()
    if visit is None or not _may_join(visit, ordinal, stream):
        visit = Visit(ordinal, stream)
        _thread.visit = weakref.ref(visit)
    return export(array, stream.ptr or LEGACY_STREAM), visit


def _may_join(visit: Visit, ordinal: int, stream: Any) -> bool:
    same = visit.stream is stream or visit.stream == stream
    return same and visit.ordinal == ordinal and len(visit.lent) < MOST_LENT


def _after(ordinal: int, stream: Any, lent: list[Any]) -> None:
    """Lets ``lent`` go when the device has done what is on the stream now."""
    cuda = cupy().cuda
    if cuda.runtime.getDevice() != ordinal:
        with on_device(ordinal):
            return _after(ordinal, stream, lent)
    if stream.ptr and cuda.runtime.streamIsCapturing(stream.ptr):
        return None  # a graph's memory is the caller's to keep
    try:
        event = _idle[ordinal].pop()
    except IndexError:
        event = cuda.Event(disable_timing=True)
    event.record(stream)
    return _ended.append((ordinal, event, lent))


def sweep() -> None:
    """Gives back what the GPU is done with, oldest first."""
    while _ended:
        try:
            visit = _ended.popleft()
        except IndexError:  # another thread was faster
            return
        ordinal, event, _ = visit
        if not event.done:
            _ended.appendleft(visit)
            return
        _idle[ordinal].append(event)


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
