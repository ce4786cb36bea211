"""The experts on the fewest tokens: tables of 32 slots and of 64, and the same bytes from both."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pytest
import torch

import cumoe
from cumoe.plan import experts_tiny
from cumoe.plan import fused_experts_fp8 as planning
from cumoe.plan.device import H200
from cumoe.plan.silu_and_mul_quant_fp8 import clamp_kind
from tests.helpers import cases, tolerances
from tests.helpers.backends import TorchBackend
from tests.helpers.compare import assert_bitwise_equal, assert_rows_close
from tests.helpers.layers import (
    ACTIVATIONS,
    WEIGHT_TYPES,
    Layer,
    Tokens,
    alone,
    compile_all,
    local_ids,
    only,
    random_layer,
    run,
)
from tests.helpers.workloads import churn, raw_bytes

DEVICE = "cuda"


class Case(NamedTuple):
    E: int
    topk: int
    K: int
    N: int
    activation: str = "ten"
    scale_format: str = "fp32"
    ids: str = "int32"
    weight: str = "fp32"
    mapped: bool = False

    @property
    def counts(self) -> range:
        """Of tokens, in both kernels."""
        return range(1, experts_tiny.max_tokens(self.topk, self.K, self.N) + 1)

    @property
    def local(self) -> int:
        return self.E // 4 if self.mapped else self.E

    @property
    def expert_map(self) -> np.ndarray | None:
        """A fourth of the experts is here, in descending order; others lie outside of w1."""
        if not self.mapped:
            return None
        table = np.full(self.E, -1, np.int32)
        table[1::4] = np.arange(self.local)[::-1]
        table[2::4] = self.local
        return table

    def problem(self, count: int) -> planning.Problem:
        options = ACTIVATIONS[self.activation]
        return planning.Problem(
            count, self.K, self.N, self.E, self.local, self.topk, self.ids, self.weight,
            self.mapped, self.scale_format, clamp_kind(options.get("swiglu_limit")),
            "swiglu_alpha" in options, False, True, True,
        )  # fmt: skip


CASES = {
    "stages_of_24": Case(256, 8, 3072, 256),
    "stages_of_16": Case(128, 8, 2048, 512, "inexact", "ue8m0", "int64", "bf16", mapped=True),
    "ragged_stages": Case(60, 8, 1280, 384, "oai", weight="fp16"),
    "widest": Case(64, 8, 512, 768, "plain", ids="int64"),
    "topk_16": Case(64, 16, 1152, 256, "scaled", "ue8m0", weight="bf16"),
    "topk_10": Case(512, 10, 2048, 128, mapped=True),
    "topk_5": Case(16, 5, 640, 640, ids="int64"),
    "one_token_of_more_than_32": Case(96, 40, 512, 128),
    "each_token_on_all_experts": Case(8, 8, 256, 128),
}
ROUTINGS = {
    **cases.ROUTINGS,
    # Several chunks of an expert, whose slots lie all over the table.
    "five_experts": lambda rng, M, E, topk: rng.integers(0, 5, (M, topk)),
}
EVERY_CASE = pytest.mark.parametrize("name", CASES)


def test_the_cases_have_both_tables():
    sizes = {name: experts_tiny.sizes(c.topk, c.K, c.N) for name, c in CASES.items()}
    for name, c in CASES.items():
        rooms = {n: experts_tiny.plan(c.problem(n), H200) for n in c.counts}
        slots = {n * c.topk > 32 for n in rooms}
        assert all(rooms.values())
        assert slots == ({True} if c.topk > 32 else {False, True}), name
    assert sizes["widest"] == sizes["stages_of_24"] == (4, 8)
    assert sizes["topk_16"] == (2, 4)


@pytest.fixture(scope="module")
def compiled() -> None:
    compile_all(c.problem(count) for c in CASES.values() for count in c.counts)


@pytest.fixture
def only_fewest(compiled) -> Iterator[None]:
    """A call that would take another chain fails."""
    with only("fewest"):
        yield


@lru_cache(1)
def layer_of(name: str) -> Layer:
    case = CASES[name]
    return random_layer(case.local, case.K, case.N, DEVICE)


def tokens(case: Case, routing: str, seed: int = 0) -> Tokens:
    """As many as there may be. Slots that nobody computes have NaN for a weight."""
    rng = np.random.default_rng(seed)
    M = case.counts[-1]
    ids = ROUTINGS[routing](rng, M, case.E, case.topk).astype(case.ids)
    if case.mapped and not (local_ids(ids, case.local, case.expert_map) >= 0).any():
        ids[:, 0] = 1
    if case.ids == "int64":
        ids[0, -1] = (1 << 32) + 1
    weights = cases.router_weights(rng, ids).astype(WEIGHT_TYPES[case.weight])
    x = cases.activations(rng, M, case.K)
    local = local_ids(ids, case.local, case.expert_map)
    weights[local < 0] = np.nan
    x[(local < 0).all(axis=1)] = np.nan
    return Tokens(x, ids, weights)


def result(name: str, t: Tokens) -> np.ndarray:
    """In an array that held NaN, by workspace that held NaN."""
    case = CASES[name]
    out = torch.full(t.x.shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
    got = run(
        layer_of(name), t, DEVICE, scale_format=case.scale_format, expert_map=case.expert_map,
        out=out, workspace=torch.full((1 << 20,), 0xFF, dtype=torch.uint8, device=DEVICE),
        **ACTIVATIONS[case.activation],
    )  # fmt: skip
    return TorchBackend(DEVICE).bf16(got)


def reference(name: str, t: Tokens) -> np.ndarray:
    """With local ids."""
    case = CASES[name]
    return alone(layer_of(name), t).run(
        cumoe.reference.fused_experts_fp8,
        scale_format=case.scale_format,
        **ACTIVATIONS[case.activation],
    )


@pytest.mark.gpu
@EVERY_CASE
@pytest.mark.parametrize("routing", ROUTINGS)
def test_rows_equal_the_reference(only_fewest, name, routing):
    case = CASES[name]
    t = tokens(case, routing)
    local = local_ids(t.ids, case.local, case.expert_map)
    for count in {case.counts[-1], case.counts[len(case.counts) // 2]}:
        rows = np.unique([0, count // 2, count - 1])
        got = result(name, t.of(slice(count)))
        idle = (local[:count] < 0).all(axis=1)
        assert (got[idle].view(np.uint16) == 0).all()
        assert np.isfinite(got.astype(np.float32)).all()
        want = reference(name, t._replace(ids=local).of(rows))
        assert_rows_close(got[rows], want, tolerances.MMA_ROW, f"{count} tokens")


@pytest.mark.gpu
@EVERY_CASE
@pytest.mark.parametrize("routing", ["uniform", "zipf", "with_duplicates", "one_expert"])
def test_a_tokens_bytes_do_not_depend_on_the_others(only_fewest, name, routing):
    """Alone in the kernels of 32 slots, and in any place among others in those of 64."""
    t = tokens(CASES[name], routing)
    want = np.concatenate([result(name, t.of([row])) for row in range(len(t.x))])
    rng = np.random.default_rng(1)
    for count in CASES[name].counts:
        for rows in (np.arange(count), rng.permutation(len(t.x))[:count]):
            got = result(name, t.of(rows))
            assert_bitwise_equal(got, want[rows], f"tokens {rows}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["stages_of_24", "topk_16"])
def test_a_bad_row_spares_the_others(only_fewest, name):
    t = tokens(CASES[name], "zipf")
    clean = result(name, t)
    for row in range(len(t.x)):
        x = t.x.copy()
        x[row] = np.nan
        got = result(name, t._replace(x=x))
        keep = np.arange(len(x)) != row
        assert_bitwise_equal(got[keep], clean[keep], f"row {row}")
        assert np.isnan(got[row].astype(np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["stages_of_24", "stages_of_16", "topk_10"])
def test_the_same_bytes_in_a_hundred_runs(only_fewest, name):
    t = tokens(CASES[name], "uniform")
    want = result(name, t)
    for i in range(100):
        if i % 10 == 0:
            churn()
        assert_bitwise_equal(result(name, t), want, f"run {i}")


@pytest.mark.gpu
def test_a_changed_weight_would_fail(only_fewest):
    name = "stages_of_24"
    t = tokens(CASES[name], "uniform")
    rows = np.array([0, 7])
    want = reference(name, t.of(rows))
    weights = t.weights.copy()
    weights[-1, -1] += 0.1
    got = result(name, t._replace(weights=weights))
    with pytest.raises(AssertionError, match="1 of 2 rows are off"):
        assert_rows_close(got[rows], want, tolerances.MMA_ROW, "the last slot")


@pytest.mark.gpu
def test_a_graph_replays_other_tokens(only_fewest):
    """Calls of 32 slots and of 64 in turn."""
    name = "stages_of_24"
    layer, put = layer_of(name), TorchBackend(DEVICE).put
    counts = (8, 4, 5, 1)
    static = [[put(a[:n].copy()) for a in tokens(CASES[name], "uniform")] for n in counts]

    def calls() -> list[torch.Tensor]:
        return [
            cumoe.fused_experts_fp8(
                x, layer.w1, layer.w2, weights, ids,
                w1_scale=layer.w1_scale, w2_scale=layer.w2_scale, swiglu_limit=10.0,
            )
            for x, ids, weights in static
        ]  # fmt: skip

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = calls()
    for seed in (1, 2, 3):
        t = tokens(CASES[name], "with_minus_one", seed)
        for arrays in static:
            for to, source in zip(arrays, t, strict=True):
                raw_bytes(to).copy_(raw_bytes(put(source[: len(to)].copy())))
        for out in outs:
            raw_bytes(out).fill_(0xAA)
        graph.replay()
        for n, out in zip(counts, outs, strict=True):
            want = result(name, t.of(slice(n)))
            assert_bitwise_equal(TorchBackend(DEVICE).bf16(out), want, f"{n} tokens, seed {seed}")
