"""The experts on many tokens: against the reference, and to the bit where sums are exact."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import cumoe
from cumoe.launch import device as gpu
from cumoe.plan import experts_prefill
from cumoe.plan import fused_experts_fp8 as planning
from cumoe.plan.device import H200
from cumoe.plan.silu_and_mul_quant_fp8 import clamp_kind
from tests.helpers import cases, tolerances
from tests.helpers.backends import TorchBackend
from tests.helpers.cases import BF16, E4M3, ExpertsCase, ExpertWeights
from tests.helpers.compare import assert_bitwise_equal, assert_rows_close, assert_total_close
from tests.helpers.layers import (
    ACTIVATIONS,
    WEIGHT_TYPES,
    Layer,
    Tokens,
    alone,
    compile_all,
    local_ids,
    only,
    placed,
    random_layer,
    run,
)
from tests.helpers.layouts import aligned_bytes, embedded
from tests.helpers.workloads import assert_same_bytes, bytes_of, churn, raw_bytes

DEVICE = "cuda"
NUM_CASES = 40
JUDGED_BYTES = 30_000_000
"""Of the experts of all tokens that are compared: the reference takes its time."""
GUARD = 4096


def hot(rng: np.random.Generator, M: int, E: int, topk: int) -> np.ndarray:
    """Nine tenths of the slots on one expert, and most experts have none."""
    ids = rng.choice(rng.choice(E, max(1, E // 8), replace=False), (M, topk))
    return np.where(rng.random((M, topk)) < 0.9, E - 1, ids).astype(np.int32)


ROUTINGS = {**cases.ROUTINGS, "hot": hot}
SHAPES = (
    (1, 1, 128, 128),
    (3, 2, 384, 128),  # the second consumer of the last tile has no columns
    (5, 1, 128, 384),
    (8, 2, 512, 256),
    (8, 4, 640, 640),  # the codes do not fit beside the ring
    (16, 6, 1152, 512),
    (24, 8, 2304, 256),
    (32, 8, 2048, 2048),
    (256, 8, 6144, 256),
)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "shape": SHAPES,
    "slots": (1, 2, 5, 16),
    "odd": (0, 1, 17, 63),
    "routing": tuple(ROUTINGS),
    "ids": ("int32", "int64"),
    "weight": tuple(WEIGHT_TYPES),
    "scale_format": ("fp32", "ue8m0"),
    "activation": tuple(ACTIVATIONS),
    "mapped": (False, True),
    "on_input": (False, True),
    "factor": (1.0, 2.5),
    "rows": ("plain", "x_apart", "out_apart", "in_place"),
    "weights_at": ("plain", "w1_apart", "w2_apart", "scales_apart"),
}


class Case(NamedTuple):
    shape: tuple[int, int, int, int]
    """E, topk, K, N"""
    slots: int
    """How many times as many as few tokens have, about."""
    odd: int
    """Tokens more than that."""
    routing: str
    ids: str
    weight: str
    scale_format: str
    activation: str
    mapped: bool
    """Whether half of the experts are local."""
    on_input: bool
    factor: float
    rows: str
    weights_at: str

    @property
    def M(self) -> int:
        few = max(planning.few_tokens(*self.shape))
        return self.slots * few + 1 + self.odd

    @property
    def local(self) -> int:
        return -(-self.shape[0] // 2) if self.mapped else self.shape[0]

    @property
    def problem(self) -> planning.Problem:
        (E, topk, K, N), options = self.shape, ACTIVATIONS[self.activation]
        return planning.Problem(
            self.M, K, N, E, self.local, topk, self.ids, self.weight, self.mapped,
            self.scale_format, clamp_kind(options.get("swiglu_limit")), "swiglu_alpha" in options,
            self.on_input, self.rows not in ("x_apart", "in_place"),
            self.rows not in ("out_apart", "in_place"), self.weights_at != "w2_apart",
        )  # fmt: skip

    @property
    def is_possible(self) -> bool:
        return self.shape[1] == 1 or not self.on_input


@cache
def chosen() -> tuple[Case, ...]:
    """Random cases, so many that every option is in some."""
    rng, found = np.random.default_rng(1858), []
    while len(found) < NUM_CASES:
        case = Case(**{name: v[rng.integers(len(v))] for name, v in OPTIONS.items()})
        if case.is_possible:
            found.append(case)
    return tuple(found)


def name_of(case: Case) -> str:
    return "-".join(str(v).replace(", ", "x").strip("()") for v in case)


CASES = {name_of(c): c for c in chosen()}
BASE = Case(
    (8, 2, 512, 256), 3, 17, "uniform", "int32", "fp32", "fp32", "ten", False, False, 1.0, "plain",
    "plain",
)  # fmt: skip


def test_the_cases_have_every_option():
    for i, (name, values) in enumerate(OPTIONS.items()):
        assert {c[i] for c in chosen()} == set(values), name
    for case in chosen():
        assert isinstance(planning.plan(case.problem, H200), experts_prefill.Plan), case


@pytest.fixture(scope="module")
def compiled() -> None:
    compile_all(c.problem for c in [*CASES.values(), BASE])


@pytest.fixture
def only_many(compiled) -> Iterator[None]:
    with only("many"):
        yield


@lru_cache(1)
def layer_of(experts: int, K: int, N: int) -> Layer:
    return random_layer(experts, K, N, DEVICE)


def expert_map_of(case: Case) -> np.ndarray | None:
    """Every other expert is here, in descending order; others lie outside of w1."""
    if not case.mapped:
        return None
    table = np.full(case.shape[0], -1, np.int32)
    table[::2] = np.arange(case.local)[::-1]
    table[1::4] = case.local
    return table


def tokens_of(case: Case) -> Tokens:
    """A token without an expert, ids that are none, and NaN wherever nothing may be read."""
    rng = np.random.default_rng(case.M)
    E, topk, K, _ = case.shape
    ids = ROUTINGS[case.routing](rng, case.M, E, topk).astype(case.ids)
    ids[2], ids[-3] = -1, E
    if case.ids == "int64":
        ids[3, 0] = (1 << 32) + 3
    weights = cases.router_weights(rng, ids).astype(WEIGHT_TYPES[case.weight])
    x = cases.activations(rng, case.M, K)
    local = local_ids(ids, case.local, expert_map_of(case))
    weights[local < 0] = np.nan
    x[(local < 0).all(axis=1)] = np.nan
    return Tokens(x, ids, weights)


def run_case(case: Case, layer: Layer, t: Tokens) -> np.ndarray:
    """The result in a NaN buffer, from a workspace of just the size, full of NaN."""
    backend, table = TorchBackend(DEVICE), expert_map_of(case)
    apart = {"offset": 3, "gap": 5}
    x = embedded(backend, t.x, **(apart if case.rows in ("x_apart", "in_place") else {}))
    poison = np.full_like(t.x, np.nan)
    out = embedded(backend, poison, **(apart if case.rows == "out_apart" else {}))
    target = x if case.rows == "in_place" else out
    size = planning.plan(case.problem, gpu.info(0)).workspace.total
    workspace, at = aligned_bytes(backend, size + GUARD), placed(layer, case.weights_at)
    workspace.fill_(0xFF)
    result = cumoe.fused_experts_fp8(
        x.view, at.w1, at.w2, backend.put(t.weights), backend.put(t.ids), w1_scale=at.w1_scale,
        w2_scale=at.w2_scale, scale_format=case.scale_format, routed_scaling_factor=case.factor,
        apply_router_weight_on_input=case.on_input, out=target.view, workspace=workspace[:size],
        expert_map=None if table is None else backend.put(table), **ACTIVATIONS[case.activation],
    )  # fmt: skip
    assert result is target.view
    assert bool((workspace[size:] == 0xFF).all())
    for island in (x, out):
        assert (island.guard(backend) == 0xFF).all()
    return backend.bf16(result)


def check(case: Case, layer: Layer, t: Tokens, got: np.ndarray) -> None:
    """Exact zeros where nothing is local, and as many rows as the reference is quick enough for."""
    local = local_ids(t.ids, case.local, expert_map_of(case))
    idle = (local < 0).all(axis=1)
    assert (got[idle].view(np.uint16) == 0).all()
    assert np.isfinite(got.astype(np.float32)).all()
    assert got[~idle].astype(np.float32).any(axis=1).all()
    rows = some_rows(case, local)
    want = alone(layer, Tokens(t.x, local, t.weights).of(rows)).run(
        cumoe.reference.fused_experts_fp8,
        scale_format=case.scale_format,
        routed_scaling_factor=case.factor,
        apply_router_weight_on_input=case.on_input,
        **ACTIVATIONS[case.activation],
    )
    tolerance = tolerances.wgmma(*case.shape[2:])
    assert_rows_close(got[rows], want, tolerance.row, "against the reference")
    if len(rows) >= 32:  # few rows have no more in common than one
        assert_total_close(got[rows], want, tolerance.total, name="against the reference")


def some_rows(case: Case, local: np.ndarray) -> np.ndarray:
    """Busy rows first, ends before others, while their experts are few enough."""
    order = np.append([0, len(local) - 1], np.random.default_rng(0).permutation(len(local)))
    order = order[np.argsort((local[order] < 0).all(axis=1), kind="stable")]
    _, _, K, N = case.shape
    rows: list[int] = []
    for row in order:
        needed = (np.unique(local[[*rows, row]]) >= 0).sum()
        if len(rows) < 2 or (len(rows) < 48 and needed * 3 * K * N <= JUDGED_BYTES):
            rows.append(int(row))
    return np.unique(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_rows_equal_the_reference(only_many, name):
    case = CASES[name]
    layer, t = layer_of(case.local, *case.shape[2:]), tokens_of(case)
    check(case, layer, t, run_case(case, layer, t))


@pytest.mark.gpu
def test_a_changed_weight_would_fail(only_many):
    layer, t = layer_of(8, 512, 256), tokens_of(BASE)
    row = BASE.M - 1
    assert row in some_rows(BASE, t.ids)
    check(BASE, layer, t, run_case(BASE, layer, t))
    changed = t.weights.copy()
    changed[row, 1] += 0.5
    got = run_case(BASE, layer, t._replace(weights=changed))
    with pytest.raises(AssertionError, match=r"1 of \d+ rows are off"):
        check(BASE, layer, t, got)


@pytest.mark.gpu
def test_a_call_of_few_tokens_would_fail(only_many):
    layer, t = layer_of(8, 512, 256), tokens_of(BASE)
    with pytest.raises(AssertionError, match="tokens take the chain for few"):
        run(layer, t.of(slice(9)), DEVICE)


def exact_case(E: int, topk: int, K: int, N: int, M: int, routing: str) -> ExpertsCase:
    """All sums are exact in any order and with few bits, so only `exp` may round differently.

    Codes of x are small integers (a 448, which no weight meets, makes each scale 1), those of w1 a
    few of -1 and 1 in a block, every row of w2 picks one value; scales are powers of two.
    """
    rng = np.random.default_rng(M)
    x = rng.integers(-2, 3, (M, K)).astype(np.float32)
    x[:, ::128] = 448
    w1 = rng.choice([-1.0, 1.0], (E, 2 * N, K)) * (rng.random((E, 2 * N, K)) < 0.06)
    w1[:, :, ::128] = 0
    picked = rng.integers(0, N, (E, K))
    w2 = (np.arange(N) == picked[:, :, None]).astype(np.float32)
    scales = [
        np.exp2(rng.integers(-3, 1, shape)).astype(np.float32)
        for shape in ((E, 2 * N // 128, K // 128), (E, K // 128, N // 128))
    ]
    ids = ROUTINGS[routing](rng, M, E, topk)
    return ExpertsCase(
        ExpertWeights(w1.astype(E4M3), w2.astype(E4M3), *scales),
        x.astype(BF16),
        np.exp2(rng.integers(-2, 1, (M, topk))).astype(np.float32),
        ids,
    )


def assert_exact(got: np.ndarray, want: np.ndarray) -> None:
    """All but one value in 500: a step of y moves its code, or the scale and 128 of them."""
    off = (got.view(np.uint16) != want.view(np.uint16)).mean()
    assert off < 2e-3, f"{off:.2%} of the values differ"
    assert_rows_close(got, want, 2e-2, "of exact sums")


EXACT_SHAPES = [
    (1, 1, 128, 128, 130), (3, 2, 384, 128, 77), (4, 3, 640, 384, 65), (6, 2, 256, 640, 200),
    (8, 4, 1152, 256, 333), (8, 2, 2048, 512, 129),
]  # fmt: skip


def test_a_swapped_column_would_not_be_exact():
    case = exact_case(3, 2, 384, 128, 77, "uniform")
    want = case.run(cumoe.reference.fused_experts_fp8)
    assert_exact(want.copy(), want)
    got = want.copy()
    got[:, [5, 9]] = got[:, [9, 5]]
    with pytest.raises(AssertionError, match="of the values differ"):
        assert_exact(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("routing", ["uniform", "hot", "with_duplicates"])
@pytest.mark.parametrize("shape", EXACT_SHAPES)
def test_exact_sums(shape, routing, scale_format):
    """Every value in its place: each scale, each half of a tile, each padded block."""
    case = exact_case(*shape, routing)
    layer = Layer(*map(TorchBackend(DEVICE).put, case.experts))
    with only("many"):
        got = run(layer, Tokens(case.x, case.ids, case.weights), DEVICE, scale_format=scale_format)
    want = case.run(cumoe.reference.fused_experts_fp8, scale_format=scale_format)
    assert_exact(TorchBackend(DEVICE).bf16(got), want)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 2, 512, 256), (8, 4, 640, 640), (256, 8, 6144, 256)])
def test_other_tokens_and_their_number_do_not_matter(only_many, shape):
    """A token's bytes are the same wherever it lies in a block, and with however many others."""
    case = BASE._replace(shape=shape, slots=3)
    layer, t = layer_of(shape[0], *shape[2:]), tokens_of(case)
    want = TorchBackend(DEVICE).bf16(run(layer, t, DEVICE))
    least = BASE._replace(shape=shape, slots=1, odd=0).M
    order = np.random.default_rng(1).permutation(case.M)
    for rows in (slice(least), slice(1, least + 8), slice(case.M - least, None), order):
        got = TorchBackend(DEVICE).bf16(run(layer, t.of(rows), DEVICE))
        assert_bitwise_equal(got, want[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [2, 3, 50])
def test_parts_give_the_same_bytes(only_many, parts):
    case = BASE._replace(mapped=True, ids="int64")
    layer, t = layer_of(case.local, 512, 256), tokens_of(case)
    table = expert_map_of(case)
    want = bytes_of((run(layer, t, DEVICE, expert_map=table),))
    info = gpu.info(0)
    some = planning.part(case.problem, -(-case.M // parts))
    limit = planning.plan(some, info).workspace.total
    got = run(layer, t, DEVICE, expert_map=table, max_workspace_bytes=limit)
    assert planning.plan(case.problem, info).workspace.total > limit
    assert_same_bytes(bytes_of((got,)), want)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 2, 512, 256), (32, 8, 2048, 2048), (256, 8, 6144, 256)])
def test_the_same_bytes_in_twenty_runs(only_many, shape):
    case = BASE._replace(shape=shape)
    layer, t = layer_of(shape[0], *shape[2:]), tokens_of(case)
    want = bytes_of((run(layer, t, DEVICE),))
    for _ in range(20):
        churn()
        assert_same_bytes(bytes_of((run(layer, t, DEVICE),)), want)


@pytest.mark.gpu
def test_a_graph_replays_other_tokens(only_many):
    """Other ids and other routings: from even to all on one expert, and to none."""
    layer, put = layer_of(8, 512, 256), TorchBackend(DEVICE).put
    first = tokens_of(BASE)
    x, ids, weights = (put(a.copy()) for a in first)
    call = lambda: cumoe.fused_experts_fp8(  # noqa: E731
        x, layer.w1, layer.w2, weights, ids, w1_scale=layer.w1_scale, w2_scale=layer.w2_scale
    )
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    seen = set()
    for seed, routing in enumerate(("round_robin", "hot", "one_expert", "uniform", "none")):
        rng = np.random.default_rng(seed)
        new = ROUTINGS.get(routing, cases.uniform)(rng, BASE.M, 8, 2)
        t = Tokens(
            cases.activations(rng, BASE.M, 512),
            np.full_like(new, -1) if routing == "none" else new,
            cases.router_weights(rng, new),
        )
        for target, source in zip((x, ids, weights), t, strict=True):
            raw_bytes(target).copy_(raw_bytes(put(source.copy())))
        raw_bytes(result).fill_(0xAA)
        churn()
        graph.replay()
        got = bytes_of((result,))
        assert_same_bytes(got, bytes_of((run(layer, t, DEVICE),)))
        seen.add(got[0].tobytes())
    assert len(seen) == 5


@pytest.mark.gpu
def test_weights_that_move_are_found_again(only_many):
    """Tensor maps hold addresses: a call on other weights of the same kind must not reuse them."""
    t = tokens_of(BASE)
    layers = [random_layer(8, 512, 256, DEVICE, seed) for seed in (1, 2)]
    wanted = [bytes_of((run(layer, t, DEVICE),)) for layer in layers]
    assert wanted[0][0].tobytes() != wanted[1][0].tobytes()
    for layer, want in [*zip(layers, wanted, strict=True)] * 3:
        assert_same_bytes(bytes_of((run(layer, t, DEVICE),)), want)
        copy = Layer(*(a.clone() for a in layer))
        assert_same_bytes(bytes_of((run(copy, t, DEVICE),)), want)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_token_spares_all_others(only_many, bad):
    layer, t = layer_of(8, 512, 256), tokens_of(BASE)
    clean = TorchBackend(DEVICE).bf16(run(layer, t, DEVICE))
    x = t.x.copy()
    x[5, 300] = bad
    got = TorchBackend(DEVICE).bf16(run(layer, t._replace(x=x), DEVICE))
    keep = np.arange(BASE.M) != 5
    assert_bitwise_equal(got[keep], clean[keep])
    assert not np.isfinite(got[5].astype(np.float32)).any()


@pytest.mark.gpu
def test_nothing_is_local(only_many):
    layer, t = layer_of(8, 512, 256), tokens_of(BASE)
    nowhere = Tokens(
        np.full_like(t.x, np.nan), np.full_like(t.ids, 8), np.full_like(t.weights, np.inf)
    )
    got = TorchBackend(DEVICE).bf16(run(layer, nowhere, DEVICE))
    assert (got.view(np.uint16) == 0).all()


@pytest.mark.gpu
def test_weights_that_no_map_holds_take_the_chain_for_any():
    """All experts share one w1: a stride of 0."""
    layer, t = layer_of(8, 512, 256), tokens_of(BASE)
    shared = layer._replace(w1=layer.w1[:1].expand(8, -1, -1))
    full = layer._replace(w1=layer.w1[:1].repeat(8, 1, 1))
    with only("any"):
        got = TorchBackend(DEVICE).bf16(run(shared, t, DEVICE))
    with only("many"):
        want = TorchBackend(DEVICE).bf16(run(full, t, DEVICE))
    assert_rows_close(got, want, tolerances.wgmma(512, 256).row, "against the chain for many")
    rows = some_rows(BASE, t.ids)
    local = Tokens(t.x, local_ids(t.ids, 8, None), t.weights)
    reference = alone(full, local.of(rows)).run(cumoe.reference.fused_experts_fp8)
    assert_rows_close(got[rows], reference, tolerances.MMA_ROW, "against the reference")
