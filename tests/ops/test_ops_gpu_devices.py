"""What only a GPU shows: arrays on the CPU and on GPUs, of several frameworks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import cumoe
from cumoe import DeviceMismatchError
from tests.helpers import cases
from tests.helpers.backends import CupyBackend, NumpyBackend, TorchBackend
from tests.helpers.calls import RIGHT_ARGUMENTS, Arguments, placed
from tests.helpers.compare import assert_bitwise_equal
from tests.helpers.workloads import OPS, assert_same_bytes, bytes_of, raw_bytes, workload

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

OPTIONAL: dict[str, Arguments] = {
    "per_token_group_quant_fp8": {
        "out": cases.poisoned_codes(4, 256),
        "out_scale": np.zeros((4, 2), np.float32),
    },
    "silu_and_mul_quant_fp8": {
        "topk_ids": np.zeros(4, np.int32),
        "expert_map": np.zeros(8, np.int32),
        "out": cases.poisoned_codes(4, 256),
        "out_scale": np.zeros((4, 2), np.float32),
    },
    "moe_align_block_size": {"expert_map": np.zeros(8, np.int32)},
    "fused_experts_fp8": {
        "expert_map": np.zeros(8, np.int32),
        "workspace": np.zeros(1 << 20, np.uint8),
        "out": np.zeros((4, 256), cases.BF16),
    },
    "pad_experts": {},
}


def everything(op: str) -> Arguments:
    return {**RIGHT_ARGUMENTS[op](), **OPTIONAL[op]}


def arrays_of(op: str) -> list[str]:
    return [name for name, v in everything(op).items() if isinstance(v, np.ndarray)]


SEVERAL = [(op, name) for op in RIGHT_ARGUMENTS for name in arrays_of(op) if len(arrays_of(op)) > 1]
ON_GPU = [TorchBackend("cuda"), CupyBackend()]
on_gpu = pytest.mark.parametrize("gpu", ON_GPU, ids=lambda b: b.name)


def on_cpu(array: np.ndarray) -> Any:
    """On the CPU, where a workspace needs an address that is a multiple of 256."""
    if array.dtype != np.uint8:
        return array
    buffer = np.zeros(array.size + 256, np.uint8)
    first = -buffer.ctypes.data % 256
    return buffer[first : first + array.size]


@on_gpu
@pytest.mark.parametrize(("op", "name"), SEVERAL)
def test_one_array_on_the_cpu_is_refused(gpu, op, name):
    arguments = placed(gpu, everything(op))
    getattr(cumoe, op)(**arguments)
    arguments[name] = on_cpu(everything(op)[name])
    with pytest.raises(DeviceMismatchError, match=r"cuda:0.* cpu|cpu.* cuda:0"):
        getattr(cumoe, op)(**arguments)


@pytest.mark.parametrize("op", RIGHT_ARGUMENTS)
def test_frameworks_of_one_gpu_may_be_mixed(op):
    """torch and CuPy; the results have the framework of the first array."""
    import cupy

    first, *others = RIGHT_ARGUMENTS[op]().items()
    for a, b, kind in (
        (TorchBackend("cuda"), CupyBackend(), torch.Tensor),
        (CupyBackend(), TorchBackend("cuda"), cupy.ndarray),
    ):
        results = getattr(cumoe, op)(**placed(a, dict([first])), **placed(b, dict(others)))
        results = results if isinstance(results, tuple) else (results,)
        assert [type(r) for r in results] == [kind] * len(results)


@pytest.mark.parametrize("op", OPS)
def test_gpu_and_cpu_agree_and_the_current_device_stays(op):
    import cupy

    before = torch.cuda.current_device(), cupy.cuda.runtime.getDevice()
    work = workload(op, routing="uniform")
    results = work.call()
    assert (torch.cuda.current_device(), cupy.cuda.runtime.getDevice()) == before
    assert {t.device for t in results} == {work.inputs[0].device}
    if op in ("quantizer", "sort"):
        assert_same_bytes(
            bytes_of(results), bytes_of(workload(op, device="cpu", routing="uniform").call())
        )


@on_gpu
def test_refusals_leave_the_current_device(gpu):
    import cupy

    before = cupy.cuda.runtime.getDevice()
    arguments = placed(gpu, everything("fused_experts_fp8"))
    arguments["workspace"] = arguments["workspace"][:256]
    with pytest.raises(cumoe.ArgumentError, match="workspace"):
        cumoe.fused_experts_fp8(**arguments)
    assert cupy.cuda.runtime.getDevice() == before


@pytest.fixture
def device_0() -> Iterator[None]:
    """Device 0 is current for torch and CuPy, and still is after the test."""
    import cupy

    torch.cuda.set_device(0)
    cupy.cuda.runtime.setDevice(0)
    yield
    assert (torch.cuda.current_device(), cupy.cuda.runtime.getDevice()) == (0, 0)


@two_gpus
@pytest.mark.usefixtures("device_0")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("first", ["cuda:0", "cuda:1"])
def test_arrays_on_another_than_the_current_device(op, first):
    """Kernels that one device has loaded serve the other too, whichever was first."""
    hidden = {"cuda:0": 256, "cuda:1": 384}[first]
    second = {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}[first]
    results = {d: workload(op, device=d, hidden=hidden).call() for d in (first, second)}
    for device, tensors in results.items():
        assert {str(t.device) for t in tensors} == {device}
    assert_same_bytes(bytes_of(results["cuda:1"]), bytes_of(results["cuda:0"]))


@two_gpus
@pytest.mark.usefixtures("device_0")
@pytest.mark.parametrize("op", OPS)
def test_a_late_producer_on_a_side_stream_of_another_device(op):
    work = workload(op, device="cuda:1")
    want = bytes_of(work.call())
    kept = [t.clone() for t in work.inputs]
    for t in work.inputs:
        raw_bytes(t).fill_(0xFF)
    torch.cuda.synchronize(1)
    side = torch.cuda.Stream(device=1)
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        for t, value in zip(work.inputs, kept, strict=True):
            raw_bytes(t).copy_(raw_bytes(value))
        with torch.cuda.device(0):
            results = work.call()
    side.synchronize()
    assert_same_bytes(bytes_of(results), want)


@two_gpus
@pytest.mark.usefixtures("device_0")
def test_cupy_arrays_on_another_device():
    import cupy

    x = cases.activations(np.random.default_rng(1), 8, 512)
    with cupy.cuda.Device(1):
        placed_x = CupyBackend().put(x)
    cupy.cuda.runtime.setDevice(0)
    q, scale = cumoe.per_token_group_quant_fp8(placed_x)
    assert (q.device.id, scale.device.id) == (1, 1)
    want_q, want_scale = cumoe.reference.per_token_group_quant_fp8(x)
    with cupy.cuda.Device(1):
        got = CupyBackend().codes(q), CupyBackend().raw(scale)
    cupy.cuda.runtime.setDevice(0)
    assert_bitwise_equal(got[0], want_q.view(np.uint8))
    assert_bitwise_equal(got[1], want_scale)


@two_gpus
@pytest.mark.usefixtures("device_0")
@pytest.mark.parametrize(("op", "name"), SEVERAL)
def test_arrays_on_two_gpus_are_refused(op, name):
    arguments = placed(TorchBackend("cuda:0"), everything(op))
    arguments[name] = TorchBackend("cuda:1").put(everything(op)[name])
    with pytest.raises(DeviceMismatchError, match="cuda:1"):
        getattr(cumoe, op)(**arguments)


def test_numpy_arrays_need_no_gpu():
    """Also where there is one, host arrays are computed on the host."""
    x = cases.activations(np.random.default_rng(1), 8, 512)
    q, _ = cumoe.per_token_group_quant_fp8(x)
    assert isinstance(NumpyBackend().raw(q), np.ndarray)
    assert isinstance(q, np.ndarray)
