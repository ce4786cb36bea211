"""The experts on few tokens: the same bytes always, whatever runs before, beside and after."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import cumoe
from cumoe.plan import experts_tiny
from cumoe.plan import fused_experts_fp8 as planning
from cumoe.plan.silu_and_mul_quant_fp8 import BF16_CLAMP
from tests.helpers import cases
from tests.helpers.backends import TorchBackend
from tests.helpers.compare import assert_bitwise_equal
from tests.helpers.layers import (
    Layer,
    Tokens,
    compile_all,
    few_tokens_only,
    random_layer,
    run,
)
from tests.helpers.workloads import churn, raw_bytes

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
E, TOPK = 256, 8
COUNTS = (1, 4, 5, 8, 9, 32, 33, 64, 128, 129, 256)
"""Numbers of tokens on both sides of each boundary, and others."""
SHAPES = {
    "stages_of_24": (3072, 256),
    "stages_of_16": (2048, 512),
    "ragged": (1280, 384),
    "shallow": (512, 128),
}
LIMIT = 10.0


@pytest.fixture(scope="module")
def compiled() -> None:
    problems = [
        planning.Problem(
            count, K, N, E, E, TOPK, "int32", "fp32", False, scale_format, BF16_CLAMP, False,
            False, True, True,
        )
        for K, N in SHAPES.values()
        for count in COUNTS
        for scale_format in ("fp32", "ue8m0")
    ]  # fmt: skip
    K, N = SHAPES["shallow"]
    problems += [p._replace(topk=1, weight_on_input=True) for p in problems if (p.K, p.N) == (K, N)]
    compile_all(problems)


@pytest.fixture(autouse=True)
def only_few(compiled) -> Iterator[None]:
    with few_tokens_only():
        yield


@lru_cache(2)
def layer_of(K: int, N: int, seed: int = 5) -> Layer:
    return random_layer(E, K, N, DEVICE, seed)


@lru_cache(64)
def tokens(count: int, K: int, routing: str = "zipf", seed: int = 0) -> Tokens:
    """With invalid slots, a token without any expert, and another with one expert only."""
    rng = np.random.default_rng(seed)
    ids = cases.ROUTINGS[routing](rng, count, E, TOPK)
    ids[rng.random(ids.shape) < 0.05] = -1
    if count > 3:
        ids[1], ids[3] = -1, ids[3, 0]
    return Tokens(cases.activations(rng, count, K), ids, cases.router_weights(rng, ids))


def result(layer: Layer, t: Tokens, **options: Any) -> np.ndarray:
    return TorchBackend(DEVICE).bf16(run(layer, t, DEVICE, swiglu_limit=LIMIT, **options))


def test_the_counts_lie_beside_the_boundaries():
    for K, N in SHAPES.values():
        every = {*experts_tiny.sizes(TOPK, K, N), *planning.few_tokens(E, TOPK, K, N)}
        ends = {end for end in every if end <= max(COUNTS)}
        assert ends | {end + 1 for end in ends} - {max(COUNTS) + 1} <= set(COUNTS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_a_tokens_bytes_do_not_depend_on_the_others(shape, scale_format):
    """Among the first tokens, or at another place among others; the fewest tokens are apart."""
    K, N = SHAPES[shape]
    layer, t = layer_of(K, N), tokens(256, K)
    many = result(layer, t, scale_format=scale_format)
    assert many.astype(np.float32).any(axis=1).sum() >= 250

    def want(rows: np.ndarray) -> np.ndarray:
        if not experts_tiny.takes(len(rows), TOPK, K, N):
            return many[rows]
        alone = [result(layer, t.of([row]), scale_format=scale_format) for row in rows]
        return np.concatenate(alone)

    rng = np.random.default_rng(1)
    for count in COUNTS:
        for rows in (np.arange(count), rng.permutation(256)[:count]):
            got = result(layer, t.of(rows), scale_format=scale_format)
            assert_bitwise_equal(got, want(rows), f"{count} tokens")


def test_an_unaligned_row_has_the_same_bytes():
    """It is read piece by piece."""
    K, N = SHAPES["ragged"]
    layer, t = layer_of(K, N), tokens(9, K)
    want = result(layer, t)
    put = TorchBackend(DEVICE).put
    base = put(np.zeros((9, K + 1), cases.BF16))
    base[:, 1:] = put(t.x)
    got = cumoe.fused_experts_fp8(
        base[:, 1:], layer.w1, layer.w2, put(t.weights), put(t.ids),
        w1_scale=layer.w1_scale, w2_scale=layer.w2_scale, swiglu_limit=LIMIT,
    )  # fmt: skip
    assert_bitwise_equal(TorchBackend(DEVICE).bf16(got), want)


@pytest.mark.parametrize("shape", ["stages_of_24", "ragged"])
@pytest.mark.parametrize("count", [1, 8, 9, 100, 256])
def test_the_same_bytes_in_a_hundred_runs(shape, count):
    K, N = SHAPES[shape]
    call = Static(layer_of(K, N), tokens(count, K))
    want = raw_bytes(call()).clone()
    for i in range(100):
        if i % 10 == 0:
            churn()
        assert torch.equal(raw_bytes(call()), want), f"run {i}"


class Static:
    """A call on arrays that stay where they are, and may be overwritten on the GPU."""

    def __init__(self, layer: Layer, t: Tokens, **options: Any) -> None:
        put = TorchBackend(DEVICE).put
        self.x, self.ids, self.weights = (put(a.copy()) for a in t)
        self.layer, self.options = layer, options

    def __call__(self, out: torch.Tensor | None = None) -> torch.Tensor:
        w = self.layer
        return cumoe.fused_experts_fp8(
            self.x, w.w1, w.w2, self.weights, self.ids, w1_scale=w.w1_scale,
            w2_scale=w.w2_scale, swiglu_limit=LIMIT, out=out, **self.options,
        )  # fmt: skip

    def arrays(self) -> list[torch.Tensor]:
        return [*self.layer, self.x, self.ids, self.weights]


def copy_of(layer: Layer) -> Layer:
    return Layer(*(t.clone() for t in layer))


def overwrite(to: list[torch.Tensor], source: list[torch.Tensor], last: int) -> None:
    """Kernels only, without a synchronization: first NaN and -1, then the values; ``last`` last."""
    order = [i for i in range(len(to)) if i != last] + [last]
    for i in order:
        raw_bytes(to[i]).fill_(0xFF)
    for i in order:
        raw_bytes(to[i]).copy_(raw_bytes(source[i]))


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("count", [1, 8, 9, 70, 256])
def test_a_call_sees_what_the_kernel_before_it_wrote(count, on_input):
    """And no kernel after it disturbs it: each round overwrites weights, routing and tokens."""
    K, N = SHAPES["shallow"]
    options = {"apply_router_weight_on_input": on_input}
    versions = []
    for seed in (2, 4, 5):
        t = tokens(count, K, seed=seed)
        if on_input:
            t = Tokens(t.x, t.ids[:, :1].copy(), t.weights[:, :1].copy())
        versions.append(Static(random_layer(E, K, N, DEVICE, seed), t, **options))
    wants = [v().clone() for v in versions]
    static = Static(copy_of(versions[0].layer), t, **options)
    outs = torch.full((60, count, K), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    static(outs[0])
    torch.cuda.synchronize()
    for i, out in enumerate(outs):
        overwrite(static.arrays(), versions[i % 3].arrays(), last=i % 7)
        static(out)
    torch.cuda.synchronize()
    for i, out in enumerate(outs):
        assert torch.equal(raw_bytes(out), raw_bytes(wants[i % 3])), f"round {i}"
    assert len({raw_bytes(w).cpu().numpy().tobytes() for w in wants}) == 3


@pytest.mark.parametrize("shape", ["shallow", "ragged"])
def test_calls_share_a_workspace_back_to_back(shape):
    """Of other sizes and routings each, with nothing between them."""
    K, N = SHAPES[shape]
    layer = layer_of(K, N)
    workspace = torch.full((16 << 20,), 0xFF, dtype=torch.uint8, device=DEVICE)
    routings = ("uniform", "one_expert", "zipf", "with_duplicates", "round_robin", "out_of_range")
    calls = [
        Static(layer, tokens(count, K, routings[i % 6], seed=i), workspace=workspace)
        for i, count in enumerate((256, 1, 128, 8, 9, 2, 200, 64, 5, 129, 1, 65))
    ]
    wants = [call().clone() for call in calls]
    torch.cuda.synchronize()
    order = np.random.default_rng(2).integers(0, len(calls), 400)
    outs = [torch.empty_like(wants[i]) for i in order]
    torch.cuda.synchronize()
    for i, out in zip(order, outs, strict=True):
        calls[i](out)
    torch.cuda.synchronize()
    for n, (i, out) in enumerate(zip(order, outs, strict=True)):
        assert torch.equal(raw_bytes(out), raw_bytes(wants[i])), f"call {n}"


def test_in_place_calls_are_a_chain():
    """Each call reads as x what the call before wrote as out."""
    K, N = SHAPES["shallow"]
    layer, t = layer_of(K, N), tokens(8, K, "uniform")
    x = TorchBackend(DEVICE).put(t.x)
    steps = []
    for _ in range(20):
        x = run(layer, t._replace(x=TorchBackend(DEVICE).bf16(x)), DEVICE, swiglu_limit=LIMIT)
        steps.append(raw_bytes(x).clone())
    for length in (1, 7, 20):
        call = Static(layer, t)
        for _ in range(length):
            call(call.x)
        assert torch.equal(raw_bytes(call.x), steps[length - 1])


class Graph(NamedTuple):
    static: Static
    graph: torch.cuda.CUDAGraph
    out: torch.Tensor


def captured(static: Static) -> Graph:
    static()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static()
    return Graph(static, graph, out)


def test_graphs_that_live_together_replay_what_their_inputs_hold_then():
    K, N = SHAPES["ragged"]
    layer = layer_of(K, N)
    counts = (1, 8, 9, 65, 256)
    graphs = [captured(Static(copy_of(layer), tokens(count, K))) for count in counts]
    for seed, routing in enumerate(("uniform", "one_expert", "with_minus_one", "zipf"), 1):
        other = random_layer(E, K, N, DEVICE, seed)
        news = [Static(other, tokens(count, K, routing, seed)) for count in counts]
        wants = [new().clone() for new in news]
        for graph, new in zip(graphs, news, strict=True):
            raw_bytes(graph.out).fill_(0xAA)
            overwrite(graph.static.arrays(), new.arrays(), last=0)
            graph.graph.replay()
        for graph, want in zip(graphs, wants, strict=True):
            assert torch.equal(raw_bytes(graph.out), raw_bytes(want))
        for graph in graphs * 3:
            graph.graph.replay()
        for graph, want in zip(graphs, wants, strict=True):
            assert torch.equal(raw_bytes(graph.out), raw_bytes(want))


def test_two_streams_at_once():
    K, N = SHAPES["ragged"]
    layer = layer_of(K, N)
    for counts in ((1, 256), (9, 8), (128, 129)):
        calls = [
            Static(layer, tokens(count, K, seed=count), workspace=torch.empty(
                16 << 20, dtype=torch.uint8, device=DEVICE))
            for count in counts
        ]  # fmt: skip
        wants = [call().clone() for call in calls]
        outs = [[torch.empty_like(want) for _ in range(50)] for want in wants]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        for i in range(50):
            for call, stream, some in zip(calls, streams, outs, strict=True):
                with torch.cuda.stream(stream):
                    call(some[i])
        torch.cuda.synchronize()
        for want, some in zip(wants, outs, strict=True):
            for i, out in enumerate(some):
                assert torch.equal(raw_bytes(out), raw_bytes(want)), f"call {i}"


@pytest.mark.parametrize("limit", [1 << 17, 1 << 19, 1 << 21])
def test_parts_give_the_same_bytes(limit):
    K, N = SHAPES["ragged"]
    layer, t = layer_of(K, N), tokens(256, K)
    assert_bitwise_equal(result(layer, t, max_workspace_bytes=limit), result(layer, t))


@pytest.mark.parametrize("count", [5, 8, 9, 100, 256])
@pytest.mark.parametrize("routing", ["one_expert", "zipf"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_row_stays_where_it_is(count, routing, bad):
    K, N = SHAPES["shallow"]
    layer, t = layer_of(K, N), tokens(count, K, routing)
    clean = result(layer, t)
    for row in {0, count // 2, count - 1}:
        x = t.x.copy()
        x[row] = bad
        got = result(layer, t._replace(x=x))
        keep = np.arange(count) != row
        assert_bitwise_equal(got[keep], clean[keep])
        assert not np.isfinite(got[row].astype(np.float32)).any()


@pytest.mark.parametrize("count", [5, 8, 9, 100, 256])
@pytest.mark.parametrize("what", ["w1", "w2", "w1_scale", "w2_scale"])
def test_a_bad_expert_stays_with_its_tokens(count, what):
    K, N = SHAPES["shallow"]
    layer, t = layer_of(K, N), tokens(count, K)
    clean = result(layer, t)
    expert = int(t.ids[0].max())
    bad = getattr(layer, what).clone()
    raw_bytes(bad[expert]).fill_(0x7F if what in ("w1", "w2") else 0xFF)
    got = result(layer._replace(**{what: bad}), t)
    touched = (t.ids == expert).any(axis=1)
    assert touched.any()
    assert not touched.all()
    assert_bitwise_equal(got[~touched], clean[~touched])
    assert np.isnan(got[touched].astype(np.float32)).all()


@pytest.mark.parametrize("count", COUNTS)
def test_weights_of_skipped_slots_do_not_count(count):
    K, N = SHAPES["shallow"]
    layer, t = layer_of(K, N), tokens(count, K, "with_minus_one" if count > 1 else "zipf")
    wild = np.where(t.ids < 0, np.float32(np.nan), t.weights)
    assert_bitwise_equal(result(layer, t._replace(weights=wild)), result(layer, t))
