"""Thousands of mixed calls, each result compared where it lies: what drifts, leaks or races shows.

The machine says which frameworks and streams there are and how a call is captured, so that the same
steps run on the CPU.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.helpers import jax_arrays
from tests.helpers.backends import CupyBackend, NumpyBackend, TorchBackend
from tests.helpers.lenders import Wrapped
from tests.helpers.soak_pool import Arguments, Case, as_bytes, call

EPOCH = 200
"""Steps between two synchronisations, at which graphs are captured anew."""
GRAPHS = 4
"""Captured in an epoch, on any stream, and replayed in a tenth of its steps."""
CHURN = 64
"""Allocations of the test's own that live at once."""
_REPLAYED = "graph"

Results = tuple[Any, ...]


class Step(NamedTuple):
    """One call, or one replay of the graph of that number."""

    framework: str
    case: int
    stream: int
    is_given: bool
    """Outputs of the caller."""


class Lender(Wrapped):
    """One that keeps no list of the streams that it was told: that would grow."""

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None) -> Any:
        return self.array.__dlpack__(stream=stream, max_version=max_version)


class Cpu:
    """The reference, in every framework; a graph is the call itself."""

    device = "cpu"

    def __init__(self) -> None:
        torch_cpu = TorchBackend("cpu").put
        self.frameworks: dict[str, Callable[[np.ndarray], Any]] = {
            "torch": torch_cpu, "numpy": NumpyBackend().put, "jax": jax_arrays.put,
            "dlpack": lambda a: Lender(torch_cpu(a)),
        }  # fmt: skip
        self.streams: list[Any] = [None]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def captured(self, replay: Callable[[], Results]) -> Callable[[], Results]:
        return replay

    def synchronize(self) -> None:
        pass


class Gpu:
    """The kernels, on the current stream and on two others, which torch and CuPy share."""

    device = "cuda"

    def __init__(self) -> None:
        torch_cuda = TorchBackend("cuda").put
        self.frameworks: dict[str, Callable[[np.ndarray], Any]] = {
            "torch": torch_cuda, "cupy": CupyBackend().put,
            "dlpack": lambda a: Lender(torch_cuda(a)),
        }  # fmt: skip
        if jax_arrays.has_gpu():
            self.frameworks["jax"] = lambda a: jax_arrays.put(a, "cuda")
        self.streams = [None, torch.cuda.Stream(), torch.cuda.Stream()]
        self._capturing = torch.cuda.Stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else _both_on(stream)

    def captured(self, replay: Callable[[], Results]) -> Callable[[], Results]:
        """Without the collection and the emptied cache of `torch.cuda.graph`, which take long."""
        graph = torch.cuda.CUDAGraph()
        self.synchronize()
        with torch.cuda.stream(self._capturing):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                results = replay()
            finally:
                graph.capture_end()

        def replayed() -> Results:
            graph.replay()
            return results

        return replayed

    def synchronize(self) -> None:
        torch.cuda.synchronize()


@contextmanager
def _both_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """torch and CuPy on one stream."""
    import cupy

    with torch.cuda.stream(stream), cupy.cuda.Stream.from_external(stream):
        yield


class Soak:
    """Runs steps; counts mismatches on the device, one counter for each stream."""

    def __init__(self, machine: Cpu | Gpu, pool: list[Case], seed: int = 0) -> None:
        self.machine, self.pool = machine, pool
        self.rng = random.Random(seed)  # noqa: S311 - no secrets
        self.seen: Counter[tuple[str, str]] = Counter()
        """Steps by framework and op."""
        self.host_us: list[float] = []
        """Time of the processor that each call took."""
        self._wrong = [torch.zeros((), dtype=torch.int64, device=machine.device)
                       for _ in machine.streams]  # fmt: skip
        self._graphs: list[tuple[Step, Callable[[], Results]]] = []
        self._kept: list[torch.Tensor] = []
        self._arguments = cache(self._placed)
        for framework in machine.frameworks:
            for case in range(len(pool)):
                self._arguments(framework, case)
        machine.synchronize()

    def run(self, steps: int, captures: bool = True) -> None:
        """So many steps more, with new graphs or those that there are."""
        for i in range(steps):
            if captures and i % EPOCH == 0:
                self._capture()
            self._churn()
            step = self._next()
            with self.machine.on(self.machine.streams[step.stream]):
                self._step(step)
        self.machine.synchronize()

    def mismatches(self) -> int:
        """Steps whose bytes were wrong."""
        self.machine.synchronize()
        return sum(int(wrong) for wrong in self._wrong)

    def drop(self) -> None:
        """Graphs and allocations; what cases were placed stays."""
        self.machine.synchronize()
        self._graphs.clear()
        self._kept.clear()

    def _next(self) -> Step:
        if self.rng.random() < 0.1:
            number = self.rng.randrange(GRAPHS)
            return Step(_REPLAYED, number, self._graphs[number][0].stream, False)
        return self._drawn(self.rng.choice(list(self.machine.frameworks)))

    def _drawn(self, framework: str) -> Step:
        case, stream = (self.rng.randrange(len(a)) for a in (self.pool, self.machine.streams))
        is_given = framework in ("torch", "dlpack") and self.rng.random() < 0.5
        return Step(framework, case, stream, is_given)

    def _step(self, step: Step) -> None:
        start = time.thread_time()  # what other processes do does not count
        case, results = self._results(step)
        self.host_us.append((time.thread_time() - start) * 1e6)
        self.seen[step.framework, case.op] += 1
        self._wrong[step.stream] += differs(case, results)

    def _results(self, step: Step) -> tuple[Case, Results]:
        if step.framework == _REPLAYED:
            captured, replay = self._graphs[step.case]
            return self.pool[captured.case], replay()
        return self.pool[step.case], self._called(step)

    def _called(self, step: Step) -> Results:
        case, given = self.pool[step.case], self._arguments(step.framework, step.case)
        if not step.is_given:
            return call(case.op, given)
        outputs = case.outputs()
        wrap = Lender if step.framework == "dlpack" else lambda t: t
        results = call(case.op, given | {name: wrap(t) for name, t in outputs.items()})
        return tuple(outputs.values()) if outputs else results

    def _placed(self, framework: str, case: int) -> Arguments:
        return self.pool[case].placed(self.machine.frameworks[framework])

    def _capture(self) -> None:
        """New graphs of torch's in the place of the old ones, whose replays have ended."""
        self.machine.synchronize()
        self._graphs.clear()
        for _ in range(GRAPHS):
            step = self._drawn("torch")
            with self.machine.on(self.machine.streams[step.stream]):
                self._called(step)  # the same call once before, on the stream of its replays
            self._graphs.append((step, self.machine.captured(lambda s=step: self._called(s))))

    def _churn(self) -> None:
        """Now and then an allocation full of 0xFF, and one of the older ones dropped."""
        if self.rng.random() < 0.3:
            size = 1 << self.rng.randrange(9, 22)
            full = torch.full((size,), 0xFF, dtype=torch.uint8, device=self.machine.device)
            self._kept.append(full)
        if len(self._kept) > self.rng.randrange(CHURN):
            self._kept.pop(self.rng.randrange(len(self._kept)))


def differs(case: Case, results: Results) -> torch.Tensor:
    """bool [], on the device: whether a byte is not the one that it must be."""
    found = []
    for got, want in zip(map(as_bytes, results), case.want, strict=True):
        wrong = got != want
        found.append(wrong.any() if case.kept is None else (wrong.any(1) & case.kept).any())
    return torch.stack(found).any()


def slope(values: list[float]) -> float:
    """Per step, of the line through them."""
    return float(np.polyfit(np.arange(len(values)), values, 1)[0])


def resident_bytes() -> int:
    """Of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def kinds(soak: Soak) -> Iterator[tuple[str, str]]:
    """What has to be among the steps: each op in each framework and in graphs."""
    ops = {case.op for case in soak.pool}
    for framework in (*soak.machine.frameworks, _REPLAYED):
        yield from ((framework, op) for op in ops)
