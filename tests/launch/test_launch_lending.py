"""When lent memory goes back: one event for each call, waited for and used again."""

from __future__ import annotations

import contextlib
import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cumoe.errors import CumoeError
from cumoe.launch import device, driver, lending


class Stream:
    def __init__(self, ptr: int, is_capturing: bool = False) -> None:
        self.ptr, self.is_capturing = ptr, is_capturing


class Event:
    """Done where the test says so. A query outside of `relaxed_capture` is an error."""

    made: list[Event]
    gpu: Gpu

    def __init__(self, disable_timing: bool) -> None:
        assert disable_timing
        self.is_done = False
        self.queries = 0
        self.streams: list[Stream] = []
        self.made.append(self)

    def record(self, stream: Stream) -> None:
        assert not stream.is_capturing
        self.is_done = False
        self.streams.append(stream)

    @property
    def done(self) -> bool:
        self.queries += 1
        if not self.gpu.is_relaxed or self.gpu.is_broken:
            raise RuntimeError("cudaErrorStreamCaptureUnsupported")
        return self.is_done


class Gpu:
    def __init__(self) -> None:
        self.stream, self.current = Stream(0), 0
        self.returned: list[Any] = []
        self.is_relaxed = self.is_broken = self.is_implicit = False
        self.exchanges = 0
        self.streams: dict[int, Stream] = {}

    @contextlib.contextmanager
    def relaxed_capture(self):
        self.exchanges += 1
        self.is_relaxed = True
        try:
            yield
        finally:
            self.is_relaxed = False

    def is_capturing(self, ptr: int) -> bool:
        """Of the legacy stream, whether a stream is captured that waits for it: an error."""
        if ptr <= 1:
            if self.is_implicit:
                raise CumoeError("CUDA_ERROR_STREAM_CAPTURE_IMPLICIT")
            return False
        return self.streams[ptr].is_capturing

    def on(self, ptr: int, is_capturing: bool = False) -> Stream:
        """Makes a new stream current."""
        self.stream = self.streams[ptr] = Stream(ptr, is_capturing)
        return self.stream

    def set(self, ordinal: int) -> None:
        self.current = ordinal

    def call(self, count: int = 3, ordinal: int = 0) -> lending.Visit:
        """The visit of a call on so many arrays, each of which lends one `_Memory`."""
        visit = lending.begin(ordinal)
        assert visit.is_current is (self.current == ordinal)
        for i in range(count):
            exported = visit.ask(lambda a, s: (a, s, self.current), i)
            assert exported == (i, self.stream.ptr or 1, ordinal)
            visit.lent.append(_Memory(self.returned, i))
        return visit


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
        ),
        get_current_stream=lambda: gpu.stream,
        Event=type("Event", (Event,), {"made": [], "gpu": gpu}),
    )
    gpu.events = cuda.Event.made
    for module in (device, lending):
        monkeypatch.setattr(module, "cupy", lambda: SimpleNamespace(cuda=cuda))
    for name in ("relaxed_capture", "is_capturing"):
        monkeypatch.setattr(driver, name, getattr(gpu, name))
    lending._ended.clear()
    lending._idle.clear()
    yield gpu
    lending._ended.clear()
    lending._idle.clear()


def test_a_call_has_one_event_after_which_all_goes_back(gpu):
    visit = gpu.call()
    assert gpu.events == []
    del visit
    (event,) = gpu.events
    assert (event.streams, gpu.returned) == ([gpu.stream], [])
    lending.sweep()
    assert gpu.returned == []
    event.is_done = True
    lending.sweep()
    assert sorted(gpu.returned) == [0, 1, 2]


def test_events_are_used_again_by_their_device_alone(gpu):
    for ordinal, events in ((0, 1), (0, 1), (1, 2), (1, 2), (0, 2)):
        gpu.call(ordinal=ordinal)
        assert len(gpu.events) == events
        assert gpu.current == 0
        for event in gpu.events:
            event.is_done = True
        lending.sweep()
    assert len(gpu.returned) == 15


def test_another_stream_is_another_visit(gpu):
    first = gpu.call(1)
    gpu.on(7)
    second = gpu.call(1)
    assert first is not second
    del first, second
    assert [e.streams[0].ptr for e in gpu.events] == [0, 7]


def test_who_keeps_a_loan_does_not_keep_those_of_all_later_calls(gpu):
    kept = gpu.call()
    for _ in range(20):
        gpu.call()
    finish(gpu)
    lending.sweep()
    assert (len(gpu.returned), len(kept.lent)) == (60, 3)


def test_a_graph_keeps_nothing(gpu):
    gpu.on(7, is_capturing=True)
    gpu.call()
    gc.collect()
    assert sorted(gpu.returned) == [0, 1, 2]
    assert gpu.events == []


def finish(gpu: Gpu) -> None:
    for event in gpu.events:
        event.is_done = True


def waiting() -> int:
    """Visits that have ended and are not given back."""
    return sum(map(len, lending._ended.values()))


def test_a_query_that_fails_loses_nothing(gpu):
    """The memory is the GPU's until a query has said that it is done."""
    gpu.call()
    gpu.is_broken = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="CaptureUnsupported"):
            lending.sweep()
        assert (gpu.returned, waiting(), gpu.is_relaxed) == ([], 1, False)
    gpu.is_broken = False
    finish(gpu)
    lending.sweep()
    assert sorted(gpu.returned) == [0, 1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_visit_that_ends_where_a_query_fails_is_kept(gpu):
    gpu.call(1)
    gpu.is_broken = True
    gpu.call(1)
    gc.collect()
    gpu.is_broken = False
    assert (gpu.returned, waiting()) == ([], 2)


def test_the_capture_mode_is_exchanged_only_where_there_is_something_to_sweep(gpu):
    lending.sweep()
    assert gpu.exchanges == 0
    gpu.call()
    assert gpu.exchanges == 0
    lending.sweep()
    assert gpu.exchanges == 1
    finish(gpu)
    lending.sweep()
    lending.sweep()
    assert gpu.exchanges == 2


def test_what_is_given_back_may_end_other_loans(gpu):
    """A producer's deleter that runs a finalizer with a sweep of its own, which must not wait."""

    class Deleter:
        def __del__(self) -> None:
            gpu.returned.append("deleted")
            lending.sweep()

    visit = gpu.call(1)
    visit.lent.append(Deleter())
    del visit
    finish(gpu)
    lending.sweep()
    assert sorted(map(str, gpu.returned)) == ["0", "deleted"]


def test_one_thread_sweeps_at_a_time(gpu):
    """What another thread asks about is not taken away under it."""
    gpu.call()
    finish(gpu)
    with lending._sweeping:
        thread = threading.Thread(target=lending.sweep)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        assert (gpu.events[0].queries, gpu.returned) == (0, [])
    lending.sweep()
    assert sorted(gpu.returned) == [0, 1, 2]


@pytest.mark.parametrize("other", [(1, 0), (0, 7)])
def test_a_long_kernel_holds_only_its_own_stream(gpu, other):
    gpu.call(1)
    ordinal, ptr = other
    if ptr:
        gpu.on(ptr)
    gpu.call(2, ordinal)
    long, short = gpu.events
    short.is_done = True
    lending.sweep()
    assert (sorted(gpu.returned), waiting()) == ([0, 1], 1)
    long.is_done = True
    lending.sweep()
    assert (sorted(gpu.returned), waiting()) == ([0, 0, 1], 0)


def test_the_visits_of_a_stream_go_back_in_order(gpu):
    for count in (1, 2):
        gpu.call(count)
    first, second = gpu.events
    second.is_done = True
    lending.sweep()
    assert (gpu.returned, second.queries) == ([], 0)
    first.is_done = True
    lending.sweep()
    assert len(gpu.returned) == 3


def test_a_visit_that_a_capture_overtakes_is_kept_until_it_is_over(gpu):
    """Its kernels are no part of the graph: they may still run."""
    stream = gpu.on(7)
    visit = gpu.call()
    stream.is_capturing = True
    del visit
    lending.sweep()
    assert (gpu.events, gpu.returned, waiting()) == ([], [], 1)
    stream.is_capturing = False
    lending.sweep()
    assert (gpu.returned, gpu.events[0].streams) == ([], [stream])
    finish(gpu)
    lending.sweep()
    assert sorted(gpu.returned) == [0, 1, 2]


def test_no_event_on_the_legacy_stream_while_another_is_captured_that_waits_for_it(gpu):
    visit = gpu.call(1)
    gpu.is_implicit = True
    del visit
    lending.sweep()
    assert (gpu.events, gpu.returned, waiting()) == ([], [], 1)
    gpu.is_implicit = False
    lending.sweep()
    finish(gpu)
    lending.sweep()
    assert gpu.returned == [0]


def test_a_visit_gives_back_once(gpu):
    """Its end keeps the object itself, in a queue, and after that it ends no second time."""
    gpu.call(1)
    gpu.call(1)
    for _ in range(2):
        finish(gpu)
        lending.sweep()
        gc.collect()
    assert (gpu.returned, waiting(), len(gpu.events)) == ([0, 0], 0, 2)
    assert not any(type(o) is lending.Visit for o in gc.get_objects())


@pytest.mark.parametrize("is_capturing", [False, True])
def test_no_call_in_a_graph_joins_one_outside_nor_the_other_way(gpu, is_capturing):
    """Though something keeps a loan of the first."""
    stream = gpu.on(7, is_capturing)
    first = gpu.call(1)
    stream.is_capturing = not is_capturing
    second = gpu.call(1)
    assert [v.is_captured for v in (first, second)] == [is_capturing, not is_capturing]
