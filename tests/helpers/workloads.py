"""One small call of each op on torch tensors, for tests of streams, graphs and devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

import cumoe
from tests.helpers import cases
from tests.helpers.backends import TorchBackend

OPS = ("quantizer", "activation", "sort", "experts")
NUM_EXPERTS = 32


class Workload(NamedTuple):
    inputs: list[torch.Tensor]
    call: Callable[[], tuple[torch.Tensor, ...]]
    """The op on these inputs as they are then, into new outputs without uninitialised bytes."""


def workload(
    op: str,
    *,
    seed: int = 0,
    device: str = "cuda",
    num_tokens: int = 8,
    routing: str = "with_minus_one",
    hidden: int = 256,
    **options: Any,
) -> Workload:
    """``options`` go to the op; arrays among them move to the device and are inputs too."""
    rng = np.random.default_rng(seed)
    backend = TorchBackend(device)
    topk_ids = cases.ROUTINGS[routing](rng, num_tokens, NUM_EXPERTS, 8)
    moved = {k: backend.put(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    more = [v for v in moved.values() if isinstance(v, torch.Tensor)]
    x = backend.put(cases.activations(rng, num_tokens, hidden))
    ids = backend.put(topk_ids)
    if op == "quantizer":
        return Workload([x, *more], lambda: cumoe.per_token_group_quant_fp8(x, **moved))
    if op == "sort":
        call = lambda: cumoe.moe_align_block_size(ids, 16, NUM_EXPERTS, **moved)  # noqa: E731
        return Workload([ids, *more], call)
    if op == "activation":
        rows = backend.put(cases.activations(rng, num_tokens * 8, 2 * hidden))
        return Workload([rows, ids, *more], lambda: _activation(rows, ids, moved))
    weights = cases.router_weights(rng, topk_ids)
    inputs = [x, *map(backend.put, (*_weights(hidden), weights)), ids]
    return Workload([*inputs, *more], lambda: (_experts(*inputs, **moved),))


@cache
def _weights(hidden: int) -> cases.ExpertWeights:
    return cases.random_experts(np.random.default_rng(0), NUM_EXPERTS, 128, hidden)


def _activation(
    rows: torch.Tensor, ids: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    columns = rows.shape[1] // 2
    out = torch.zeros((len(rows), columns), dtype=torch.uint8, device=rows.device)
    out_scale = torch.zeros((len(rows), columns // 128), device=rows.device)
    return cumoe.silu_and_mul_quant_fp8(
        rows, topk_ids=ids, num_experts=NUM_EXPERTS, limit=2.0, out=out, out_scale=out_scale,
        **options,
    )  # fmt: skip


def _experts(x, w1, w2, w1_scale, w2_scale, weights, ids, **options: Any) -> torch.Tensor:
    return cumoe.fused_experts_fp8(
        x, w1, w2, weights, ids, w1_scale=w1_scale, w2_scale=w2_scale, **options
    )


def raw_bytes(t: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return t.view(torch.uint8)


def bytes_of(results: tuple[torch.Tensor, ...]) -> list[np.ndarray]:
    """The results as NumPy arrays of bytes."""
    return [raw_bytes(t.contiguous()).cpu().numpy() for t in results]


def assert_same_bytes(got: list[np.ndarray], want: list[np.ndarray], name: str = "") -> None:
    assert [a.shape for a in got] == [a.shape for a in want]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a == b).all(), f"{name}: {(a != b).sum()} of {a.size} bytes of result {i} differ"


def churn(device: str = "cuda") -> None:
    """Fills much of what torch's allocator has at hand with 0xFF, and gives it back."""
    sizes = [1 << n for n in range(9, 25)] * 2
    kept = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in sizes]
    del kept
