"""pad_experts on every backend: zeros in the right places, and the same function as before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumoe
from tests.helpers import cases, oracles, tolerances
from tests.helpers.backends import NumpyBackend
from tests.helpers.calls import fused_experts_on
from tests.helpers.cases import E4M3, ExpertsCase, ExpertWeights
from tests.helpers.compare import assert_bitwise_equal, assert_rows_close, assert_total_close
from tests.helpers.layouts import address_of

E = 3


def experts_of_any_size(rng: np.random.Generator, N: int, K: int) -> ExpertWeights:
    """Random experts cut down from the next multiples of 128, each half of w1 by itself."""
    n, k = -(-N // 128) * 128, -(-K // 128) * 128
    w1, w2, w1_scale, w2_scale = cases.random_experts(rng, E, n, k)
    halves = w1.view(np.uint8).reshape(E, 2, n, k)[:, :, :N, :K]
    w1 = np.ascontiguousarray(halves).reshape(E, 2 * N, K).view(E4M3)
    return ExpertWeights(w1, np.ascontiguousarray(w2[:, :K, :N]), w1_scale, w2_scale)


def pad(backend: NumpyBackend, experts: ExpertWeights, **options: Any) -> ExpertWeights:
    padded = cumoe.pad_experts(*(backend.put(a) for a in experts), **options)
    w1, w2 = (backend.codes(a).view(E4M3) for a in padded[:2])
    return ExpertWeights(w1, w2, *(backend.raw(a) for a in padded[2:]))


def grown(a: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Zeros with ``a`` in the first corner of each matrix."""
    out = np.zeros((len(a), rows, columns), a.dtype)
    out[:, : a.shape[1], : a.shape[2]] = a
    return out


def grown_halves(a: np.ndarray, rows: int, columns: int) -> np.ndarray:
    gate, up = np.split(a, 2, axis=1)
    return np.concatenate([grown(gate, rows // 2, columns), grown(up, rows // 2, columns)], axis=1)


@pytest.mark.parametrize(
    ("N", "K", "multiple", "n", "k"),
    [
        (192, 128, 128, 256, 128),
        (288, 256, 128, 384, 256),
        (320, 128, 128, 384, 128),
        (128, 192, 128, 128, 256),
        (100, 300, 128, 128, 384),
        (192, 128, 256, 256, 256),
        (128, 384, 256, 256, 512),
        (128, 256, 128, 128, 256),
    ],
)
def test_zeros_in_the_right_places(backend, rng, N, K, multiple, n, k):
    experts = experts_of_any_size(rng, N, K)
    got = pad(backend, experts, multiple=multiple)
    assert_bitwise_equal(got.w1, grown_halves(experts.w1, 2 * n, k), "w1")
    assert_bitwise_equal(got.w2, grown(experts.w2, k, n), "w2")
    assert_bitwise_equal(
        got.w1_scale, grown_halves(experts.w1_scale, 2 * n // 128, k // 128), "w1_scale"
    )
    assert_bitwise_equal(got.w2_scale, grown(experts.w2_scale, k // 128, n // 128), "w2_scale")


@pytest.mark.parametrize(("N", "K"), [(192, 128), (288, 128), (320, 256), (128, 192), (192, 320)])
def test_the_padded_layer_computes_the_same_function(backend, rng, N, K):
    """Against float64 on the weights as they were."""
    experts = experts_of_any_size(rng, N, K)
    ids = cases.uniform(rng, 17, E, 2)
    weights = cases.router_weights(rng, ids)
    x = cases.activations(rng, 17, K)
    padded = pad(backend, experts)
    wide = np.zeros((17, padded.w2.shape[1]), x.dtype)
    wide[:, :K] = x
    got = ExpertsCase(padded, wide, weights, ids).run(fused_experts_on(backend), swiglu_limit=2.0)
    assert not got[:, K:].astype(np.float32).any()
    exact = oracles.experts_by_token(
        x, *unpadded_halves(experts), weights, ids,
        w1_scale=experts.w1_scale, w2_scale=experts.w2_scale, limit=2.0,
    )  # fmt: skip
    assert_rows_close(got[:, :K], exact, tolerances.EXACT_ROW)
    assert_total_close(got[:, :K], exact, tolerances.EXACT_TOTAL, cosine=tolerances.EXACT_COSINE)
    want = ExpertsCase(padded, wide, weights, ids).run(
        cumoe.reference.fused_experts_fp8, swiglu_limit=2.0
    )
    K, N = padded.w2.shape[1:]
    assert_rows_close(got, want, tolerances.experts_row(*ids.shape, K, N))


def unpadded_halves(experts: ExpertWeights) -> tuple[np.ndarray, np.ndarray]:
    """The oracle finds the scale of row r of w1 in block r / 128: up must start on a block."""
    _, rows, columns = experts.w1.shape
    half = -(-rows // 2 // 128) * 128
    return grown_halves(experts.w1, 2 * half, columns), grown(experts.w2, columns, half)


def test_weights_may_be_bytes(backend, rng):
    experts = experts_of_any_size(rng, 192, 128)
    raw = experts._replace(w1=experts.w1.view(np.uint8), w2=experts.w2.view(np.uint8))
    padded = cumoe.pad_experts(*(backend.put(a) for a in raw))
    assert [str(a.dtype).removeprefix("torch.") for a in padded[:2]] == ["uint8", "uint8"]
    for got, want in zip(padded[:2], pad(backend, experts)[:2], strict=True):
        assert_bitwise_equal(backend.raw(got), want.view(np.uint8))


def test_scales_may_have_any_strides(backend, rng):
    experts = experts_of_any_size(rng, 192, 320)
    views = [np.swapaxes(np.swapaxes(s, 1, 2).copy(), 1, 2) for s in experts[2:]]
    assert not any(v.flags.c_contiguous for v in views)
    got = pad(backend, ExpertWeights(*experts[:2], *views))
    for a, b in zip(got, pad(backend, experts), strict=True):
        assert_bitwise_equal(a, b)


def test_inputs_stay_and_results_are_new(backend, rng):
    experts = experts_of_any_size(rng, 128, 128)
    placed = [backend.put(a.copy()) for a in experts]
    padded = cumoe.pad_experts(*placed)
    for new, old, original in zip(padded, placed, experts, strict=True):
        assert new is not old
        assert type(new) is type(old)
        assert new.dtype == old.dtype
        assert getattr(new, "device", "cpu") == getattr(old, "device", "cpu")
        assert address_of(new) != address_of(old)
        kept = np.ascontiguousarray(backend.raw(old)).view(np.uint8)
        assert_bitwise_equal(kept, original.view(np.uint8))
