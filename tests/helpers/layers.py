"""Layers of a model's size on a torch device, and calls that must take one chain of kernels."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

import cumoe
from cumoe.launch import device as gpu
from cumoe.ops import _op
from cumoe.plan import experts_decode, experts_prefill, experts_tiny
from cumoe.plan import fused_experts_fp8 as planning
from cumoe.plan.enumerate import steps_in
from cumoe.store import store
from tests.helpers import oracles
from tests.helpers.backends import TorchBackend
from tests.helpers.cases import BF16, E4M3, ExpertsCase, ExpertWeights
from tests.helpers.workloads import raw_bytes

ACTIVATIONS: dict[str, dict[str, float]] = {
    "plain": {},
    "ten": {"swiglu_limit": 10.0},
    "inexact": {"swiglu_limit": 1.1},
    "oai": {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
    "scaled": {"swiglu_alpha": 0.5, "swiglu_beta": -2.0},
}
WEIGHT_TYPES = {"fp32": np.float32, "bf16": BF16, "fp16": np.float16}


class Layer(NamedTuple):
    """Random weights on a device."""

    w1: torch.Tensor
    w2: torch.Tensor
    w1_scale: torch.Tensor
    w2_scale: torch.Tensor


class Tokens(NamedTuple):
    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray

    def of(self, rows: Any) -> Tokens:
        """Some of the tokens."""
        return Tokens(*(a[rows] for a in self))


def random_layer(experts: int, hidden: int, intermediate: int, device: str, seed: int = 5) -> Layer:
    """Every e4m3 code but NaN, equally likely; a row times a unit normal vector is about 1."""
    generator = torch.Generator(device).manual_seed(seed)

    def codes(*shape: int) -> torch.Tensor:
        out = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
        return out.masked_fill_((out & 0x7F) == 0x7F, 0x38).view(torch.float8_e4m3fn)

    def scales(depth: int, *shape: int) -> torch.Tensor:
        size = torch.rand(shape, device=device, generator=generator)
        rms = np.sqrt(np.nanmean(oracles.E4M3_VALUES**2))
        return torch.exp2(2 * size - 1) / (rms * depth**0.5)

    return Layer(
        codes(experts, 2 * intermediate, hidden),
        codes(experts, hidden, intermediate),
        scales(hidden, experts, 2 * intermediate // 128, hidden // 128),
        scales(intermediate, experts, hidden // 128, intermediate // 128),
    )


def run(layer: Layer, t: Tokens, device: str, **options: Any) -> torch.Tensor:
    """The op on tokens that are NumPy arrays."""
    put = TorchBackend(device).put
    moved = {k: put(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    return cumoe.fused_experts_fp8(
        put(t.x), layer.w1, layer.w2, put(t.weights), put(t.ids),
        w1_scale=layer.w1_scale, w2_scale=layer.w2_scale, **moved,
    )  # fmt: skip


def local_ids(ids: np.ndarray, experts: int, expert_map: np.ndarray | None) -> np.ndarray:
    """int32 [M, topk]: the row of w1 of each slot, -1 where there is none."""
    bound = experts if expert_map is None else len(expert_map)
    valid = (ids >= 0) & (ids < bound)
    rows = np.where(valid, ids, 0)
    local = rows if expert_map is None else expert_map[rows]
    return np.where(valid & (local >= 0) & (local < experts), local, -1).astype(np.int32)


def alone(layer: Layer, t: Tokens) -> ExpertsCase:
    """Tokens with local ids, and no more than the experts that they need."""
    needed = np.unique(np.append(t.ids[t.ids >= 0], 0)).astype(np.int64)
    raw, index = TorchBackend("cpu").raw, torch.from_numpy(needed)

    def part(a: torch.Tensor) -> np.ndarray:
        return raw(raw_bytes(a[index.to(a.device)].contiguous()).cpu())

    weights, scales = layer[:2], layer[2:]
    experts = ExpertWeights(
        *(part(w.view(torch.uint8)).view(E4M3) for w in weights),
        *(part(s).view(np.float32) for s in scales),
    )
    compact = np.where(t.ids >= 0, np.searchsorted(needed, t.ids), -1).astype(np.int32)
    return ExpertsCase(experts, t.x, t.weights, compact)


def spaced(t: torch.Tensor, last: int, filler: int) -> torch.Tensor:
    """The same values in rows and experts that lie apart; bytes of ``filler`` between them."""
    experts, rows, columns = t.shape
    base = torch.full(
        (experts, rows + 1, (columns + last) * t.element_size()), filler, dtype=torch.uint8,
        device=t.device,
    ).view(t.dtype)  # fmt: skip
    view = base[:, :rows, :columns]
    plain = torch.uint8 if t.element_size() == 1 else t.dtype
    view.view(plain).copy_(t.view(plain))
    return view


def placed(layer: Layer, weights_at: str) -> Layer:
    """Its weights where their name says; those of `spaced` with NaN between."""
    if weights_at in ("w1_apart", "w2_apart"):
        name = weights_at[:2]
        return layer._replace(**{name: spaced(getattr(layer, name), 48, 0x7F)})
    if weights_at == "scales_apart":
        w1_scale, w2_scale = (spaced(s, 3, 0xFF) for s in layer[2:])
        turned = w1_scale.transpose(1, 2).contiguous().transpose(1, 2)
        return layer._replace(w1_scale=turned, w2_scale=w2_scale)
    return layer


def compile_all(problems: Iterable[planning.Problem]) -> None:
    """The kernels of these calls, by many threads."""
    info = gpu.info(0)
    kernels = {step.kernel for p in problems for step in steps_in(planning.plan(p, info))}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(store.get, kernels))


@contextmanager
def only(chain: str) -> Iterator[None]:
    """Every call is planned anew; one that would take another chain than this one fails.

    "fewest", "few" (those among them) and "many" tokens, or "any" strides of the weights on any
    GPU.
    """
    real = planning.plan.__wrapped__

    def planned(problem: planning.Problem, device: Any) -> planning.AnyPlan:
        plan = real(problem, device)
        if not isinstance(plan, CHAINS[chain]):
            taken = next(name for name, kind in CHAINS.items() if isinstance(plan, kind))
            raise AssertionError(f"{problem.M} tokens take the chain for {taken}")
        return plan

    try:
        forget_calls()
        with patch.object(planning, "plan", planned):
            yield
    finally:
        forget_calls()


CHAINS: dict[str, tuple[type, ...]] = {
    "fewest": (experts_tiny.Plan,),
    "few": (experts_tiny.Plan, experts_decode.Plan),
    "many": (experts_prefill.Plan,),
    "any": (planning.Plan,),
}


def few_tokens_only() -> AbstractContextManager[None]:
    """One that would not take the chain for few tokens fails."""
    return only("few")


def forget_calls() -> None:
    """Plans and prepared calls."""
    planning.plan.cache_clear()
    planning.tokens_per_call.cache_clear()
    importlib.import_module("cumoe.ops.fused_experts_fp8")._checked.cache_clear()
    _op._thread.forget()
