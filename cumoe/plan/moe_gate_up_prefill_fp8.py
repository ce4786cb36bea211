"""Plan of moe_gate_up_prefill_fp8: as many CTAs as SMs, which take tiles in turns."""

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
    BLOCK_N,
    STAGING_BYTES,
    THREADS,
    WARPS,
)

ABI = "TPPPqqqPPPPPqfff"
STAGES = 4
MAXIMA_BYTES = 2 * WARPS * 16 * 4
"""What the consumers tell each other: the largest value of each row, of two tiles."""
SMEM_BYTES = STAGES * (A_BYTES + B_BYTES + BARRIERS_BYTES) + STAGING_BYTES + MAXIMA_BYTES
BOX_ROWS = 64
"""Of gate, then of up."""


class Problem(NamedTuple):
    """The gate and up products, the activation and its quantization, of sorted slots."""

    K: int
    N: int
    topk: int
    scale_format: str
    clamp: int
    scaled: bool
    max_blocks: int
    """Bound on the blocks of BLOCK_M slots."""


def weights(shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorMap:
    """The map of w1, [E, 2N, K] with these strides."""
    return matrices("w1", shape, strides, BOX_ROWS)


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> Step:
    """The kernel and its grid."""
    p = problem
    kernel = kernel_spec(
        "moe_gate_up_prefill_fp8",
        device.arch,
        K=p.K,
        N=p.N,
        TOPK=p.topk,
        UE8M0=p.scale_format == "ue8m0",
        CLAMP=p.clamp,
        SCALED=p.scaled,
        STAGES=STAGES,
    )
    grid = min(device.num_sms, p.max_blocks * (2 * p.N // BLOCK_N))
    launch = LaunchSpec(grid, THREADS, SMEM_BYTES)
    return Step(kernel, "moe_gate_up_prefill_fp8", launch, ABI)
