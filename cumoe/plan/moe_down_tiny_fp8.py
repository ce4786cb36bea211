"""Plan of moe_down_tiny_fp8: CTAs own as many columns of the output as make the grid one wave."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from cumoe.plan.codes import FLOAT_TYPE, ID_TYPE
from cumoe.plan.device import H200, DeviceInfo
from cumoe.plan.scales import GROUP_SIZE, ceil_to
from cumoe.plan.small_table import MAX_SLOTS, table_bytes, table_slots
from cumoe.plan.spec import LaunchSpec, Step, kernel_spec

ABI = "PPPPPqPqqqPqqqqf"
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
    topk: int
    ids: str
    has_map: bool
    weight: str
    """Type of topk_weights."""
    scale_format: str
    aligned: bool
    """Whether every row of out starts at a multiple of 4 bytes."""


class Ring(NamedTuple):
    """Warps, and the weights that each has in flight."""

    warps: int
    stages: int
    stage_blocks: int

    @property
    def bytes(self) -> int:
        """Without the barriers."""
        return self.warps * self.stages * ROWS * self.stage_blocks * GROUP_SIZE


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> Step | None:
    """The kernel and its grid; None where the slots, or a ring beside them, are too many."""
    p, smem = problem, device.smem_optin_bytes
    if p.max_tokens * p.topk > MAX_SLOTS:
        return None
    ring = next((r for r in _rings(p.N) if _smem_bytes(p, r) <= smem), None)
    if ring is None:
        return None
    kernel = kernel_spec(
        "moe_down_tiny_fp8",
        device.arch,
        K=p.K,
        N=p.N,
        TOPK=p.topk,
        MAX_TOKENS=p.max_tokens,
        IDS=ID_TYPE[p.ids],
        MAP=p.has_map,
        WEIGHT=FLOAT_TYPE[p.weight],
        ALIGNED=p.aligned,
        UE8M0=p.scale_format == "ue8m0",
        WARPS=ring.warps,
        TILES=_tiles(p.K),
        STAGE_BLOCKS=ring.stage_blocks,
        STAGES=ring.stages,
    )
    grid = -(-p.K // (ROWS * _tiles(p.K)))
    launch = LaunchSpec(grid, 32 * ring.warps, _smem_bytes(p, ring), overlap=True)
    return Step(kernel, "moe_down_tiny_fp8", launch, ABI)


def _tiles(K: int) -> int:
    """Row tiles of a CTA, those of an H200: a kernel must not depend on the number of SMs, or
    nobody could build it without the GPU."""
    return -(-K // (ROWS * H200.num_sms))


def _rings(N: int) -> Iterator[Ring]:
    """Candidates, the best first: 16 warps, then 8."""
    blocks = N // GROUP_SIZE
    stage_blocks = next(n for n in range(MAX_STAGE_BLOCKS, 0, -1) if blocks % n == 0)
    rings = (Ring(warps, n, stage_blocks) for warps, n in product((16, 8), (4, 3, 2)))
    return (ring for ring in rings if ring.bytes <= RING_BYTES)


def _smem_bytes(p: Problem, ring: Ring) -> int:
    most = p.max_tokens * p.topk
    barriers, weights = ring.warps * ring.stages * 8, table_slots(most) * 4
    slot = _tiles(p.K) * ROWS * 2 + p.N + ROW_PADDING + p.N // GROUP_SIZE * 4
    return ring.bytes + barriers + table_bytes(most) + weights + ceil_to(most * slot, 16)
