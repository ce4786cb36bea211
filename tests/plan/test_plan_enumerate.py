"""The kernels that calls can reach are a finite set, known beforehand."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cumoe
from cumoe.arrays import exchange
from cumoe.arrays.view import Device
from cumoe.errors import ArgumentError
from cumoe.launch import device as launch_device
from cumoe.launch import driver, memory, module
from cumoe.plan import fused_experts_fp8 as fused
from cumoe.plan import moe_align_block_size as align
from cumoe.plan.device import ARCHITECTURES, H200
from cumoe.plan.enumerate import (
    Layer,
    all_steps,
    device_of,
    layer_specs,
    serving_steps,
    specs_of,
    steps_in,
)
from cumoe.plan.spec import KernelSpec
from cumoe.store import store
from tests.helpers.cases import BF16, E4M3

_DTYPES = {"e4m3": E4M3, "bf16": BF16, "fp32": np.float32}


def keys(steps) -> set[tuple[object, ...]]:
    """What must be compiled, loaded and set up for a launch, whatever its grid."""
    return {(s.kernel, s.entry, s.launch.smem_bytes) for s in steps}


@lru_cache(None)
def reachable(layer: Layer) -> set[tuple[object, ...]]:
    """What any call of the layer may need; its activation does not matter."""
    return keys(all_steps(H200, layer._replace(limit=None, scaled=False)))


class FakeDriver:
    """A driver of a GPU that runs nothing; `launches` is what it was asked to run."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self.loaded: list[tuple[KernelSpec, str]] = []
        self.launches: list[tuple[object, ...]] = []
        self.thread = thread

    def launched_by(self, op, *arguments, **options) -> set[tuple[object, ...]]:
        """What a call of an op launches."""
        self.launches.clear()
        self.thread.submit(op, *arguments, **options).result()
        return set(self.launches)

    def load(self, kernel: KernelSpec) -> SimpleNamespace:
        """A module, whose functions are numbers."""

        def get_function(entry: str) -> SimpleNamespace:
            self.loaded.append((kernel, entry))
            return SimpleNamespace(ptr=len(self.loaded))

        return SimpleNamespace(get_function=get_function)

    def cuLaunchKernelEx(self, config, function, parameters, extra) -> int:
        kernel, entry = self.loaded[function.value - 1]
        self.launches.append((kernel, entry, config._obj.smem_bytes))
        return 0

    def __getattr__(self, name):
        return lambda *arguments: 0  # success: no stream is being captured


@pytest.fixture(scope="module")
def gpu():
    """Calls on NumPy arrays, which pass for arrays on an H200.

    They are made in a thread of their own, with which all that it kept of this driver goes.
    """
    thread = ThreadPoolExecutor(1)
    gpu = FakeDriver(thread)

    def maker(framework, device, output):
        (rows, *columns), dtype = output.shape, np.dtype(_DTYPES.get(output.dtype, output.dtype))
        if not output.column_rows:
            return lambda: aligned_empty(output.shape, dtype)
        return lambda: aligned_empty((*columns, output.column_rows), dtype)[:, :rows].T

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "CPU", Device("cuda", 0))
        patch.setattr(launch_device, "on_device", lambda ordinal: nullcontext())
        patch.setattr(launch_device, "info", lambda ordinal: H200)
        patch.setattr(memory, "maker", maker)
        ways = memory.Ways(lambda: 0, lambda ordinal: 0, lambda array: array.ctypes.data)
        patch.setattr(memory, "ways", lambda framework: ways)
        patch.setattr(store, "get", lambda kernel: kernel)
        patch.setattr(module, "_load_module", gpu.load)
        patch.setattr(module, "_functions", {})
        patch.setattr(module, "_modules", {})
        patch.setattr(driver, "library", lambda: gpu)
        yield gpu
        thread.shutdown()


def aligned_empty(shape, dtype, offset: int = 0) -> np.ndarray:
    """An array at `offset` elements past a multiple of 256 bytes, as CUDA allocates."""
    count = int(np.prod(shape)) if shape else 1
    raw = np.empty(count * dtype.itemsize + 512 + offset * dtype.itemsize, np.uint8)
    start = -raw.ctypes.data % 256 + offset * dtype.itemsize
    return raw[start : start + count * dtype.itemsize].view(dtype).reshape(shape)


@st.composite
def experts_calls(d: st.DrawFn) -> tuple[Layer, dict]:
    """A legal call of fused_experts_fp8, and its layer."""
    local, topk = d(st.sampled_from([(1, 1), (4, 1), (4, 3), (12, 6)]))
    mapped = d(st.booleans())
    experts = local + d(st.sampled_from([0, 7])) if mapped else local
    K, N = d(st.sampled_from([(128, 384), (384, 128)]))
    M = d(st.integers(1, 40) | st.integers(1, 40 * experts))
    limit = d(st.sampled_from([None, 7.0, 0.1]))
    alpha = d(st.sampled_from([1.0, 1.7]))
    ids = np.dtype(d(st.sampled_from(["int32", "int64"])))
    weight = np.dtype(d(st.sampled_from([np.float32, np.float16, BF16])))
    call = {
        "x": aligned_empty((M, K), BF16, offset=d(st.integers(0, 1))),
        "w1": aligned_empty((local, 2 * N, K), E4M3),
        "w2": aligned_empty((local, K, N), E4M3),
        "topk_weights": aligned_empty((M, topk), weight),
        "topk_ids": aligned_empty((M, topk), ids),
        "w1_scale": aligned_empty((local, 2 * N // 128, K // 128), np.dtype(np.float32)),
        "w2_scale": aligned_empty((local, K // 128, N // 128), np.dtype(np.float32)),
        "scale_format": d(st.sampled_from(["fp32", "ue8m0"])),
        "swiglu_limit": limit,
        "swiglu_alpha": alpha,
        "expert_map": aligned_empty((experts,), np.dtype(np.int32)) if mapped else None,
        "apply_router_weight_on_input": topk == 1 and d(st.booleans()),
        "max_workspace_bytes": d(st.sampled_from([None, 1 << 20])),
    }
    if d(st.booleans()):
        call["out"] = aligned_empty((M, K), BF16, offset=d(st.integers(0, 1)))
    return Layer(K, N, experts, local, topk, limit=limit, scaled=alpha != 1), call


@given(experts_calls())
@settings(max_examples=30, deadline=None)
def test_no_call_of_the_layer_leaves_the_enumerated_kernels(gpu, layer_and_call):
    layer, call = layer_and_call
    launched = gpu.launched_by(cumoe.fused_experts_fp8, **call)
    assert launched
    assert launched <= reachable(layer)


@given(experts_calls())
@settings(max_examples=30, deadline=None)
def test_a_serving_engines_calls_stay_in_the_default_set(gpu, layer_and_call):
    layer, call = layer_and_call
    M, K = call["x"].shape
    call |= {
        "x": aligned_empty((M, K), BF16),
        "topk_weights": aligned_empty(call["topk_weights"].shape, np.dtype(np.float32)),
        "topk_ids": aligned_empty(call["topk_ids"].shape, np.dtype(np.int32)),
        "apply_router_weight_on_input": False,
        "out": None,
    }
    layer = layer._replace(scale_formats=(call["scale_format"],))
    launched = gpu.launched_by(cumoe.fused_experts_fp8, **call)
    assert launched <= keys(serving_steps(H200, layer))
    assert keys(serving_steps(H200, layer)) < reachable(layer)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_no_call_of_a_single_op_leaves_the_enumerated_kernels(gpu, data):
    d = data.draw
    layer = Layer(K=256, N=384, num_experts=12, num_local_experts=6, topk=2)
    rows, offset = d(st.integers(1, 3000)), d(st.integers(0, 1))
    tokens = d(st.integers(1, 40_000))
    scale_format = d(st.sampled_from(["fp32", "ue8m0"]))
    layouts = ["row", "column", "tma"] + ["packed"] * (scale_format == "ue8m0")
    named = {"scale_format": scale_format, "scale_layout": d(st.sampled_from(layouts))}
    x_type = np.dtype(d(st.sampled_from([np.float32, np.float16, BF16])))
    columns = d(st.sampled_from([layer.K, layer.N]))
    ids_type = np.dtype(d(st.sampled_from(["int32", "int64"])))
    map_ = d(st.sampled_from([None, aligned_empty((12,), np.dtype(np.int32))]))
    ids = d(st.sampled_from([None, aligned_empty((rows, 1), ids_type)]))
    x = aligned_empty((rows, columns), x_type, offset)
    quantized = gpu.launched_by(cumoe.per_token_group_quant_fp8, x, **named)
    activated = gpu.launched_by(
        cumoe.silu_and_mul_quant_fp8,
        aligned_empty((rows, 2 * layer.N), BF16, offset),
        limit=d(st.sampled_from([None, 7.0, 0.1])), alpha=d(st.sampled_from([1.0, 1.7])),
        topk_ids=ids, expert_map=None if ids is None else map_, **named,
    )  # fmt: skip
    block = d(st.sampled_from([1, 16, 64, 5000]))
    pairs = aligned_empty((tokens, 2), ids_type)
    sorted_ = gpu.launched_by(cumoe.moe_align_block_size, pairs, block, 12, map_)
    few = pairs.size <= align.MAX_SLOTS_AT_ONCE and block <= align.MAX_BLOCK_AT_ONCE
    assert (len(quantized), len(activated), len(sorted_)) == (1, 1, 1 if few else 3)
    assert quantized | activated | sorted_ <= reachable(layer)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 16), st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_the_set_is_what_all_token_counts_reach(experts, topk, k, n, clamp):
    layer = {"K": 128 * k, "N": 128 * n, "num_experts": experts, "topk": topk, "clamp": clamp}
    problem = fused.Problem(
        1, 128 * k, 128 * n, experts, experts, topk, "int32", "fp32", False, "fp32", clamp,
        False, False, True, True,
    )  # fmt: skip
    counts = {1 << i for i in range(18)} | set(range(1, 40, 3))
    counts |= {c + near for c in fused.representative_token_counts(problem) for near in (-1, 0, 1)}
    calls = [problem._replace(M=m, whole_M=w) for m in counts if m > 0 for w in (None, 1 << 20)]
    plans = (fused.plan(call, H200) for call in calls)
    steps = {s for p in plans for s in steps_in(p)}
    assert {s.kernel for s in steps} == set(layer_specs(H200, **layer))
    named = Layer(128 * k, 128 * n, experts, experts, topk, limit=7.0 if clamp else None)
    assert keys(s for s in steps if s.kernel.stem == "moe_align_block_size") <= keys(
        serving_steps(H200, named)
    )


def test_a_missing_regime_would_be_seen(monkeypatch):
    layer = {"K": 256, "N": 128, "num_experts": 8, "topk": 2}
    whole = layer_specs(H200, **layer)
    monkeypatch.setattr(fused, "representative_token_counts", lambda problem: (1,))
    assert set(layer_specs(H200, **layer)) < set(whole)


def test_the_number_of_sms_chooses_no_kernel():
    layer = Layer(6144, 256, 256, 256, 8)
    h20 = H200._replace(num_sms=78)
    assert keys(all_steps(h20, layer)) == keys(all_steps(H200, layer))


@pytest.mark.parametrize("arch", ARCHITECTURES.values())
def test_every_architecture_has_its_kernels(arch):
    layer = Layer(512, 256, 16, 8, 2)
    device = device_of(arch)
    steps = serving_steps(device, layer)
    assert {s.kernel.arch for s in steps} == {arch}
    assert all(s.launch.smem_bytes <= device.smem_optin_bytes for s in steps)


def test_an_unknown_architecture_is_refused_by_name():
    with pytest.raises(ArgumentError, match=r"arch: want one of sm_89, .*, got 'sm_90'"):
        device_of("sm_90")


def test_h200_is_the_sm_90a_device():
    assert device_of("sm_90a") == H200


def test_specs_are_sorted_and_single():
    specs = specs_of(serving_steps(H200, Layer(512, 256, 16, 16, 2)))
    assert [s.text for s in specs] == sorted({s.text for s in specs})


def test_the_default_set_of_a_layer_is_small():
    layer = Layer(6144, 256, 256, 256, 8, scale_formats=("fp32", "ue8m0"))
    assert len(specs_of(serving_steps(H200, layer))) < 60
