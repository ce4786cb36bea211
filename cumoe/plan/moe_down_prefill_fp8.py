"""Plan of moe_down_prefill_fp8: as many CTAs as SMs, which take items of a few tiles in turns."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cumoe.plan.device import DeviceInfo
from cumoe.plan.spec import LaunchSpec, Step, kernel_spec
from cumoe.plan.tensor_map import TensorMap, matrices
from cumoe.plan.wgmma_tile import (
    A_BYTES,
    B_BYTES,
    BARRIERS_BYTES,
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    STAGING_BYTES,
    THREADS,
)

ABI = "TTPPqqqPPPPq"
STAGES = 4
ITEM_TILES = 2
"""Neighbouring tiles of a block of slots, where so many divide all of them."""
MAX_RESIDENT_N = 512
"""Up to here a CTA fetches all codes of an item at once: the two buffers fit beside the ring."""
BUFFERS = 2
BOX_ROWS = 128


class Problem(NamedTuple):
    """The down products of sorted slots."""

    K: int
    N: int
    max_blocks: int
    """Bound on the blocks of BLOCK_M slots."""


def weights(shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorMap:
    """The map of w2, [E, K, N] with these strides."""
    return matrices("w2", shape, strides, BOX_ROWS)


def codes(array: str, offset: int, max_blocks: int, N: int) -> TensorMap:
    """The map of the activation's codes, [max_blocks * BLOCK_M, N]."""
    return TensorMap(array, (N, max_blocks * BLOCK_M), (N,), (BLOCK_K, BLOCK_M), offset)


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> Step:
    """The kernel and its grid."""
    p = problem
    tiles = -(-p.K // BLOCK_N)
    item_tiles = ITEM_TILES if tiles % ITEM_TILES == 0 else 1
    is_resident = p.N <= MAX_RESIDENT_N
    kernel = kernel_spec(
        "moe_down_prefill_fp8",
        device.arch,
        K=p.K,
        N=p.N,
        STAGES=STAGES,
        ITEM_TILES=item_tiles,
        RESIDENT=is_resident,
    )
    grid = min(device.num_sms, p.max_blocks * (tiles // item_tiles))
    launch = LaunchSpec(grid, THREADS, _smem_bytes(p.N, is_resident), overlap=True)
    return Step(kernel, "moe_down_prefill_fp8", launch, ABI)


def _smem_bytes(N: int, is_resident: bool) -> int:
    stage = B_BYTES + BARRIERS_BYTES + (0 if is_resident else A_BYTES)
    buffers = BUFFERS * (BARRIERS_BYTES + (N * BLOCK_M if is_resident else 0))
    return STAGES * stage + buffers + STAGING_BYTES
