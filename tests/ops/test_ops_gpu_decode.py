"""The experts on few tokens against the reference: shapes, routings and options in pairs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pytest

import cumoe
from cumoe.plan import experts_decode, experts_tiny
from cumoe.plan import fused_experts_fp8 as planning
from cumoe.plan.device import H200
from cumoe.plan.silu_and_mul_quant_fp8 import clamp_kind
from tests.helpers import cases, tolerances
from tests.helpers.backends import TorchBackend
from tests.helpers.compare import assert_rows_close
from tests.helpers.layers import (
    ACTIVATIONS,
    WEIGHT_TYPES,
    Layer,
    Tokens,
    alone,
    compile_all,
    few_tokens_only,
    local_ids,
    placed,
    random_layer,
    run,
)
from tests.helpers.layouts import embedded

DEVICE = "cuda"
FEW = experts_tiny.Plan, experts_decode.Plan
NUM_CASES = 44
LAYER_BYTES = 1_700_000_000
TOKEN_BYTES, JUDGED_BYTES = 45_000_000, 16_000_000
"""Of the experts of a token, and of those for more than one: the reference takes its time."""


def same_experts(rng: np.random.Generator, M: int, E: int, topk: int) -> np.ndarray:
    """All tokens on the same experts."""
    return np.repeat(cases.uniform(rng, 1, E, topk), M, 0)


def few_experts(rng: np.random.Generator, M: int, E: int, topk: int) -> np.ndarray:
    """Most experts have no token, and a token may have one twice."""
    return rng.choice(rng.choice(E, max(1, E // 8), replace=False), (M, topk)).astype(np.int32)


ROUTINGS = {**cases.ROUTINGS, "same_experts": same_experts, "few_experts": few_experts}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "E": (8, 64, 256, 288, 512),
    "topk": (1, 2, 6, 8, 16),
    "K": (512, 1280, 2048, 4096, 6144, 7168),
    "N": (128, 256, 384, 512, 2048),
    "place": tuple(range(8)),
    "routing": tuple(ROUTINGS),
    "ids": ("int32", "int64"),
    "weight": tuple(WEIGHT_TYPES),
    "scale_format": ("fp32", "ue8m0"),
    "activation": tuple(ACTIVATIONS),
    "mapped": (False, True),
    "on_input": (False, True),
    "factor": (1.0, 2.5),
    "rows": ("plain", "x_apart", "out_apart", "in_place"),
    "weights_at": ("plain", "w1_apart", "scales_apart"),
}


class Case(NamedTuple):
    E: int
    topk: int
    K: int
    N: int
    place: int
    """1 token, then for each regime its last number of tokens and the next one; but no further."""
    routing: str
    ids: str
    weight: str
    scale_format: str
    activation: str
    mapped: bool
    """Whether an eighth of the experts is local."""
    on_input: bool
    factor: float
    rows: str
    weights_at: str

    @property
    def counts(self) -> list[int]:
        """Of tokens: 1, the ends of the regimes, and what comes after them."""
        ends = planning.few_tokens(self.E, self.topk, self.K, self.N)
        return [1] + [m for end in ends for m in (end, end + 1)]

    @property
    def M(self) -> int:
        return self.counts[self.place] if self.place < len(self.counts) else 0

    @property
    def local(self) -> int:
        return self.E // 8 if self.mapped else self.E

    @property
    def problem(self) -> planning.Problem:
        options = ACTIVATIONS[self.activation]
        return planning.Problem(
            self.M, self.K, self.N, self.E, self.local, self.topk, self.ids, self.weight,
            self.mapped, self.scale_format, clamp_kind(options.get("swiglu_limit")),
            "swiglu_alpha" in options, self.on_input, self.rows not in ("x_apart", "in_place"),
            self.rows not in ("out_apart", "in_place"), self.weights_at != "w2_apart",
        )  # fmt: skip

    @property
    def is_possible(self) -> bool:
        expert = 3 * self.K * self.N
        return (
            self.topk <= self.E
            and self.M > 0
            and (self.topk == 1 or not self.on_input)
            and self.local * expert <= LAYER_BYTES
            and self.topk * expert <= TOKEN_BYTES
            and isinstance(planning.plan(self.problem, H200), FEW)
        )


def pairs_of(case: Case) -> set[tuple[tuple[str, Any], ...]]:
    return set(combinations(case._asdict().items(), 2))


@cache
def chosen() -> tuple[tuple[Case, ...], float]:
    """Cases that together have most of the possible pairs of options, and the share of these."""
    rng = np.random.default_rng(3)
    drawn = []
    while len(drawn) < 3000:
        case = Case(**{name: v[rng.integers(len(v))] for name, v in OPTIONS.items()})
        if case.is_possible:
            drawn.append((case, pairs_of(case)))
    possible = set().union(*(pairs for _, pairs in drawn))
    missing, found = set(possible), []
    for _ in range(NUM_CASES):
        case, pairs = max(drawn, key=lambda d: len(d[1] & missing))
        found.append(case)
        missing -= pairs
    return tuple(found), 1 - len(missing) / len(possible)


CASES = {"-".join(map(str, c)): c for c in chosen()[0]}


def test_the_cases_have_most_pairs_of_options():
    found, share = chosen()
    assert share > 0.85
    for i, (name, values) in enumerate(OPTIONS.items()):
        assert {c[i] for c in found} == set(values), name


BASE = Case(
    64, 8, 512, 256, 1, "uniform", "int32", "fp32", "fp32", "ten", False, False, 1.0, "plain",
    "plain",
)  # fmt: skip
LAST = len(BASE.counts) - 2
"""Place of the last call of few tokens."""
SMALLEST = [(128, 128), (256, 128), (384, 384), (640, 384), (1152, 640), (3072, 128)]
DEEP = [8576, 17_024]
"""K of two and of three passes of down."""
SHARING = [(256, 8, 512, 256), (288, 8, 4096, 256), (256, 6, 1024, 2048)]
"""Shapes whose regimes have tiles in common."""
SHARING_CASES = {
    (E, topk, K, N): [
        case
        for place in range(8)
        if (case := BASE._replace(E=E, topk=topk, K=K, N=N, place=place)).is_possible
    ]
    for E, topk, K, N in SHARING
}


@pytest.fixture(scope="module")
def compiled() -> None:
    extra = [BASE._replace(place=place, ids=ids) for place in range(8) for ids in OPTIONS["ids"]]
    extra += [BASE._replace(topk=topk, place=1) for topk in (1, 2)]
    small = [BASE._replace(topk=2, E=E, K=K, N=N) for K, N in SMALLEST for E in (1, 3)]
    extra += [case._replace(rows=rows) for case in small for rows in ("plain", "x_apart")]
    extra += [BASE._replace(topk=2, E=8, K=K, N=128, place=place) for K in DEEP for place in (5, 7)]
    extra += [case for cases_of_one in SHARING_CASES.values() for case in cases_of_one]
    compile_all(c.problem for c in [*CASES.values(), *extra] if c.is_possible)


@pytest.fixture
def only_few(compiled) -> Iterator[None]:
    with few_tokens_only():
        yield


@lru_cache(1)
def layer_of(experts: int, K: int, N: int) -> Layer:
    return random_layer(experts, K, N, DEVICE)


def expert_map_of(case: Case) -> np.ndarray | None:
    """Every eighth expert is here, in descending order; others lie outside of w1."""
    if not case.mapped:
        return None
    table = np.full(case.E, -1, np.int32)
    table[1::8] = np.arange(case.local)[::-1]
    table[2::8], table[3::8] = case.local, -(1 << 31)
    return table


def tokens_of(case: Case) -> Tokens:
    rng = np.random.default_rng(case.M)
    ids = ROUTINGS[case.routing](rng, case.M, case.E, case.topk).astype(case.ids)
    valid = (ids >= 0) & (ids < case.E)
    if case.mapped and valid.any() and not (ids[valid] % 8 == 1).any():
        ids[valid] = ids[valid] // 8 * 8 + 1  # there is work for somebody
    if case.M > 2:
        ids[2] = -1
    if case.ids == "int64" and case.M > 3:
        ids[3, 0] = (1 << 32) + 3
    weights = cases.router_weights(rng, ids).astype(WEIGHT_TYPES[case.weight])
    x = cases.activations(rng, case.M, case.K)
    local = local_ids(ids, case.local, expert_map_of(case))
    weights[local < 0] = np.nan
    x[(local < 0).all(axis=1)] = np.nan
    return Tokens(x, ids, weights)


def run_case(case: Case, layer: Layer, t: Tokens) -> np.ndarray:
    backend = TorchBackend(DEVICE)
    apart = {"offset": 3, "gap": 5}
    x = embedded(backend, t.x, **(apart if case.rows in ("x_apart", "in_place") else {}))
    poison = np.full_like(t.x, np.nan)
    out = embedded(backend, poison, **(apart if case.rows == "out_apart" else {}))
    target = x if case.rows == "in_place" else out
    table = expert_map_of(case)
    options = {
        **ACTIVATIONS[case.activation],
        "scale_format": case.scale_format,
        "routed_scaling_factor": case.factor,
        "apply_router_weight_on_input": case.on_input,
        "expert_map": None if table is None else backend.put(table),
        "out": target.view,
    }
    put = backend.put
    at = placed(layer, case.weights_at)
    result = cumoe.fused_experts_fp8(
        x.view, at.w1, at.w2, put(t.weights), put(t.ids), w1_scale=at.w1_scale,
        w2_scale=at.w2_scale, **options,
    )  # fmt: skip
    assert result is target.view
    for island in (x, out):
        assert (island.guard(backend) == 0xFF).all()
    return backend.bf16(result)


def tolerance_of(case: Case, t: Tokens) -> float:
    """The chain for the fewest tokens adds up in fp32."""
    M, topk = t.ids.shape
    tiny = experts_tiny.plan(case.problem._replace(M=M, topk=topk), H200)
    return tolerances.MMA_ROW if tiny else tolerances.wgmma(case.K, case.N).row


def check(case: Case, layer: Layer, t: Tokens, got: np.ndarray) -> None:
    """Exact zeros where nothing is local, and as many rows as the reference is quick enough for."""
    local = local_ids(t.ids, case.local, expert_map_of(case))
    idle = (local < 0).all(axis=1)
    assert (got[idle].view(np.uint16) == 0).all()
    assert np.isfinite(got.astype(np.float32)).all()
    rows = some_rows(case, local)
    want = alone(layer, Tokens(t.x, local, t.weights).of(rows)).run(
        cumoe.reference.fused_experts_fp8,
        scale_format=case.scale_format,
        routed_scaling_factor=case.factor,
        apply_router_weight_on_input=case.on_input,
        **ACTIVATIONS[case.activation],
    )
    assert_rows_close(got[rows], want, tolerance_of(case, t), "against the reference")


def some_rows(case: Case, local: np.ndarray) -> np.ndarray:
    """Busy rows first, ends and middle before others, while their experts are few enough."""
    order = np.random.default_rng(0).permutation(len(local))
    order = np.append([0, len(local) - 1], order)
    order = order[np.argsort((local[order] < 0).all(axis=1), kind="stable")]
    rows: list[int] = []
    for row in order:
        needed = (np.unique(local[[*rows, row]]) >= 0).sum()
        if not rows or (len(rows) < 32 and needed * 3 * case.K * case.N <= JUDGED_BYTES):
            rows.append(int(row))
    return np.unique(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_rows_equal_the_reference(only_few, name):
    case = CASES[name]
    layer, t = layer_of(case.local, case.K, case.N), tokens_of(case)
    check(case, layer, t, run_case(case, layer, t))


@pytest.mark.gpu
@pytest.mark.parametrize("place", [1, 3, LAST])
def test_a_changed_weight_would_fail(only_few, place):
    case = BASE._replace(place=place)
    layer, t = layer_of(case.local, case.K, case.N), tokens_of(case)
    row = case.M - 1
    assert row in some_rows(case, t.ids)
    check(case, layer, t, run_case(case, layer, t))
    changed = t.weights.copy()
    changed[row, 5] += 0.1
    got = run_case(case, layer, t._replace(weights=changed))
    with pytest.raises(AssertionError, match=r"1 of \d+ rows are off"):
        check(case, layer, t, got)


@pytest.mark.gpu
def test_a_call_of_many_tokens_would_fail(only_few):
    case = BASE._replace(place=LAST)
    layer = layer_of(case.local, case.K, case.N)
    t = tokens_of(case)
    more = Tokens(*(np.concatenate([a, a]) for a in t))
    with pytest.raises(AssertionError, match="tokens take the chain for many"):
        run(layer, more, DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 9, 100, 256])
def test_w2_with_gaps(only_few, num_tokens):
    """The kernels for the fewest tokens cannot, those for few can."""
    case = BASE._replace(E=256)
    layer = layer_of(case.local, case.K, case.N)
    rng = np.random.default_rng(1)
    ids = cases.zipf(rng, num_tokens, 256, 8)
    t = Tokens(cases.activations(rng, num_tokens, 512), ids, cases.router_weights(rng, ids))
    gaps = placed(layer, "w2_apart")
    got = TorchBackend(DEVICE).bf16(run(gaps, t, DEVICE, swiglu_limit=10.0))
    check(case._replace(weights_at="w2_apart"), layer, t, got)


@pytest.mark.gpu
def test_calls_beside_the_last_boundary():
    """The last call of few tokens and the first of many, in any order."""
    case = BASE._replace(place=LAST)
    layer = layer_of(case.local, case.K, case.N)
    rng = np.random.default_rng(4)
    ids = cases.uniform(rng, case.M + 1, case.E, case.topk)
    t = Tokens(cases.activations(rng, len(ids), 512), ids, cases.router_weights(rng, ids))
    for count in (case.M + 1, case.M, case.M + 1, 1, case.M):
        some = t.of(slice(count))
        got = TorchBackend(DEVICE).bf16(run(layer, some, DEVICE, swiglu_limit=10))
        check(case, layer, some, got)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHARING)
def test_small_calls_first_then_larger_ones(only_few, shape):
    """Kernels that regimes share were loaded for the smaller one: the larger must launch too."""
    E, _, K, N = shape
    layer = layer_of(E, K, N)
    for case in SHARING_CASES[shape]:
        t = tokens_of(case)
        check(case, layer, t, run_case(case, layer, t))


@pytest.mark.gpu
@pytest.mark.parametrize("topk", [1, 2, 8])
@pytest.mark.parametrize("num_tokens", [1, 4, 8])
@pytest.mark.parametrize("expert", [0, 63])
def test_all_slots_on_one_expert(only_few, expert, num_tokens, topk):
    case = BASE._replace(topk=topk)
    layer = layer_of(64, case.K, case.N)
    rng = np.random.default_rng(topk)
    ids = np.full((num_tokens, topk), expert, np.int32)
    t = Tokens(cases.activations(rng, num_tokens, 512), ids, cases.router_weights(rng, ids))
    check(case, layer, t, TorchBackend(DEVICE).bf16(run(layer, t, DEVICE, swiglu_limit=10.0)))


@pytest.mark.gpu
@pytest.mark.parametrize("place", range(LAST + 1))
def test_nothing_is_local(only_few, place):
    case = BASE._replace(place=place, ids="int64")
    layer = layer_of(64, case.K, case.N)
    t = tokens_of(case)
    x, weights = np.full_like(t.x, np.nan), np.full_like(t.weights, np.inf)
    for bad in (-1, 64, (1 << 32) + 3, 1 << 31, -(1 << 63)):
        nowhere = Tokens(x, np.full_like(t.ids, bad), weights)
        got = TorchBackend(DEVICE).bf16(run(layer, nowhere, DEVICE, swiglu_limit=10.0))
        assert (got.view(np.uint16) == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "N"), SMALLEST)
@pytest.mark.parametrize("E", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
@pytest.mark.parametrize("rows", ["plain", "x_apart"])
def test_smallest_layers(compiled, rows, num_tokens, E, K, N):
    """Fewer 128-blocks than warps, one expert, one chunk and none; by both chains for few."""
    case = BASE._replace(E=E, topk=2, K=K, N=N, rows=rows)
    layer = layer_of(E, K, N)
    rng = np.random.default_rng(num_tokens)
    ids = rng.integers(-1, E, (num_tokens, 2)).astype(np.int32)
    t = Tokens(cases.activations(rng, num_tokens, K), ids, cases.router_weights(rng, ids))
    check(case, layer, t, run_case(case, layer, t))


@pytest.mark.gpu
@pytest.mark.parametrize("K", DEEP)
@pytest.mark.parametrize("num_tokens", [9, 17, 32])
def test_several_passes_over_the_columns(only_few, num_tokens, K):
    case = BASE._replace(E=8, topk=2, K=K, N=128)
    layer = layer_of(8, K, 128)
    rng = np.random.default_rng(num_tokens)
    ids = cases.uniform(rng, num_tokens, 8, 2)
    t = Tokens(cases.activations(rng, num_tokens, K), ids, cases.router_weights(rng, ids))
    check(case, layer, t, run_case(case, layer, t))


def test_the_cases_reach_what_the_kernels_tell_apart():
    """Rests of a stage, sums outside of shared memory, more than one pass."""
    small = [BASE._replace(topk=2, E=3, K=K, N=N, rows="x_apart") for K, N in SMALLEST]
    deep = [BASE._replace(topk=2, E=8, K=K, N=128, place=5) for K in DEEP]
    plans = [experts_decode.plan(c.problem, H200) for c in (*CASES.values(), *small, *deep)]
    found = [(dict(p.gate_up.kernel.constants), p.down) for p in plans if p]
    assert {c["K"] // 128 % 4 for c, _ in found} == {0, 1, 2, 3}
    assert {c["N_TILES"] for c, _ in found} == {1, 2, 4}
    assert {1, 2, 3} <= {down.passes for _, down in found}
    constants = [(dict(down.step.kernel.constants), down) for _, down in found]
    assert any(down.shared_tokens < d["MAX_SLOTS"] // d["TOPK"] for d, down in constants)
