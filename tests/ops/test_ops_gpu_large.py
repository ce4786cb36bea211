"""Offsets beyond 2^31: many slots, filtered rows, weights that lie far apart."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import cumoe
from tests.helpers import cases, tolerances
from tests.helpers.backends import TorchBackend
from tests.helpers.compare import assert_bitwise_equal, assert_rows_close
from tests.helpers.layers import Layer, Tokens, alone, few_tokens_only, random_layer, run

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
MANY = 100_000
"""Tokens: with topk 6, 600,000 rows of 4096 gates and ups."""


@pytest.fixture(autouse=True)
def _memory_goes_back() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def tokens(count: int, experts: int, topk: int, hidden: int) -> Tokens:
    rng = np.random.default_rng(4)
    ids = np.argsort(rng.random((count, experts)), axis=1)[:, :topk].astype(np.int32)
    return Tokens(cases.activations(rng, count, hidden), ids, cases.router_weights(rng, ids))


def repeated(t: Tokens, times: int) -> Tokens:
    return Tokens(*(np.tile(a, (times, 1)) for a in t))


def test_six_hundred_thousand_slots():
    """The first 125 tokens again and again: the same bytes all the way to the last."""
    layer, some = random_layer(8, 1024, 2048, DEVICE), tokens(125, 8, 6, 1024)
    got = TorchBackend(DEVICE).bf16(run(layer, repeated(some, MANY // 125), DEVICE))
    last = MANY // 125 - 1
    for i in (1, last // 2, last):
        assert_bitwise_equal(got[125 * i :][:125], got[:125])
    want = alone(layer, some).run(cumoe.reference.fused_experts_fp8)
    assert_rows_close(got[:125], want, tolerances.wgmma(1024, 2048).row, "against the reference")


def test_weights_far_apart():
    """Two experts whose weights lie 2^31 bytes and more apart, in the chain for few tokens."""
    close, stride = random_layer(2, 512, 256, DEVICE), (1 << 31) + 4096

    def apart(w: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(stride + w[0].numel(), dtype=torch.uint8, device=DEVICE)
        far = buffer.as_strided(w.shape, (stride, *w.stride()[1:]))
        far.copy_(w.view(torch.uint8))
        return far.view(w.dtype)

    far = Layer(apart(close.w1), apart(close.w2), close.w1_scale, close.w2_scale)
    some = tokens(7, 2, 2, 512)
    with few_tokens_only():
        want, got = (TorchBackend(DEVICE).bf16(run(w, some, DEVICE)) for w in (close, far))
    assert_bitwise_equal(got, want)


def test_filtered_rows_beyond_2_to_the_31():
    """One row in 64 counts, the last among them: 61,682 rows of 17,408 gates and 17,408 ups."""
    rows, H = 61_682, 17_408
    gate_up = torch.randn(1, 2 * H, device=DEVICE).bfloat16().repeat(rows, 1)
    ids = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)
    ids[(rows - 1) % 64 :: 64] = 3
    out = torch.full((rows, H), 0xAA, dtype=torch.uint8, device=DEVICE)
    scale = torch.full((rows, H // 128), 123.0, device=DEVICE)
    cumoe.silu_and_mul_quant_fp8(
        gate_up, limit=10.0, topk_ids=ids, num_experts=8, out=out, out_scale=scale
    )
    q, s = cumoe.silu_and_mul_quant_fp8(gate_up[:1], limit=10.0)
    counts = ids == 3
    assert bool((out[counts] == q.view(torch.uint8)).all())
    assert bool((scale[counts] == s).all())
    assert bool((out[~counts] == 0xAA).all())
    assert bool((scale[~counts] == 123.0).all())
