"""Calls like one before: run at once, with their own addresses, and refused as the first was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import cumoe
from cumoe.errors import ArgumentError, CumoeError, DTypeError, UnsupportedDeviceError
from cumoe.launch import module
from cumoe.ops import _op
from cumoe.plan.moe_align_block_size import MAX_SLOTS_AT_ONCE
from tests.helpers.forks import fork, join
from tests.helpers.noting_driver import BF16, E4M3, experts, quantized, tensor


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


def quantize(rows: int = 4, start: int = 0) -> None:
    cumoe.per_token_group_quant_fp8(tensor(rows, 256, start=start), **quantized(rows, 256))


def looks_at_nothing(monkeypatch) -> None:
    """From here on what reads a tensor's shape or type is an error."""
    at_once(monkeypatch)
    monkeypatch.setattr(_op, "torch_facts", _op.view_all)


def test_a_call_like_the_last_looks_at_no_tensor(warm, monkeypatch):
    quantize()
    looks_at_nothing(monkeypatch)
    x, outputs = tensor(4, 256), quantized(4, 256)
    cumoe.per_token_group_quant_fp8(x, **outputs)
    assert warm.launches[-1][2][0] == x.data_ptr()
    for other in ({"rows": 5}, {"start": 16}):
        with pytest.raises(AssertionError):
            quantize(**other)


def test_a_mode_of_torch_takes_one_more_look(warm, monkeypatch):
    quantize()
    with torch.inference_mode():
        quantize()
        looks_at_nothing(monkeypatch)
        quantize()


def test_two_shapes_in_turn_are_guarded_once_each(warm, monkeypatch):
    made, guard = [], _op.torch_guard
    monkeypatch.setattr(_op, "torch_guard", lambda given: made.append(given) or guard(given))
    for _ in range(3):
        quantize(4)
        quantize(8)
    assert len(made) == 2
    assert [words[8] for _, _, words in warm.launches] == [4, 8] * 3


def test_without_a_guard_of_torch_every_call_is_looked_at(gpu, monkeypatch):
    monkeypatch.setattr(_op, "torch_guard", lambda given: None)
    for _ in range(3):
        quantize()
    assert len(gpu.launches) == 3


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
    ids = tensor(MAX_SLOTS_AT_ONCE, 2, dtype=torch.int32)
    kept = []  # so that no two calls get the same memory

    def empty(make, *sizes, **options):
        kept.append(make(*sizes, **options))
        return kept[-1]

    for name in ("empty", "empty_strided", "zeros"):
        monkeypatch.setattr(torch, name, partial(empty, getattr(torch, name)))
    cumoe.moe_align_block_size(ids, 16, 8)
    cumoe.moe_align_block_size(ids.clone(), 16, 8)
    for count, scan, _ in (gpu.launches[:3], gpu.launches[3:]):
        counts, chunks = count[2][2], scan[2][3]
        assert scan[2][:2] == [counts, counts + chunks * 8 * 4]
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
    assert sum(len(a.ready) + len(a.guards) for a in _op._thread.alike.values()) <= 8


@pytest.mark.usefixtures("unfused")
def test_the_two_halves_of_the_activation_share_a_scratch(gpu):
    for _ in range(2):
        x = tensor(4, 512)
        q, scale = cumoe.silu_and_mul_quant_fp8(x)
        (_, _, one), (_, _, two) = gpu.launches[-2:]
        assert one[:7] == two[:7]
        assert (one[0], one[5:7]) == (x.data_ptr(), [q.data_ptr(), scale.data_ptr()])
        assert one[4] not in (0, one[0], *one[5:7])
