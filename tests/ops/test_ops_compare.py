"""The helpers of this room: what is right passes, one wrong value fails."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import cases, layouts
from tests.helpers.compare import assert_activations_close
from tests.helpers.tolerances import SILU_CODE_SHARE

SHAPE = (80, 256)
"""20,480 codes, of which three may be off."""


@pytest.fixture
def want(rng) -> tuple[np.ndarray, np.ndarray]:
    codes = rng.integers(0x20, 0x70, SHAPE, np.uint8)
    return codes, rng.uniform(1, 2, (80, 2)).astype(np.float32)


def nudged(want, codes=(), by=1, scales=(), factor=1.0):
    """A copy in which these flat positions are changed."""
    q, scale = want[0].copy(), want[1].copy()
    q.reshape(-1)[list(codes)] += by
    scale.reshape(-1)[list(scales)] *= np.float32(factor)
    return q, scale


def check(got, want):
    assert_activations_close(got, want, SILU_CODE_SHARE)


def test_a_few_neighbouring_codes_pass(want):
    check(want, want)
    check(nudged(want, codes=[0, 200, 20_000]), want)


@pytest.mark.parametrize("factor", [1 + 2**-7, 1 - 2**-8])
def test_a_moved_scale_counts_once_and_frees_its_group(want, factor):
    check(nudged(want, codes=range(256, 384), scales=[2], factor=factor), want)
    check(nudged(want, codes=[0, 1, *range(256, 384)], scales=[2], factor=factor), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": [0, 1, 2, 3]}, "4 of 20480 values are off, at most 3"),
        ({"codes": [7], "by": 2}, "2 apart"),
        ({"scales": [2], "factor": 1 + 2**-6}, "scales"),
        ({"scales": [2, 3, 4, 5], "factor": 1 + 2**-8}, "4 of 20480"),
        ({"codes": [0, 1, 2], "scales": [2], "factor": 1 + 2**-8}, "4 of 20480"),
        ({"codes": range(256, 384), "by": 2, "scales": [2], "factor": 1 + 2**-8}, "2 apart"),
    ],
)
def test_more_than_that_fails(want, change, message):
    with pytest.raises(AssertionError, match=message):
        check(nudged(want, **change), want)


def test_powers_of_two_and_packed_scales_must_be_equal(want):
    q = want[0]
    powers, words = np.ones((80, 2), np.float32), np.full((80, 1), 127, np.int32)
    for scale in (powers, words):
        check((q, scale), (q, scale.copy()))
    with pytest.raises(AssertionError, match="scales"):
        check((q, powers * np.float32(1 + 2**-7)), (q, powers))
    with pytest.raises(AssertionError, match="scales"):
        check((q, words + 1), (q, words))


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("gap", [0, 5])
def test_embedded_rows_have_the_address_the_strides_and_a_guard(backend, rng, offset, gap):
    rows = cases.activations(rng, 3, 8)
    placed = layouts.embedded(backend, rows, offset=offset, gap=gap)
    assert layouts.strides_of(placed.view) == (8 + gap, 1)
    assert layouts.address_of(placed.view) == layouts.address_of(placed.base) + 2 * offset
    assert (backend.bf16(placed.view).view(np.uint16) == rows.view(np.uint16)).all()
    guard = placed.guard(backend)
    assert guard.size == 2 * (offset + 3 * gap)
    assert (guard == layouts.GUARD).all()


@pytest.mark.parametrize(
    ("layout", "strides", "rows"),
    [("row", (5, 1), 6), ("column", (1, 6), 6), ("tma", (1, 8), 8), ("packed", (1, 8), 8)],
)
def test_scale_buffers_have_the_strides_of_their_layout(backend, layout, strides, rows):
    view, storage = layouts.scale_buffer(backend, 6, 5, layout)
    assert layouts.strides_of(view) == strides
    raw = backend.raw(view)
    assert raw.shape == ((6, 2) if layout == "packed" else (6, 5))
    assert (raw == (cases.POISON_WORD if layout == "packed" else cases.POISON_SCALE)).all()
    assert rows in backend.raw(storage).shape
