"""Plans of the expert sort: one launch up to a number of slots, three beyond."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumoe.plan import moe_align_block_size as align
from cumoe.plan.device import H200
from cumoe.store.source import kernels_root


def problem(num_slots: int, block_size: int = 64) -> align.Problem:
    return align.Problem(num_slots, block_size, 256, 256, "int32", has_map=False)


@given(st.integers(0, align.MAX_SLOTS_AT_ONCE), st.integers(1, 200))
def test_chunks_of_the_one_launch_hold_every_slot_and_a_thread_has_one(num_slots, num_sms):
    plan = align.plan(problem(num_slots), H200._replace(num_sms=num_sms))
    (step,) = plan.steps
    assert 1 <= plan.chunk_slots // align.WARP <= align.THREADS // align.WARP
    assert plan.chunk_slots % align.WARP == 0
    assert step.launch.grid * plan.chunk_slots >= num_slots
    assert (step.launch.grid - 1) * plan.chunk_slots <= num_slots
    assert not step.launch.overlap
    assert align.counts_bytes(plan, 256) == (0, 0)


def test_the_one_launch_fills_a_gpu_once():
    for num_slots in (1, 512, 4096, 8192, align.MAX_SLOTS_AT_ONCE):
        assert align.plan(problem(num_slots), H200).steps[0].launch.grid <= H200.num_sms


@pytest.mark.parametrize(
    ("num_slots", "block_size", "launches"),
    [
        (0, 1, 1),
        (align.MAX_SLOTS_AT_ONCE, 64, 1),
        (align.MAX_SLOTS_AT_ONCE + 1, 64, 3),
        (512, align.MAX_BLOCK_AT_ONCE, 1),
        (512, align.MAX_BLOCK_AT_ONCE + 1, 3),
    ],
)
def test_many_slots_or_tall_blocks_take_three(num_slots, block_size, launches):
    plan = align.plan(problem(num_slots, block_size), H200)
    assert len(plan.steps) == launches
    assert align.counts_bytes(plan, 8) == (plan.chunks * 32, 32 * (launches == 3))


def test_ctas_are_as_large_as_the_source_says():
    source = (kernels_root() / "moe_align_block_size.cu").read_text()
    assert re.findall(r"constexpr int THREADS = (\d+);", source) == [str(align.THREADS)]
