"""The expert filter of silu_and_mul_quant_fp8: other rows keep the bytes they had."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

import cumoe
from tests.helpers import cases
from tests.helpers.backends import NumpyBackend
from tests.helpers.compare import assert_activations_close, assert_bitwise_equal
from tests.helpers.layouts import padded_columns, scale_buffer
from tests.helpers.tolerances import SILU_CODE_SHARE


class Filter(NamedTuple):
    ids: list[list[int]]
    expert_map: list[int] | None
    num_experts: int | None
    rows: list[int]
    """Rows that are computed."""


FILTERS = {
    "ids": Filter([[0, -1], [2, 1], [-1, -1]], None, 4, [0, 2, 3]),
    "negative_only": Filter([[0, -1], [200, 1], [-5, -1]], None, None, [0, 2, 3]),
    "far_beyond": Filter([[8, 1 << 30], [3, 0]], None, 8, [2, 3]),
    "just_beyond": Filter([[4, 3], [5, 4]], None, 4, [1]),
    "smallest_int": Filter([[-(1 << 31), 3], [(1 << 31) - 1, 0]], None, 4, [1, 3]),
    "map": Filter([[0, 1], [2, 3], [4, -1]], [-1, 0, -1, 1], None, [1, 3]),
    "map_and_number": Filter([[0, 1], [2, 3], [4, 99]], [-1, 0, -1, 1], 4, [1, 3]),
    "map_beyond_its_length": Filter([[0, 1], [2, 3]], [4, 3, 99, -7], None, [1]),
    "nothing_local": Filter([[0, 1], [2, 3]], [-1] * 4, None, []),
    "nothing_valid": Filter([[-1] * 4] * 4, None, 4, []),
    "all_local": Filter([[0, 1], [2, 3]], None, 4, [0, 1, 2, 3]),
    "duplicates": Filter([[1, 1], [1, -1], [1, 1]], None, 2, [0, 1, 2, 4, 5]),
}
LAYOUTS = [("fp32", "row"), ("fp32", "column"), ("fp32", "tma"), ("ue8m0", "packed")]
WIDE = [(1 << 32) + 3, (1 << 32), -(1 << 32) + 1, -(1 << 63), (1 << 63) - 1, 1 << 31, 4 + (1 << 40)]


def check(
    backend: NumpyBackend,
    rng: np.random.Generator,
    ids: np.ndarray,
    rows: list[int],
    *,
    expert_map: list[int] | None = None,
    num_experts: int | None = None,
    scale_format: str = "fp32",
    scale_layout: str = "row",
) -> None:
    """The rows are computed as without a filter; NaN lies in all others and they are untouched."""
    skipped = [r for r in range(ids.size) if r not in rows]
    x = cases.activations(rng, ids.size, 1280)
    options = {"scale_format": scale_format, "scale_layout": scale_layout, "limit": 2.0}
    want_q, want_scale = cumoe.reference.silu_and_mul_quant_fp8(x, **options)
    x[skipped] = np.nan
    out = backend.put(cases.poisoned_codes(ids.size, 640))
    out_scale = scale_buffer(backend, ids.size, 5, scale_layout).view
    before = backend.raw(out_scale).copy()
    q, scale = cumoe.silu_and_mul_quant_fp8(
        backend.put(x),
        topk_ids=backend.put(ids),
        expert_map=None if expert_map is None else backend.put(np.array(expert_map, np.int32)),
        num_experts=num_experts,
        out=out,
        out_scale=out_scale,
        **options,
    )
    codes, got_scale = backend.codes(q), backend.raw(scale)
    assert_activations_close(
        (codes[rows], np.ascontiguousarray(got_scale[rows])),
        (want_q.view(np.uint8)[rows], np.ascontiguousarray(want_scale[rows])),
        SILU_CODE_SHARE,
    )
    assert (codes[skipped] == cases.POISON_CODE).all()
    assert_bitwise_equal(
        np.ascontiguousarray(got_scale[skipped]), np.ascontiguousarray(before[skipped])
    )


@pytest.mark.parametrize("case", FILTERS)
@pytest.mark.parametrize(("scale_format", "scale_layout"), LAYOUTS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_other_rows_keep_their_bytes(backend, rng, case, scale_format, scale_layout, dtype):
    f = FILTERS[case]
    check(
        backend, rng, np.array(f.ids, dtype), f.rows, expert_map=f.expert_map,
        num_experts=f.num_experts, scale_format=scale_format, scale_layout=scale_layout,
    )  # fmt: skip


@pytest.mark.parametrize("routing", cases.ROUTINGS)
@pytest.mark.parametrize("has_map", [False, True])
@pytest.mark.parametrize("num_tokens", [33, 301])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_every_routing(backend, rng, num_tokens, routing, has_map, dtype):
    """A GPU takes another kernel from 2,048 groups of 128 on: sizes lie on both sides."""
    ids = cases.ROUTINGS[routing](rng, num_tokens, 60, 6).astype(dtype)
    expert_map = cases.local_map(60, 7, 20) if has_map else None
    valid = (ids >= 0) & (ids < 60)
    if expert_map is not None:
        valid &= expert_map[np.where(valid, ids, 0)] >= 0
    check(
        backend, rng, ids, np.flatnonzero(valid).tolist(),
        expert_map=None if expert_map is None else expert_map.tolist(),
        num_experts=60,
    )  # fmt: skip


@pytest.mark.parametrize("valid", [0, 1, 31, 32, 33, 2047, 2048])
def test_few_rows_of_many(backend, rng, valid):
    """Any share of valid rows, wherever they lie."""
    ids = np.full(2049, -1, np.int32)
    rows = np.sort(rng.permutation(2049)[:valid])
    ids[rows] = rng.integers(0, 4, valid)
    for layout in ("row", "tma"):
        check(backend, rng, ids, rows.tolist(), num_experts=4, scale_layout=layout)


@pytest.mark.parametrize("num_rows", [1, 3, 5, 127, 450])
@pytest.mark.parametrize(("scale_format", "scale_layout"), [("fp32", "tma"), ("ue8m0", "packed")])
@pytest.mark.parametrize("filtered", [False, True])
def test_padding_is_zero(backend, rng, filtered, scale_format, scale_layout, num_rows):
    """In new scales, and with a filter that skips all rows: padding belongs to no row."""
    x = cases.activations(rng, num_rows, 1280)
    ids = np.full(num_rows, -1, np.int32)
    _, scale = cumoe.silu_and_mul_quant_fp8(
        backend.put(x),
        topk_ids=backend.put(ids) if filtered else None,
        scale_format=scale_format,
        scale_layout=scale_layout,
    )
    assert not padded_columns(backend, scale)[:, num_rows:].any()


@pytest.mark.parametrize("expert_map", [None, [3, 2, 1, 0]])
def test_wide_ids_are_tested_before_they_are_narrowed(backend, rng, expert_map):
    ids = np.array([*WIDE, 3], np.int64)
    check(backend, rng, ids, [len(WIDE)], expert_map=expert_map, num_experts=4)


def test_without_a_bound_only_negative_ids_are_invalid(backend, rng):
    ids = np.array([*WIDE, 3], np.int64)
    check(backend, rng, ids, np.flatnonzero(ids >= 0).tolist())


@pytest.mark.parametrize("shape", [(6,), (6, 1), (2, 3), (1, 6)])
def test_ids_may_have_any_shape(backend, rng, shape):
    ids = np.array([0, -1, 1, 4, 2, -1], np.int32).reshape(shape)
    check(backend, rng, ids, [0, 2, 4], num_experts=4)


def test_ids_and_map_are_not_written(backend, rng):
    ids, expert_map = cases.with_minus_one(rng, 5, 4, 2), cases.local_map(4, 1, 2)
    placed, placed_map = backend.put(ids.copy()), backend.put(expert_map.copy())
    x = backend.put(cases.activations(rng, 10, 512))
    cumoe.silu_and_mul_quant_fp8(x, topk_ids=placed, expert_map=placed_map)
    assert_bitwise_equal(backend.raw(placed), ids)
    assert_bitwise_equal(backend.raw(placed_map), expert_map)
