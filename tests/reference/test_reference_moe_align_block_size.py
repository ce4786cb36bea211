"""The expert sort against a plain loop and against answers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumoe.errors import ArgumentError, DTypeError
from cumoe.reference import moe_align_block_size
from tests.helpers import cases, oracles


def check(topk_ids, block_size, num_experts, expert_map=None) -> None:
    """The used part equals the loop's, the rest holds the sentinels, all lengths are the bound."""
    got_ids, got_experts, got_length = moe_align_block_size(
        topk_ids, block_size, num_experts, expert_map
    )
    ids, experts, length = oracles.align_by_loops(topk_ids, block_size, num_experts, expert_map)
    bound = min(topk_ids.size + num_experts * (block_size - 1), topk_ids.size * block_size)
    bound += -bound % block_size
    assert got_length.tolist() == [length]
    assert got_ids.tolist() == ids + [topk_ids.size] * (bound - length)
    assert got_experts.tolist() == experts + [-1] * (bound // block_size - len(experts))
    assert {a.dtype for a in (got_ids, got_experts, got_length)} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    ("ids", "num_experts", "block_size", "expert_map", "sorted_ids", "experts"),
    [
        ([[0]] * 4, 1, 16, None, [0, 1, 2, 3] + [4] * 12, [0]),
        ([[0, -1], [5, 4], [7, 0]], 5, 4, None, [0, 5, 6, 6, 3, 6, 6, 6], [0, 4]),
        ([[4, 0], [5, 4], [1, 2]], 8, 2, [-1] * 4 + [0, 1, 2, 3], [0, 3, 2, 6], [0, 1]),
        ([[0] * 8], 8, 16, None, list(range(8)) + [8] * 8, [0]),
        (
            [[256, 0], [256, 255]],
            257,
            4,
            None,
            [1, 4, 4, 4, 3, 4, 4, 4, 0, 2, 4, 4],
            [0, 255, 256],
        ),
    ],
    ids=["one_expert", "invalid_ids", "map", "duplicates", "257_experts"],
)
def test_by_hand(ids, num_experts, block_size, expert_map, sorted_ids, experts):
    topk_ids = np.array(ids, np.int32)
    table = None if expert_map is None else np.array(expert_map, np.int32)
    got = moe_align_block_size(topk_ids, block_size, num_experts, table)
    used = len(sorted_ids)
    assert got[0][:used].tolist() == sorted_ids
    assert (got[0][used:] == topk_ids.size).all()
    assert got[1][: len(experts)].tolist() == experts
    assert (got[1][len(experts) :] == -1).all()
    assert got[2].tolist() == [used]


@pytest.mark.parametrize("routing", cases.ROUTINGS)
@pytest.mark.parametrize("num_experts", [8, 60, 160, 257])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_every_routing_equals_the_loop(rng, routing, num_experts, block_size):
    topk_ids = cases.ROUTINGS[routing](rng, 37, num_experts, 6)
    check(topk_ids, block_size, num_experts)
    check(topk_ids, block_size, num_experts, cases.local_map(num_experts, 3, num_experts // 2))


@given(
    st.integers(1, 8),
    st.lists(st.lists(st.integers(-2, 9), min_size=3, max_size=3), max_size=12),
    st.integers(1, 9),
    st.data(),
)
def test_any_ids_and_map_equal_the_loop(num_experts, ids, block_size, data):
    topk_ids = np.array(ids, np.int32).reshape(-1, 3)
    entries = st.lists(st.integers(-3, 12), min_size=num_experts, max_size=num_experts)
    expert_map = np.array(data.draw(entries), np.int32)
    check(topk_ids, block_size, num_experts)
    check(topk_ids, block_size, num_experts, expert_map)


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 130])
def test_every_slot_occurs_once(rng, num_tokens):
    topk_ids = cases.uniform(rng, num_tokens, 8, 6)
    sorted_ids, _, _ = moe_align_block_size(topk_ids, 16, 8)
    assert sorted(sorted_ids[sorted_ids < topk_ids.size]) == list(range(topk_ids.size))


def test_wide_ids_are_tested_before_they_are_narrowed(rng):
    wide = cases.wrapped_ids(cases.uniform(rng, 9, 8, 4), 8)
    assert (wide.astype(np.int32) < 8).all()
    check(wide, 4, 8)
    assert moe_align_block_size(np.array([[(1 << 32) + 3]]), 4, 8)[2] == 0


def test_length_is_bounded_by_the_slots():
    topk_ids = np.arange(32, dtype=np.int32).reshape(4, 8)
    assert len(moe_align_block_size(topk_ids, 16, 256)[0]) == 512


def test_length_is_rounded_up_to_whole_blocks():
    topk_ids = np.zeros((5, 2), np.int32)
    sorted_ids, expert_ids, _ = moe_align_block_size(topk_ids, 8, 2)
    assert (len(sorted_ids), len(expert_ids)) == (24, 3)


def test_nothing_local():
    topk_ids = np.zeros((3, 2), np.int32)
    sorted_ids, expert_ids, length = moe_align_block_size(topk_ids, 4, 8, np.full(8, -1, np.int32))
    assert (sorted_ids == 6).all()
    assert (expert_ids == -1).all()
    assert length == 0


def test_no_tokens():
    sorted_ids, expert_ids, length = moe_align_block_size(np.zeros((0, 8), np.int32), 16, 8)
    assert (sorted_ids.shape, expert_ids.shape, length.tolist()) == ((0,), (0,), [0])


def test_4096_experts(rng):
    check(cases.uniform(rng, 50, 4096, 8), 16, 4096)


def test_a_map_entry_beyond_the_map_counts_as_elsewhere():
    topk_ids = np.array([[0, 1]], np.int32)
    got = moe_align_block_size(topk_ids, 1, 2, np.array([2, 1], np.int32))
    assert [a.tolist() for a in got] == [[1, 2], [1, -1], [1]]


@pytest.mark.parametrize(
    ("topk_ids", "block_size", "num_experts", "expert_map", "message"),
    [
        (np.zeros((2, 2), np.int32), 0, 4, None, "block_size"),
        (np.zeros((2, 2), np.int32), 4, 0, None, "num_experts"),
        (np.zeros(4, np.int32), 4, 4, None, "topk_ids"),
        (np.zeros((2, 2), np.int32), 4, 4, np.zeros(3, np.int32), "expert_map"),
        (np.zeros((2, 2), np.int32), 4, 4, np.zeros((2, 2), np.int32), "expert_map"),
    ],
)
def test_refuses_arguments_that_do_not_fit(topk_ids, block_size, num_experts, expert_map, message):
    with pytest.raises(ArgumentError, match=message):
        moe_align_block_size(topk_ids, block_size, num_experts, expert_map)


def test_refuses_other_element_types():
    with pytest.raises(DTypeError, match="topk_ids"):
        moe_align_block_size(np.zeros((2, 2), np.float32), 4, 4)
    with pytest.raises(DTypeError, match="expert_map"):
        moe_align_block_size(np.zeros((2, 2), np.int32), 4, 4, np.zeros(4, np.int16))
