"""SwiGLU and quantization: rounding points by hand, clamp, filter, non-finite values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumoe.errors import ArgumentError, DTypeError
from cumoe.reference import per_token_group_quant_fp8, silu_and_mul_quant_fp8
from cumoe.reference.silu_and_mul_quant_fp8 import swiglu, swiglu_constants
from tests.helpers import cases, oracles
from tests.helpers.compare import assert_bitwise_equal

BF16 = cases.BF16
ALL_BF16 = np.arange(1 << 16, dtype=np.uint16).view(BF16).astype(np.float32)


def activate(gate, up, limit=None, alpha=1.0, beta=0.0) -> np.ndarray:
    """float32 activations of scalars or lists of bf16 values."""
    gate_up = np.array([np.ravel([gate]), np.ravel([up])], np.float32)
    with np.errstate(all="ignore"):
        y = swiglu(gate_up.reshape(1, -1), *swiglu_constants(limit, alpha, beta))
    return y.astype(np.float32)[0]


def gate_up_row(gate, up, size: int = 128) -> np.ndarray:
    """[1, 2 * size] bf16: the values at the front of each half, the rest 0."""
    x = np.zeros((2, size), np.float32)
    x[0, : len(gate)], x[1, : len(up)] = gate, up
    return x.reshape(1, -1).astype(BF16)


def by_formula(gate: float, up: float, limit: float, alpha: float, beta: float) -> float:
    """One activation in scalar float32 steps, rounded to bf16 by bits."""

    def bf16(value) -> np.float32:
        bits = oracles.nearest_bf16_bits(np.array([value], np.float32)).astype(np.uint32)
        return (bits << 16).view(np.float32)[0]

    g = bf16(min(np.float32(gate), np.float32(limit)))
    u = max(min(np.float32(up), np.float32(limit)), -np.float32(limit))
    exponential = np.float32(np.exp(np.float64(-np.float32(alpha) * g)))
    s = bf16(g / (np.float32(1) + exponential))
    return float(bf16(s * (u + np.float32(beta))))


def test_clamp_by_hand():
    gate, up = [-20, -12, 2, 20], [20, -20, 20, -20]
    want = np.array([-4.1164458e-07, 7.4005127e-04, 17.625, -100], np.float32).astype(BF16)
    assert_bitwise_equal(activate(gate, up, 10), want.astype(np.float32))
    for scale_format, s, codes in (
        ("fp32", np.float32(0.22321428), "8002 6a fe"),
        ("ue8m0", 0.25, "8002 69 fc"),
    ):
        q, scale = silu_and_mul_quant_fp8(
            gate_up_row(gate, up), limit=10, scale_format=scale_format
        )
        assert scale.tolist() == [[s]]
        assert q.view(np.uint8)[0, :4].tobytes() == bytes.fromhex(codes)
        assert not q.view(np.uint8)[0, 4:].any()


def test_silu_and_product_are_both_rounded_to_bf16():
    assert activate(0.515625, 5.4375) == 1.75
    q, scale = silu_and_mul_quant_fp8(gate_up_row([0.515625], [5.4375]), scale_format="ue8m0")
    assert (scale[0, 0], q.view(np.uint8)[0, 0]) == (2.0**-8, 0x7E)


@pytest.mark.parametrize(
    ("gate", "up", "want"), [(1, 4, 2.921875), (4, 1, 3.921875), (5, 0, 0), (0, 5, 0)]
)
def test_gate_comes_first(gate, up, want):
    assert activate(gate, up) == want


@pytest.mark.parametrize(
    ("limit", "want"), [(None, -73.5), (np.inf, -73.5), (1e39, -73.5), (10, -70.0)]
)
def test_limit_or_none(limit, want):
    assert activate(7, -10.5, limit) == want


def test_up_is_clamped_in_fp32_and_the_gate_in_bf16():
    assert activate(20, 20, 9.9) == 98.0  # 97.5 with up rounded to bf16


def test_gate_has_no_lower_clamp():
    assert activate(-12, 1, 10) == by_formula(-12, 1, np.inf, 1, 0)
    assert abs(activate(-12, 1, 10)) < 1e-4  # silu(-10) is -4.5e-4


def test_alpha_and_beta():
    with_both = activate([2.0, 20.0], [3.0, 20.0], 7, 1.702, 1)
    assert with_both.tolist() == [by_formula(2, 3, 7, 1.702, 1), by_formula(20, 20, 7, 1.702, 1)]
    assert with_both.tolist() != activate([2.0, 20.0], [3.0, 20.0], 7).tolist()


@given(
    st.floats(-30, 30, width=16),
    st.floats(-30, 30, width=16),
    st.sampled_from([np.inf, 0.5, 7.0, 9.9, 10.0]),
    st.sampled_from([(1.0, 0.0), (1.702, 1.0), (0.5, -2.0)]),
)
def test_swiglu_is_the_formula_in_scalar_steps(gate, up, limit, constants):
    gate, up = (float(np.float32(v).astype(BF16)) for v in (gate, up))
    assert activate(gate, up, limit, *constants) == by_formula(gate, up, limit, *constants)


def test_every_finite_gate_has_a_finite_silu():
    gate = ALL_BF16[np.isfinite(ALL_BF16)]
    assert gate.size == 65_280
    got = activate(gate, np.ones_like(gate))
    assert np.isfinite(got).all()
    x = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        want = x / (1 + np.exp(-x))
    # Two roundings to bf16 (the second of a bf16 value, so none); the subnormals of exp at the end.
    np.testing.assert_allclose(got, want, rtol=2.0**-8 * 1.001, atol=2.0**-120)


@pytest.mark.parametrize(
    ("gate", "up", "limit"),
    [(np.nan, 1, None), (np.nan, 1, 10), (1, np.nan, None), (1, np.nan, 10), (np.nan, np.inf, 10)],
)
def test_nan_stays_nan(gate, up, limit):
    assert np.isnan(activate(gate, up, limit)).all()


@pytest.mark.parametrize("gate", [-100, -3e38, -np.inf])
@pytest.mark.parametrize("limit", [None, 10])
def test_far_negative_gates_give_minus_zero(gate, limit):
    q, _ = silu_and_mul_quant_fp8(gate_up_row([gate], [5]), limit=limit)
    assert q.view(np.uint8)[0, 0] == 0x80


def test_small_silu_next_to_a_large_one_is_zero():
    q, _ = silu_and_mul_quant_fp8(gate_up_row([-88, 100], [1, 0.01]))
    assert q.view(np.uint8)[0, 0] & 0x7F == 0


def test_minus_zero_up_is_plus_zero_once_beta_is_added():
    assert np.signbit(activate(-1, -0.0)) == np.True_
    assert np.signbit(activate(1, -0.0)) == np.False_


def test_overflowing_product_follows_the_infinity_rule():
    q, scale = silu_and_mul_quant_fp8(gate_up_row([3e38, 1], [3e38, 1]))
    assert scale[0, 0] == np.inf
    assert q.view(np.uint8)[0, :2].tolist() == [0x7F, 0]


def test_nan_spares_the_other_groups(rng):
    x = cases.activations(rng, 2, 512)
    clean_q, clean_scale = silu_and_mul_quant_fp8(x, limit=10)
    x[0, 3] = np.nan
    q, scale = silu_and_mul_quant_fp8(x, limit=10)
    assert q.view(np.uint8)[0, 3] == 0x7F
    assert_bitwise_equal(q[0, 128:], clean_q[0, 128:])
    assert_bitwise_equal(q[1], clean_q[1])
    assert_bitwise_equal(scale.ravel()[1:], clean_scale.ravel()[1:])


@pytest.mark.parametrize("layout", ["row", "column", "tma", "packed"])
@pytest.mark.parametrize("limit", [None, 1.5])
def test_equals_activation_then_quantization(rng, layout, limit):
    x = cases.activations(rng, 7, 2 * 640)
    options = {"scale_format": "ue8m0", "scale_layout": layout}
    y = activate(x[:, :640].ravel(), x[:, 640:].ravel(), limit).reshape(7, 640).astype(BF16)
    got = silu_and_mul_quant_fp8(x, limit=limit, **options)
    want = per_token_group_quant_fp8(y, **options)
    for a, b in zip(got, want, strict=True):
        assert_bitwise_equal(a, b)
        assert a.strides == b.strides


def test_each_row_is_its_own(rng):
    x = cases.activations(rng, 9, 1024)
    q, scale = silu_and_mul_quant_fp8(x, limit=2)
    for r in range(9):
        one_q, one_scale = silu_and_mul_quant_fp8(x[r : r + 1], limit=2)
        assert_bitwise_equal(q[r : r + 1], one_q)
        assert_bitwise_equal(scale[r : r + 1], one_scale)


FILTERS = {
    "ids": ([[0, -1], [2, 1], [-1, -1]], None, 4, [0, 2, 3]),
    "negative_only": ([[0, -1], [200, 1], [-5, -1]], None, None, [0, 2, 3]),
    "beyond_the_last": ([[8, 1 << 30], [3, 0]], None, 8, [2, 3]),
    "map": ([[0, 1], [2, 3], [4, -1]], [-1, 0, -1, 1], None, [1, 3]),
    "map_beyond_its_length": ([[0, 1], [2, 3]], [4, 3, 99, -7], None, [1]),
    "nothing_local": ([[0, 1], [2, 3]], [-1] * 4, None, []),
    "all_local": ([[0, 1], [2, 3]], None, 4, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("case", FILTERS)
@pytest.mark.parametrize("layout", ["row", "column", "tma", "packed"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_filter_leaves_other_rows_alone(rng, case, layout, dtype):
    ids, expert_map, num_experts, rows = FILTERS[case]
    topk_ids = np.array(ids, dtype)
    skipped = [r for r in range(topk_ids.size) if r not in rows]
    x = cases.activations(rng, topk_ids.size, 512)
    options = {"scale_format": "ue8m0", "scale_layout": layout}
    want_q, want_scale = silu_and_mul_quant_fp8(x, **options)
    x[skipped] = np.nan
    out = cases.poisoned_codes(topk_ids.size, 256)
    out_scale = cases.poisoned_scales(topk_ids.size, 2, layout)
    before = out_scale.copy()
    q, scale = silu_and_mul_quant_fp8(
        x,
        topk_ids=topk_ids,
        expert_map=None if expert_map is None else np.array(expert_map, np.int32),
        num_experts=num_experts,
        out=out,
        out_scale=out_scale,
        **options,
    )
    assert q is out
    assert scale is out_scale
    assert_bitwise_equal(q[rows], want_q[rows])
    assert_bitwise_equal(scale[rows], want_scale[rows])
    assert (q[skipped].view(np.uint8) == cases.POISON_CODE).all()
    assert_bitwise_equal(scale[skipped], before[skipped])


def test_wide_ids_are_tested_before_they_are_narrowed(rng):
    x = cases.activations(rng, 2, 256)
    out = cases.poisoned_codes(2, 128)
    silu_and_mul_quant_fp8(x, topk_ids=np.array([(1 << 32) + 3, 3]), num_experts=4, out=out)
    assert (out[0].view(np.uint8) == cases.POISON_CODE).all()
    assert (out[1].view(np.uint8) != cases.POISON_CODE).any()


def test_leading_dimensions_flatten_into_rows(rng):
    x = cases.activations(rng, 2, 3, 512)
    ids = np.array([[0, 1, -1], [1, -1, 0]], np.int32)
    q, scale = silu_and_mul_quant_fp8(x, topk_ids=ids)
    flat_q, flat_scale = silu_and_mul_quant_fp8(x.reshape(6, 512), topk_ids=ids)
    assert_bitwise_equal(q, flat_q.reshape(2, 3, 256))
    assert_bitwise_equal(scale, flat_scale)


def test_no_rows():
    q, scale = silu_and_mul_quant_fp8(np.zeros((0, 512), BF16))
    assert (q.shape, scale.shape) == ((0, 256), (0, 2))


@pytest.mark.parametrize("size", [192, 288, 320])
def test_refuses_sizes_that_are_no_multiple(size):
    with pytest.raises(ArgumentError, match="128"):
        silu_and_mul_quant_fp8(np.zeros((1, 2 * size), BF16))


IDS = np.zeros(1, np.int32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": -1}, "limit"),
        ({"limit": np.nan}, "limit"),
        ({"limit": 1e-60}, "limit"),
        ({"alpha": 0}, "alpha"),
        ({"alpha": -1}, "alpha"),
        ({"alpha": np.inf}, "alpha"),
        ({"alpha": np.nan}, "alpha"),
        ({"beta": np.inf}, "beta"),
        ({"beta": np.nan}, "beta"),
        ({"scale_layout": "packed"}, "ue8m0"),
        ({"topk_ids": np.zeros(2, np.int32)}, "topk_ids"),
        ({"expert_map": IDS}, "topk_ids"),
        ({"topk_ids": IDS, "expert_map": IDS, "num_experts": 2}, "expert_map"),
        ({"topk_ids": IDS, "num_experts": 0}, "num_experts"),
    ],
)
def test_refuses_arguments_that_do_not_fit(options, message):
    with pytest.raises(ArgumentError, match=message):
        silu_and_mul_quant_fp8(np.zeros((1, 256), BF16), **options)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_takes_bf16_only(dtype):
    with pytest.raises(DTypeError, match="gate_up"):
        silu_and_mul_quant_fp8(np.zeros((1, 256), dtype))
