"""Memory of other frameworks on a GPU: lent on CuPy's stream, given back when that has passed."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from cumoe.arrays.view import ITEM_BYTES, ArrayView
from cumoe.errors import CumoeError
from cumoe.launch import driver
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


class _Ended:
    """A visit that has ended on the host."""

    __slots__ = ("event", "lent", "ordinal", "stream")

    def __init__(self, ordinal: int, stream: Any, lent: list[Any]) -> None:
        self.ordinal, self.stream, self.lent = ordinal, stream, lent
        self.event: Any = None
        """Behind its launches; None while the stream takes none, as in a capture."""


_ended: dict[tuple[int, int], deque[_Ended]] = {}
"""By device and stream, in their order. No queue is removed: a thread may be about to append."""
_sweeping = threading.Lock()
"""Held by the one thread that takes from `_ended`; no other waits for it."""
_idle: defaultdict[int, list[Any]] = defaultdict(list)
"""Events of each device to be used again."""


class Visit:
    """The arrays that one call was lent on a stream. It ends with the last of their loans.

    One event for all of them then: it comes after the launches, since the call holds the loans.
    A graph's memory is the caller's to keep: a visit in a capture gives its own back as it ends.
    """

    __slots__ = ("__weakref__", "is_captured", "lent", "ordinal", "stream")

    def __init__(self, ordinal: int, stream: Any, is_captured: bool) -> None:
        self.ordinal, self.stream, self.is_captured = ordinal, stream, is_captured
        self.lent: list[Any] = []

    def __del__(self) -> None:
        try:
            sweep()  # first: it may free an event for this visit
        finally:
            if self.lent and not self.is_captured:
                _after(self.ordinal, self.stream, self.lent)


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
    visit, is_captured = _thread.visit(), is_capturing(stream.ptr)
    if visit is None or not _may_join(visit, ordinal, stream, is_captured):
        visit = Visit(ordinal, stream, is_captured)
        _thread.visit = weakref.ref(visit)
    return export(array, stream.ptr or LEGACY_STREAM), visit


def is_capturing(stream: int) -> bool:
    """Whether work on a stream is being recorded into a graph; the legacy stream's never is."""
    return stream > LEGACY_STREAM and driver.is_capturing(stream)


def _may_join(visit: Visit, ordinal: int, stream: Any, is_captured: bool) -> bool:
    same = visit.stream is stream or visit.stream == stream
    same = same and visit.ordinal == ordinal and visit.is_captured is is_captured
    return same and len(visit.lent) < MOST_LENT


def _after(ordinal: int, stream: Any, lent: list[Any]) -> None:
    """Lets ``lent`` go when the device has done what is on the stream now."""
    ended = _Ended(ordinal, stream, lent)
    try:
        _record(ended)
    finally:
        _ended.setdefault((ordinal, stream.ptr), deque()).append(ended)


def _record(ended: _Ended) -> None:
    """Puts an event on the stream, unless that would become part of a graph, or end a capture."""
    cuda, ordinal = cupy().cuda, ended.ordinal
    if cuda.runtime.getDevice() != ordinal:
        with on_device(ordinal):
            return _record(ended)
    if not _takes_events(ended.stream.ptr):
        return None
    try:
        event = _idle[ordinal].pop()
    except IndexError:
        event = cuda.Event(disable_timing=True)
    event.record(ended.stream)
    ended.event = event
    return None


def _takes_events(stream: int) -> bool:
    try:
        return not driver.is_capturing(stream)
    except CumoeError:  # so the driver answers for the legacy stream while one is captured that
        return False  # waits for it: an event there would end that capture, the question does not


def sweep() -> None:
    """Gives back what the GPU is done with, oldest first on each stream.

    A query fails, and ends the capture, where any thread captures in CUDA's global mode: torch's.
    """
    queues = [queue for queue in list(_ended.values()) if queue]
    if not queues or not _sweeping.acquire(blocking=False):
        return
    try:
        with driver.relaxed_capture():
            for queue in queues:
                _give_back(queue)
    finally:
        _sweeping.release()


def _give_back(queue: deque[_Ended]) -> None:
    while queue and _is_done(queue[0]):
        ended = queue.popleft()
        _idle[ended.ordinal].append(ended.event)


def _is_done(ended: _Ended) -> bool:
    if ended.event is None:  # its stream took none when it ended
        _record(ended)
    return ended.event is not None and bool(ended.event.done)


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
