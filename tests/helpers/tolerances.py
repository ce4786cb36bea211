"""Every tolerance of the tests, with its reason. ``docs/numerics.md`` has the derivations.

An error is ``norm(got - want) / norm(want)``, of a token row ("row") or of all rows together
("total").
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BF16_ROUNDING = 2.0**-8
"""Half a unit in the last place of bf16, relative: 8 bits of significand."""

E4M3_ROUNDING = 2.0**-4
"""The same of e4m3: 4 bits of significand."""

# Against float64 without rounding. A rounding to e4m3 costs about 2.5 %: that of x comes in through
# gate and through up, that of the activation once, 4.3 % in quadrature; clamps and ue8m0 add to it.
EXACT_TOTAL = 0.06
EXACT_COSINE = 0.998
EXACT_ROW = 0.12

# Against the NumPy reference, same rounding points. With fp32 accumulation only an odd bf16 or e4m3
# rounding falls the other way; a wgmma keeps about 14 bits inside a block of 128.
MMA_ROW = 5e-3


class Wgmma(NamedTuple):
    row: float
    total: float


def wgmma(K: int, N: int) -> Wgmma:
    """In a shallow layer fewer sums average out: up to 4.3e-2 and 1.3e-2 were seen on an H200."""
    return Wgmma(6e-2, 1.6e-2) if K < 512 or N < 256 else Wgmma(4e-2, 8e-3)


def experts_row(num_tokens: int, topk: int, K: int, N: int) -> float:
    """Of a call of the experts: the fewest tokens add up in fp32, more on wgmma if there is one.

    The fewest are 8 tokens, or what 32 slots are, if N codes for each of these fit in 48 KiB; 64
    slots if moreover their experts have at most 320 MiB.
    """
    some, more = min(32 // topk, 8), min(64 // topk, 8)
    few_bytes = more * topk <= 32 or more * topk * 3 * N * K <= 320 << 20
    ends = (0, some, more if few_bytes else 0)
    fewest = max(n for n in ends if n * topk * N <= 48 << 10)
    return MMA_ROW if num_tokens <= fewest else wgmma(K, N).row


SILU_CODE_SHARE = 1e-4
"""Share of e4m3 codes that may be off by one where two ``exp`` differ next to a tie."""

ONE_BF16_ULP = 2.0**-7
"""Relative distance of neighbouring bf16 values, at most: for results worked out by hand."""


def up_projection(want: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """How far an h may be from its float64 value on wgmma.

    ``magnitude`` is the sum over blocks of ``a_scale * w_scale`` times the largest value that the
    accumulator sees in the block (``oracles.block_matmul_float64``).
    """
    return BF16_ROUNDING * np.abs(want) + 2.0**-11 * magnitude
