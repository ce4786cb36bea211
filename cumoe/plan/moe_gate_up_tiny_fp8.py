"""Plan of moe_gate_up_tiny_fp8: as many CTAs as SMs, which share its items evenly."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cumoe.plan.codes import ID_TYPE
from cumoe.plan.device import DeviceInfo
from cumoe.plan.scales import GROUP_SIZE, ceil_to
from cumoe.plan.small_table import MAX_SLOTS, SIZES, table_bytes
from cumoe.plan.spec import LaunchSpec, Step, kernel_spec

ABI = "PqPPPqqPqqqPqqqfff"
WARPS = 8
"""That multiply. Each takes every eighth 128-block of K, whatever a stage holds, so that the order
of the sums, and with it a token's bytes, is the same for every plan."""
PRODUCER_WARPS = 2
RING_BYTES = 163_840
"""Of weights in flight, at most: four stages of 49 KiB took 16.8 us at M=1, three 15.9."""
SUMS_BYTES = 2 * WARPS * 32 * 16
"""The warps' sums of two items."""
ROW_PADDING = 64


class Problem(NamedTuple):
    """The gate and up products, and the activation, of up to max_tokens tokens."""

    max_tokens: int
    K: int
    N: int
    topk: int
    ids: str
    has_map: bool
    scale_format: str
    clamp: int
    scaled: bool


def stage_blocks(K: int, num_slots: int) -> int:
    """128-blocks of K in a stage: the most, up to 24, that divide K, in steps of `WARPS`.

    Up to 16 beside more than 32 slots, whose tokens leave room for three stages of 24: at 64 slots
    70.6 us instead of 74.8 (K=6144, N=256, H200).
    """
    blocks, most = K // GROUP_SIZE, 24 if num_slots <= SIZES[0] else 16
    return next((n for n in (24, 16, 8) if n <= most and blocks % n == 0), WARPS)


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> Step | None:
    """The kernel and its grid; None where the slots, or two stages beside them, are too many."""
    p, blocks = problem, stage_blocks(problem.K, problem.max_tokens * problem.topk)
    if p.max_tokens * p.topk > MAX_SLOTS:
        return None
    stage = 2 * (8 * (blocks * GROUP_SIZE + ROW_PADDING) + blocks * 4) + 2 * 8  # and its barriers
    fixed = SUMS_BYTES + table_bytes(p.max_tokens * p.topk) + _tokens_bytes(p)
    stages = min(RING_BYTES, device.smem_optin_bytes - fixed) // stage
    if stages < 2:
        return None
    kernel = kernel_spec(
        "moe_gate_up_tiny_fp8",
        device.arch,
        K=p.K,
        N=p.N,
        TOPK=p.topk,
        MAX_TOKENS=p.max_tokens,
        IDS=ID_TYPE[p.ids],
        MAP=p.has_map,
        UE8M0=p.scale_format == "ue8m0",
        CLAMP=p.clamp,
        SCALED=p.scaled,
        WARPS=WARPS,
        STAGE_BLOCKS=blocks,
        STAGES=stages,
    )
    threads = 32 * (WARPS + PRODUCER_WARPS)
    launch = LaunchSpec(device.num_sms, threads, fixed + stages * stage)
    return Step(kernel, "moe_gate_up_tiny_fp8", launch, ABI)


def _tokens_bytes(p: Problem) -> int:
    """Codes and scales."""
    row = p.K + ROW_PADDING + p.K // GROUP_SIZE * 4
    return ceil_to(p.max_tokens * row, 16)
