"""The experts against float64: every routing within the gates, every fault outside, no leaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cumoe.reference import fused_experts_fp8, per_token_group_quant_fp8
from cumoe.reference.block_gemm import block_scaled_matmul
from cumoe.reference.exact import fused_experts_float64
from tests.helpers import cases, oracles, tolerances
from tests.helpers.cases import ExpertsCase, experts_case
from tests.helpers.compare import (
    assert_bitwise_equal,
    assert_rows_close,
    assert_total_close,
    assert_within,
    row_errors,
)

BF16 = cases.BF16


def assert_gates(got: np.ndarray, exact: np.ndarray) -> None:
    assert_total_close(got, exact, tolerances.EXACT_TOTAL, cosine=tolerances.EXACT_COSINE)
    assert_rows_close(got, exact, tolerances.EXACT_ROW)


@pytest.mark.parametrize("routing", cases.ROUTINGS)
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("limit", [None, 1.0])
def test_every_routing_is_near_the_float64_oracle(rng, routing, scale_format, limit):
    case = experts_case(rng, routing=routing)
    got = case.run(fused_experts_fp8, scale_format=scale_format, swiglu_limit=limit)
    assert_gates(got, case.run(fused_experts_float64, swiglu_limit=limit))


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("limit", [None, 1.0])
def test_the_errors_are_those_that_the_page_names(rng, scale_format, limit):
    """Prints a line of the table in docs/numerics.md, which must hold it."""
    totals, rows, cosines = [], [], []
    for routing in cases.ROUTINGS:
        for num_tokens in (16, 64):
            case = experts_case(rng, routing=routing, num_tokens=num_tokens, hidden=1024)
            got = case.run(fused_experts_fp8, scale_format=scale_format, swiglu_limit=limit)
            exact = case.run(fused_experts_float64, swiglu_limit=limit)
            if exact.any():
                flat = [np.asarray(a, np.float64).reshape(1, -1) for a in (got, exact)]
                lengths = np.linalg.norm(flat, axis=-1)
                totals.append(row_errors(*flat)[0])
                rows.append(row_errors(got, exact).max())
                cosines.append((flat[0] @ flat[1].T).item() / lengths.prod())
    line = (
        f"| {scale_format} | {'none' if limit is None else limit} | {min(totals):.3f} – "
        f"{max(totals):.3f} | {max(rows):.3f} | {min(cosines):.4f} |"
    )
    print(line)
    page = Path(__file__).parents[2] / "docs" / "numerics.md"
    assert line in page.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("num_tokens", [1, 3, 15, 16, 17, 64, 65, 129])
def test_every_number_of_tokens_is_near_the_float64_oracle(rng, num_tokens):
    case = experts_case(rng, num_tokens=num_tokens)
    assert_gates(case.run(fused_experts_fp8), case.run(fused_experts_float64))


OPTIONS = {
    "plain": {},
    "oai": {"swiglu_limit": 1.5, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
    "factor": {"routed_scaling_factor": 2.5},
    "map": {"expert_map": np.array([-1, 3, 0, -1, 7, 1, 8, 2, 99], np.int32)},
    "fewer_ids": {"num_experts": 5},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options_are_near_the_float64_oracle(rng, options):
    case = experts_case(rng)
    assert_gates(
        case.run(fused_experts_fp8, **OPTIONS[options]),
        case.run(fused_experts_float64, **OPTIONS[options]),
    )


def test_weight_on_the_input_is_near_the_float64_oracle(rng):
    case = experts_case(rng, topk=1)
    options = {"apply_router_weight_on_input": True, "swiglu_limit": 1.0}
    assert_gates(case.run(fused_experts_fp8, **options), case.run(fused_experts_float64, **options))


@pytest.mark.parametrize("weight_on_input", [False, True])
def test_float64_oracle_equals_the_one_by_token(rng, weight_on_input):
    topk = 1 if weight_on_input else 3
    case = experts_case(
        rng, routing="out_of_range", num_tokens=6, topk=topk, intermediate=128, hidden=256
    )
    expert_map = np.array([2, -1, 0, 5, 7, 1, 8, 3], np.int32)
    got = case.run(
        fused_experts_float64,
        swiglu_limit=1.0,
        swiglu_alpha=1.702,
        swiglu_beta=0.5,
        routed_scaling_factor=2.0,
        expert_map=expert_map,
        apply_router_weight_on_input=weight_on_input,
    )
    want = oracles.experts_by_token(
        case.x,
        case.experts.w1,
        case.experts.w2,
        case.weights,
        case.ids,
        **case.experts.scales,
        limit=1.0,
        alpha=1.702,
        beta=0.5,
        factor=2.0,
        expert_map=expert_map,
        weight_on_input=weight_on_input,
    )
    assert np.abs(want).max() > 0.1
    assert_rows_close(got, want, 1e-12)


def swap_halves(case: ExpertsCase) -> None:
    halves = case.experts.w1.reshape(len(case.experts.w1), 2, -1, case.x.shape[1])
    case.experts = case.experts._replace(w1=halves[:, ::-1].reshape(case.experts.w1.shape))


def scale_of_the_first_block(case: ExpertsCase) -> None:
    case.experts.w1_scale[:, :, 1:] = case.experts.w1_scale[:, :, :1]


def zero_one_token(case: ExpertsCase) -> None:
    case.x[7] = 0


def next_expert(case: ExpertsCase) -> None:
    case.ids[7] = (case.ids[7] + 1) % 8


def drop_the_largest_weight(case: ExpertsCase) -> None:
    case.weights[7, case.weights[7].argmax()] = 0


@pytest.mark.parametrize(
    "fault",
    [swap_halves, scale_of_the_first_block, zero_one_token, next_expert, drop_the_largest_weight],
)
def test_gates_catch_a_fault(rng, fault):
    case = experts_case(rng)
    exact = case.run(fused_experts_float64)
    fault(case)
    with pytest.raises(AssertionError):
        assert_gates(case.run(fused_experts_fp8), exact)


def test_gates_catch_a_missing_clamp(rng):
    case = experts_case(rng)
    with pytest.raises(AssertionError):
        assert_gates(case.run(fused_experts_fp8), case.run(fused_experts_float64, swiglu_limit=1.0))


def test_experts_of_two_ranks_add_up(rng):
    case = experts_case(rng, num_tokens=16)
    full = case.run(fused_experts_fp8)
    parts = []
    for first in (0, 4):
        rank = replace(case, experts=case.experts.of(slice(first, first + 4)))
        part = rank.run(fused_experts_fp8, expert_map=cases.local_map(8, first, 4))
        parts.append(part.astype(np.float32))
    # Each part and the full result are rounded to bf16 once.
    magnitude = np.abs(parts).sum(axis=0) + np.abs(full.astype(np.float32))
    assert_within(sum(parts), full, tolerances.BF16_ROUNDING * magnitude + 1e-6)


def test_a_nan_token_stays_alone(rng):
    case = experts_case(rng, routing="one_expert", num_tokens=5)
    clean = case.run(fused_experts_fp8)
    case.x[0] = np.nan
    got = case.run(fused_experts_fp8)
    assert np.isnan(got[0].astype(np.float32)).all()
    assert_bitwise_equal(got[1:], clean[1:])


def test_nan_in_an_expert_stays_with_its_tokens(rng):
    case = experts_case(rng, num_tokens=16, topk=2)
    clean = case.run(fused_experts_fp8)
    case.experts.w1_scale[3] = np.nan
    case.experts.w2.view(np.uint8)[5] = 0x7F
    touched = np.isin(case.ids, [3, 5]).any(axis=1)
    assert touched.any()
    assert not touched.all()
    got = case.run(fused_experts_fp8)
    assert np.isnan(got[touched].astype(np.float32)).all()
    assert_bitwise_equal(got[~touched], clean[~touched])


def test_tokens_do_not_depend_on_each_other(rng):
    case = experts_case(rng, routing="zipf", num_tokens=33)
    together = case.run(fused_experts_fp8)
    for t in range(0, 33, 8):
        row = slice(t, t + 1)
        assert_bitwise_equal(together[row], case.tokens(row).run(fused_experts_fp8))


def test_block_matmul_equals_float64_but_for_fp32_rounding(rng):
    w, w_scale = (a[0] for a in cases.quantize_weights(rng, 1, 256, 640))
    a, a_scale = per_token_group_quant_fp8(cases.activations(rng, 5, 640))
    value, magnitude = oracles.block_matmul_float64(a, a_scale, w, w_scale)
    got = block_scaled_matmul(a, a_scale, w, w_scale)
    assert_within(got, value, magnitude * 6 * 2.0**-24)
    poisoned = got.copy()
    poisoned[2, 17] *= 1.001
    with pytest.raises(AssertionError):
        assert_within(poisoned, value, magnitude * 6 * 2.0**-24)


def test_bound_of_the_up_projection_admits_bf16_and_little_more(rng):
    w, w_scale = (a[0] for a in cases.quantize_weights(rng, 1, 256, 640))
    a, a_scale = per_token_group_quant_fp8(cases.activations(rng, 5, 640))
    value, magnitude = oracles.block_matmul_float64(a, a_scale, w, w_scale)
    bound = tolerances.up_projection(value, magnitude)
    h = block_scaled_matmul(a, a_scale, w, w_scale).astype(BF16)
    assert assert_within(h, value, bound) < 1
    dropped = block_scaled_matmul(a[:, :512], a_scale, w[:, :512], w_scale[:, :4]).astype(BF16)
    with pytest.raises(AssertionError):
        assert_within(dropped, value, bound)
