"""Ten thousand mixed calls on a GPU: all right, and nothing grows."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from statistics import median

import pytest
import torch

from cumoe.launch import lending
from tests.helpers import soak_pool
from tests.helpers.soak import Gpu, Soak, kinds, resident_bytes, slope

pytestmark = pytest.mark.gpu

WARM_UP, CALLS, SAMPLED = 2_000, 10_000, 500
CAPTURES_END = 2_500
"""Until then graphs are captured: each leaves memory with the process, with torch's own ops too."""
THOUSAND = 1_000
MAX_HOST_RATIO = 1.3
MAX_RESIDENT_SLOPE = 1 << 10
"""Bytes for a call."""


@pytest.fixture(scope="module")
def pool() -> list[soak_pool.Case]:
    return soak_pool.pool("cuda")


def at_rest(soak: Soak) -> tuple[int, int]:
    """Bytes that torch and CuPy have given out while nothing is under way."""
    import cupy

    soak.drop()
    gc.collect()
    lending.sweep()
    return torch.cuda.memory_allocated(), cupy.get_default_memory_pool().used_bytes()


def test_ten_thousand_calls(pool):
    soak = Soak(Gpu(), pool)
    soak.run(WARM_UP)
    start = at_rest(soak)
    soak.host_us.clear()
    resident: list[float] = []
    for done in range(0, CALLS, SAMPLED):
        soak.run(SAMPLED, captures=done < CAPTURES_END)
        resident.append(resident_bytes())
    assert soak.mismatches() == 0
    assert set(soak.seen) == set(kinds(soak))
    assert at_rest(soak) == start
    assert len(soak.host_us) == CALLS
    assert slope(resident[CAPTURES_END // SAMPLED :]) / SAMPLED < MAX_RESIDENT_SLOPE, resident
    first, last = soak.host_us[:THOUSAND], soak.host_us[-THOUSAND:]
    assert median(last) < MAX_HOST_RATIO * median(first), (median(first), median(last))


def _corrupted(case: soak_pool.Case) -> soak_pool.Case:
    case = copy.deepcopy(case)
    case.want[-1][0, -1] ^= 1
    return case


def _first(pool: list[soak_pool.Case], op: str) -> soak_pool.Case:
    is_plain: Callable[[soak_pool.Case], bool] = lambda c: c.op == op and c.kept is None  # noqa: E731
    return next(filter(is_plain, pool))


@pytest.mark.parametrize("op", soak_pool.OUTPUTS)
def test_a_corrupted_expectation_is_noticed_in_every_framework(pool, op):
    soak = Soak(Gpu(), [_corrupted(_first(pool, op))])
    soak.run(60)
    assert soak.mismatches() == 60
    assert set(soak.seen) == set(kinds(soak))
