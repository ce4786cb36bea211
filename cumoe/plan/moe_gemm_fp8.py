"""Plan of moe_gemm_fp8: grouped GEMM on mma.sync, tiles of BLOCK_M slots by 128 columns."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cumoe.errors import UnsupportedDeviceError
from cumoe.plan.device import DeviceInfo
from cumoe.plan.spec import LaunchSpec, Step, kernel_spec

ABI = "PPPqqPqqqPPPPq"
THREADS = {16: 128, 64: 256}
"""Threads of a CTA by the height of its tile, as in the kernel."""
BLOCKS_M = tuple(THREADS)
BLOCK_N = 128
BLOCK_K = 128
MAX_STAGES = 4
MIN_STAGES = 2
SLOTS_PER_EXPERT_OF_TALL_TILES = 32


class Problem(NamedTuple):
    """One grouped product of gathered rows of [rows, K] with [E, N, K] transposed."""

    max_blocks: int
    """Bound on the blocks of BLOCK_M slots; those past the real number return at once."""
    N: int
    K: int
    slots_per_row: int
    """topk where a row of the input serves all slots of a token, 1 where each slot has its own."""
    block_m: int


def choose_block_m(num_slots: int, num_experts: int) -> int:
    """Slots per tile: 64 once an expert has 32 slots on average, so that half a tile is filled."""
    return 64 if num_slots >= SLOTS_PER_EXPERT_OF_TALL_TILES * num_experts else 16


def representative_slot_counts(num_experts: int) -> tuple[int, ...]:
    """Numbers of slots that together draw every answer from `choose_block_m`."""
    return 1, SLOTS_PER_EXPERT_OF_TALL_TILES * num_experts


def stages_that_fit(block_m: int, smem_bytes: int) -> int:
    """Pipeline depth: the deepest that leaves 1 KiB for static shared memory."""
    stage = (block_m + BLOCK_N) * BLOCK_K
    stages = min(MAX_STAGES, (smem_bytes - 1024) // stage)
    if stages < MIN_STAGES:
        raise UnsupportedDeviceError(
            f"GPU: moe_gemm_fp8 wants {MIN_STAGES * stage + 1024} bytes of shared memory per CTA, "
            f"the device offers {smem_bytes}; move the arrays to the CPU to use the reference"
        )
    return stages


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> Step:
    """The kernel and its grid."""
    p = problem
    stages = stages_that_fit(p.block_m, device.smem_optin_bytes)
    kernel = kernel_spec(
        "moe_gemm_fp8",
        device.arch,
        N=p.N,
        K=p.K,
        BLOCK_M=p.block_m,
        STAGES=stages,
        SLOTS_PER_ROW=p.slots_per_row,
    )
    smem = stages * (p.block_m + BLOCK_N) * BLOCK_K
    return Step(
        kernel,
        "moe_gemm_fp8",
        LaunchSpec(p.max_blocks * (p.N // BLOCK_N), THREADS[p.block_m], smem),
        ABI,
    )
