"""Plan of moe_down_decode_fp8: CTAs own as many columns of the output as make the grid one wave."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cumoe.plan.codes import ID_TYPE
from cumoe.plan.decode_tile import (
    BARRIER_BYTES,
    BLOCK_K,
    CONSUMERS,
    ROUTE_BYTES,
    TILE_BYTES,
    TILE_SLOTS,
    chunks_bytes,
    scale_pitch,
    slots,
)
from cumoe.plan.device import H200, DeviceInfo
from cumoe.plan.spec import LaunchSpec, Step, kernel_spec
from cumoe.plan.tensor_map import TensorMap

ABI = "TTPPPPPqqqPPqqqqqf"
THREADS = CONSUMERS + 128
WARPGROUPS = 2
MIN_ROWS, WGMMA_ROWS = 16, 64
"""Of a warp, and of an instruction: those of a group of chunks, and whatever lies behind."""
MAX_GROUP_TILES = 8
"""Of slots, that an instruction multiplies: a thread keeps 4 sums of each."""
HEADS, GROUP_HEADS = 8, 4
"""Chunks of a warpgroup whose scales and routes are fetched ahead; groups of more than one."""
MAX_STAGE_BLOCKS = 3
"""128-blocks of N that a stage holds, of which a box fetches all; one more of passes of 32 rows and
fewer, since a box takes its time whatever its size."""
MIN_STAGES, MAX_WEIGHT_BYTES = 2, 96 << 10
"""Stages of a warpgroup: as many as leave room for the sums of all tokens, and of weights in both
rings no more than keeps the memory busy."""
ROW_GROUP = 8
"""Rows that lie together in a stage: a period of the swizzle."""
SUM_BYTES = 4


class Problem(NamedTuple):
    """The down products and the combine of up to max_slots slots."""

    max_slots: int
    K: int
    N: int
    num_local_experts: int
    topk: int
    n_tiles: int
    """8 slots each, that one pass over an expert's weights serves."""
    ids: str
    has_map: bool
    aligned: bool
    """Whether every row of out starts at a multiple of 4 bytes."""


class Plan(NamedTuple):
    """One launch, and what its arguments and its workspace follow from."""

    step: Step
    passes: int
    """Of each CTA."""
    rows: int
    """Columns of the output, rows of w2, in a pass."""
    stage_blocks: int
    shared_tokens: int
    """Whose sums lie in shared memory."""

    def memory_bytes(self, num_tokens: int) -> int:
        """Of the sums of the other tokens."""
        outside = max(num_tokens - self.shared_tokens, 0)
        return self.step.launch.grid * outside * self.rows * SUM_BYTES

    def weights(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorMap:
        """w2 [E, K, N] as [E, K / 8, N / 128, 8, 128], in boxes of a chunk's part of a stage."""
        E, K, N = shape
        row = strides[1]
        apart = strides[0] if E > 1 else K * row  # of one expert it says nothing
        dims = (BLOCK_K, ROW_GROUP, N // BLOCK_K, K // ROW_GROUP, E)
        box = (BLOCK_K, ROW_GROUP, self.stage_blocks, self.rows // ROW_GROUP, 1)
        return TensorMap("w2", dims, (row, BLOCK_K, ROW_GROUP * row, apart), box)

    def codes(self, array: str, offset: int, num_slots: int, N: int) -> TensorMap:
        """Those of the activation."""
        return slots(array, offset, num_slots, N, self.stage_blocks)


class Ring(NamedTuple):
    """Of stages, one for each warpgroup."""

    blocks: int
    """Of 128, of N, in a stage."""
    stages: int
    """Of a warpgroup."""
    stage_bytes: int
    """Of both warpgroups, with their barriers."""

    @property
    def bytes(self) -> int:
        """Of shared memory."""
        return self.stages * self.stage_bytes


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> Plan | None:
    """The kernel and its grid; None where the rings do not fit into shared memory."""
    p, rows = problem, pass_rows(problem.K)
    room = device.smem_optin_bytes - _fixed_bytes(p)
    tokens, sums = p.max_slots // p.topk, rows * SUM_BYTES
    ring = _ring(p, rows, room - tokens * sums) or _ring(p, rows, room)
    if ring is None:
        return None
    if room - ring.bytes < tokens * sums:
        ring = ring._replace(stages=MIN_STAGES)
    inside = min((room - ring.bytes) // sums, tokens)
    kernel = kernel_spec(
        "moe_down_decode_fp8",
        device.arch,
        K=p.K,
        N=p.N,
        EXPERTS=p.num_local_experts,
        TOPK=p.topk,
        MAX_SLOTS=p.max_slots,
        IDS=ID_TYPE[p.ids],
        MAP=p.has_map,
        ALIGNED=p.aligned,
        N_TILES=p.n_tiles,
        STAGES=ring.stages,
        STAGE_BLOCKS=ring.blocks,
        ROWS=rows,
        SHARED_TOKENS=inside,
    )
    all_passes = -(-p.K // rows)
    passes = -(-all_passes // device.num_sms)
    grid = -(-all_passes // passes)
    smem = max(_fixed_bytes(p) + ring.bytes + inside * sums, _end_of_products(ring))
    launch = LaunchSpec(grid, THREADS, smem, overlap=True)
    return Plan(Step(kernel, "moe_down_decode_fp8", launch, ABI), passes, rows, ring.blocks, inside)


def pass_rows(K: int) -> int:
    """The fewest, of 16 to 64, with which the CTAs of an H200 own all columns at a time.

    A kernel must not depend on the number of SMs, or nobody could build it without the GPU.
    """
    return next((n for n in (MIN_ROWS, 32, 48) if n * H200.num_sms >= K), WGMMA_ROWS)


def _ring(p: Problem, rows: int, room: int) -> Ring | None:
    """The one of most blocks a stage that fits into so many bytes."""
    group = _group(p, rows)
    for blocks in range(MAX_STAGE_BLOCKS + (rows <= 32), 0, -1):
        weights = WARPGROUPS * group * blocks * rows * BLOCK_K
        slots = WARPGROUPS * group * blocks * p.n_tiles * TILE_BYTES
        stage = weights + slots + WARPGROUPS * 2 * BARRIER_BYTES
        stages = min(room // stage, max(MAX_WEIGHT_BYTES // weights, MIN_STAGES))
        if p.N // BLOCK_K % blocks == 0 and stages >= MIN_STAGES:
            return Ring(blocks, stages, stage)
    return None


def _group(p: Problem, rows: int) -> int:
    """Chunks that an instruction multiplies."""
    return min(WGMMA_ROWS // rows, MAX_GROUP_TILES // p.n_tiles)


def _end_of_products(ring: Ring) -> int:
    """Where the weights end that the instructions for the last stage read."""
    data = ring.stage_bytes // WARPGROUPS - 2 * BARRIER_BYTES
    return (WARPGROUPS * ring.stages - 1) * data + ring.blocks * WGMMA_ROWS * BLOCK_K


def _fixed_bytes(p: Problem) -> int:
    of_slot = scale_pitch(p.N) * 4 + ROUTE_BYTES
    rows = pass_rows(p.K)
    group = _group(p, rows)
    head = group * TILE_SLOTS * p.n_tiles * of_slot + 4 * p.N // BLOCK_K * 4
    heads = WARPGROUPS * (HEADS if group == 1 else GROUP_HEADS) * (head + 2 * BARRIER_BYTES)
    turns = WARPGROUPS * group * (rows // MIN_ROWS) * BARRIER_BYTES
    return heads + turns + chunks_bytes(p.max_slots, p.num_local_experts, p.n_tiles)
