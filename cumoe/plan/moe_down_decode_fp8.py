"""Plan of moe_down_decode_fp8: CTAs own as many columns of the output as make the grid one wave."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from cumoe.plan.codes import ABSENT, FLOAT_TYPE, ID_TYPE
from cumoe.plan.device import H200, DeviceInfo
from cumoe.plan.scales import GROUP_SIZE
from cumoe.plan.slot_table import table_bytes
from cumoe.plan.spec import LaunchSpec, Step, kernel_spec

ABI = "PPPPPPPqPqqqPqqqqqf"
ROWS = 16
"""Of a row tile."""
MAX_STAGE_BLOCKS = 4
"""128-blocks of N that a stage holds: whole rows, contiguous, where there are no more."""
RING_BYTES = 131_072
ROW_PADDING = 64


class Problem(NamedTuple):
    """The down products and the combine of up to max_tokens tokens."""

    max_tokens: int
    K: int
    N: int
    num_local_experts: int
    topk: int
    n_tiles: int
    """8 slots each, that one pass over an expert's weights serves."""
    ids: str
    has_map: bool
    weight: str | None
    """Type of topk_weights, or None where they were applied before."""
    scale_format: str
    aligned: bool
    """Whether every row of out starts at a multiple of 4 bytes."""
    quantize: bool
    """Whether every CTA quantizes the slots for itself."""

    @property
    def num_slots(self) -> int:
        """At most."""
        return self.max_tokens * self.topk


class Tiles(NamedTuple):
    """How a CTA walks its columns."""

    warps: int
    stages: int
    stage_blocks: int
    pass_tiles: int
    """Row tiles of a pass."""


class Plan(NamedTuple):
    """One launch, and the passes that each of its CTAs makes."""

    step: Step
    passes: int


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> Plan | None:
    """The kernel and its grid; None where the slots of 16 columns do not fit into shared memory."""
    p, smem = problem, device.smem_optin_bytes
    chosen = next((t for t in _tiles(p) if _smem_bytes(p, t) <= smem), None)
    if chosen is None:
        return None
    kernel = kernel_spec(
        "moe_down_decode_fp8",
        device.arch,
        K=p.K,
        N=p.N,
        EXPERTS=p.num_local_experts,
        TOPK=p.topk,
        MAX_SLOTS=p.max_tokens * p.topk,
        IDS=ID_TYPE[p.ids],
        MAP=p.has_map,
        WEIGHT=ABSENT if p.weight is None else FLOAT_TYPE[p.weight],
        ALIGNED=p.aligned,
        UE8M0=p.quantize and p.scale_format == "ue8m0",
        QUANTIZE=p.quantize,
        WARPS=chosen.warps,
        N_TILES=p.n_tiles,
        ITEM_TILES=1,
        PASS_TILES=chosen.pass_tiles,
        STAGE_BLOCKS=chosen.stage_blocks,
        STAGES=chosen.stages,
    )
    all_passes = -(-p.K // (ROWS * chosen.pass_tiles))
    passes = -(-all_passes // device.num_sms)
    grid = -(-all_passes // passes)
    launch = LaunchSpec(grid, 32 * chosen.warps, _smem_bytes(p, chosen), overlap=True)
    return Plan(Step(kernel, "moe_down_decode_fp8", launch, ABI), passes)


def _tiles(p: Problem) -> Iterator[Tiles]:
    """Candidates, the best first: all of a CTA's columns in one pass, then fewer; 16 warps, then 8.

    What a CTA of an H200 has: a kernel must not depend on the number of SMs, or nobody could build
    it without the GPU.
    """
    blocks = p.N // GROUP_SIZE
    stage_blocks = next(n for n in range(MAX_STAGE_BLOCKS, 0, -1) if blocks % n == 0)
    row_tiles = -(-p.K // (ROWS * H200.num_sms))
    passes = [n for n in range(row_tiles, 0, -1) if row_tiles % n == 0]
    many = (16, 8) if p.n_tiles == 1 else (12, 8)  # two column tiles take more than 128 registers
    for pass_tiles, warps, stages in product(passes, many, (4, 3, 2)):
        if warps * stages * _stage_bytes(stage_blocks) <= RING_BYTES:
            yield Tiles(warps, stages, stage_blocks, pass_tiles)


def _stage_bytes(stage_blocks: int) -> int:
    return ROWS * stage_blocks * GROUP_SIZE


def _smem_bytes(p: Problem, t: Tiles) -> int:
    ring = t.warps * t.stages
    slots = p.num_slots * t.pass_tiles * ROWS * 2
    codes = p.num_slots * (p.N + ROW_PADDING + p.N // GROUP_SIZE * 4) if p.quantize else 0
    table = table_bytes(p.num_slots, p.num_local_experts)
    return ring * _stage_bytes(t.stage_blocks) + -(-ring // 2) * 16 + slots + table + codes
