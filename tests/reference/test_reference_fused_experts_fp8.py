"""The experts: small answers by hand, the forms that inputs take, refusals."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from cumoe.errors import ArgumentError, DTypeError
from cumoe.reference import fused_experts_fp8
from tests.helpers import cases, tolerances
from tests.helpers.cases import experts_case
from tests.helpers.compare import assert_bitwise_equal

BF16, E4M3 = cases.BF16, cases.E4M3


def constant_experts(num_experts: int, w1_scale, w2_scale, n: int = 128, k: int = 128) -> dict:
    """Weights whose codes are all 1.0; the scales broadcast to their grids."""
    return {
        "w1": np.ones((num_experts, 2 * n, k), E4M3),
        "w2": np.ones((num_experts, k, n), E4M3),
        "w1_scale": _grid(w1_scale, (num_experts, 2 * n // 128, k // 128)),
        "w2_scale": _grid(w2_scale, (num_experts, k // 128, n // 128)),
    }


def _grid(scale, shape) -> np.ndarray:
    return np.ascontiguousarray(np.broadcast_to(np.asarray(scale, np.float32), shape))


def small(experts: dict, ids=((0, 1),), weights=((0.5, 0.5),), **options) -> float:
    """The one value that every element of the output has, for x = 1."""
    x = np.ones((len(ids), experts["w1"].shape[2]), BF16)
    out = fused_experts_fp8(
        topk_weights=np.array(weights, np.float32),
        topk_ids=np.array(ids, np.int32),
        **{"x": x, **experts, **options},
    )
    assert out.dtype == BF16
    (value,) = set(out.astype(np.float64).ravel().tolist())
    return value


SMALL = constant_experts(2, 1 / 64, 1 / 128)


@pytest.mark.parametrize(("scale_format", "want"), [("fp32", 3.515625), ("ue8m0", 3.5)])
def test_by_hand(scale_format, want):
    assert small(SMALL, scale_format=scale_format) == want


def test_gate_comes_first():
    halves = np.array([1 / 64, 1 / 128]).reshape(1, 2, 1)
    assert small(constant_experts(2, halves, 1 / 128)) == pytest.approx(1.7578125, rel=2**-8)


def test_routed_scaling_factor_multiplies_once():
    got = small(SMALL, routed_scaling_factor=1.5)
    assert got == pytest.approx(5.28125, rel=tolerances.ONE_BF16_ULP)


def test_negative_gates_are_not_clamped_from_below():
    experts = constant_experts(2, 1, 1 / 128)
    experts["w1"][:, :128] = -1
    assert abs(small(experts, swiglu_limit=10)) < 1e-30


def test_combine_accumulates_in_fp32():
    experts = constant_experts(7, 1, 1 / 12800)
    got = small(experts, [range(7)], [[256] + [1] * 6], swiglu_limit=10)
    assert got == pytest.approx(262, rel=2**-8)


def test_combine_rounds_every_slot_to_bf16_and_adds_in_order():
    x = np.ones((1, 128), BF16)
    experts = constant_experts(3, 1 / 64, np.array([1 / 3, 1 / 5, 1 / 7]).reshape(3, 1, 1))
    slots = [small(experts, [[e]], [[1]]) for e in range(3)]
    weights = np.array([[0.3, 0.5, 0.7]], np.float32)
    out = fused_experts_fp8(
        x, topk_weights=weights, topk_ids=np.array([[2, 0, 1]], np.int32), **experts
    )
    total = np.float32(0)
    for weight, expert in zip(weights[0], [2, 0, 1], strict=True):
        total = total + weight * np.float32(slots[expert])
    assert_bitwise_equal(out, np.full((1, 128), total, np.float32).astype(BF16))


def test_weight_on_the_input():
    options = {"apply_router_weight_on_input": True}
    assert small(SMALL, [[0]], [[0.5]], **options) == pytest.approx(0.73046875, rel=2**-8)
    assert small(SMALL, [[0]], [[0.5]]) == pytest.approx(1.7578125, rel=2**-8)


def test_weight_on_the_input_is_rounded_to_bf16(rng):
    case = experts_case(rng, topk=1)
    case.weights = rng.random(case.ids.shape).astype(np.float32)
    got = case.run(fused_experts_fp8, apply_router_weight_on_input=True)
    rounded = case.weights.astype(BF16).astype(np.float32)
    case.x = (case.x.astype(np.float32) * rounded).astype(BF16)
    case.weights[:] = 1
    assert_bitwise_equal(got, case.run(fused_experts_fp8))


def test_token_without_an_expert_is_zero_even_if_its_weight_is_nan(rng):
    case = experts_case(rng)
    clean = case.run(fused_experts_fp8)
    case.ids[3], case.weights[3] = -1, np.nan
    got = case.run(fused_experts_fp8)
    assert not got[3].astype(np.float32).any()
    keep = np.arange(len(got)) != 3
    assert_bitwise_equal(got[keep], clean[keep])


def test_no_tokens():
    out = fused_experts_fp8(
        np.zeros((0, 128), BF16),
        topk_weights=np.zeros((0, 2), np.float32),
        topk_ids=np.zeros((0, 2), np.int32),
        **SMALL,
    )
    assert (out.shape, out.dtype) == ((0, 128), BF16)


def test_wide_ids_are_tested_before_they_are_narrowed(rng):
    case = experts_case(rng)
    wide = cases.wrapped_ids(case.ids, 8)
    narrow = np.where(wide < 8, wide, -1).astype(np.int32)
    want = replace(case, ids=narrow).run(fused_experts_fp8)
    assert_bitwise_equal(replace(case, ids=wide).run(fused_experts_fp8), want)


@pytest.mark.parametrize("dtype", [BF16, np.float16], ids=["bf16", "fp16"])
def test_weights_are_converted(rng, dtype):
    case = experts_case(rng)
    halves = case.weights.astype(dtype)
    want = replace(case, weights=halves.astype(np.float32)).run(fused_experts_fp8)
    assert_bitwise_equal(replace(case, weights=halves).run(fused_experts_fp8), want)


def test_strides_of_the_scales_are_honoured(rng):
    case = experts_case(rng, intermediate=128, hidden=256)
    want = case.run(fused_experts_fp8)
    w1_scale, w2_scale = (np.swapaxes(s, 1, 2).copy() for s in case.experts[2:])
    assert w1_scale.shape[1:] == (2, 2)
    got = case.run(
        fused_experts_fp8,
        w1_scale=np.swapaxes(w1_scale, 1, 2),
        w2_scale=np.swapaxes(w2_scale, 1, 2),
    )
    assert_bitwise_equal(got, want)
    assert (case.run(fused_experts_fp8, w1_scale=w1_scale) != want).any()


def test_bits_stand_for_values(rng):
    case = experts_case(rng)
    want = case.run(fused_experts_fp8)
    w1, w2 = (w.view(np.uint8) for w in case.experts[:2])
    case.experts, case.x = case.experts._replace(w1=w1, w2=w2), case.x.view(np.uint16)
    assert_bitwise_equal(case.run(fused_experts_fp8), want)


def test_inputs_are_not_written_and_out_may_be_x(rng):
    case = experts_case(rng)
    before = case.x.copy()
    want = case.run(fused_experts_fp8)
    assert_bitwise_equal(case.x, before)
    out = np.full(case.x.shape, np.nan, BF16)
    assert case.run(fused_experts_fp8, out=out) is out
    assert_bitwise_equal(out, want)
    assert case.run(fused_experts_fp8, out=case.x) is case.x
    assert_bitwise_equal(case.x, want)


@pytest.mark.parametrize(("n", "k"), [(192, 128), (128, 192), (288, 128), (320, 128)])
def test_refuses_sizes_that_need_padding(n, k):
    grid = np.ones((1, 1, 1), np.float32)
    with pytest.raises(ArgumentError, match="pad_experts"):
        fused_experts_fp8(
            np.zeros((1, k), BF16),
            np.zeros((1, 2 * n, k), E4M3),
            np.zeros((1, k, n), E4M3),
            np.ones((1, 1), np.float32),
            np.zeros((1, 1), np.int32),
            w1_scale=grid,
            w2_scale=grid,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"apply_router_weight_on_input": True}, "topk"),
        ({"num_experts": 3}, "expert_map"),
        ({"num_experts": 3, "expert_map": np.zeros(4, np.int32)}, "expert_map"),
        ({"swiglu_limit": -1}, "swiglu_limit"),
        ({"swiglu_alpha": np.inf}, "swiglu_alpha"),
        ({"swiglu_beta": np.nan}, "swiglu_beta"),
        ({"routed_scaling_factor": np.nan}, "routed_scaling_factor"),
        ({"block_shape": (64, 128)}, "block_shape"),
        ({"scale_format": "e8m0"}, "scale_format"),
        ({"w1_scale": np.ones((2, 1, 1), np.float32)}, "w1_scale"),
        ({"w2_scale": np.ones((2, 1, 2), np.float32)}, "w2_scale"),
        ({"w1": np.ones((2, 128, 128), E4M3)}, "w1"),
        ({"out": np.zeros((2, 128), BF16)}, "out"),
    ],
)
def test_refuses_arguments_that_do_not_fit(options, message):
    with pytest.raises(ArgumentError, match=message):
        small({**SMALL, **options})


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"x": np.ones((1, 128), np.float32)}, "x"),
        ({"w1": np.ones((2, 256, 128), ml_dtypes.float8_e5m2)}, "w1"),
        ({"w2": np.ones((2, 128, 128), np.int8)}, "w2"),
        ({"w1_scale": np.ones((2, 2, 1))}, "w1_scale"),
        ({"w2_scale": np.ones((2, 1, 1), BF16)}, "w2_scale"),
        ({"out": np.ones((1, 128), np.float32)}, "out"),
    ],
)
def test_refuses_other_element_types(options, name):
    with pytest.raises(DTypeError, match=f"^{name} must"):
        small({**SMALL, **options})
