"""Where the arrays of fused_experts_fp8 lie: strides, odd addresses, outputs, workspaces."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cumoe import ArgumentError
from tests.helpers import cases
from tests.helpers.backends import BACKENDS, NumpyBackend
from tests.helpers.calls import fused_experts_on
from tests.helpers.cases import E4M3, ExpertsCase
from tests.helpers.compare import assert_bitwise_equal
from tests.helpers.layouts import address_of, aligned_bytes, embedded

GPU = [b for b in BACKENDS if b.values[0].is_gpu]
gpu_backends = pytest.mark.parametrize("backend", GPU)


@pytest.fixture
def case(rng) -> ExpertsCase:
    """M = 40 of topk 4 to 8 experts; K = 256 and N = 128, so that w1 has scales of 2 x 2."""
    return cases.experts_case(rng, num_tokens=40, intermediate=128, hidden=256)


@pytest.fixture
def want(backend, case) -> np.ndarray:
    return case.run(fused_experts_on(backend))


def transposed(s: np.ndarray) -> np.ndarray:
    """The same values with the last two strides swapped."""
    return np.swapaxes(np.swapaxes(s, 1, 2).copy(), 1, 2)


def experts_last(s: np.ndarray) -> np.ndarray:
    """The same values with the experts next to each other."""
    return np.moveaxis(np.moveaxis(s, 0, -1).copy(), -1, 0)


def sliced(backend: NumpyBackend, s: np.ndarray) -> Any:
    """The same values as every other one of a larger grid of NaN."""
    base = np.full(tuple(2 * n for n in s.shape), np.nan, np.float32)
    base[::2, ::2, 1::2] = s
    return backend.put(base)[::2, ::2, 1::2]


STRIDES = {
    "transposed": lambda backend, s: backend.put(transposed(s)),
    "experts_last": lambda backend, s: backend.put(experts_last(s)),
    "sliced": sliced,
}


@pytest.mark.parametrize("w1_strides", STRIDES)
@pytest.mark.parametrize("w2_strides", STRIDES)
def test_scales_may_have_any_strides(backend, case, want, w1_strides, w2_strides):
    w1_scale = STRIDES[w1_strides](backend, case.experts.w1_scale)
    w2_scale = STRIDES[w2_strides](backend, case.experts.w2_scale)
    got = case.run(fused_experts_on(backend), w1_scale=w1_scale, w2_scale=w2_scale)
    assert_bitwise_equal(got, want)
    swapped = np.swapaxes(case.experts.w1_scale, 1, 2).copy()
    assert (case.run(fused_experts_on(backend), w1_scale=swapped) != want).any()


def test_scales_may_be_shared_by_all_experts(backend, case):
    """A stride of 0."""
    s1, s2 = case.experts.w1_scale, case.experts.w2_scale
    full = {"w1_scale": np.repeat(s1[:1], 8, 0), "w2_scale": np.repeat(s2[:1], 8, 0)}
    one = {name: backend.put(s[:1].copy()) for name, s in full.items()}
    shared = {
        name: s.expand(8, -1, -1) if hasattr(s, "expand") else np.broadcast_to(s, (8, *s.shape[1:]))
        for name, s in one.items()
    }
    got = case.run(fused_experts_on(backend), **shared)
    assert_bitwise_equal(got, case.run(fused_experts_on(backend), **full))


@pytest.mark.parametrize("what", ["w1", "w2"])
@pytest.mark.parametrize("row_gap", [0, 16, 48])
@pytest.mark.parametrize("rows_between", [0, 1, 2])
def test_weights_may_have_gaps(backend, case, want, what, row_gap, rows_between):
    """Between rows in multiples of 16 bytes, and between experts in whole rows; NaN lies there."""
    w = getattr(case.experts, what)
    num_experts, rows, columns = w.shape
    base = np.full((num_experts, rows + rows_between, columns + row_gap), 0x7F, np.uint8)
    base[:, :rows, :columns] = w.view(np.uint8)
    view = backend.put(base.view(E4M3))[:, :rows, :columns]
    got = replace(case, experts=case.experts._replace(**{what: view})).run(
        fused_experts_on(backend)
    )
    assert_bitwise_equal(got, want)


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
@pytest.mark.parametrize("gap", [0, 1, 8, 127])
def test_x_and_out_may_lie_anywhere(backend, case, want, offset, gap):
    x = embedded(backend, case.x, offset=offset, gap=gap)
    out = embedded(backend, np.full_like(case.x, np.nan), offset=gap % 5, gap=offset)
    assert_bitwise_equal(replace(case, x=x.view).run(fused_experts_on(backend), out=out.view), want)
    for island in (x, out):
        assert (island.guard(backend) == 0xFF).all()
    assert_bitwise_equal(backend.bf16(x.view), case.x)


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, cases.BF16], ids=["f32", "f16", "bf16"])
def test_ids_weights_and_map_may_start_anywhere(backend, case, offset, dtype):
    case.weights = case.weights.astype(dtype)
    table = np.arange(8, dtype=np.int32)[::-1].copy()
    want = case.run(fused_experts_on(backend), expert_map=table)

    def shifted(a: np.ndarray) -> Any:
        return embedded(backend, a.reshape(1, -1), offset=offset).view.reshape(a.shape)

    moved = replace(case, ids=shifted(case.ids), weights=shifted(case.weights))
    assert_bitwise_equal(moved.run(fused_experts_on(backend), expert_map=shifted(table)), want)


def test_inputs_are_not_written(backend, case, want):
    table = np.arange(8, dtype=np.int32)
    placed = ExpertsCase(
        cases.ExpertWeights(*(backend.put(a.copy()) for a in case.experts)),
        *(backend.put(a.copy()) for a in (case.x, case.weights, case.ids)),
    )
    placed_map = backend.put(table.copy())
    assert_bitwise_equal(placed.run(fused_experts_on(backend), expert_map=placed_map), want)
    for array, original in zip(placed.experts, case.experts, strict=True):
        assert_bitwise_equal(bytes_of(backend, array), original.view(np.uint8))
    for name in ("x", "weights", "ids"):
        original = getattr(case, name)
        assert_bitwise_equal(bytes_of(backend, getattr(placed, name)), original.view(np.uint8))
    assert_bitwise_equal(backend.raw(placed_map), table)


def bytes_of(backend: NumpyBackend, a: Any) -> np.ndarray:
    return np.ascontiguousarray(backend.raw(a)).view(np.uint8)


def test_out_may_be_x_or_new(backend, case, want):
    assert_bitwise_equal(case.run(fused_experts_on(backend), out=None), want)
    x = backend.put(case.x.copy())
    assert_bitwise_equal(replace(case, x=x).run(fused_experts_on(backend), out=x), want)
    assert_bitwise_equal(backend.bf16(x), want)


def test_out_may_be_a_second_view_of_x(backend, case, want):
    place = embedded(backend, case.x, offset=8, gap=8)
    again = place.base[8:].reshape(40, 264)[:, :256]
    assert address_of(again) == address_of(place.view)
    got = replace(case, x=place.view).run(fused_experts_on(backend), out=again)
    assert_bitwise_equal(got, want)
    assert (place.guard(backend) == 0xFF).all()


def test_a_workspace_does_not_change_the_result(backend, case, want):
    workspace = aligned_bytes(backend, 1 << 20)
    for _ in range(2):
        assert_bitwise_equal(case.run(fused_experts_on(backend), workspace=workspace), want)


@pytest.mark.parametrize("limit", [1 << 16, 1 << 17, 1 << 40])
def test_parts_give_the_same_bytes(backend, case, want, limit):
    got = case.run(fused_experts_on(backend), max_workspace_bytes=limit)
    assert_bitwise_equal(got, want)


def wanted_bytes(backend: NumpyBackend, case: ExpertsCase, **options: Any) -> int:
    """What the error about a workspace that is too small says."""
    with pytest.raises(ArgumentError, match="workspace: ") as caught:
        case.run(fused_experts_on(backend), workspace=aligned_bytes(backend, 256), **options)
    return int(re.search(r"wants (\d+) bytes, got 256", str(caught.value))[1])


def one_tokens_bytes(backend: NumpyBackend, case: ExpertsCase) -> int:
    """What the error about a limit that is too small for a part of one token says."""
    with pytest.raises(ArgumentError, match="max_workspace_bytes: ") as caught:
        case.run(fused_experts_on(backend), max_workspace_bytes=1000)
    return int(re.search(r"one token of this shape wants (\d+) bytes", str(caught.value))[1])


@gpu_backends
def test_a_workspace_of_exactly_the_size_it_says(backend, case, want):
    needed = wanted_bytes(backend, case)
    workspace = backend.put(np.full(needed + 4096, 0xFF, np.uint8))
    assert_bitwise_equal(case.run(fused_experts_on(backend), workspace=workspace[:needed]), want)
    assert (backend.raw(workspace)[needed:] == 0xFF).all()
    with pytest.raises(ArgumentError, match=f"wants {needed} bytes, got {needed - 1}"):
        case.run(fused_experts_on(backend), workspace=workspace[: needed - 1])


@gpu_backends
@pytest.mark.parametrize("parts", [2, 3, 7, 40])
def test_a_workspace_for_some_of_the_tokens(backend, case, parts):
    """Any part of the tokens at a time gives the bytes of the whole, in place too."""
    case.ids, case.weights = case.ids.astype(np.int64), case.weights.astype(cases.BF16)
    want = case.run(fused_experts_on(backend))
    few = case.tokens(slice(-(-40 // parts)))  # a call of its own, in another chain than a part
    limit = max(one_tokens_bytes(backend, case), wanted_bytes(backend, few))
    assert limit < wanted_bytes(backend, case)
    workspace = aligned_bytes(backend, limit)
    options = {"workspace": workspace, "max_workspace_bytes": limit}
    assert_bitwise_equal(case.run(fused_experts_on(backend), **options), want)
    x = embedded(backend, case.x, offset=3, gap=5)
    in_place = replace(case, x=x.view).run(fused_experts_on(backend), out=x.view, **options)
    assert_bitwise_equal(in_place, want)
    assert (x.guard(backend) == 0xFF).all()


@gpu_backends
def test_a_limit_below_one_token_is_refused(backend, case):
    one = one_tokens_bytes(backend, case)
    with pytest.raises(ArgumentError, match=f"wants {one} bytes, got {one - 1}"):
        case.run(fused_experts_on(backend), max_workspace_bytes=one - 1)
    case.run(fused_experts_on(backend), max_workspace_bytes=one)
