"""The ops on a GPU with arrays of any framework: streams, lifetimes, and JAX where it has a GPU."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

import cumoe
from cumoe.launch import lending
from tests.helpers import cases, jax_arrays
from tests.helpers.backends import CupyBackend, NumpyBackend, TorchBackend
from tests.helpers.calls import RIGHT_ARGUMENTS, placed, random_arguments
from tests.helpers.compare import assert_bitwise_equal
from tests.helpers.jax_arrays import jax
from tests.helpers.lenders import OfTorch, Old, Wrapped
from tests.helpers.workloads import OPS, assert_same_bytes, bytes_of, raw_bytes, workload

pytestmark = pytest.mark.gpu
DELAY = 100_000_000
"""Cycles: 50 ms at the highest clock of an H200."""


@pytest.fixture(scope="session")
def _jax_gpu() -> None:
    if not jax_arrays.has_gpu():
        pytest.skip("this JAX has no CUDA backend")


class Lending(NumpyBackend):
    """Puts arrays on the GPU with another backend and wraps them."""

    is_gpu = True

    def __init__(self, inner: NumpyBackend, cls: type[Wrapped]) -> None:
        self.inner, self.cls = inner, cls
        self.name = f"{cls.__name__} {inner.name}"

    def put(self, a: np.ndarray) -> Any:
        return self.cls(self.inner.put(a))

    def raw(self, a: Any) -> np.ndarray:
        if isinstance(a, Wrapped):
            return self.inner.raw(a.array)
        return (TorchBackend("cuda") if isinstance(a, torch.Tensor) else CupyBackend()).raw(a)


LENDERS = [
    Lending(TorchBackend("cuda"), Wrapped),
    Lending(TorchBackend("cuda"), Old),
    Lending(TorchBackend("cuda"), OfTorch),
    Lending(CupyBackend(), Wrapped),
]
every_lender = pytest.mark.parametrize("lender", LENDERS, ids=lambda b: b.name)


def results_of(op: str, backend: NumpyBackend, arguments: dict[str, Any]) -> tuple[Any, ...]:
    results = getattr(cumoe, op)(**placed(backend, arguments))
    return results if isinstance(results, tuple) else (results,)


@every_lender
@pytest.mark.parametrize("op", RIGHT_ARGUMENTS)
def test_the_bytes_are_those_of_torch_tensors(op, lender):
    arguments = random_arguments(op)
    cuda = TorchBackend("cuda")
    want = results_of(op, cuda, arguments)
    got = results_of(op, lender, arguments)
    kind = torch.Tensor if lender.cls is OfTorch else __import__("cupy").ndarray
    for a, b in zip(got, want, strict=True):
        assert type(a) is kind
        assert_bitwise_equal(
            np.ascontiguousarray(lender.raw(a)).view(np.uint8),
            np.ascontiguousarray(cuda.raw(b)).view(np.uint8),
        )
        if kind is torch.Tensor:
            assert (a.dtype, a.device) == (b.dtype, b.device)


@every_lender
def test_given_outputs_are_filled_and_returned(lender):
    x = cases.activations(np.random.default_rng(0), 64, 512)
    out, out_scale = cases.poisoned_codes(64, 256), np.full((64, 2), cases.POISON_SCALE)
    cuda = TorchBackend("cuda")
    want = cumoe.silu_and_mul_quant_fp8(cuda.put(x), limit=2.0)
    moved = lender.put(out), lender.put(out_scale)
    got = cumoe.silu_and_mul_quant_fp8(lender.put(x), limit=2.0, out=moved[0], out_scale=moved[1])
    assert got == moved
    assert_bitwise_equal(lender.codes(got[0]), cuda.codes(want[0]))
    assert_bitwise_equal(lender.raw(got[1]), cuda.raw(want[1]))


@pytest.mark.parametrize("scale_layout", ["column", "tma"])
def test_scale_layouts_reach_the_framework(scale_layout):
    x = torch.randn(6, 512, device="cuda")
    want = cumoe.per_token_group_quant_fp8(x, scale_layout=scale_layout)
    got = cumoe.per_token_group_quant_fp8(OfTorch(x), scale_layout=scale_layout)
    assert_same_bytes(bytes_of(got), bytes_of(want))
    assert [t.stride() for t in got] == [t.stride() for t in want]


def test_the_producer_is_told_the_stream():
    import cupy

    x = Wrapped(torch.ones(4, 256, device="cuda"))
    side = cupy.cuda.Stream(non_blocking=True)
    cumoe.per_token_group_quant_fp8(x)
    with side:
        cumoe.per_token_group_quant_fp8(x)
    assert x.streams == [1, side.ptr]
    side.synchronize()


@pytest.mark.parametrize("op", OPS)
def test_a_late_producer_on_a_side_stream(op, monkeypatch):
    """The work that fills the inputs is on torch's stream, ours on another one, CuPy's."""
    import cupy

    work = workload(op)
    want = bytes_of(work.call())
    kept = [t.clone() for t in work.inputs]
    for t in work.inputs:
        raw_bytes(t).fill_(0xFF)
    torch.cuda.synchronize()
    calls = []

    def wrapping(function):
        def call(*arrays, **options):
            wrap = lambda v: OfTorch(v) if isinstance(v, torch.Tensor) else v  # noqa: E731
            calls.append(function)
            results = function(*map(wrap, arrays), **{k: wrap(v) for k, v in options.items()})
            results = results if isinstance(results, tuple) else (results,)
            results = tuple(r.array if isinstance(r, OfTorch) else r for r in results)
            return results if len(results) > 1 else results[0]

        return call

    for name in RIGHT_ARGUMENTS:
        monkeypatch.setattr(cumoe, name, wrapping(getattr(cumoe, name)))
    producer, ours = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    with torch.cuda.stream(producer), ours:
        torch.cuda._sleep(DELAY)
        for t, value in zip(work.inputs, kept, strict=True):
            raw_bytes(t).copy_(raw_bytes(value))
        results = work.call()
    assert len(calls) == 1
    torch.cuda.synchronize()
    assert_same_bytes(bytes_of(results), want)


def test_a_consumer_on_another_stream_waits_for_the_result():
    import cupy

    x = torch.randn(64, 512, device="cuda")
    want = bytes_of(cumoe.per_token_group_quant_fp8(x))
    torch.cuda.synchronize()
    ours, consumer = cupy.cuda.Stream(non_blocking=True), torch.cuda.Stream()
    with torch.cuda.stream(consumer), ours:
        with torch.cuda.stream(torch.cuda.ExternalStream(ours.ptr)):
            torch.cuda._sleep(DELAY)
        results = cumoe.per_token_group_quant_fp8(OfTorch(x))
        copies = tuple(raw_bytes(t).clone() for t in results)
    consumer.synchronize()
    assert_same_bytes([c.cpu().numpy() for c in copies], want)


class Copies(Wrapped):
    """Lends a copy, to which only the capsule refers."""

    def __dlpack__(self, **options: Any) -> Any:
        copy = self.array.clone()
        self.at = copy.data_ptr()
        return copy.__dlpack__(**options)

    def is_lent(self) -> bool:
        """Whether torch's allocator would not hand the memory of the copy out again."""
        return torch.empty_like(self.array).data_ptr() != self.at


def test_lent_memory_goes_back_after_the_kernel_and_not_before():
    import cupy

    x = Copies(torch.randn(2048, 4096, device="cuda"))
    want, _ = cumoe.per_token_group_quant_fp8(x.array)  # compiles: that would outlast the delay
    ours = cupy.cuda.Stream(non_blocking=True)
    torch.cuda.synchronize()
    gc.collect()
    with ours:
        with torch.cuda.stream(torch.cuda.ExternalStream(ours.ptr)):
            torch.cuda._sleep(20 * DELAY)
        q, _ = cumoe.per_token_group_quant_fp8(x)
    lending.sweep()
    is_lent, is_early = x.is_lent(), not ours.done
    assert is_early, "the delay is over: it says nothing"
    assert is_lent
    raw_bytes(torch.empty_like(x.array)).fill_(0xFF)  # what a reuse that came too early would do
    ours.synchronize()
    lending.sweep()
    assert not x.is_lent()
    assert (CupyBackend().codes(q) == TorchBackend("cuda").codes(want)).all()


def test_the_arrays_of_a_call_go_back_together():
    """Also where the next call on them is refused in its middle."""
    x, out = (Wrapped(torch.zeros(8, 256, device="cuda")) for _ in range(2))
    with pytest.raises(cumoe.DTypeError, match="out"):
        cumoe.per_token_group_quant_fp8(x, out=out)
    gc.collect()
    torch.cuda.synchronize()
    lending.sweep()
    assert not any(lending._ended.values())


def test_a_call_can_be_captured():
    import cupy

    x = torch.randn(8, 512, device="cuda")
    out = torch.zeros(8, 512, dtype=torch.uint8, device="cuda")
    out_scale = torch.zeros(8, 4, device="cuda")
    lent = Wrapped(x), Wrapped(out), Wrapped(out_scale)
    call = lambda: cumoe.per_token_group_quant_fp8(lent[0], out=lent[1], out_scale=lent[2])  # noqa: E731
    call()
    torch.cuda.synchronize()
    out.zero_()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream), cupy.cuda.Stream.from_external(stream):
        call()
    assert not out.any()
    x.mul_(3)
    graph.replay()
    want = cumoe.per_token_group_quant_fp8(x)
    assert_same_bytes(bytes_of((out, out_scale)), bytes_of(want))


@pytest.mark.usefixtures("_jax_gpu")
@pytest.mark.parametrize("op", RIGHT_ARGUMENTS)
def test_jax_on_the_gpu(op):
    arguments = random_arguments(op)
    cuda = TorchBackend("cuda")
    want = results_of(op, cuda, arguments)
    moved = {
        name: jax_arrays.put(v, "cuda") if isinstance(v, np.ndarray) else v
        for name, v in arguments.items()
    }
    got = getattr(cumoe, op)(**moved)
    for a, b in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
        assert isinstance(a, jax.Array)
        assert (a.dtype.name, a.device.platform) == (str(b.dtype).removeprefix("torch."), "gpu")
        assert_bitwise_equal(
            jax_arrays.host_bytes(a), np.ascontiguousarray(cuda.raw(b)).view(np.uint8)
        )


@pytest.mark.usefixtures("_jax_gpu")
def test_jax_streams_and_memory_are_kept_in_order():
    """Chained with JAX's own work, eagerly and without waiting, each input dropped at once."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((512, 2048), np.float32)
    double = jax.jit(lambda a: a * 2)
    want, _ = cumoe.per_token_group_quant_fp8(TorchBackend("cuda").put(x))
    codes = TorchBackend("cuda").codes(want)
    start = jax_arrays.put(x, "cuda")
    for i in range(50):
        a = double(start)
        q, scale = cumoe.per_token_group_quant_fp8(a)
        del a
        noise = [double(start + i + n) for n in range(4)]
        assert (jax_arrays.host_bytes(q) == codes).all(), i
        del noise, q, scale
