"""Sums over the slots of a token where few tokens run: experts again and again, any neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pytest

import cumoe
from cumoe.plan import experts_decode
from cumoe.plan import fused_experts_fp8 as planning
from cumoe.plan.device import H200
from cumoe.plan.silu_and_mul_quant_fp8 import BF16_CLAMP
from tests.helpers import cases, tolerances
from tests.helpers.backends import TorchBackend
from tests.helpers.compare import assert_bitwise_equal, assert_rows_close
from tests.helpers.layers import (
    Layer,
    Tokens,
    alone,
    compile_all,
    few_tokens_only,
    random_layer,
    run,
)

DEVICE, LIMIT = "cuda", 10.0


class Shape(NamedTuple):
    E: int
    topk: int
    K: int
    N: int

    @property
    def most(self) -> int:
        """Tokens of the last call of few."""
        return max(planning.few_tokens(*self))

    @property
    def counts(self) -> tuple[int, ...]:
        """Of tokens, one in each regime and the last."""
        fewest, *ends = planning.few_tokens(*self)
        return tuple(sorted({max(fewest + 1, end - 3) for end in ends} | {self.most}))

    def problem(self, count: int) -> planning.Problem:
        return planning.Problem(
            count, self.K, self.N, self.E, self.E, self.topk, "int32", "fp32", False, "fp32",
            BF16_CLAMP, False, False, True, True,
        )  # fmt: skip


SHAPES = {
    "one_pass": Shape(64, 8, 1280, 256),
    "three_passes": Shape(9, 8, 17_024, 128),
    "sums_outside": Shape(256, 2, 8192, 256),
}
EVERY_CALL = pytest.mark.parametrize(
    ("name", "count"), [(name, count) for name, s in SHAPES.items() for count in s.counts]
)


def test_the_shapes_reach_what_the_kernel_tells_apart():
    plans = {
        name: [experts_decode.plan(s.problem(n), H200).down for n in s.counts]
        for name, s in SHAPES.items()
    }
    assert {d.passes for d in plans["one_pass"]} == {1}
    assert {d.passes for d in plans["three_passes"]} == {3}
    assert plans["sums_outside"][-1].shared_tokens < SHAPES["sums_outside"].most
    assert {dict(d.step.kernel.constants)["N_TILES"] for ds in plans.values() for d in ds} == {
        1, 2, 4
    }  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> None:
    compile_all(s.problem(count) for s in SHAPES.values() for count in s.counts)


@pytest.fixture
def only_few(compiled) -> Iterator[None]:
    with few_tokens_only():
        yield


@lru_cache(1)
def layer_of(shape: Shape) -> Layer:
    return random_layer(shape.E, shape.K, shape.N, DEVICE)


def tokens(shape: Shape, count: int, ids: np.ndarray) -> Tokens:
    rng = np.random.default_rng(count)
    x = cases.activations(rng, count, shape.K)
    return Tokens(x, ids.astype(np.int32), cases.router_weights(rng, ids))


def result(shape: Shape, t: Tokens) -> np.ndarray:
    return TorchBackend(DEVICE).bf16(run(layer_of(shape), t, DEVICE, swiglu_limit=LIMIT))


def repeated(shape: Shape, count: int) -> np.ndarray:
    """Experts that a token has up to topk times, not side by side."""
    rng = np.random.default_rng(7)
    few = rng.integers(0, shape.E, (count, 1 + shape.topk // 3))
    return np.take_along_axis(few, rng.integers(0, few.shape[1], (count, shape.topk)), 1)


@pytest.mark.gpu
@EVERY_CALL
def test_an_eighth_of_an_expert_eight_times_is_the_expert(only_few, name, count):
    """To the bit, as the parts are powers of two; on one expert and on many, so in any lanes."""
    shape = SHAPES[name]
    rng = np.random.default_rng(count)
    for experts in (1, 3, shape.E):
        of_token = rng.integers(0, experts, (count, 1))
        t = tokens(shape, count, np.repeat(of_token, shape.topk, 1))
        parts = t._replace(weights=np.full_like(t.weights, 1 / shape.topk))
        once = t._replace(ids=t.ids.copy(), weights=np.ones_like(t.weights))
        once.ids[:, 1:] = -1
        want = result(shape, once)
        assert want.astype(np.float32).any(axis=1).all()
        assert_bitwise_equal(result(shape, parts), want, f"{experts} experts")


@pytest.mark.gpu
@EVERY_CALL
def test_repeated_experts_equal_the_reference(only_few, name, count):
    shape = SHAPES[name]
    t = tokens(shape, count, repeated(shape, count))
    got = result(shape, t)
    rows = np.unique(np.linspace(0, count - 1, 4).astype(int))
    want = alone(layer_of(shape), t.of(rows)).run(
        cumoe.reference.fused_experts_fp8, swiglu_limit=LIMIT
    )
    bound = tolerances.wgmma(shape.K, shape.N).row
    assert_rows_close(got[rows], want, bound)
    changed = t.weights.copy()
    changed[rows[-1], -1] += 0.2
    with pytest.raises(AssertionError, match=r"1 of \d+ rows are off"):
        assert_rows_close(result(shape, t._replace(weights=changed))[rows], want, bound)


@pytest.mark.gpu
@EVERY_CALL
def test_one_token_names_its_lowest_expert_twice(only_few, name, count):
    """Wherever its slots lie among the others: twice a quarter, from 0 on, is a half to the bit."""
    shape = SHAPES[name]
    rng = np.random.default_rng(count)
    ids = np.sort(cases.uniform(rng, count, shape.E, shape.topk), axis=1)
    t = tokens(shape, count, ids)
    for token in np.unique(np.linspace(0, count - 1, 24).astype(int)):
        twice = t._replace(ids=t.ids.copy(), weights=t.weights.copy())
        twice.ids[token, 1], twice.weights[token, :2] = ids[token, 0], 1 / 4
        once = twice._replace(ids=twice.ids.copy(), weights=twice.weights.copy())
        once.ids[token, 1], once.weights[token, :2] = -1, 1 / 2
        assert_bitwise_equal(result(shape, twice)[token], result(shape, once)[token], f"{token}")


@pytest.mark.gpu
@EVERY_CALL
@pytest.mark.parametrize("routing", ["repeated", "uniform"])
def test_a_tokens_bytes_do_not_depend_on_its_neighbours(only_few, name, count, routing):
    """At other places, among fewer tokens, and with other experts beside it."""
    shape = SHAPES[name]
    rng = np.random.default_rng(count)
    if routing == "repeated":
        ids = repeated(shape, count)
    else:
        ids = cases.uniform(rng, count, shape.E, shape.topk)
    t = tokens(shape, count, ids)
    want = result(shape, t)
    order = rng.permutation(count)
    assert_bitwise_equal(result(shape, t.of(order)), want[order], "in another order")
    least = shape.counts[0]
    some = np.sort(order[:least])
    assert_bitwise_equal(result(shape, t.of(some)), want[some], f"{least} of them")
    others = t.ids.copy()
    others[some[0] + 1 :: 2] = others[some[0]]
    keep = (others == t.ids).all(axis=1)
    assert keep[some[0]]
    got = result(shape, t._replace(ids=others))
    assert_bitwise_equal(got[keep], want[keep], "beside others")


@pytest.mark.gpu
@EVERY_CALL
def test_slots_of_other_experts_may_come_in_any_order(only_few, name, count):
    """The sum runs over the experts, ascending (docs/numerics.md)."""
    shape = SHAPES[name]
    rng = np.random.default_rng(count)
    t = tokens(shape, count, cases.uniform(rng, count, shape.E, shape.topk))
    by_token = np.argsort(rng.random(t.ids.shape), axis=1)
    shuffled = t._replace(
        ids=np.take_along_axis(t.ids, by_token, 1),
        weights=np.take_along_axis(t.weights, by_token, 1),
    )
    assert (shuffled.ids != t.ids).any()
    assert_bitwise_equal(result(shape, shuffled), result(shape, t))
