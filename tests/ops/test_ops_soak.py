"""The soak's own machinery, on the CPU: its pool, its steps, and what it notices."""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache

import pytest
import torch

from tests.helpers import soak_pool
from tests.helpers.backends import TorchBackend
from tests.helpers.soak import Cpu, Soak, differs, kinds, resident_bytes, slope

SMALL = (1, 8)


@cache
def small_pool() -> list[soak_pool.Case]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak_pool, "TOKENS", SMALL)
        return soak_pool.pool("cpu")


def case_of(op: str, **options) -> soak_pool.Case:
    """A case of the op that has, or has not, some of the arguments."""
    found = (c for c in small_pool() if c.op == op)
    return next(c for c in found if all((k in c.arguments) == v for k, v in options.items()))


def corrupted(case: soak_pool.Case, row: int = 0) -> soak_pool.Case:
    """One bit of the last result's row is another one."""
    case = copy.deepcopy(case)
    case.want[-1][row, -1] ^= 1
    return case


def test_mixed_calls_are_all_right():
    soak = Soak(Cpu(), small_pool())
    soak.run(250)
    assert soak.mismatches() == 0
    assert len(soak.host_us) == soak.seen.total() == 250
    assert set(soak.seen) == set(kinds(soak))


@pytest.mark.parametrize("op", soak_pool.OUTPUTS)
def test_a_corrupted_expectation_is_noticed_in_every_framework(op):
    soak = Soak(Cpu(), [corrupted(case_of(op))])
    soak.run(40)
    assert soak.mismatches() == 40
    assert set(soak.seen) == set(kinds(soak))


def test_the_pool_is_large_and_holds_every_op_alike():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak_pool, "_expect", lambda case, device: None)
        found = soak_pool.pool("cpu")
    assert Counter(case.op for case in found) == dict.fromkeys(soak_pool.OUTPUTS, 16)


def test_skipped_rows_may_hold_anything_and_others_may_not():
    case = next(c for c in small_pool() if c.kept is not None and not c.kept.all() and c.kept.any())
    put = TorchBackend("cpu").put
    results = soak_pool.call(case.op, case.placed(put))
    skipped, kept = (int(case.kept.int().argmin()), int(case.kept.int().argmax()))
    assert not differs(corrupted(case, skipped), results)
    assert differs(corrupted(case, kept), results)


def test_a_wrong_result_is_judged_before_it_is_expected(monkeypatch):
    right = soak_pool.call

    def wrong(op, arguments):
        results = right(op, arguments)
        results[0].view(torch.uint8).view(-1)[1] ^= 0x40
        return results

    monkeypatch.setattr(soak_pool, "call", wrong)
    for op in soak_pool.OUTPUTS:
        case = copy.deepcopy(next(c for c in small_pool() if c.op == op and c.kept is None))
        with pytest.raises(AssertionError):
            soak_pool._expect(case, "cpu")


def test_outputs_of_the_caller_are_poisoned():
    outputs = case_of("per_token_group_quant_fp8", scale_layout=False).outputs()
    assert {name: set(t.flatten().tolist()) for name, t in outputs.items()} == {
        "out": {123}, "out_scale": {123.0},
    }  # fmt: skip
    assert case_of("per_token_group_quant_fp8", scale_layout=True).outputs() == {}


def test_memory_that_grows_has_a_slope():
    assert slope([5.0, 5.0, 5.0, 5.0]) == pytest.approx(0)
    assert slope([5.0, 7.0, 9.0]) == pytest.approx(2)
    before = resident_bytes()
    held = torch.ones(1 << 26, dtype=torch.uint8)
    assert resident_bytes() - before > 1 << 25
    del held
