"""Kernels loaded ahead, and refused under capture, with a driver that only takes notes."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

import cumoe
from cumoe.errors import ArgumentError, KernelNotBuiltError, UnsupportedDeviceError
from cumoe.launch import device, driver, module
from cumoe.models import selected_layers
from cumoe.plan import fused_experts_fp8 as fused
from cumoe.plan.device import H200
from cumoe.plan.enumerate import all_steps, serving_steps, steps_in
from cumoe.store import store

SIZES = {"hidden": 256, "intermediate": 128, "experts": 4, "top_k": 2}


@pytest.fixture
def gpu(monkeypatch):
    """Two H200s that nothing runs on: `log` says in which order what was loaded and set."""
    gpu = SimpleNamespace(log=[], captured=False, relaxed=False)

    class Module:
        def __init__(self, spec):
            self.spec = spec
            gpu.log.append(("load", spec, gpu.relaxed))

        def get_function(self, entry):
            gpu.log.append(("function", self.spec, entry))
            return SimpleNamespace(ptr=len(gpu.log))

    @contextmanager
    def relaxed_capture():
        gpu.relaxed = True
        yield
        gpu.relaxed = False

    runtime = SimpleNamespace(getDevice=lambda: 1)
    monkeypatch.setattr(device, "device_count", lambda: 2)
    monkeypatch.setattr(device, "info", lambda ordinal: H200)
    fake = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(device, "cupy", lambda: fake)
    monkeypatch.setattr(module, "on_device", lambda ordinal: nullcontext())
    monkeypatch.setattr(module, "_functions", {})
    monkeypatch.setattr(module, "_modules", {})
    monkeypatch.setattr(module, "_load_module", Module)
    monkeypatch.setattr(driver, "relaxed_capture", relaxed_capture)
    monkeypatch.setattr(driver, "is_capturing", lambda stream: gpu.captured)
    monkeypatch.setattr(
        driver, "set_shared_memory", lambda f, size, what: gpu.log.append(("smem", what, size))
    )
    monkeypatch.setattr(store, "get", lambda spec: spec)
    return gpu


def layer_plan(num_tokens: int) -> fused.Plan:
    problem = fused.Problem(
        num_tokens, 256, 128, 4, 4, 2, "int32", "fp32", False, "fp32", 0, False, False, True, True
    )
    return fused.plan(problem, H200)


def functions_of(plan: fused.Plan, ordinal: int) -> list[int]:
    """What a call on a stream looks up before its first launch."""
    return [module.function(step, ordinal, 5) for step in plan.steps]


def test_all_of_a_layer_is_loaded_once(gpu):
    (layer,) = selected_layers(SIZES)
    steps = serving_steps(H200, layer)
    assert cumoe.warmup(**SIZES) == len(steps)
    loads = [spec for what, spec, _ in gpu.log if what == "load"]
    assert sorted(loads, key=str) == sorted({s.kernel for s in steps}, key=str)
    assert all(relaxed for what, _, relaxed in gpu.log if what == "load")
    assert {(k, e) for w, k, e in gpu.log if w == "function"} == {
        (s.kernel, s.entry) for s in steps
    }
    wanted = {(s.kernel.text, s.launch.smem_bytes) for s in steps if s.launch.smem_bytes}
    assert {(text, size) for what, text, size in gpu.log if what == "smem"} == wanted
    assert {ordinal for _, _, ordinal in module._functions} == {1}
    assert cumoe.warmup(**SIZES) == 0


def test_every_call_of_a_warm_layer_can_be_captured(gpu):
    cumoe.warmup(**SIZES, device=0)
    gpu.captured = True
    for num_tokens in (0, 1, 7, 64, 65, 1000, 20_000):
        assert all(functions_of(layer_plan(num_tokens), 0))


def test_single_steps_and_everything_can_be_named(gpu):
    steps = tuple(steps_in(layer_plan(8)))
    assert cumoe.warmup(steps) == len(set(steps))
    (layer,) = selected_layers(SIZES)
    cumoe.warmup(**SIZES, everything=True)
    assert len(module._functions) == len(all_steps(H200, layer))


def test_a_cold_kernel_is_refused_under_capture_before_anything_is_recorded(gpu):
    plan = layer_plan(8)
    *first, last = plan.steps
    module.load(first, 0)
    loaded = len(gpu.log)
    gpu.captured = True
    with pytest.raises(KernelNotBuiltError) as error:
        functions_of(plan, 0)
    text = last.kernel.text
    assert str(error.value).startswith(f"{text}: not loaded on cuda:0, and the stream is being cap")
    assert "cumoe.warmup" in str(error.value)
    assert f"    cumoe prebuild --kernel {text}" in str(error.value)
    with pytest.raises(KernelNotBuiltError):
        module.function(last, 0, 5)
    assert len(gpu.log) == loaded
    gpu.captured = False
    assert all(functions_of(plan, 0))


def test_another_device_is_cold(gpu):
    cumoe.warmup(**SIZES, device=0)
    gpu.captured = True
    with pytest.raises(KernelNotBuiltError, match="not loaded on cuda:1"):
        functions_of(layer_plan(8), 1)


def test_without_a_gpu_it_names_prebuild(monkeypatch):
    monkeypatch.setattr(device, "device_count", lambda: 0)
    with pytest.raises(
        UnsupportedDeviceError, match=r"found none; .* cumoe\.prebuild on a machine"
    ):
        cumoe.warmup(model="glm-5.3", tp=8)


@pytest.mark.parametrize("ordinal", [2, -1])
def test_a_device_that_is_not_there(gpu, ordinal):
    with pytest.raises(UnsupportedDeviceError, match=f"want device from 0 to 1, got {ordinal}"):
        cumoe.warmup(**SIZES, device=ordinal)


def test_nothing_to_load_is_an_error(gpu):
    with pytest.raises(ArgumentError, match="warmup: want a model, a config, sizes or steps"):
        cumoe.warmup()
