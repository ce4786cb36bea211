"""Plan of moe_gate_up_decode_fp8: as many CTAs as SMs, which share its items evenly."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cumoe.plan.codes import ID_TYPE
from cumoe.plan.device import DeviceInfo
from cumoe.plan.scales import GROUP_SIZE, ceil_to
from cumoe.plan.slot_table import table_bytes
from cumoe.plan.spec import LaunchSpec, Step, kernel_spec

ABI = "PqPPPPPqqPqqqPqqqfff"
WARPS = 8
"""That multiply. Each takes every eighth 128-block of K, whatever a stage holds, so that the order
of the sums, and with it a token's bytes, is the same for every plan."""
PRODUCER_WARPS = 3
RING_BYTES = 163_840
"""Of weights and tokens in flight, at most. A larger ring was slower (docs/decisions/0003)."""
TILE_BYTES = 32 * 4 * 4
"""A warp's sums of 16 rows by 8 columns."""
ROW_PADDING = 64


class Problem(NamedTuple):
    """The gate and up products, and the activation, of up to max_tokens tokens."""

    max_tokens: int
    K: int
    N: int
    num_local_experts: int
    topk: int
    n_tiles: int
    """8 slots each, that one pass over an expert's weights serves."""
    ids: str
    has_map: bool
    scale_format: str
    clamp: int
    scaled: bool
    quantize: bool
    """Whether every CTA quantizes the tokens for itself."""


def stage_blocks(K: int) -> int:
    """128-blocks of K in a stage: the most, up to 24, that divide K, in steps of `WARPS`."""
    blocks = K // GROUP_SIZE
    return next((n for n in (24, 16, 8) if blocks % n == 0), WARPS)


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> Step | None:
    """The kernel and its grid; None where two stages do not fit into shared memory."""
    p = problem
    m_tiles, blocks = p.n_tiles, stage_blocks(p.K)
    if p.n_tiles > 1:
        blocks = WARPS  # a stage of more rows and tokens is as large with fewer of them
    stage = _stage_bytes(p, m_tiles, blocks)
    fixed = 2 * WARPS * m_tiles * p.n_tiles * TILE_BYTES + _tokens_bytes(p)
    stages = min(RING_BYTES, device.smem_optin_bytes - fixed) // (stage + 16)
    if stages < 2:
        return None
    kernel = kernel_spec(
        "moe_gate_up_decode_fp8",
        device.arch,
        K=p.K,
        N=p.N,
        EXPERTS=p.num_local_experts,
        TOPK=p.topk,
        MAX_SLOTS=p.max_tokens * p.topk,
        IDS=ID_TYPE[p.ids],
        MAP=p.has_map,
        UE8M0=p.quantize and p.scale_format == "ue8m0",
        CLAMP=p.clamp,
        SCALED=p.scaled,
        QUANTIZE=p.quantize,
        WARPS=WARPS,
        M_TILES=m_tiles,
        N_TILES=p.n_tiles,
        STAGE_BLOCKS=blocks,
        STAGES=stages,
    )
    smem = fixed + stages * (stage + 16)
    threads = 32 * (WARPS + PRODUCER_WARPS)
    launch = LaunchSpec(device.num_sms, threads, smem, overlap=not p.quantize)
    return Step(kernel, "moe_gate_up_decode_fp8", launch, ABI)


def _stage_bytes(p: Problem, m_tiles: int, blocks: int) -> int:
    row, columns = blocks * GROUP_SIZE + ROW_PADDING, 0 if p.quantize else 8 * p.n_tiles
    return ceil_to((16 * m_tiles + columns) * row + (2 + columns) * blocks * 4, 16)


def _tokens_bytes(p: Problem) -> int:
    """The table of slots, and the tokens where the CTA quantizes them."""
    table = table_bytes(p.max_tokens * p.topk, p.num_local_experts)
    row = p.K + ROW_PADDING + p.K // GROUP_SIZE * 4
    return table + (p.max_tokens * row if p.quantize else 0)
