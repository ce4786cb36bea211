"""The experts at the size of a real model, and sorts of many slots."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch

import cumoe
from cumoe.reference.exact import fused_experts_float64
from tests.helpers import cases, layers, oracles, tolerances
from tests.helpers.backends import TorchBackend
from tests.helpers.cases import ExpertsCase
from tests.helpers.compare import assert_bitwise_equal, assert_rows_close, assert_total_close
from tests.helpers.layers import Layer, Tokens, alone, random_layer
from tests.helpers.workloads import assert_same_bytes, bytes_of, churn, raw_bytes

pytestmark = pytest.mark.gpu

E, TOPK, K, N = 256, 8, 6144, 256
"""GLM-5.3, one rank of eight under tensor parallelism."""
ROWS_LOOKED_AT = 8
LIMIT = 10.0


@cache
def tokens(num_tokens: int, *, seed: int = 0, experts: int = E, hidden: int = K) -> Tokens:
    """Skewed routing with invalid slots, and a token without any expert."""
    rng = np.random.default_rng(seed)
    ids = cases.zipf(rng, num_tokens, experts, TOPK)
    ids[rng.random(ids.shape) < 0.1] = -1
    if num_tokens > 1:
        ids[1] = -1
    return Tokens(cases.activations(rng, num_tokens, hidden), ids, cases.router_weights(rng, ids))


@pytest.fixture(scope="module")
def layer() -> Iterator[Layer]:
    """1.2 GB of random weights on the GPU."""
    yield random_layer(E, K, N, "cuda")
    torch.cuda.empty_cache()


def run(layer: Layer, t: Tokens, device: str = "cuda", **options) -> torch.Tensor:
    return layers.run(layer, t, device, swiglu_limit=LIMIT, **options)


def some_rows(layer: Layer, t: Tokens) -> tuple[np.ndarray, ExpertsCase]:
    """Rows spread over the tokens, and the case of them alone with the experts that they need."""
    rows = np.unique(np.linspace(0, len(t.x) - 1, ROWS_LOOKED_AT).astype(int))
    if len(t.x) > 1:
        rows[1] = 1  # the token without an expert
    return rows, alone(layer, t.of(rows))


def check_rows(layer: Layer, t: Tokens, got: np.ndarray) -> None:
    rows, case = some_rows(layer, t)
    want = case.run(cumoe.reference.fused_experts_fp8, swiglu_limit=LIMIT)
    exact = case.run(fused_experts_float64, swiglu_limit=LIMIT)
    tolerance = tolerances.experts_row(*t.ids.shape, K, N)
    assert_rows_close(got[rows], want, tolerance, "against the reference")
    assert_rows_close(got[rows], exact, tolerances.EXACT_ROW, "against float64")
    assert_total_close(got[rows], exact, tolerances.EXACT_TOTAL, cosine=tolerances.EXACT_COSINE)


@pytest.mark.parametrize("num_tokens", [1, 16, 512, 2048])
def test_rows_are_within_the_tolerances(layer, num_tokens):
    t = tokens(num_tokens)
    got = TorchBackend("cuda").bf16(run(layer, t))
    assert np.isfinite(got.astype(np.float32)).all()
    nothing = (t.ids < 0).all(axis=1)
    assert (got[nothing].view(np.uint16) == 0).all()
    assert got[~nothing].astype(np.float32).any(axis=1).all()
    check_rows(layer, t, got)


@pytest.mark.parametrize("num_tokens", [1, 16, 512])
def test_the_same_bytes_in_twenty_runs(layer, num_tokens):
    t = tokens(num_tokens)
    want = bytes_of((run(layer, t),))
    for _ in range(20):
        churn()
        assert_same_bytes(bytes_of((run(layer, t),)), want)


def test_a_tokens_bytes_do_not_depend_on_the_number_of_tokens(layer):
    """Many tokens and more take tiles of different height."""
    t = tokens(2048)
    want = TorchBackend("cuda").bf16(run(layer, t))
    for some in (slice(0, 513), slice(3, 703), slice(1000, 2000)):
        got = TorchBackend("cuda").bf16(run(layer, Tokens(*(a[some] for a in t))))
        assert_bitwise_equal(got, want[some])


def test_parts_give_the_same_bytes(layer):
    t = tokens(512)
    want = bytes_of((run(layer, t),))
    assert_same_bytes(bytes_of((run(layer, t, max_workspace_bytes=16 << 20),)), want)


@pytest.mark.parametrize("num_tokens", [1, 8, 16, 512])
def test_a_graph_replays_other_tokens(layer, num_tokens):
    put = TorchBackend("cuda").put
    static = [put(a.copy()) for a in tokens(num_tokens)]
    call = lambda: cumoe.fused_experts_fp8(  # noqa: E731
        static[0], layer.w1, layer.w2, static[2], static[1],
        w1_scale=layer.w1_scale, w2_scale=layer.w2_scale, swiglu_limit=LIMIT,
    )  # fmt: skip
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    seen = set()
    for seed in (1, 2, 3):
        t = tokens(num_tokens, seed=seed)
        for target, source in zip(static, t, strict=True):
            raw_bytes(target).copy_(raw_bytes(put(source.copy())))
        raw_bytes(result).fill_(0xAA)
        churn()
        graph.replay()
        got = bytes_of((result,))
        assert_same_bytes(got, bytes_of((run(layer, t),)))
        seen.add(got[0].tobytes())
    assert len(seen) == 3


@pytest.mark.parametrize("num_experts", [256, 4096])
@pytest.mark.parametrize("num_tokens", [512, 4096, 4097, 65_536])
@pytest.mark.parametrize("block_size", [16, 64])
def test_sorts_of_many_slots_equal_a_stable_sort(rng, num_tokens, num_experts, block_size):
    ids = rng.integers(0, num_experts, (num_tokens, 8)).astype(np.int32)
    ids[: num_tokens // 4] = 7  # a hot expert
    put = TorchBackend("cuda").put(ids)
    results = [r.cpu().numpy() for r in cumoe.moe_align_block_size(put, block_size, num_experts)]
    slots, experts, used = oracles.align_by_sort(ids, block_size, num_experts)
    assert results[2].tolist() == [used]
    assert_bitwise_equal(results[0][:used], slots.astype(np.int32))
    assert_bitwise_equal(results[1][: used // block_size], experts.astype(np.int32))
    assert (results[0][used:] == ids.size).all()
    assert (results[1][used // block_size :] == -1).all()
    for _ in range(5):
        again = cumoe.moe_align_block_size(put, block_size, num_experts)
        for got, want in zip(again, results, strict=True):
            assert_bitwise_equal(got.cpu().numpy(), want)
