"""Named inputs: routings, weights, activations, and poison for buffers that an op must write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)

POISON_CODE = 0xAA
POISON_SCALE = np.float32(123.0)
POISON_WORD = 0x7B7B7B7B

Routing = Callable[[np.random.Generator, int, int, int], np.ndarray]
"""(rng, num_tokens, num_experts, topk) -> topk_ids [M, topk] int32."""


def uniform(rng: np.random.Generator, num_tokens: int, num_experts: int, topk: int) -> np.ndarray:
    """Distinct experts per token, all equally likely."""
    return _top(rng.random((num_tokens, num_experts)), topk)


def zipf(rng: np.random.Generator, num_tokens: int, num_experts: int, topk: int) -> np.ndarray:
    """Distinct experts per token, expert e chosen in proportion to (e + 1) ^ -1.2."""
    popularity = -1.2 * np.log(np.arange(1, num_experts + 1))
    return _top(popularity + rng.gumbel(size=(num_tokens, num_experts)), topk)


def one_expert(
    rng: np.random.Generator, num_tokens: int, num_experts: int, topk: int
) -> np.ndarray:
    """Every slot goes to the same expert."""
    return np.full((num_tokens, topk), rng.integers(num_experts), np.int32)


def round_robin(
    rng: np.random.Generator, num_tokens: int, num_experts: int, topk: int
) -> np.ndarray:
    """Slot s goes to expert s mod E."""
    return (np.arange(num_tokens * topk, dtype=np.int32) % num_experts).reshape(-1, topk)


def with_duplicates(
    rng: np.random.Generator, num_tokens: int, num_experts: int, topk: int
) -> np.ndarray:
    """The last slot of each token repeats its first expert."""
    ids = uniform(rng, num_tokens, num_experts, topk)
    ids[:, -1] = ids[:, 0]
    return ids


def with_minus_one(
    rng: np.random.Generator, num_tokens: int, num_experts: int, topk: int
) -> np.ndarray:
    """A third of the slots is -1, among them all slots of token 0."""
    ids = uniform(rng, num_tokens, num_experts, topk)
    ids[rng.random(ids.shape) < 1 / 3] = -1
    ids[:1] = -1
    return ids


def out_of_range(
    rng: np.random.Generator, num_tokens: int, num_experts: int, topk: int
) -> np.ndarray:
    """A third of the slots is outside [0, E) on either side, near and far."""
    ids = uniform(rng, num_tokens, num_experts, topk)
    bad = np.array([-1, num_experts, num_experts + 7, 1 << 30, -(1 << 31)], np.int32)
    return np.where(rng.random(ids.shape) < 1 / 3, rng.choice(bad, ids.shape), ids)


ROUTINGS: dict[str, Routing] = {
    "uniform": uniform,
    "zipf": zipf,
    "one_expert": one_expert,
    "round_robin": round_robin,
    "with_duplicates": with_duplicates,
    "with_minus_one": with_minus_one,
    "out_of_range": out_of_range,
}


def wrapped_ids(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """int64 ids in which every odd slot is invalid, but turns valid when narrowed to 32 bits."""
    wide = ids.astype(np.int64)
    wide.reshape(-1)[1::2] = np.arange(wide.size // 2) % num_experts + (1 << 32)
    return wide


def local_map(num_experts: int, first: int, count: int) -> np.ndarray:
    """expert_map [E] int32 of the rank that holds experts first, first + 1, ..."""
    expert_map = np.full(num_experts, -1, np.int32)
    expert_map[first : first + count] = np.arange(count)
    return expert_map


def router_weights(rng: np.random.Generator, ids: np.ndarray) -> np.ndarray:
    """topk_weights [M, topk] fp32, positive, adding up to 1 for each token."""
    weights = rng.random(ids.shape) + 0.1
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def activations(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal bf16 values, one in a hundred of them five times as large."""
    values = rng.standard_normal(shape)
    values[rng.random(shape) < 0.01] *= 5
    return values.astype(np.float32).astype(BF16)


def quantize_weights(
    rng: np.random.Generator, num_experts: int, rows: int, columns: int
) -> tuple[np.ndarray, np.ndarray]:
    """Random e4m3 weights [E, rows, columns] and their scales [E, rows/128, columns/128] fp32.

    A row times a unit normal vector is of the order of 1; blocks differ in size by up to four, so
    that a scale taken from a wrong block shows.
    """
    blocks = (num_experts, rows // 128, 128, columns // 128, 128)
    values = rng.standard_normal(blocks, np.float32) / np.float32(np.sqrt(columns))
    values *= np.exp2(rng.uniform(-1, 1, (*blocks[:2], 1, blocks[3], 1))).astype(np.float32)
    scale = np.abs(values).max(axis=(2, 4), keepdims=True) / np.float32(448)
    codes = np.clip(values / scale, -448, 448).astype(E4M3)
    return codes.reshape(num_experts, rows, columns), np.ascontiguousarray(scale[:, :, 0, :, 0])


class ExpertWeights(NamedTuple):
    w1: np.ndarray
    """[E, 2N, K] e4m3"""
    w2: np.ndarray
    """[E, K, N] e4m3"""
    w1_scale: np.ndarray
    """[E, 2N/128, K/128] fp32"""
    w2_scale: np.ndarray
    """[E, K/128, N/128] fp32"""

    @property
    def scales(self) -> dict[str, np.ndarray]:
        """The keyword arguments of ``fused_experts_fp8``."""
        return {"w1_scale": self.w1_scale, "w2_scale": self.w2_scale}

    def of(self, experts: slice | list[int]) -> ExpertWeights:
        """The weights of some of the experts."""
        return ExpertWeights(*(array[experts] for array in self))


def random_experts(
    rng: np.random.Generator, num_experts: int, intermediate: int, hidden: int
) -> ExpertWeights:
    """Experts with N = ``intermediate`` and K = ``hidden``."""
    w1, w1_scale = quantize_weights(rng, num_experts, 2 * intermediate, hidden)
    w2, w2_scale = quantize_weights(rng, num_experts, hidden, intermediate)
    return ExpertWeights(w1, w2, w1_scale, w2_scale)


@dataclass
class ExpertsCase:
    """The arrays of one call of ``fused_experts_fp8``; they may be changed before it."""

    experts: ExpertWeights
    x: np.ndarray
    weights: np.ndarray
    ids: np.ndarray

    def run(self, op: Callable[..., np.ndarray], **options: object) -> np.ndarray:
        """``op`` with these arrays; options are further arguments, or other scales."""
        w1, w2 = self.experts.w1, self.experts.w2
        return op(self.x, w1, w2, self.weights, self.ids, **{**self.experts.scales, **options})

    def tokens(self, rows: slice) -> ExpertsCase:
        """The case of these tokens alone."""
        return replace(self, x=self.x[rows], weights=self.weights[rows], ids=self.ids[rows])


def experts_case(
    rng: np.random.Generator,
    *,
    routing: str = "uniform",
    num_tokens: int = 24,
    num_experts: int = 8,
    topk: int = 4,
    intermediate: int = 256,
    hidden: int = 512,
) -> ExpertsCase:
    """Random experts, tokens and routing."""
    ids = ROUTINGS[routing](rng, num_tokens, num_experts, topk)
    return ExpertsCase(
        experts=random_experts(rng, num_experts, intermediate, hidden),
        x=activations(rng, num_tokens, hidden),
        weights=router_weights(rng, ids),
        ids=ids,
    )


def poisoned_codes(*shape: int) -> np.ndarray:
    """e4m3 buffer with 0xAA in every byte."""
    return np.full(shape, POISON_CODE, np.uint8).view(E4M3)


def poisoned_scales(num_rows: int, num_groups: int, layout: str = "row") -> np.ndarray:
    """Scale buffer of the layout's shape and strides, 123.0 (or 0x7B7B7B7B) throughout."""
    padded_rows = -(-num_rows // 4) * 4
    if layout == "row":
        return np.full((num_rows, num_groups), POISON_SCALE)
    if layout == "column":
        return np.full((num_groups, num_rows), POISON_SCALE).T
    if layout == "tma":
        return np.full((num_groups, padded_rows), POISON_SCALE).T[:num_rows]
    return np.full((-(-num_groups // 4), padded_rows), POISON_WORD, np.int32).T[:num_rows]


def _top(keys: np.ndarray, topk: int) -> np.ndarray:
    return np.argsort(-keys, axis=1, kind="stable")[:, :topk].astype(np.int32)
