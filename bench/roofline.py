"""The least time a call can take, from its bytes and operations. H200 figures, measured.

A GPU that is not in the table gets no floor: a percentage of a guess would be nonsense.
"""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """What one GPU can do, as measured on it."""

    copy_bytes_per_us: float
    """Device-to-device copy, bytes read and written."""
    read_bytes_per_us: float
    read_ramp_us: float
    """A kernel that only reads takes this long plus its bytes at the rate above."""
    fp8_flops_per_us: float
    """8192^3 matrix product with 1x128 by 128x128 scales."""


RATES = {"NVIDIA H200": Rates(4.15e6, 4.66e6, 2.5, 1.3e9)}


def activation_floor_us(device: str, rows: int, H: int) -> float | None:
    """bf16 gate and up in (4 bytes an output), code and its share of an fp32 scale out."""
    rates = RATES.get(device)
    return rates and rows * H * (4 + 1 + 4 / 128) / rates.copy_bytes_per_us


def quantize_floor_us(device: str, rows: int, K: int) -> float | None:
    """bf16 in, code and its share of an fp32 scale out."""
    rates = RATES.get(device)
    return rates and rows * K * (2 + 1 + 4 / 128) / rates.copy_bytes_per_us


def experts_bytes(*, M: int, K: int, N: int, active: float) -> float:
    """Active experts' weights, x and out once."""
    return active * 3 * N * K + 2 * 2 * M * K


def experts_flops(*, K: int, N: int, slots: float) -> float:
    """Of both products, without any padding."""
    return slots * 6 * N * K


def experts_floor_us(
    device: str, *, M: int, K: int, N: int, active: float, slots: float
) -> float | None:
    """The bytes at the reading rate, or the operations of all local slots."""
    rates = RATES.get(device)
    if rates is None:
        return None
    moved = experts_bytes(M=M, K=K, N=N, active=active)
    flops = experts_flops(K=K, N=N, slots=slots)
    return max(rates.read_ramp_us + moved / rates.read_bytes_per_us, flops / rates.fp8_flops_per_us)
