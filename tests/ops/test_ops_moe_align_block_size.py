"""The expert sort on every backend: exactly the answer of a plain loop, unused entries included."""

from __future__ import annotations

import numpy as np
import pytest

import cumoe
from cumoe.plan.moe_align_block_size import MAX_BLOCK_AT_ONCE, MAX_SLOTS_AT_ONCE
from tests.helpers import cases, oracles
from tests.helpers.backends import NumpyBackend
from tests.helpers.compare import assert_bitwise_equal

WIDE = [(1 << 32) + 3, (1 << 32), -(1 << 32) + 1, -(1 << 63), (1 << 63) - 1, 1 << 31, 4 + (1 << 40)]


def align(
    backend: NumpyBackend,
    topk_ids: np.ndarray,
    block_size: int,
    num_experts: int,
    expert_map: np.ndarray | None = None,
) -> list[np.ndarray]:
    results = cumoe.moe_align_block_size(
        backend.put(topk_ids),
        block_size,
        num_experts,
        None if expert_map is None else backend.put(expert_map),
    )
    return [backend.raw(r) for r in results]


def bound(num_slots: int, num_experts: int, block_size: int) -> int:
    """Length of sorted_token_ids."""
    most = min(num_slots + num_experts * (block_size - 1), num_slots * block_size)
    return most + -most % block_size


def check(
    backend: NumpyBackend,
    topk_ids: np.ndarray,
    block_size: int,
    num_experts: int,
    expert_map: np.ndarray | None = None,
) -> None:
    """Equal to the loop, unused entries included."""
    got = align(backend, topk_ids, block_size, num_experts, expert_map)
    want = oracles.align_by_loops(topk_ids, block_size, num_experts, expert_map)
    assert_aligned(got, *want, num_slots=topk_ids.size, num_experts=num_experts, block=block_size)


def check_against_sort(
    backend: NumpyBackend, topk_ids: np.ndarray, block_size: int, num_experts: int
) -> None:
    got = align(backend, topk_ids, block_size, num_experts)
    want = oracles.align_by_sort(topk_ids, block_size, num_experts)
    assert_aligned(got, *want, num_slots=topk_ids.size, num_experts=num_experts, block=block_size)


def assert_aligned(
    got: list[np.ndarray], ids, experts, used: int, *, num_slots: int, num_experts: int, block: int
) -> None:
    length = bound(num_slots, num_experts, block)
    slots, blocks = np.full(length, num_slots, np.int32), np.full(length // block, -1, np.int32)
    slots[:used], blocks[: used // block] = ids, experts
    want = (slots, blocks, np.array([used], np.int32))
    for name, a, b in zip(("slots", "experts", "used"), got, want, strict=True):
        assert_bitwise_equal(a, b, name)


def test_a_swapped_pair_would_fail(backend, rng):
    ids = cases.uniform(rng, 20, 8, 4)
    got = align(backend, ids, 16, 8)
    want = oracles.align_by_sort(ids, 16, 8)
    assert oracles.align_by_loops(ids, 16, 8)[0] == want[0].tolist()
    got = [a.copy() for a in got]
    got[0][[0, 1]] = got[0][[1, 0]]
    with pytest.raises(AssertionError, match="slots: 2 of"):
        assert_aligned(got, *want, num_slots=80, num_experts=8, block=16)


BY_HAND = {
    "one_expert": ([[0]] * 4, 1, 16, None, [0, 1, 2, 3] + [4] * 12, [0]),
    "invalid_ids": ([[0, -1], [5, 4], [7, 0]], 5, 4, None, [0, 5, 6, 6, 3, 6, 6, 6], [0, 4]),
    "map": ([[4, 0], [5, 4], [1, 2]], 8, 2, [-1] * 4 + [0, 1, 2, 3], [0, 3, 2, 6], [0, 1]),
    "nothing_local": ([[4, 0], [5, 4]], 8, 2, [-1] * 8, [], []),
    "duplicates": ([[0] * 8], 8, 16, None, list(range(8)) + [8] * 8, [0]),
    "257_experts": (
        [[256, 0], [256, 255]], 257, 4, None,
        [1, 4, 4, 4, 3, 4, 4, 4, 0, 2, 4, 4], [0, 255, 256],
    ),
    "duplicate_among_others": (
        [[121, 62, 117, 62, 32, 13]], 144, 1, None,
        [5, 4, 1, 3, 2, 0], [13, 32, 62, 62, 117, 121],
    ),
    "ranks_after_the_first": ([[2, 3], [0, 5], [2, 7]], 8, 1, [-1, -1, 0, 1, -1, -1, -1, -1],
                              [0, 4, 1], [0, 0, 1]),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_by_hand(backend, case, dtype):
    ids, num_experts, block_size, expert_map, want, want_experts = BY_HAND[case]
    topk_ids = np.array(ids, dtype)
    table = None if expert_map is None else np.array(expert_map, np.int32)
    slots, experts, used = align(backend, topk_ids, block_size, num_experts, table)
    assert len(slots) == bound(topk_ids.size, num_experts, block_size)
    assert slots[: len(want)].tolist() == want
    assert (slots[len(want) :] == topk_ids.size).all()
    assert experts[: len(want_experts)].tolist() == want_experts
    assert (experts[len(want_experts) :] == -1).all()
    assert used.tolist() == [len(want)]
    check(backend, topk_ids, block_size, num_experts, table)


@pytest.mark.parametrize("num_tokens", [20, 700])
@pytest.mark.parametrize("num_experts", [60, 72, 160, 288])
@pytest.mark.parametrize("block_size", [16, 64])
def test_few_and_many_slots(backend, rng, num_tokens, num_experts, block_size):
    """120 slots fit one chunk of the kernel, 4,200 do not."""
    ids = cases.zipf(rng, num_tokens, num_experts, 6)
    check_against_sort(backend, ids, block_size, num_experts)
    check(backend, ids, block_size, num_experts)


@pytest.mark.parametrize("num_experts", [1, 2, 31, 32, 33, 257, 1023, 1024, 1025, 2048, 4096])
def test_any_number_of_experts(backend, rng, num_experts):
    ids = rng.integers(0, num_experts, (150, 4)).astype(np.int32)
    ids[0] = num_experts - 1
    check(backend, ids, 16, num_experts)


@pytest.mark.parametrize("routing", cases.ROUTINGS)
@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 128])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_every_routing(backend, rng, routing, block_size, dtype):
    ids = cases.ROUTINGS[routing](rng, 97, 60, 6).astype(dtype)
    check(backend, ids, block_size, 60)


@pytest.mark.parametrize("routing", cases.ROUTINGS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_every_routing_with_a_map(backend, rng, routing, dtype):
    ids = cases.ROUTINGS[routing](rng, 97, 60, 6).astype(dtype)
    tables = {
        "first_rank": cases.local_map(60, 0, 20),
        "last_rank": cases.local_map(60, 40, 20),
        "interleaved": np.where(np.arange(60) % 3 == 1, np.arange(60) // 3, -1).astype(np.int32),
        "permuted": rng.permutation(60).astype(np.int32),
        "not_injective": (np.arange(60, dtype=np.int32) // 7),
        "out_of_range": np.where(np.arange(60) % 2, np.arange(60), 60 + np.arange(60)).astype(
            np.int32
        ),
        "very_negative": np.where(np.arange(60) % 2, np.arange(60), -(1 << 31)).astype(np.int32),
        "nothing": np.full(60, -1, np.int32),
    }
    for table in tables.values():
        check(backend, ids, 16, 60, table)


def test_wide_ids_are_tested_before_they_are_narrowed(backend):
    ids = np.array([[*WIDE, 3]], np.int64)
    assert align(backend, ids, 4, 8)[0][:4].tolist() == [7, 8, 8, 8]
    check(backend, ids, 4, 8)
    check(backend, ids, 4, 8, np.arange(8, dtype=np.int32)[::-1].copy())


@pytest.mark.parametrize("bad", [-1, -(1 << 31), 60, 61, 1 << 30, (1 << 31) - 1])
def test_invalid_ids_take_no_slot(backend, rng, bad):
    ids = cases.uniform(rng, 97, 60, 6)
    ids[rng.random(ids.shape) < 0.5] = bad
    check(backend, ids, 16, 60)
    check(backend, np.full((97, 6), bad, np.int32), 16, 60)
    check(backend, ids, 16, 60, cases.local_map(60, 10, 30))


@pytest.mark.parametrize("topk", [1, 8, 64])
@pytest.mark.parametrize("has_map", [False, True])
def test_no_tokens(backend, topk, has_map):
    table = np.arange(8, dtype=np.int32) if has_map else None
    slots, experts, used = align(backend, np.zeros((0, topk), np.int32), 16, 8, table)
    assert (slots.shape, experts.shape, used.tolist()) == ((0,), (0,), [0])
    assert {a.dtype for a in (slots, experts, used)} == {np.dtype(np.int32)}


def test_length_is_bounded_by_the_slots(backend):
    """4 tokens x topk 8, 256 experts, blocks of 16: 512, not 3,872."""
    ids = np.arange(32, dtype=np.int32).reshape(4, 8)
    assert len(align(backend, ids, 16, 256)[0]) == 512
    check(backend, ids, 16, 256)


@pytest.mark.parametrize("num_slots", [1, 5, 9, 10, 16, 17])
def test_length_is_rounded_up_to_whole_blocks(backend, num_slots):
    check(backend, np.zeros((num_slots, 2), np.int32), 8, 2)


def test_every_number_of_tokens(backend, rng):
    for num_tokens in range(1, 131):
        ids = cases.uniform(rng, num_tokens, 8, 6)
        slots = align(backend, ids, 16, 8)[0]
        real = slots[slots < ids.size]
        assert np.array_equal(np.sort(real), np.arange(ids.size)), num_tokens
        check(backend, ids, 16, 8)


@pytest.mark.parametrize("topk", [*range(1, 17), 33, 64])
def test_every_topk(backend, rng, topk):
    check(backend, cases.uniform(rng, 33, 72, topk), 16, 72)


@pytest.mark.parametrize("num_tokens", [1, 255, 256, 257, 511, 513, 4097, 32_767, 33_025])
def test_sizes_around_the_kernels_chunks(backend, rng, num_tokens):
    check_against_sort(backend, cases.uniform(rng, num_tokens, 160, 1), 16, 160)


@pytest.mark.parametrize("num_experts", [1, 256, 4096])
@pytest.mark.parametrize("hot", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("has_map", [False, True])
def test_one_launch_and_three_give_what_a_loop_gives(
    backend, rng, num_experts, hot, dtype, has_map
):
    """The most slots of one launch, and more; duplicates, wrong ids and one hot expert."""
    table = None
    if has_map:
        table = np.where(rng.random(num_experts) < 0.2, -1, rng.permutation(num_experts))
        table = table.astype(np.int32)
    for num_slots in (MAX_SLOTS_AT_ONCE, MAX_SLOTS_AT_ONCE + 8):
        ids = rng.integers(-2, num_experts + 2, (num_slots // 8, 8)).astype(dtype)
        ids[rng.random(ids.shape) < hot] = num_experts // 2
        check(backend, ids, 64, num_experts, table)


@pytest.mark.parametrize("block_size", [MAX_BLOCK_AT_ONCE, MAX_BLOCK_AT_ONCE + 1])
def test_tall_blocks(backend, rng, block_size):
    check(backend, cases.uniform(rng, 97, 60, 6), block_size, 60)


def test_one_hot_expert_with_many_slots(backend):
    check_against_sort(backend, np.full((4097, 16), 127, np.int32), 64, 128)


def test_the_same_ids_give_the_same_bytes(backend, rng):
    ids = cases.uniform(rng, 4097, 128, 16)
    first = align(backend, ids, 64, 128)
    for _ in range(5):
        for got, want in zip(align(backend, ids, 64, 128), first, strict=True):
            assert_bitwise_equal(got, want)


def test_ids_and_map_are_not_written(backend, rng):
    ids, expert_map = cases.with_minus_one(rng, 37, 60, 6), cases.local_map(60, 10, 20)
    placed, placed_map = backend.put(ids.copy()), backend.put(expert_map.copy())
    cumoe.moe_align_block_size(placed, 16, 60, placed_map)
    assert_bitwise_equal(backend.raw(placed), ids)
    assert_bitwise_equal(backend.raw(placed_map), expert_map)


def test_results_lie_where_the_ids_lie(backend):
    ids = backend.put(np.zeros((2, 2), np.int32))
    for result in cumoe.moe_align_block_size(ids, 16, 8):
        assert type(result) is type(ids)
        assert getattr(result, "device", "cpu") == getattr(ids, "device", "cpu")
