"""Calls like one before: run at once, with their own addresses, and refused as the first was.

CPU tensors pass for tensors on a GPU; its driver takes notes.
"""

from __future__ import annotations

import ctypes
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cumoe
from cumoe.arrays import dlpack, exchange
from cumoe.arrays.view import Device
from cumoe.errors import ArgumentError, CumoeError, DTypeError, UnsupportedDeviceError
from cumoe.launch import device, driver, memory, module
from cumoe.ops import _op
from cumoe.ops import per_token_group_quant_fp8 as quant
from cumoe.ops import silu_and_mul_quant_fp8 as silu
from cumoe.plan.device import H200
from cumoe.store import store
from tests.helpers.forks import fork, join
from tests.helpers.lenders import FakeGpu, Wrapped

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


class Gpu:
    """Answers every call with success, or with `answer` at a launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, int, list[int]]] = []
        """Entry, stream, and every argument that is no float."""
        self.entries: list[str] = []
        self.answer = self.current = self.stream = self.cupy_stream = 0
        self.capturing: set[int] = set()
        """Streams."""
        self.modes = [0]
        """Of capture, as the thread has exchanged them: 0 is global, 2 relaxed."""

    def load(self, kernel: Any) -> Any:
        def get_function(entry: str) -> Any:
            self.entries.append(entry)
            return SimpleNamespace(ptr=len(self.entries))

        return SimpleNamespace(get_function=get_function)

    def cuLaunchKernelEx(self, config, function, places, extra) -> int:
        entry = self.entries[function.value - 1]
        count = len(places) - 3 * entry.startswith("silu")
        words = [ctypes.c_int64.from_address(place).value for place in places[:count]]
        self.launches.append((entry, config._obj.stream or 0, words))
        return self.answer

    def cuStreamIsCapturing(self, stream, status) -> int:
        status._obj.value = stream.value in self.capturing
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode) -> int:
        self.modes.append(mode._obj.value)
        mode._obj.value = self.modes[-2]
        return 0

    def cuGetErrorName(self, code, name) -> None:
        name._obj.value = b"CUDA_ERROR_LAUNCH_FAILED"

    def __getattr__(self, name):
        return lambda *arguments: 0


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
    monkeypatch.setattr(_op, "_of_graphs", [])
    forget()
    yield gpu
    forget()


def forget() -> None:
    """What was remembered of CPU tensors is of another device now."""
    exchange._torch_facts.cache_clear()
    _op._thread.forget()


def made(output: memory.Output) -> torch.Tensor:
    return tensor(*output.shape, dtype=memory._torch_dtype(output.dtype))


def tensor(*shape: int, dtype: torch.dtype = BF16, start: int = 0) -> torch.Tensor:
    """At ``start`` bytes past a multiple of 256."""
    size = math.prod(shape) * dtype.itemsize
    raw = torch.zeros(size + 512, dtype=torch.uint8)
    first = -raw.data_ptr() % 256 + start
    return raw[first : first + size].view(dtype).view(shape)


def quantized(*shape: int) -> dict[str, torch.Tensor]:
    return {
        "out": tensor(*shape, dtype=E4M3),
        "out_scale": tensor(shape[0], shape[1] // 128, dtype=torch.float32),
    }


def experts(x: Any, topk: int = 2) -> dict[str, Any]:
    """A call on [M, 256] tokens and eight experts."""
    slots = x.shape[0], topk
    return {
        "x": x, "w1": tensor(8, 256, 256, dtype=E4M3),
        "w2": tensor(8, 256, 128, dtype=E4M3), "topk_weights": tensor(*slots, dtype=torch.float32),
        "topk_ids": tensor(*slots, dtype=torch.int32),
        "w1_scale": tensor(8, 2, 2, dtype=torch.float32),
        "w2_scale": tensor(8, 2, 1, dtype=torch.float32),
    }  # fmt: skip


@pytest.fixture
def warm(gpu, monkeypatch):
    """The quantizer has run on [4, 256]; from here on a view of an array is an error."""
    cumoe.per_token_group_quant_fp8(tensor(4, 256), **quantized(4, 256))
    gpu.launches.clear()
    return gpu


def at_once(monkeypatch) -> None:
    """From here on what looks at an array anew is an error."""

    def looked(*arguments):
        raise AssertionError(arguments)

    monkeypatch.setattr(_op, "view_all", looked)


def test_a_call_like_one_before_runs_with_its_own_addresses(warm, monkeypatch):
    at_once(monkeypatch)
    for _ in range(3):
        x, outputs = tensor(4, 256), quantized(4, 256)
        q, scale = cumoe.per_token_group_quant_fp8(x, **outputs)
        assert q is outputs["out"]
        assert scale is outputs["out_scale"]
    ((entry, stream, words),) = warm.launches[-1:]
    assert (entry, stream) == ("per_token_group_quant_fp8", 0)
    assert words == [x.data_ptr(), 256, 0, q.data_ptr(), scale.data_ptr(), 2, 1, 4, 4, 0]


def test_each_op_runs_at_once(gpu, monkeypatch):
    ids, table = tensor(4, 2, dtype=torch.int32), tensor(8, dtype=torch.int32)
    layer = experts(tensor(4, 256))
    calls = [
        lambda: cumoe.per_token_group_quant_fp8(tensor(4, 256)),
        lambda: cumoe.silu_and_mul_quant_fp8(
            tensor(8, 512), topk_ids=ids.view(-1), expert_map=table
        ),
        lambda: cumoe.moe_align_block_size(ids, 16, 8, table),
        lambda: cumoe.fused_experts_fp8(**layer),
        lambda: cumoe.fused_experts_fp8(**layer, max_workspace_bytes=1 << 14),
    ]
    first = [[len(gpu.launches), call(), len(gpu.launches)] for call in calls]
    firsts = [[entry for entry, *_ in gpu.launches[a:b]] for a, _, b in first]
    gpu.launches.clear()
    at_once(monkeypatch)
    for call, (_, results, _), entries in zip(calls, first, firsts, strict=True):
        again = call()
        assert [entry for entry, *_ in gpu.launches] == entries
        for a, b in zip(tuple(again), tuple(results), strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        gpu.launches.clear()


def test_a_region_of_an_array_moves_with_it(gpu, monkeypatch):
    ids = tensor(4, 2, dtype=torch.int32)
    kept = []  # so that no two calls get the same memory

    def empty(make, *sizes, **options):
        kept.append(make(*sizes, **options))
        return kept[-1]

    for name in ("empty", "empty_strided", "zeros"):
        monkeypatch.setattr(torch, name, partial(empty, getattr(torch, name)))
    cumoe.moe_align_block_size(ids, 16, 8)
    cumoe.moe_align_block_size(ids.clone(), 16, 8)
    for count, scan, _ in (gpu.launches[:3], gpu.launches[3:]):
        counts = count[2][2]
        assert scan[2][:2] == [counts, counts + 8 * 4]
    assert gpu.launches[0][2][2] != gpu.launches[3][2][2]


def test_the_stream_is_that_of_the_call(warm):
    for stream in (0, 77, 77, 0, 5):
        warm.stream = stream
        cumoe.per_token_group_quant_fp8(tensor(4, 256), **quantized(4, 256))
    assert [stream for _, stream, _ in warm.launches] == [0, 77, 77, 0, 5]


def test_the_device_is_made_current_and_given_back(warm, monkeypatch):
    warm.current, seen = 1, []
    (ready,) = _op._thread.ready.values()
    monkeypatch.setattr(ready._prepared, "_fire", [lambda: seen.append(warm.current)])
    cumoe.per_token_group_quant_fp8(tensor(4, 256), **quantized(4, 256))
    assert (seen, warm.current) == ([0], 1)


def change_shape(x: torch.Tensor) -> None:
    x.resize_(2, 256)


def change_memory(x: torch.Tensor) -> None:
    x.set_(tensor(8, 256))


def change_data(x: torch.Tensor) -> None:
    x.data = tensor(8, 256)


@pytest.mark.parametrize("change", [change_shape, change_memory, change_data])
def test_a_tensor_that_was_changed_in_place_is_looked_at_anew(warm, change):
    x, outputs = torch.zeros(4, 256, dtype=BF16), quantized(4, 256)
    for _ in range(2):
        cumoe.per_token_group_quant_fp8(x, **outputs)
    change(x)
    with pytest.raises(ArgumentError, match=r"out: want shape \[\d, 256\], got \[4, 256\]"):
        cumoe.per_token_group_quant_fp8(x, **outputs)
    outputs["out"].t_()
    with pytest.raises(ArgumentError):
        cumoe.per_token_group_quant_fp8(tensor(4, 256), **outputs)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [("alpha", 1.0, True), ("beta", 0.0, False), ("limit", 1, True), ("group_size", 128, 128.0),
     ("num_experts", 1, True)],
)  # fmt: skip
def test_a_scalar_of_another_type_is_refused_though_it_is_equal(gpu, name, good, bad):
    x = tensor(4, 512)
    for _ in range(2):
        cumoe.silu_and_mul_quant_fp8(x, **{name: good})
        with pytest.raises(DTypeError, match=f"^{name}: want"):
            cumoe.silu_and_mul_quant_fp8(x, **{name: bad})


def test_a_scalar_that_is_no_key_is_refused_by_name_or_taken(gpu):
    for _ in range(2):
        with pytest.raises(DTypeError, match=r"^scale_format: want a string"):
            cumoe.silu_and_mul_quant_fp8(tensor(4, 512), scale_format=["fp32"])
    arrays = [tensor(1, 128), tensor(1, 256, 128, dtype=E4M3), tensor(1, 128, 128, dtype=E4M3),
              tensor(1, 1, dtype=torch.float32), tensor(1, 1, dtype=torch.int32)]  # fmt: skip
    scales = {
        "w1_scale": tensor(1, 2, 1, dtype=torch.float32),
        "w2_scale": tensor(1, 1, 1, dtype=torch.float32),
    }
    for _ in range(2):
        cumoe.fused_experts_fp8(*arrays, **scales, block_shape=[128, 128])


def test_an_overlap_is_refused(warm, monkeypatch):
    at_once(monkeypatch)
    x, outputs = tensor(4, 256), quantized(4, 256)
    half = x.view(-1).view(E4M3)[1024:].view(4, 256)
    with pytest.raises(ArgumentError, match="out: must not overlap x"):
        cumoe.per_token_group_quant_fp8(x, **outputs | {"out": half})
    with pytest.raises(ArgumentError, match="out_scale: must not overlap out"):
        cumoe.per_token_group_quant_fp8(x, **outputs | {"out_scale": scale_in(outputs["out"])})
    assert warm.launches == []


def scale_in(codes: torch.Tensor) -> torch.Tensor:
    """Scales in the first bytes of codes."""
    return codes.view(-1)[:32].view(torch.float32).view(4, 2)


def test_another_alignment_is_another_kernel(warm):
    outputs = quantized(4, 256)
    for start in (0, 2, 0, 16):
        cumoe.per_token_group_quant_fp8(tensor(4, 256, start=start), **outputs)
    kernels = [dict(kernel.constants)["ALIGNED"] for kernel, _ in module._modules]
    assert sorted(kernels) == [0, 1]


def test_a_negative_bit_is_refused(gpu):
    rows = torch.zeros(4, 512, dtype=BF16)
    for _ in range(2):
        cumoe.per_token_group_quant_fp8(rows[:, :256])
        with pytest.raises(DTypeError, match=r"^x: want the values in memory"):
            cumoe.per_token_group_quant_fp8(torch._neg_view(rows)[:, :256])


def test_a_negative_bit_of_one_number_is_refused(gpu):
    """The weight of one token's one expert: contiguous, with strides of 2."""
    numbers = torch.zeros(1, 1, dtype=torch.complex64)
    call = experts(tensor(1, 256), topk=1)
    for _ in range(2):
        cumoe.fused_experts_fp8(**call | {"topk_weights": numbers.imag})
        with pytest.raises(DTypeError, match=r"^topk_weights: want the values in memory"):
            cumoe.fused_experts_fp8(**call | {"topk_weights": numbers.conj().imag})


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.functionalize])
def test_a_tensor_inside_a_transform_is_refused(warm, transform):
    def refused(x):
        with pytest.raises(DTypeError, match=r"^x: want a dense torch tensor with memory"):
            cumoe.per_token_group_quant_fp8(x, **quantized(4, 256))
        return x

    transform(refused)(
        torch.zeros((3, 4, 256) if transform is torch.vmap else (4, 256), dtype=BF16)
    )
    assert warm.launches == []


def test_no_array_is_refused_by_name(warm):
    for thing in (None, [1.0], 3):
        with pytest.raises(DTypeError, match=r"^x: want a NumPy, torch or CuPy array"):
            cumoe.per_token_group_quant_fp8(thing, **quantized(4, 256))


def test_an_array_elsewhere_is_refused(gpu):
    x, outputs = tensor(4, 256), quantized(4, 256)
    cumoe.per_token_group_quant_fp8(x, **outputs)
    elsewhere = {"out": outputs["out"], "out_scale": torch.empty(4, 2, device="meta")}
    with pytest.raises(UnsupportedDeviceError, match=r"^out_scale: want a tensor on cpu or cuda"):
        cumoe.per_token_group_quant_fp8(x, **elsewhere)


def test_empty_tensors_are_welcome(gpu):
    for _ in range(2):
        q, scale = cumoe.per_token_group_quant_fp8(torch.zeros(0, 256, dtype=BF16))
        assert (q.shape, scale.shape) == ((0, 256), (0, 2))
    assert gpu.launches == []


def test_a_failed_launch_names_its_kernel(warm):
    warm.answer = 719
    wanted = "launch of per_token_group_quant_fp8 of .* CUDA_ERROR_LAUNCH_FAILED"
    with pytest.raises(CumoeError, match=wanted):
        cumoe.per_token_group_quant_fp8(tensor(4, 256), **quantized(4, 256))


def test_each_thread_has_its_own(warm):
    def mine():
        before = len(_op._thread.ready)
        cumoe.per_token_group_quant_fp8(tensor(4, 256), **quantized(4, 256))
        return before, set(map(id, _op._thread.ready.values()))

    with ThreadPoolExecutor(1) as pool:
        before, others = pool.submit(mine).result()
    assert before == 0
    assert not others & set(map(id, _op._thread.ready.values()))


def test_a_fork_has_nothing_prepared(warm):
    child = join(fork(lambda: {"ready": len(_op._thread.ready), "alike": len(_op._thread.alike)}))
    assert child == {"ready": 0, "alike": 0}
    assert len(_op._thread.ready) == len(_op._thread.alike) == 1


def test_what_is_kept_is_bounded(gpu, monkeypatch):
    monkeypatch.setattr(_op, "MAX_READY", 4)
    for rows in range(1, 20):
        cumoe.per_token_group_quant_fp8(tensor(rows, 256))
        assert len(_op._thread.ready) <= 4
    assert sum(map(len, _op._thread.alike.values())) <= 4


@pytest.mark.usefixtures("unfused")
def test_the_two_halves_of_the_activation_share_a_scratch(gpu):
    for _ in range(2):
        x = tensor(4, 512)
        q, scale = cumoe.silu_and_mul_quant_fp8(x)
        (_, _, one), (_, _, two) = gpu.launches[-2:]
        assert one[:7] == two[:7]
        assert (one[0], one[5:7]) == (x.data_ptr(), [q.data_ptr(), scale.data_ptr()])
        assert one[4] not in (0, one[0], *one[5:7])


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
    return {
        "experts": (lambda: cumoe.fused_experts_fp8(**layer, out=out), 1),
        "sort": (lambda: cumoe.moe_align_block_size(ids, 16, 8), 1),
        "two halves": (lambda: cumoe.silu_and_mul_quant_fp8(Lent(tensor(4, 512))), 1),
        "quantizer": (lambda: cumoe.per_token_group_quant_fp8(layer["x"]), 0),
        "workspace": (lambda: cumoe.fused_experts_fp8(**layer, workspace=workspace), 0),
    }


@pytest.fixture
def unfused(monkeypatch):
    monkeypatch.setattr(silu, "settings", lambda: SimpleNamespace(fused_act_quant=False))
    silu._checked.cache_clear()
    yield
    silu._checked.cache_clear()


def addresses_of(launches: list[tuple[str, int, list[int]]]) -> set[int]:
    return {word for _, _, words in launches for word in words}


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("name", ["experts", "sort", "two halves", "quantizer", "workspace"])
def test_what_a_captured_call_makes_for_itself_is_kept(lending_gpu, name):
    """Each replay writes there, and CuPy's pool would give it to the next who asks."""
    (call, count), gpu = lent_calls()[name], lending_gpu
    gpu.stream = 77
    call()
    assert _op._of_graphs == []
    gpu.capturing = {77}
    for i in range(1, 3):
        gpu.launches.clear()
        results = call()
        results = results if isinstance(results, tuple) else (results,)
        assert len(_op._of_graphs) == i * count
        kept = _op._of_graphs[-count:] if count else []
        assert {a.data_ptr() for a in kept} <= addresses_of(gpu.launches)
        assert not any(a is r for a in kept for r in results)
    gpu.capturing = set()
    call()
    assert len(_op._of_graphs) == 2 * count


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
    assert (_op._of_graphs, len(gpu.modes)) == ([], modes)


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
