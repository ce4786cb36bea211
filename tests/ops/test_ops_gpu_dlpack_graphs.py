"""Graphs of lent arrays and CuPy's on a GPU: whose memory is whose while they live."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

import cumoe
from cumoe import ArgumentError
from cumoe.launch import driver, lending
from cumoe.ops import _ready
from cumoe.plan.moe_align_block_size import MAX_SLOTS_AT_ONCE
from tests.helpers.backends import CupyBackend
from tests.helpers.calls import RIGHT_ARGUMENTS, placed
from tests.helpers.compare import assert_bitwise_equal
from tests.helpers.lenders import Wrapped
from tests.helpers.workloads import assert_same_bytes, bytes_of

pytestmark = pytest.mark.gpu


class Memory:
    """Tells when it goes back."""

    def __init__(self, returned: list[str]) -> None:
        self.returned = returned

    def __del__(self) -> None:
        self.returned.append("it")


def visit(returned: list[str]) -> lending.Visit:
    """One on CuPy's current stream."""
    made = lending.begin(0)
    made.lent.append(Memory(returned))
    return made


def on_cupy(op: str, **others: Any) -> Any:
    """A call on CuPy arrays of random values, which has run once."""
    rng = np.random.default_rng(5)
    arguments = RIGHT_ARGUMENTS[op]() | others
    for name, a in arguments.items():
        if isinstance(a, np.ndarray) and a.dtype == np.int32:
            arguments[name] = rng.integers(-1, 8, a.shape, np.int32)
        elif isinstance(a, np.ndarray):
            arguments[name] = np.abs(rng.standard_normal(a.shape, np.float32)).astype(a.dtype)
    arguments = placed(CupyBackend(), arguments)

    def call() -> list[Any]:
        results = getattr(cumoe, op)(**arguments)
        return list(results) if isinstance(results, tuple) else [results]

    call()
    torch.cuda.synchronize()
    return call


def compare(got: list[Any], want: list[Any]) -> None:
    for a, b in zip(got, want, strict=True):
        assert_bitwise_equal(CupyBackend().raw(a), CupyBackend().raw(b))


WITH_SCRATCH = {
    "moe_align_block_size": {"topk_ids": np.zeros((MAX_SLOTS_AT_ONCE, 2), np.int32)},
    "fused_experts_fp8": {},
}


@pytest.mark.parametrize("op", WITH_SCRATCH)
def test_who_allocates_after_a_capture_does_not_get_the_scratch_of_the_graph(op):
    import cupy

    call = on_cupy(op, **WITH_SCRATCH[op])
    want = call()
    before, stream = len(_ready._of_graphs), cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        results = call()
        graph = stream.end_capture()
        sizes = [a.nbytes for a in _ready._of_graphs[before:]]
        assert len(sizes) == 1
        others = [cupy.empty(sizes[0], "uint8") for _ in range(8)]
        for a in others:
            a.data.memset_async(0xA5, a.nbytes, stream)
        graph.launch(stream)
    stream.synchronize()
    compare(results, want)
    for a in others:
        assert (cupy.asnumpy(a) == 0xA5).all()


@pytest.mark.parametrize("op", [op for op in RIGHT_ARGUMENTS if op != "pad_experts"])
def test_calls_in_a_capture_of_torchs_may_want_new_memory(op):
    """That is in CUDA's global mode, where a cudaMalloc ends the capture."""
    import cupy

    call = on_cupy(op)
    want = call()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    cupy.get_default_memory_pool().free_all_blocks()
    with torch.cuda.graph(graph, stream=stream), cupy.cuda.Stream.from_external(stream):
        results = [call() for _ in range(4)]
    graph.replay()
    torch.cuda.synchronize()
    for got in results:
        compare(got, want)


def test_loans_end_while_a_stream_is_captured_by_this_thread_or_another():
    import cupy

    x = torch.randn(8, 512, device="cuda")
    outputs = [torch.zeros(8, 512, dtype=torch.uint8, device="cuda"), torch.zeros(8, 4).cuda()]
    lent = [Wrapped(a) for a in (x, *outputs)]
    call = lambda: cumoe.per_token_group_quant_fp8(lent[0], out=lent[1], out_scale=lent[2])  # noqa: E731
    call()
    for a in outputs:
        a.zero_()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    ours = cupy.cuda.Stream(non_blocking=True)
    returned: list[str] = []
    with torch.cuda.graph(graph, stream=stream), cupy.cuda.Stream.from_external(stream):
        for sweep in (lending.sweep, threaded_sweep):
            with ours:
                visit(returned)  # ends at once, behind nothing
            wait_for(ours)
            sweep()
        call()
    assert returned == ["it", "it"]
    graph.replay()
    assert_same_bytes(bytes_of(tuple(outputs)), bytes_of(cumoe.per_token_group_quant_fp8(x)))


def threaded_sweep() -> None:
    thread = threading.Thread(target=lending.sweep)
    thread.start()
    thread.join()


def wait_for(stream: Any) -> None:
    """Waits where a synchronization would end the capture."""
    with driver.relaxed_capture():
        while not stream.done:
            pass


@pytest.mark.parametrize("which", ["its own stream", "a stream that the legacy one waits for"])
def test_a_visit_that_a_capture_overtakes(which):
    """It neither ends the capture nor gives its memory back before that is over."""
    import cupy

    call, returned = on_cupy("per_token_group_quant_fp8"), []
    want = call()
    stream = cupy.cuda.Stream(non_blocking=which == "its own stream")
    with stream if which == "its own stream" else cupy.cuda.Stream.null:
        kept = visit(returned)
    torch.cuda.synchronize()
    with stream:
        stream.begin_capture()
        del kept
        lending.sweep()
        results = call()
        graph = stream.end_capture()
    assert returned == []
    graph.launch(stream)
    lending.sweep()  # now it gets its event
    torch.cuda.synchronize()
    lending.sweep()
    assert returned == ["it"]
    compare(results, want)


def test_what_is_lent_beside_torchs_arrays_is_lent_on_their_stream():
    import cupy

    x = torch.randn(8, 512, device="cuda")
    out = torch.zeros(8, 512, dtype=torch.uint8, device="cuda")
    want = bytes_of(cumoe.per_token_group_quant_fp8(x))
    cumoe.per_token_group_quant_fp8(x, out=Wrapped(out))  # both on the legacy stream
    out.zero_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        with pytest.raises(ArgumentError, match=r"^out: want .* torch's .* got CuPy's"):
            cumoe.per_token_group_quant_fp8(x, out=Wrapped(out))
        with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
            _, scale = cumoe.per_token_group_quant_fp8(x, out=Wrapped(out))
    torch.cuda.synchronize()
    assert_same_bytes(bytes_of((out, scale)), want)
