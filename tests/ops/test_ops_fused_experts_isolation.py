"""What a token gets depends on its own row, its slots and their experts, and on nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import cumoe
from tests.helpers import cases, tolerances
from tests.helpers.calls import fused_experts_on
from tests.helpers.cases import ExpertsCase
from tests.helpers.compare import assert_bitwise_equal, assert_rows_close

E = 8
FEWEST, FEW, MANY = 7, 16, 150
"""Tokens: with topk 4 and 8 experts, narrow and wide tiles on a GPU."""
SIZES = pytest.mark.parametrize("num_tokens", [FEWEST, FEW, MANY])
WIDE = {"wraps_to_3": (1 << 32) + 3, "wraps_to_0": 1 << 40, "wraps_to_negative": 1 << 31}
BAD_IDS = {"minus_one": -1, "first_beyond": E, "far_beyond": 1 << 30, "smallest": -(1 << 31)}


def small_case(rng: np.random.Generator, num_tokens: int, routing: str = "uniform") -> ExpertsCase:
    return cases.experts_case(
        rng, routing=routing, num_tokens=num_tokens, num_experts=E, intermediate=128, hidden=256
    )


def other_rows(num_tokens: int, row: int) -> np.ndarray:
    return np.arange(num_tokens) != row


@SIZES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("routing", ["one_expert", "uniform"])
def test_a_bad_row_spares_the_rows_that_share_its_experts(backend, rng, bad, routing, num_tokens):
    case = small_case(rng, num_tokens, routing)
    clean = case.run(fused_experts_on(backend))
    for row in (0, num_tokens // 2, num_tokens - 1):
        x = case.x.copy()
        x[row] = bad
        got = replace(case, x=x).run(fused_experts_on(backend))
        keep = other_rows(num_tokens, row)
        assert_bitwise_equal(got[keep], clean[keep])
        assert not np.isfinite(got[row].astype(np.float32)).any()


@SIZES
def test_one_bad_value_reaches_its_whole_row_and_no_other(backend, rng, num_tokens):
    case = small_case(rng, num_tokens)
    clean = case.run(fused_experts_on(backend))
    case.x[2, 200] = np.nan
    got = case.run(fused_experts_on(backend))
    assert np.isnan(got[2].astype(np.float32)).all()
    keep = other_rows(num_tokens, 2)
    assert_bitwise_equal(got[keep], clean[keep])


def all_bad_slots(case: ExpertsCase, row: int, bad_id: int) -> None:
    """The row has no valid id and nothing but NaN and infinity besides."""
    case.ids[row] = bad_id
    case.weights[row] = np.nan
    case.weights[row, 0] = np.inf
    case.x[row] = np.nan


@SIZES
@pytest.mark.parametrize("bad", [*BAD_IDS, *WIDE])
def test_a_token_without_an_expert_is_exactly_zero(backend, rng, bad, num_tokens):
    case = small_case(rng, num_tokens)
    if bad in WIDE:
        case.ids = case.ids.astype(np.int64)
    clean = case.run(fused_experts_on(backend))
    all_bad_slots(case, 3, {**BAD_IDS, **WIDE}[bad])
    got = case.run(fused_experts_on(backend))
    assert (got[3].view(np.uint16) == 0).all()
    keep = other_rows(num_tokens, 3)
    assert_bitwise_equal(got[keep], clean[keep])


def test_no_token_has_an_expert(backend, rng):
    case = small_case(rng, MANY)
    for row in range(MANY):
        all_bad_slots(case, row, -1)
    assert (case.run(fused_experts_on(backend)).view(np.uint16) == 0).all()


@SIZES
@pytest.mark.parametrize("dtype", [np.float32, np.float16, cases.BF16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("why", [*BAD_IDS, *WIDE, "map"])
def test_weights_of_skipped_slots_do_not_count(backend, rng, why, dtype, num_tokens):
    """Select, do not multiply by zero: a skipped slot's weight may be NaN or infinite."""
    case = small_case(rng, num_tokens)
    case.weights = case.weights.astype(dtype)
    table = np.arange(E, dtype=np.int32)
    table[5] = -1
    skipped = case.ids == 5
    if why != "map":
        case.ids = case.ids.astype(np.int64 if why in WIDE else np.int32)
        case.ids[skipped] = {**BAD_IDS, **WIDE}[why]
    assert skipped.any()
    zeroed, wild = case.weights.copy(), case.weights.copy()
    zeroed[skipped] = 0
    wild[skipped] = np.where(rng.random(int(skipped.sum())) < 0.5, np.nan, -np.inf)
    runs = [
        replace(case, weights=w).run(fused_experts_on(backend), expert_map=table)
        for w in (case.weights, zeroed, wild)
    ]
    assert np.isfinite(runs[0].astype(np.float32)).all()
    assert_bitwise_equal(runs[1], runs[0])
    assert_bitwise_equal(runs[2], runs[0])
    want = replace(case, weights=case.weights).run(
        cumoe.reference.fused_experts_fp8, expert_map=table
    )
    assert_rows_close(runs[0], want, tolerances.experts_row(num_tokens, 4, 256, 128))


@SIZES
@pytest.mark.parametrize("what", ["w1_scale", "w2_scale", "w1", "w2"])
@pytest.mark.parametrize("expert", [0, 3, E - 1])
def test_nan_in_one_expert_stays_with_its_tokens(backend, rng, expert, what, num_tokens):
    case = small_case(rng, num_tokens)
    case.ids[0] = [(expert + 1 + j) % E for j in range(4)]
    clean = case.run(fused_experts_on(backend))
    array = getattr(case.experts, what).copy()
    array[expert] = np.nan
    got = replace(case, experts=case.experts._replace(**{what: array})).run(
        fused_experts_on(backend)
    )
    touched = (case.ids == expert).any(axis=1)
    assert touched.any()
    assert not touched.all()
    assert_bitwise_equal(got[~touched], clean[~touched])
    assert np.isnan(got[touched].astype(np.float32)).all()


@SIZES
def test_other_tokens_do_not_matter(backend, rng, num_tokens):
    """Tokens have the same bytes among others, as long as the same kernels take them."""
    case = small_case(rng, num_tokens, "with_duplicates")
    got = case.run(fused_experts_on(backend))
    least = {FEWEST: 1, FEW: 9, MANY: 8 * E // 4 + 1}[num_tokens]
    for first in (0, 1, num_tokens - least):
        some = slice(first, first + least)
        assert_bitwise_equal(case.tokens(some).run(fused_experts_on(backend)), got[some])


RANKS = {
    "two": [list(range(4)), list(range(4, 8))],
    "four": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "interleaved": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "uneven": [[3], [0, 1, 2, 4, 5, 6, 7]],
    "permuted": [[7, 2, 5], [0, 6, 1, 4, 3]],
}


@SIZES
@pytest.mark.parametrize("split", RANKS)
def test_ranks_add_up_to_the_whole(backend, rng, split, num_tokens):
    case = small_case(rng, num_tokens)
    case.ids[1] = -1
    case.ids[2] = [0, 0, 0, 1]
    whole = case.run(fused_experts_on(backend)).astype(np.float32)
    tolerance = tolerances.experts_row(num_tokens, 4, 256, 128)
    assert_rows_close(whole, case.run(cumoe.reference.fused_experts_fp8), tolerance, "the whole")
    total = np.zeros_like(whole)
    for experts in RANKS[split]:
        table = np.full(E, -1, np.int32)
        table[experts] = np.arange(len(experts))
        rank = replace(case, experts=case.experts.of(experts))
        got = rank.run(fused_experts_on(backend), expert_map=table)
        want = rank.run(cumoe.reference.fused_experts_fp8, expert_map=table)
        assert_rows_close(got, want, tolerance, f"rank of {experts}")
        absent = ~np.isin(case.ids, experts).any(axis=1)
        assert (got[absent].view(np.uint16) == 0).all()
        total += got.astype(np.float32)
    assert_rows_close(total, whole, tolerances.MMA_ROW, "the sum of the ranks")


@pytest.mark.parametrize("entry", [4, 5, 1 << 30, (1 << 31) - 1, -1, -2, -(1 << 31)])
def test_map_entries_beyond_the_local_experts_are_elsewhere(backend, rng, entry):
    case = small_case(rng, FEW)
    case.experts = case.experts.of(slice(0, 4))
    elsewhere = np.array([0, 1, 2, 3, -1, -1, -1, -1], np.int32)
    want = case.run(fused_experts_on(backend), expert_map=elsewhere)
    table = np.where(elsewhere < 0, entry, elsewhere).astype(np.int32)
    assert_bitwise_equal(case.run(fused_experts_on(backend), expert_map=table), want)


def test_a_map_with_nothing_local(backend, rng):
    case = small_case(rng, MANY)
    case.x[:], case.weights[:] = np.nan, np.nan
    got = case.run(fused_experts_on(backend), expert_map=np.full(E, -1, np.int32))
    assert (got.view(np.uint16) == 0).all()


def test_more_ids_than_local_experts(backend, rng):
    """A rank of 4 experts among 300."""
    case = small_case(rng, FEW)
    case.experts = case.experts.of(slice(0, 4))
    case.ids = rng.integers(-1, 301, case.ids.shape).astype(np.int32)
    case.ids[:, 0] = 200 + np.arange(FEW) % 4
    table = cases.local_map(300, 200, 4)
    got = case.run(fused_experts_on(backend), expert_map=table, num_experts=300)
    want = case.run(cumoe.reference.fused_experts_fp8, expert_map=table)
    assert want.astype(np.float32).any(axis=1).all()
    assert_rows_close(got, want, tolerances.experts_row(FEW, 4, 256, 128))
