"""How a call is timed: in a CUDA graph of 16 calls on rotated inputs, so that weights stay cold.

A sample is the time of enough replays to last a millisecond, divided by the calls in them; the
figures are the median and the 20th and 80th percentile of 15 samples, after 20 ms of replays which
bring the clocks up.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from cumoe.plan.spec import KernelSpec

CALLS = 16
SAMPLE_US = 1000.0
WARM_UP_US = 20_000.0


class Timing(NamedTuple):
    """Microseconds per call on the GPU, and of host time per eager call."""

    us: float
    p20: float
    p80: float
    host_us: float


class Effort(NamedTuple):
    """How often a call is timed."""

    samples: int = 15
    host_rounds: int = 7


FULL = Effort()
QUICK = Effort(5, 1)
"""For tables of so many rows that a single one does not matter."""


def measure(call: Callable[[int], Any], effort: Effort = FULL) -> Timing:
    """Times ``call(i)``, which takes the i-th of CALLS inputs. Run it eagerly once before."""
    import torch

    for i in range(CALLS):
        call(i)
    torch.cuda.synchronize()
    host = host_us(call, effort)
    graph = capture(call)
    replays = _warmed_up(graph)
    samples = sorted(_sample_us(graph, replays) / CALLS for _ in range(effort.samples))
    return Timing(
        round(statistics.median(samples), 3),
        round(samples[effort.samples // 5], 3),
        round(samples[-1 - effort.samples // 5], 3),
        round(host, 2),
    )


def measure_beside(
    calls: Mapping[str, Callable[[int], Any]], effort: Effort = FULL
) -> dict[str, float]:
    """Microseconds per call on the GPU of each, their samples taken in turn."""
    graphs = {name: capture(call) for name, call in calls.items()}
    replays = {name: _warmed_up(graph) for name, graph in graphs.items()}
    samples = [
        {name: _sample_us(graph, replays[name]) / CALLS for name, graph in graphs.items()}
        for _ in range(effort.samples)
    ]
    return {name: round(statistics.median(s[name] for s in samples), 3) for name in graphs}


def _warmed_up(graph: Any) -> int:
    """Replays of a sample of this graph, after it has run for a while."""
    _sample_us(graph, 1)
    one = max(1.0, _sample_us(graph, 1))
    _sample_us(graph, round(WARM_UP_US / one) + 1)
    return max(1, round(SAMPLE_US / one))


def capture(call: Callable[[int], Any]) -> Any:
    """A CUDA graph of the CALLS calls."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(0)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    return graph


def host_us(call: Callable[[int], Any], effort: Effort = FULL) -> float:
    """Median over rounds of the host's time per eager call, the GPU idle at each round's start."""
    import torch

    rounds = []
    for _ in range(effort.host_rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(CALLS):
            call(i)
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(rounds)


def _sample_us(graph: Any, replays: int) -> float:
    """Microseconds per replay."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / replays


def compile_kernels(kernels: Iterable[KernelSpec]) -> None:
    """Into the cache, by many threads, before anything is timed."""
    from cumoe.store import store

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(store.get, set(kernels)))
