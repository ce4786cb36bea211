"""A GPU for calls on CPU tensors: nothing is compiled, and its driver takes notes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cumoe.arrays import exchange
from cumoe.arrays.view import Device
from cumoe.launch import device, driver, memory, module
from cumoe.ops import _ready
from cumoe.ops import silu_and_mul_quant_fp8 as silu
from cumoe.plan.device import H200
from cumoe.store import store
from tests.helpers.noting_driver import Gpu, forget, made


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    runtime = SimpleNamespace(
        getDevice=lambda: gpu.current, setDevice=lambda n: setattr(gpu, "current", n)
    )
    streams = {"cupy": lambda ordinal: gpu.cupy_stream}

    def ways(framework: str) -> memory.Ways:
        stream = streams.get(framework, lambda ordinal: gpu.stream)
        return memory.Ways(lambda: gpu.current, stream, torch.Tensor.data_ptr)

    monkeypatch.setattr(exchange, "CPU", Device("cuda", 0))
    monkeypatch.setattr(
        device, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    )
    monkeypatch.setattr(device, "info", lambda ordinal: H200)
    monkeypatch.setattr(memory, "ways", ways)
    monkeypatch.setattr(memory, "maker", lambda framework, where, output: lambda: made(output))
    monkeypatch.setattr(store, "get", lambda kernel: kernel)
    monkeypatch.setattr(module, "_load_module", gpu.load)
    monkeypatch.setattr(module, "_functions", {})
    monkeypatch.setattr(module, "_modules", {})
    monkeypatch.setattr(driver, "library", lambda: gpu)
    monkeypatch.setattr(_ready, "_of_graphs", [])
    forget()
    yield gpu
    forget()


@pytest.fixture
def unfused(monkeypatch):
    monkeypatch.setattr(silu, "settings", lambda: SimpleNamespace(fused_act_quant=False))
    silu._checked.cache_clear()
    yield
    silu._checked.cache_clear()
