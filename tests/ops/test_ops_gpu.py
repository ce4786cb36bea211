"""What only a GPU shows: streams, graphs, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import cumoe
from cumoe import KernelNotBuiltError
from tests.helpers import cases
from tests.helpers.backends import CupyBackend
from tests.helpers.workloads import (
    NUM_EXPERTS,
    OPS,
    Workload,
    assert_same_bytes,
    bytes_of,
    churn,
    raw_bytes,
    workload,
)

pytestmark = pytest.mark.gpu

DELAY = 100_000_000
"""Cycles: 50 ms at the highest clock of an H200."""
LONG_DELAY = 400_000_000
ROUTINGS = ("uniform", "with_minus_one", "one_expert", "out_of_range", "zipf")
MAP = cases.local_map(NUM_EXPERTS, 8, 24)
EXPERTS_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "map": {"expert_map": np.where(MAP < 20, MAP, -1).astype(np.int32)},
    "clamp_ue8m0": {"swiglu_limit": 1.0, "scale_format": "ue8m0"},
    "workspace": {"workspace": np.full(1 << 20, 0xFF, np.uint8)},
    "parts": {"max_workspace_bytes": 1 << 15},
}


def capture(work: Workload) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]:
    """A graph of one call and the tensors that a replay fills."""
    work.call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work.call()
    return graph, results


def check_replays(static: Workload, others: list[Workload]) -> None:
    """A graph captured on ``static`` gives each other workload's bytes once it has its inputs."""
    graph, results = capture(static)
    seen = []
    for i, other in enumerate(others):
        want = bytes_of(other.call())
        for target, source in zip(static.inputs, other.inputs, strict=True):
            raw_bytes(target).copy_(raw_bytes(source))
        for result in results:
            raw_bytes(result).fill_(0xAA)
        churn()
        graph.replay()
        got = bytes_of(results)
        assert_same_bytes(got, want, f"replay {i}")
        seen.append(b"".join(a.tobytes() for a in got))
    assert len(set(seen)) == len(others)


@pytest.mark.parametrize("op", OPS)
def test_a_graph_replays_what_its_inputs_hold_then(op):
    others = [workload(op, seed=i + 1, routing=r) for i, r in enumerate(ROUTINGS)]
    check_replays(workload(op), others)


@pytest.mark.parametrize("name", EXPERTS_OPTIONS)
def test_a_graph_of_the_experts_with(name):
    options = EXPERTS_OPTIONS[name]
    others = [workload("experts", seed=i + 1, routing=r, **options) for i, r in enumerate(ROUTINGS)]
    check_replays(workload("experts", **options), others)


@pytest.mark.parametrize("num_tokens", [1, 200])
def test_a_graph_of_one_or_many_tokens(num_tokens):
    others = [
        workload("experts", seed=i + 1, routing=r, num_tokens=num_tokens)
        for i, r in enumerate(("uniform", "one_expert", "out_of_range"))
    ]
    check_replays(workload("experts", num_tokens=num_tokens), others)


COLD = [("quantizer", 1408, False), ("activation", 1536, False), ("experts", 1664, False),
        ("experts", 1920, True)]  # fmt: skip


@pytest.mark.parametrize(("op", "hidden", "half_warm"), COLD)
def test_a_kernel_that_is_not_loaded_is_refused_under_capture_and_harms_no_other(
    op, hidden, half_warm
):
    """No other test uses these sizes. What was captured before and after goes on.

    Half warm: the first kernels of the call are loaded, a later one is missing.
    """
    work = workload(op, hidden=hidden, num_tokens=3)
    if half_warm:
        workload("quantizer", hidden=hidden, num_tokens=3).call()
        workload("experts", num_tokens=3).call()
    warm = workload("quantizer", num_tokens=3)
    warm.call()
    counter = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter += 1
        with pytest.raises(KernelNotBuiltError, match=r"(?s)sm_\d+.*captur.*prebuild"):
            work.call()
        counter *= 3
        results = warm.call()
    for _ in range(2):
        graph.replay()
    assert counter.tolist() == [12.0] * 4
    assert_same_bytes(bytes_of(results), bytes_of(warm.call()))

    graph, results = capture(work)
    graph.replay()
    assert_same_bytes(bytes_of(results), bytes_of(work.call()))


def test_a_cold_sort_is_refused_under_capture():
    ids = torch.zeros((5, 2), dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    counter = torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        with pytest.raises(
            KernelNotBuiltError, match=r"(?s)moe_align_block_size.*captur.*prebuild"
        ):
            cumoe.moe_align_block_size(ids, 16, 1237)
        counter += 1
    graph.replay()
    assert counter.tolist() == [1.0] * 4


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_tokens", [8, 300])
def test_the_same_bytes_in_twenty_runs(op, num_tokens):
    work = workload(op, num_tokens=num_tokens)
    want = bytes_of(work.call())
    for _ in range(20):
        churn()
        assert_same_bytes(bytes_of(work.call()), want)


@pytest.mark.parametrize("op", OPS)
def test_a_late_producer_on_a_side_stream(op):
    """The inputs come only after a delay, on the stream on which the op is called."""
    work = workload(op)
    want = bytes_of(work.call())
    kept = [t.clone() for t in work.inputs]
    for t in work.inputs:
        raw_bytes(t).fill_(0xFF)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(DELAY)
        for t, value in zip(work.inputs, kept, strict=True):
            raw_bytes(t).copy_(raw_bytes(value))
        results = work.call()
    side.synchronize()
    assert_same_bytes(bytes_of(results), want)


@pytest.mark.parametrize("op", OPS)
def test_nothing_waits_for_the_default_stream(op):
    """A side stream gets its results while the default stream is still busy."""
    work = workload(op)
    want = bytes_of(work.call())
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        work.call()  # the side stream's memory is at hand
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_DELAY)
    done.record()
    with torch.cuda.stream(side):
        results = work.call()
    side.synchronize()
    assert not done.query()
    assert_same_bytes(bytes_of(results), want)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("local", [True, False])
def test_a_call_does_not_wait_for_the_gpu(op, local):
    """Not even to learn that no expert is local."""
    has_map = op in ("activation", "sort", "experts")
    options = {} if local or not has_map else {"expert_map": np.full(NUM_EXPERTS, -1, np.int32)}
    work = workload(op, **options)
    want = bytes_of(work.call())
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(LONG_DELAY)
    done.record()
    results = work.call()
    assert not done.query()
    assert_same_bytes(bytes_of(results), want)


def run_many(work: Workload, stream: torch.cuda.Stream, times: int) -> list[Any]:
    with torch.cuda.stream(stream):
        results = [work.call() for _ in range(times)]
    return results


@pytest.mark.parametrize("op", OPS)
def test_two_streams_at_once(op):
    works = [workload(op, seed=s, num_tokens=200, routing="zipf") for s in (1, 2)]
    wants = [bytes_of(w.call()) for w in works]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results: list[list[Any]] = [[], []]
    for _ in range(20):
        for i in (0, 1):
            results[i] += run_many(works[i], streams[i], 1)
    torch.cuda.synchronize()
    for i in (0, 1):
        for result in results[i]:
            assert_same_bytes(bytes_of(result), wants[i])


def test_two_threads_at_once():
    """Threads that have never called CUDA, each on a stream of its own, one op each."""
    works = [workload(op, num_tokens=200, routing="zipf") for op in OPS]
    wants = [bytes_of(w.call()) for w in works]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in works]
    with ThreadPoolExecutor(len(works)) as pool:
        results = list(pool.map(run_many, works, streams, [20] * len(works)))
    torch.cuda.synchronize()
    for want, runs in zip(wants, results, strict=True):
        for result in runs:
            assert_same_bytes(bytes_of(result), want)


def test_a_cold_kernel_is_loaded_once_by_many_threads():
    work = workload("quantizer", hidden=1792)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: work.call(), range(8)))
    torch.cuda.synchronize()
    want = bytes_of(workload("quantizer", hidden=1792).call())
    for result in results:
        assert_same_bytes(bytes_of(result), want)


def test_cupys_current_stream_is_honoured():
    import cupy

    backend = CupyBackend()
    case = cases.experts_case(np.random.default_rng(3), num_tokens=8)
    arguments = [backend.put(a) for a in (case.experts.w1, case.experts.w2, case.weights, case.ids)]
    scales = {name: backend.put(a) for name, a in case.experts.scales.items()}
    good = backend.put(case.x)
    want = backend.raw(cumoe.fused_experts_fp8(good, *arguments, **scales))
    late = backend.put(np.full_like(case.x, np.nan))
    side = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(side.ptr)):
        torch.cuda._sleep(DELAY)
    with side:
        late.data.copy_from_device_async(good.data, good.nbytes, side)
        out = cumoe.fused_experts_fp8(late, *arguments, **scales)
    side.synchronize()
    assert (backend.raw(out) == want).all()
