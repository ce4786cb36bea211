"""The calls of a soak: a few dozen of all ops, each with the bytes that it must give every time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import cumoe
from tests.helpers import cases, tolerances
from tests.helpers.backends import TorchBackend
from tests.helpers.compare import (
    assert_activations_close,
    assert_bitwise_equal,
    assert_rows_close,
)

NUM_EXPERTS, TOPK, K, N = 16, 4, 512, 256
TOKENS = (1, 8, 32, 300)
"""The experts have a chain of kernels for 1 and 8, one for 32, one for 300."""
LIMIT = 2.0
OUTPUTS = {
    "per_token_group_quant_fp8": ("out", "out_scale"),
    "silu_and_mul_quant_fp8": ("out", "out_scale"),
    "moe_align_block_size": (),
    "fused_experts_fp8": ("out",),
}
"""What the caller may give, in the order of the results."""
Arguments = dict[str, Any]


@dataclass
class Case:
    """A call with NumPy arrays, and what it must give."""

    op: str
    arguments: Arguments
    want: list[torch.Tensor] = field(default_factory=list)
    """Bytes of the results, on the device."""
    kept: torch.Tensor | None = None
    """Rows that the op writes; None for all."""
    like: list[torch.Tensor] = field(default_factory=list)
    """Results of this shape, these strides and types."""

    def placed(self, put: Callable[[np.ndarray], Any]) -> Arguments:
        """The arguments, arrays put somewhere."""
        return {
            name: put(v) if isinstance(v, np.ndarray) else v for name, v in self.arguments.items()
        }

    def outputs(self) -> Arguments:
        """Outputs of the caller's, full of bytes that the op must replace."""
        if self.arguments.get("scale_layout", "row") != "row":
            return {}
        named = zip(OUTPUTS[self.op], self.like, strict=False)
        return {name: _writable(t).fill_(123) for name, t in named}


def pool(device: str) -> list[Case]:
    """Every case, with the results of one call on torch tensors, which the reference has judged."""
    found = list(_cases(np.random.default_rng(11)))
    for case in found:
        _expect(case, device)
    return found


def call(op: str, arguments: Arguments) -> tuple[Any, ...]:
    """The results of an op."""
    results = getattr(cumoe, op)(**arguments)
    return results if isinstance(results, tuple) else (results,)


def _cases(rng: np.random.Generator) -> Iterator[Case]:
    layer = cases.random_experts(rng, NUM_EXPERTS, N, K)
    table = cases.local_map(NUM_EXPERTS, 4, 8)
    for tokens in TOKENS:
        for routing in ("uniform", "with_minus_one"):
            ids = cases.ROUTINGS[routing](rng, tokens, NUM_EXPERTS, TOPK)
            yield from _of_tokens(rng, tokens)
            yield from _activations(rng, ids)
            yield from _sorts(ids, table)
            yield from _experts(rng, ids, layer)


def _of_tokens(rng: np.random.Generator, tokens: int) -> Iterator[Case]:
    packed = {"scale_format": "ue8m0", "scale_layout": "packed"}
    for options in ({}, packed):
        x = cases.activations(rng, tokens, K)
        yield Case("per_token_group_quant_fp8", {"x": x, **options})


def _activations(rng: np.random.Generator, ids: np.ndarray) -> Iterator[Case]:
    filtered = {"topk_ids": ids, "num_experts": NUM_EXPERTS}
    for options in ({}, filtered):
        rows = cases.activations(rng, ids.size, 2 * N)
        yield Case("silu_and_mul_quant_fp8", {"gate_up": rows, "limit": LIMIT, **options})


def _sorts(ids: np.ndarray, table: np.ndarray) -> Iterator[Case]:
    for options in ({}, {"expert_map": table}):
        given = {"topk_ids": ids, "block_size": 16, "num_experts": NUM_EXPERTS, **options}
        yield Case("moe_align_block_size", given)


def _experts(
    rng: np.random.Generator, ids: np.ndarray, layer: cases.ExpertWeights
) -> Iterator[Case]:
    for _ in range(2):
        x = cases.activations(rng, len(ids), K)
        weights = cases.router_weights(rng, ids)
        given = {"x": x, "topk_weights": weights, "topk_ids": ids, "swiglu_limit": LIMIT}
        yield Case("fused_experts_fp8", {**given, **layer._asdict()})


def _expect(case: Case, device: str) -> None:
    backend = TorchBackend(device)
    results = call(case.op, case.placed(backend.put))
    judge(case, backend, results)
    case.want = [as_bytes(r) for r in results]
    case.like = [torch.empty_strided(r.shape, r.stride(), dtype=r.dtype) for r in results]
    case.like = [t.to(device) for t in case.like]
    if case.op == "silu_and_mul_quant_fp8" and "topk_ids" in case.arguments:
        kept = case.arguments["topk_ids"].flatten() >= 0
        case.kept = torch.from_numpy(kept).to(device)


def judge(case: Case, backend: TorchBackend, results: tuple[torch.Tensor, ...]) -> None:
    """Within what docs/numerics.md promises of the reference."""
    want = getattr(cumoe.reference, case.op)(**case.arguments)
    want = want if isinstance(want, tuple) else (want,)
    if case.op == "fused_experts_fp8":
        bound = tolerances.experts_row(len(case.arguments["x"]), TOPK, K, N)
        assert_rows_close(backend.bf16(results[0]), want[0], bound, case.op)
    elif case.op == "silu_and_mul_quant_fp8":
        ids = case.arguments.get("topk_ids")
        rows = slice(None) if ids is None else ids.flatten() >= 0
        got = backend.codes(results[0])[rows], backend.raw(results[1])[rows]
        right = want[0].view(np.uint8)[rows], want[1][rows]
        assert_activations_close(got, right, tolerances.SILU_CODE_SHARE, case.op)
    else:
        for a, b in zip(results, want, strict=True):
            assert_bitwise_equal(_plain(backend.raw(a)), _plain(b), case.op)


def as_bytes(result: Any) -> torch.Tensor:
    """[rows, bytes] of a result of any framework, where it lies."""
    if isinstance(result, np.ndarray):
        tensor = torch.from_numpy(_plain(result))
    elif isinstance(result, torch.Tensor):
        tensor = result
    elif hasattr(result, "addressable_shards"):  # a JAX array
        import jax

        unsigned = {1: "uint8", 2: "uint16", 4: "uint32"}[result.dtype.itemsize]
        tensor = torch.from_dlpack(jax.lax.bitcast_convert_type(result, unsigned))
    else:
        tensor = torch.from_dlpack(result)
    dense = tensor.clone(memory_format=torch.contiguous_format)
    if tensor.is_cuda and hasattr(result, "addressable_shards"):
        # JAX has other uses for the memory as soon as nobody refers to it.
        torch.cuda.current_stream().synchronize()
    return dense.view(torch.uint8).view(len(dense), -1)


def _plain(a: np.ndarray) -> np.ndarray:
    """Contiguous; e4m3 and bf16 as bytes, which torch has no other way to take."""
    bits = {cases.E4M3: np.uint8, cases.BF16: np.int16}
    a = np.ascontiguousarray(a)
    return a.view(bits[a.dtype]) if a.dtype in bits else a


def _writable(like: torch.Tensor) -> torch.Tensor:
    """A new tensor; codes as uint8, which can be filled."""
    dtype = torch.uint8 if like.itemsize == 1 else like.dtype
    return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=like.device)
