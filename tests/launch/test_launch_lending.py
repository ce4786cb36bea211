"""When lent memory goes back: one event for each call, waited for and used again."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from cumoe.launch import device, lending


class Stream:
    def __init__(self, ptr: int, is_capturing: bool = False) -> None:
        self.ptr, self.is_capturing = ptr, is_capturing


class Event:
    """Done where the test says so."""

    made: list[Event]
    done = False

    def __init__(self, disable_timing: bool) -> None:
        assert disable_timing
        self.streams: list[Stream] = []
        self.made.append(self)

    def record(self, stream: Stream) -> None:
        self.done = False
        self.streams.append(stream)


class Gpu:
    def __init__(self) -> None:
        self.stream, self.current = Stream(0), 0
        self.returned: list[Any] = []

    def set(self, ordinal: int) -> None:
        self.current = ordinal

    def call(self, count: int = 3, ordinal: int = 0) -> list[Any]:
        """The visits of a call on so many arrays, each of which lends one `_Memory`."""
        visits = []
        for i in range(count):
            asked = lending.ask(ordinal, lambda a, s: (a, s, self.current), i)
            assert asked[0] == (i, self.stream.ptr or 1, ordinal)
            asked[1].lent.append(_Memory(self.returned, i))
            visits.append(asked[1])
        return visits


class _Memory:
    def __init__(self, returned: list[Any], what: Any) -> None:
        self.returned, self.what = returned, what

    def __del__(self) -> None:
        self.returned.append(self.what)


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(
            getDevice=lambda: gpu.current,
            setDevice=gpu.set,
            streamIsCapturing=lambda ptr: gpu.stream.is_capturing,
        ),
        get_current_stream=lambda: gpu.stream,
        Event=type("Event", (Event,), {"made": []}),
    )
    gpu.events = cuda.Event.made
    for module in (device, lending):
        monkeypatch.setattr(module, "cupy", lambda: SimpleNamespace(cuda=cuda))
    lending._ended.clear()
    lending._idle.clear()
    yield gpu
    lending._ended.clear()
    lending._idle.clear()


def test_a_call_has_one_event_after_which_all_goes_back(gpu):
    visits = gpu.call()
    assert len(set(map(id, visits))) == 1
    assert gpu.events == []
    visits.clear()
    (event,) = gpu.events
    assert (event.streams, gpu.returned) == ([gpu.stream], [])
    lending.sweep()
    assert gpu.returned == []
    event.done = True
    lending.sweep()
    assert sorted(gpu.returned) == [0, 1, 2]


def test_events_are_used_again_by_their_device_alone(gpu):
    for ordinal, events in ((0, 1), (0, 1), (1, 2), (1, 2), (0, 2)):
        gpu.call(ordinal=ordinal)
        assert len(gpu.events) == events
        assert gpu.current == 0
        for event in gpu.events:
            event.done = True
        lending.sweep()
    assert len(gpu.returned) == 15


def test_another_stream_is_another_visit(gpu):
    first = gpu.call(1)
    gpu.stream = Stream(7)
    second = gpu.call(1)
    assert first[0] is not second[0]
    del first, second
    assert [e.streams[0].ptr for e in gpu.events] == [0, 7]


def test_who_keeps_a_loan_does_not_keep_those_of_all_later_calls(gpu):
    kept = gpu.call()
    for _ in range(20):
        gpu.call()
    for event in gpu.events:
        event.done = True
    lending.sweep()
    assert len(gpu.returned) >= 60 - lending.MOST_LENT
    assert len(kept[0].lent) <= lending.MOST_LENT


def test_a_graph_keeps_nothing(gpu):
    gpu.stream = Stream(7, is_capturing=True)
    gpu.call()
    gc.collect()
    assert sorted(gpu.returned) == [0, 1, 2]
    assert gpu.events == []
