"""What the sanitizers see: every kernel, and both sides of what is decided when it is compiled."""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from bench import sanitize
from bench.digest import kernel_stems
from bench.sanitize import EXPERTS, Experts
from cumoe.ops import _experts_inputs
from cumoe.plan import fused_experts_fp8 as planning
from cumoe.plan.device import H200
from cumoe.plan.enumerate import steps_in

SWITCHES = {
    "ALIGNED": {0, 1}, "BLOCK_M": {16, 64}, "CLAMP": {0, 1, 2}, "IDS": {1, 2}, "ITEM_TILES": {1, 2},
    "MAP": {0, 1}, "N_TILES": {1, 2, 4}, "RESIDENT": {0, 1}, "SCALED": {0, 1}, "TILES": {1, 2, 3},
    "UE8M0": {0, 1},
}  # fmt: skip
"""Values of a constant between which a kernel of the experts decides."""
ALONE = "silu_and_mul_quant_fp8"
"""Runs by itself too, with its own values of these."""


def seen(cases: tuple[Experts, ...] = EXPERTS) -> dict[str, dict[str, set[int]]]:
    """Values of each constant, by kernel."""
    found: dict[str, dict[str, set[int]]] = {}
    for case in cases:
        for step in steps_in(planning.plan(case.problem, H200)):
            constants = found.setdefault(step.kernel.stem, defaultdict(set))
            for name, value in step.kernel.constants:
                constants[name].add(value)
    return found


def missing(found: dict[str, dict[str, set[int]]]) -> dict[str, set[int]]:
    return {
        f"{stem} {name}": SWITCHES[name] - values
        for stem, constants in found.items()
        for name, values in constants.items()
        if stem != ALONE and SWITCHES.get(name, set()) - values
    }


def test_every_kernel_is_seen():
    assert set(seen()) == set(kernel_stems())


def test_both_sides_of_every_decision_are_seen():
    assert missing(seen()) == {}


@pytest.fixture
def cupy(monkeypatch):
    """CuPy by NumPy, on whose arrays the reference computes."""
    cuda = SimpleNamespace(
        set_allocator=lambda allocator: None,
        memory=SimpleNamespace(_malloc=None),
        runtime=SimpleNamespace(deviceSynchronize=lambda: None),
    )
    fake = SimpleNamespace(asarray=np.asarray, cuda=cuda)
    monkeypatch.setitem(sys.modules, "cupy", fake)


@pytest.mark.usefixtures("cupy")
def test_the_calls_are_those_whose_kernels_are_counted(monkeypatch):
    op, called = sys.modules["cumoe.ops.fused_experts_fp8"], []

    def checked(*call):
        result = _experts_inputs.checked(*call)
        called.append(result.problem)
        return result

    monkeypatch.setattr(op, "checked", checked)
    op._checked.cache_clear()
    sanitize.workload()
    assert called == [case.problem for case in EXPERTS]


@pytest.mark.parametrize("case", EXPERTS)
def test_cases_are_small(case):
    assert (case.local or case.E) * 3 * case.K * case.N < 1 << 27
    assert case.M * case.topk <= 2000


def test_a_decision_that_is_not_seen_is_told():
    aligned = tuple(case for case in EXPERTS if not case.out_gap)
    assert missing(seen(aligned))["moe_sum ALIGNED"] == {0}
