"""Memory of other frameworks on a GPU: lent on CuPy's stream, given back when that has passed."""

from __future__ import annotations

import threading
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


_ended: dict[tuple[int, int], deque[Visit]] = {}
"""Visits that have ended on the host, by device and stream, in their order. No queue is removed: a
thread may be about to append."""
_sweeping = threading.Lock()
"""Held by the one thread that takes from `_ended`; no other waits for it."""
_idle: defaultdict[int, list[Any]] = defaultdict(list)
"""Events of each device to be used again."""


class Visit:
    """The arrays that one call was lent on a stream. It ends with the last of their loans.

    One event for all of them then: it comes after the launches, since the call holds the loans.
    A graph's memory is the caller's to keep: a visit in a capture gives its own back as it ends.
    """

    __slots__ = ("event", "handle", "is_captured", "is_current", "lent", "ordinal", "stream")

    def __init__(self, ordinal: int, stream: Any, is_current: bool) -> None:
        self.ordinal, self.stream, self.is_current = ordinal, stream, is_current
        self.handle = stream.ptr or LEGACY_STREAM
        self.lent: list[Any] = []
        self.event: Any = None
        """Behind the launches; None before the end, and while the stream takes none."""
        self.is_captured = is_capturing(self.handle)

    def ask(self, export: Callable[[Any, int], Any], array: Any) -> Any:
        """``export(array, handle)`` with the visit's device current, as it is in most calls.

        Stream 1 is another one on each device, and torch wants the stream's.
        """
        with on_device(self.ordinal):
            return export(array, self.handle)

    def __del__(self) -> None:  # called once, though the object lives on in a queue
        try:
            sweep()  # first: it may free an event for this visit
        finally:
            if self.lent and not self.is_captured:
                try:
                    _record(self)
                finally:
                    _ended.setdefault((self.ordinal, self.stream.ptr), deque()).append(self)


def begin(ordinal: int) -> Visit:
    """A visit on CuPy's current stream of a device."""
    cuda = cupy().cuda
    if cuda.runtime.getDevice() == ordinal:
        return Visit(ordinal, cuda.get_current_stream(), is_current=True)
    with on_device(ordinal):
        return Visit(ordinal, cuda.get_current_stream(), is_current=False)


def is_capturing(stream: int) -> bool:
    """Whether work on a stream is being recorded into a graph; the legacy stream's never is."""
    return stream > LEGACY_STREAM and driver.is_capturing(stream)


def _record(ended: Visit) -> None:
    """Puts an event on the stream, unless that would become part of a graph, or end a capture."""
    cuda, ordinal = cupy().cuda, ended.ordinal
    if cuda.runtime.getDevice() != ordinal:
        with on_device(ordinal):
            _record(ended)
    elif _takes_events(ended.stream.ptr):
        try:
            event = _idle[ordinal].pop()
        except IndexError:
            event = cuda.Event(disable_timing=True)
        event.record(ended.stream)
        ended.event = event


def _takes_events(stream: int) -> bool:
    try:
        return not driver.is_capturing(stream)
    except CumoeError:  # so the driver answers for the legacy stream while one is captured that
        return False  # waits for it: an event there would end that capture, the question does not


def sweep() -> None:
    """Gives back what the GPU is done with, oldest first on each stream.

    A query fails, and ends the capture, where any thread captures in CUDA's global mode: torch's.
    """
    queues = list(filter(None, tuple(_ended.values())))
    if not queues or not _sweeping.acquire(blocking=False):
        return
    try:
        with driver.relaxed_capture():
            for queue in queues:
                _give_back(queue)
    finally:
        _sweeping.release()


def _give_back(queue: deque[Visit]) -> None:
    while queue:
        ended = queue[0]
        if ended.event is None:  # its stream took none when it ended
            _record(ended)
        if ended.event is None or not ended.event.done:
            return
        _idle[ended.ordinal].append(ended.event)
        queue.popleft()


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
