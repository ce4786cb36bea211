"""Calls like one before, on arrays that are lent; what they make for themselves in a capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cumoe
from cumoe.arrays import dlpack
from cumoe.errors import ArgumentError
from cumoe.launch import driver, memory
from cumoe.ops import _ready
from cumoe.ops import per_token_group_quant_fp8 as quant
from cumoe.plan.moe_align_block_size import MAX_SLOTS_AT_ONCE
from tests.helpers.lenders import FakeGpu, Wrapped
from tests.helpers.noting_driver import experts, made, quantized, tensor


class Lent(Wrapped):
    """A tensor of the host that passes for memory on a GPU."""

    def __dlpack__(self, *, stream, max_version):
        assert stream == 77
        return self.array.__dlpack__(max_version=max_version)


@pytest.fixture
def lending_gpu(gpu, monkeypatch):
    monkeypatch.setattr(dlpack, "gpu", FakeGpu(stream=77))
    monkeypatch.setattr(dlpack, "_CUDA", (1,))
    monkeypatch.setattr(dlpack, "_HOST", ())
    dlpack._facts.cache_clear()
    yield gpu
    dlpack._facts.cache_clear()


def test_lent_arrays_run_at_once_with_their_own_addresses(lending_gpu, monkeypatch):
    def call(rows: int = 4) -> tuple[Any, ...]:
        x, (out, out_scale) = Lent(tensor(rows, 256)), map(Lent, quantized(rows, 256).values())
        results = cumoe.per_token_group_quant_fp8(x, out=out, out_scale=out_scale)
        assert results == (out, out_scale)
        return x, out, out_scale

    call()
    monkeypatch.setattr(quant._op, "_check", None)
    x, out, out_scale = (a.array.data_ptr() for a in call())
    assert [len(visit.lent) for visit in dlpack.gpu.made] == [3, 3]
    assert lending_gpu.launches[-1][2] == [x, 256, 0, out, out_scale, 2, 1, 4, 4, 0]
    with pytest.raises(TypeError):  # looked at anew
        call(rows=5)


def lent_calls() -> dict[str, tuple[Any, int]]:
    """Calls whose results are CuPy's, and how many arrays each makes that its caller never sees."""
    layer = {name: Lent(a) for name, a in experts(tensor(4, 256)).items()}
    ids, out = layer["topk_ids"], Lent(tensor(4, 256))
    workspace = Lent(tensor(1 << 20, dtype=torch.uint8))
    many = Lent(tensor(MAX_SLOTS_AT_ONCE, 2, dtype=torch.int32))
    return {
        "experts": (lambda: cumoe.fused_experts_fp8(**layer, out=out), 1),
        "sort": (lambda: cumoe.moe_align_block_size(ids, 16, 8), 0),
        "sort of many": (lambda: cumoe.moe_align_block_size(many, 16, 8), 1),
        "two halves": (lambda: cumoe.silu_and_mul_quant_fp8(Lent(tensor(4, 512))), 1),
        "quantizer": (lambda: cumoe.per_token_group_quant_fp8(layer["x"]), 0),
        "workspace": (lambda: cumoe.fused_experts_fp8(**layer, workspace=workspace), 0),
    }


def addresses_of(launches: list[tuple[str, int, list[int]]]) -> set[int]:
    return {word for _, _, words in launches for word in words}


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize(
    "name", ["experts", "sort", "sort of many", "two halves", "quantizer", "workspace"]
)
def test_what_a_captured_call_makes_for_itself_is_kept(lending_gpu, name):
    """Each replay writes there, and CuPy's pool would give it to the next who asks."""
    (call, count), gpu = lent_calls()[name], lending_gpu
    gpu.stream = 77
    call()
    assert _ready._of_graphs == []
    gpu.capturing = {77}
    for i in range(1, 3):
        gpu.launches.clear()
        results = call()
        results = results if isinstance(results, tuple) else (results,)
        assert len(_ready._of_graphs) == i * count
        kept = _ready._of_graphs[-count:] if count else []
        assert {a.data_ptr() for a in kept} <= addresses_of(gpu.launches)
        assert not any(a is r for a in kept for r in results)
    gpu.capturing = set()
    call()
    assert len(_ready._of_graphs) == 2 * count


def test_memory_is_made_in_relaxed_mode_while_capturing_and_only_then(lending_gpu, monkeypatch):
    """In torch's mode the pool's cudaMalloc would end the capture."""
    gpu, modes = lending_gpu, []
    monkeypatch.setattr(
        memory, "maker", lambda *a: lambda: modes.append(gpu.modes[-1]) or made(a[-1])
    )
    x = Lent(tensor(4, 256))
    gpu.stream = 77
    cumoe.per_token_group_quant_fp8(x)
    gpu.capturing = {77}
    cumoe.per_token_group_quant_fp8(x)
    assert modes == [0, 0, driver.CAPTURE_MODE_RELAXED, driver.CAPTURE_MODE_RELAXED]
    assert gpu.modes[-1] == 0


def test_torch_keeps_the_memory_of_a_graph_itself(gpu):
    layer = experts(tensor(4, 256))
    gpu.stream, _ = 77, cumoe.fused_experts_fp8(**layer)
    gpu.capturing = {77}
    modes = len(gpu.modes)
    cumoe.fused_experts_fp8(**layer)
    assert (_ready._of_graphs, len(gpu.modes)) == ([], modes)


def test_what_is_lent_beside_torchs_arrays_is_lent_on_their_stream(lending_gpu):
    """The kernels run on torch's stream, the export and the end of the loan are of CuPy's."""
    gpu, x, outputs = lending_gpu, tensor(4, 256), quantized(4, 256)
    outputs["out_scale"] = Lent(outputs["out_scale"])
    for torchs, cupys in ((0, 0), (77, 77), (0, 1), (1, 0)):
        gpu.stream, gpu.cupy_stream = torchs, cupys
        cumoe.per_token_group_quant_fp8(x, **outputs)
    gpu.launches.clear()
    for gpu.stream, gpu.cupy_stream in ((0, 77), (77, 0), (77, 78)):
        wanted = rf"^out_scale: .* torch's .*{gpu.stream:#x}, .* got CuPy's .*{gpu.cupy_stream:#x};"
        with pytest.raises(ArgumentError, match=wanted + r" call inside of `with cupy\.cuda\.St"):
            cumoe.per_token_group_quant_fp8(x, **outputs)
    assert gpu.launches == []
    cumoe.per_token_group_quant_fp8(Lent(x), out=outputs["out"])  # CuPy's stream is that of all
