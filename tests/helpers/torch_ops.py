"""Calls of ``torch.ops.cumoe``: arguments on a torch device, for each overload."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

import cumoe.torch_ops  # registers them  # noqa: F401
from tests.helpers import cases
from tests.helpers.backends import TorchBackend

NUM_EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 8, 2, 512, 256
OPS = torch.ops.cumoe
LAYOUTS = [("fp32", "row"), ("fp32", "column"), ("fp32", "tma"), ("ue8m0", "tma"),
           ("ue8m0", "packed")]  # fmt: skip
Arguments = dict[str, Any]


def arguments(op: str, device: str = "cpu", *, num_tokens: int = 8, seed: int = 0) -> Arguments:
    """What the op needs. Weights are uint8: torch compares no e4m3 tensors, as opcheck does."""
    rng = np.random.default_rng(seed)
    put = TorchBackend(device).put
    ids = cases.with_minus_one(rng, num_tokens, NUM_EXPERTS, TOPK)
    if op == "moe_align_block_size":
        return {"topk_ids": put(ids), "block_size": 16, "num_experts": NUM_EXPERTS}
    if op == "per_token_group_quant_fp8":
        return {"x": put(cases.activations(rng, num_tokens, HIDDEN))}
    if op == "silu_and_mul_quant_fp8":
        rows = cases.activations(rng, num_tokens * TOPK, 2 * HIDDEN)
        return {"gate_up": put(rows), "limit": 2.0, "topk_ids": put(ids), "num_experts": 8}
    layer = cases.random_experts(np.random.default_rng(0), NUM_EXPERTS, INTERMEDIATE, HIDDEN)
    w1, w2, w1_scale, w2_scale = map(put, layer)
    return {
        "x": put(cases.activations(rng, num_tokens, HIDDEN)),
        "w1": w1.view(torch.uint8), "w2": w2.view(torch.uint8),
        "topk_weights": put(cases.router_weights(rng, ids)), "topk_ids": put(ids),
        "w1_scale": w1_scale, "w2_scale": w2_scale, "swiglu_limit": 2.0,
    }  # fmt: skip


def poisoned_outputs(op: str, given: Arguments) -> Arguments:
    """Outputs of the caller, full of bytes that the op must replace."""
    if op == "fused_experts_fp8":
        return {"out": torch.full_like(given["x"], torch.nan)}
    q, scale = getattr(OPS, op)(**given)
    poison = torch.empty_strided(
        scale.shape, scale.stride(), dtype=scale.dtype, device=scale.device
    )
    q = torch.full_like(q.view(torch.uint8), cases.POISON_CODE)
    return {"out": q, "out_scale": poison.fill_(float(cases.POISON_SCALE))}


FORMS = {
    "quantizer": ("per_token_group_quant_fp8", "default"),
    "quantizer_out": ("per_token_group_quant_fp8", "out"),
    "activation": ("silu_and_mul_quant_fp8", "default"),
    "activation_out": ("silu_and_mul_quant_fp8", "out"),
    "sort": ("moe_align_block_size", "default"),
    "experts": ("fused_experts_fp8", "default"),
    "experts_out": ("fused_experts_fp8", "out"),
    "experts_workspace": ("fused_experts_fp8", "workspace"),
}
"""Every overload: op and name."""


def form(name: str, device: str = "cpu", **options: Any) -> tuple[Any, Arguments]:
    """An overload and all of its arguments."""
    op, overload = FORMS[name]
    given = arguments(op, device, **options)
    if overload == "out":
        given |= poisoned_outputs(op, given)
    if overload == "workspace":
        given["workspace"] = torch.full((1 << 22,), 0xFF, dtype=torch.uint8, device=device)
    return getattr(getattr(OPS, op), overload), given


def outcome(given: Arguments, result: Any) -> list[torch.Tensor]:
    """What a call made or filled."""
    made = () if result is None else result if isinstance(result, tuple) else (result,)
    return [*made, *(given[name] for name in ("out", "out_scale") if name in given)]


def cloned(given: Arguments) -> Arguments:
    """Tensors of their own, strides kept."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}


def require_same(got: Iterable[torch.Tensor], want: Iterable[torch.Tensor], name: str = "") -> None:
    """Shapes, element types and bytes, wherever these lie. Codes may come as e4m3 or uint8."""
    pairs = list(zip(got, want, strict=True))
    assert pairs, name
    for i, (a, b) in enumerate(pairs):
        assert (a.shape, a.itemsize) == (b.shape, b.itemsize), f"{name}: result {i}"
        if a.numel():
            one, other = (t.detach().flatten().view(torch.uint8) for t in (a, b))
            off = int((one != other).sum())
            assert not off, f"{name}: {off} of {len(one)} bytes of result {i} differ"
