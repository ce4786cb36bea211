"""The fused experts on every backend: answers by hand, the reference, and float64."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

import cumoe
from cumoe.reference.exact import fused_experts_float64
from tests.helpers import cases, tolerances
from tests.helpers.backends import NumpyBackend
from tests.helpers.calls import fused_experts_on
from tests.helpers.cases import BF16, E4M3, ExpertsCase, ExpertWeights
from tests.helpers.compare import assert_bitwise_equal, assert_rows_close, assert_total_close

ODD_M = (1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129)


class Answers(NamedTuple):
    case: ExpertsCase
    want: np.ndarray
    """[M, K] bf16 of the reference."""
    exact: np.ndarray
    """[M, K] float64 without any rounding."""


@cache
def answers(options: tuple[tuple[str, Any], ...] = (), **shape: Any) -> Answers:
    """A random case and what it should give with these options, worked out once."""
    case = cases.experts_case(np.random.default_rng(11), **shape)
    return answers_to(case, **dict(options))


def answers_to(case: ExpertsCase, **options: Any) -> Answers:
    want = case.run(cumoe.reference.fused_experts_fp8, **options)
    options.pop("scale_format", None)
    return Answers(case, want, case.run(fused_experts_float64, **options))


def check(backend: NumpyBackend, wanted: Answers, **options: Any) -> None:
    """Every token row within the tolerances."""
    assert_right(wanted.case.run(fused_experts_on(backend), **options), wanted)


def assert_right(got: np.ndarray, wanted: Answers) -> None:
    tolerance = tolerances.experts_row(*wanted.case.ids.shape, *wanted.case.experts.w2.shape[1:])
    assert_rows_close(got, wanted.want, tolerance, "against the reference")
    assert_rows_close(got, wanted.exact, tolerances.EXACT_ROW, "against float64")
    assert_total_close(got, wanted.exact, tolerances.EXACT_TOTAL, cosine=tolerances.EXACT_COSINE)


def test_a_swapped_row_would_fail():
    case, want, exact = answers(num_tokens=40, intermediate=128, hidden=256)
    got = want.copy()
    assert_right(got, Answers(case, want, exact))
    got[[3, 4]] = got[[4, 3]]
    with pytest.raises(AssertionError, match="2 of 40 rows"):
        assert_right(got, Answers(case, want, exact))


def constant(num_experts: int, w1_scale: Any, w2_scale: float) -> ExpertWeights:
    """K = N = 128 and every code 1.0; ``w1_scale`` is one scale, or gate's and up's."""
    halves = np.broadcast_to(np.asarray(w1_scale, np.float32).reshape(-1, 1), (2, 1))
    return ExpertWeights(
        np.ones((num_experts, 256, 128), np.float32).astype(E4M3),
        np.ones((num_experts, 128, 128), np.float32).astype(E4M3),
        np.tile(halves, (num_experts, 1, 1)),
        np.full((num_experts, 1, 1), w2_scale, np.float32),
    )


def by_hand(experts, ids=((0, 1),), weights=((0.5, 0.5),), x=1.0) -> ExpertsCase:
    return ExpertsCase(
        experts,
        np.full((1, 128), x, np.float32).astype(BF16),
        np.array(weights, np.float32),
        np.array(ids, np.int32),
    )


SMALL = constant(2, 1 / 64, 1 / 128)
ONES = constant(7, 1, 1 / 12800)
BY_HAND = {
    "fp32_scales": (by_hand(SMALL), {}, 3.515625),
    "ue8m0_scales": (by_hand(SMALL), {"scale_format": "ue8m0"}, 3.5),
    "gate_rows_come_first": (by_hand(constant(2, (1 / 64, 1 / 128), 1 / 128)), {}, 1.7578125),
    "weight_on_output": (by_hand(SMALL, [[0]], [[0.5]]), {}, 1.7578125),
    "weight_on_input": (
        by_hand(SMALL, [[0]], [[0.5]]), {"apply_router_weight_on_input": True}, 0.73046875,
    ),
    "factor_once": (by_hand(SMALL), {"routed_scaling_factor": 1.5}, 5.28125),
    "factor_zero": (by_hand(SMALL), {"routed_scaling_factor": 0.0}, 0.0),
    "factor_negative": (by_hand(SMALL), {"routed_scaling_factor": -1.0}, -3.515625),
    "sum_in_fp32": (
        by_hand(ONES, [range(7)], [[256, 1, 1, 1, 1, 1, 1]]), {"swiglu_limit": 10}, 262.0,
    ),
    "duplicate_expert": (by_hand(SMALL, [[1, 1]]), {}, 3.515625),
    "one_slot_of_two": (by_hand(SMALL, [[1, -1]], [[0.5, 7.0]]), {}, 1.7578125),
    "negative_weight": (by_hand(SMALL, [[0, 1]], [[0.5, -1.0]]), {}, -1.7578125),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(backend, name):
    case, options, want = BY_HAND[name]
    got = case.run(fused_experts_on(backend), **options).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=tolerances.ONE_BF16_ULP)


def test_negative_gates_are_not_clamped_from_below(backend):
    experts = constant(2, 1, 1 / 128)
    experts.w1[:, :128] = -1
    got = by_hand(experts).run(fused_experts_on(backend), swiglu_limit=10.0)
    assert (np.abs(got.astype(np.float64)) < 1e-30).all()


@pytest.mark.parametrize(
    ("intermediate", "hidden"), [(128, 128), (256, 640), (384, 256), (128, 1152)]
)
@pytest.mark.parametrize("num_tokens", [5, 96])
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_shapes(backend, scale_format, num_tokens, intermediate, hidden):
    """One k-block, more and fewer than the pipeline is deep; narrow and wide token tiles."""
    wanted = answers(
        (("scale_format", scale_format),),
        num_tokens=num_tokens, intermediate=intermediate, hidden=hidden,
    )  # fmt: skip
    check(backend, wanted, scale_format=scale_format)


@pytest.mark.parametrize("routing", cases.ROUTINGS)
@pytest.mark.parametrize("num_tokens", [7, 150, 520])
def test_routings(backend, routing, num_tokens):
    check(
        backend,
        answers(routing=routing, num_tokens=num_tokens, intermediate=128, hidden=256),
    )


@pytest.mark.parametrize("num_tokens", ODD_M)
def test_numbers_of_tokens(backend, num_tokens):
    case, want, exact = answers(
        num_tokens=max(ODD_M), num_experts=4, topk=2, intermediate=128, hidden=256
    )
    some = slice(num_tokens)
    check(backend, Answers(case.tokens(some), want[some], exact[some]))


@pytest.mark.parametrize("topk", range(1, 17))
def test_every_topk(backend, topk):
    check(
        backend,
        answers(num_tokens=9, num_experts=16, topk=topk, intermediate=128, hidden=128),
    )


@pytest.mark.parametrize("num_experts", [1, 3, 60, 257])
def test_numbers_of_experts(backend, num_experts):
    topk = min(num_experts, 4)
    check(
        backend,
        answers(num_tokens=9, num_experts=num_experts, topk=topk, intermediate=128, hidden=128),
    )


def test_experts_are_few_but_tokens_many(backend):
    check(
        backend,
        answers(routing="one_expert", num_tokens=600, topk=1, intermediate=128, hidden=128),
    )


CONSTANTS = {
    "limit": {"swiglu_limit": 1.0},
    "oai": {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
    "scaled": {"swiglu_alpha": 0.5, "swiglu_beta": -2.0},
}


@pytest.mark.parametrize("constants", CONSTANTS)
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_constants_of_the_activation(backend, constants, scale_format):
    options = {"scale_format": scale_format, **CONSTANTS[constants]}
    wanted = answers(tuple(options.items()), num_tokens=40, intermediate=128, hidden=256)
    check(backend, wanted, **options)
    with pytest.raises(AssertionError):
        check(backend, wanted, scale_format=scale_format)


@pytest.mark.parametrize("limit", [np.inf, 1e39])
def test_an_infinite_limit_is_none(backend, rng, limit):
    """So is one beyond the largest float32."""
    case = cases.experts_case(rng, num_tokens=9, intermediate=128, hidden=256)
    got = case.run(fused_experts_on(backend), swiglu_limit=limit)
    assert_bitwise_equal(got, case.run(fused_experts_on(backend)))


@pytest.mark.parametrize("ids", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=["fp32", "fp16", "bf16"])
def test_types_of_ids_and_weights(backend, rng, ids, dtype):
    """Weights that bf16 can hold: each type has the same values, so all give the same bytes."""
    case = cases.experts_case(rng, num_tokens=40, intermediate=128, hidden=256)
    case.weights = case.weights.astype(BF16).astype(np.float32)
    wanted = answers_to(case)
    plain = case.run(fused_experts_on(backend))
    assert_right(plain, wanted)
    case.ids, case.weights = case.ids.astype(ids), case.weights.astype(dtype)
    assert_bitwise_equal(case.run(fused_experts_on(backend)), plain)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_weight_on_the_input(backend, rng, dtype, scale_format):
    case = cases.experts_case(rng, num_tokens=40, topk=1, intermediate=128, hidden=256)
    case.weights = rng.uniform(0.1, 3, case.ids.shape).astype(np.float32).astype(dtype)
    options = {"apply_router_weight_on_input": True, "scale_format": scale_format}
    wanted = answers_to(case, **options)
    check(backend, wanted, **options)
    with pytest.raises(AssertionError):
        check(backend, wanted, scale_format=scale_format)


@pytest.mark.parametrize("factor", [0.1, 1.5, 2.827])
def test_routed_scaling_factor(backend, rng, factor):
    case = cases.experts_case(rng, num_tokens=9, intermediate=128, hidden=256)
    check(backend, answers_to(case, routed_scaling_factor=factor), routed_scaling_factor=factor)


def test_fewer_experts_than_weights(backend, rng):
    """num_experts bounds the ids also where the weights hold more."""
    case = cases.experts_case(rng, num_tokens=40, intermediate=128, hidden=256)
    wanted = answers_to(case, num_experts=5)
    check(backend, wanted, num_experts=5)
    with pytest.raises(AssertionError):
        check(backend, wanted)


def test_same_inputs_same_bytes(backend, rng):
    case = cases.experts_case(rng, num_tokens=200, intermediate=128, hidden=256)
    first = case.run(fused_experts_on(backend))
    for _ in range(3):
        assert_bitwise_equal(case.run(fused_experts_on(backend)), first)


@pytest.mark.parametrize("topk", [1, 8])
@pytest.mark.parametrize("has_map", [False, True])
def test_no_tokens(backend, rng, topk, has_map):
    case = cases.experts_case(rng, num_tokens=0, topk=topk, intermediate=128, hidden=256)
    expert_map = np.arange(8, dtype=np.int32) if has_map else None
    for out in (None, np.zeros((0, 256), BF16)):
        got = case.run(fused_experts_on(backend), expert_map=expert_map, out=out)
        assert got.shape == (0, 256)


def test_result_has_the_frameworks_own_type(backend, rng):
    x = backend.put(cases.activations(rng, 1, 128))
    ids, weights = np.array([[0, 1]], np.int32), np.array([[0.5, 0.5]], np.float32)
    out = cumoe.fused_experts_fp8(
        x,
        backend.put(SMALL.w1),
        backend.put(SMALL.w2),
        backend.put(weights),
        backend.put(ids),
        w1_scale=backend.put(SMALL.w1_scale),
        w2_scale=backend.put(SMALL.w2_scale),
    )
    bf16 = {"numpy": "bfloat16", "cupy": "uint16"}.get(backend.name, "torch.bfloat16")
    assert (str(out.dtype), tuple(out.shape)) == (bf16, (1, 128))
    assert type(out) is type(x)
    assert getattr(out, "device", "cpu") == getattr(x, "device", "cpu")


def test_bytes_stand_for_e4m3(backend, rng):
    case = cases.experts_case(rng, num_tokens=9, intermediate=128, hidden=256)
    want = case.run(fused_experts_on(backend))
    experts = case.experts
    case.experts = experts._replace(w1=experts.w1.view(np.uint8), w2=experts.w2.view(np.uint8))
    assert_bitwise_equal(case.run(fused_experts_on(backend)), want)
