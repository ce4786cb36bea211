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
THREADS = CONSUMERS + 96
WARPGROUPS = 2
WGMMA_ROWS = 64
"""Of an instruction, which reads what lies behind the rows of a pass."""
HEADS = 8
"""Chunks of a warpgroup whose scales and routes are fetched ahead."""
MAX_STAGE_BLOCKS = 3
"""128-blocks of N that a stage holds, of which a box fetches all; one more of passes of 32 rows and
fewer, since a box takes its time whatever its size."""
MIN_STAGES, MAX_STAGES = 2, 5
"""Of a warpgroup: as many as leave room for the sums of all tokens."""
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
        """w2 [E, K, N] as [E, N / 128, K, 128], in boxes of a stage."""
        E, K, N = shape
        apart = strides[0] if E > 1 else K * strides[1]  # of one expert it says nothing
        box = (BLOCK_K, self.rows, self.stage_blocks, 1)
        return TensorMap("w2", (BLOCK_K, K, N // BLOCK_K, E), (strides[1], BLOCK_K, apart), box)

    def codes(self, array: str, offset: int, num_slots: int, N: int) -> TensorMap:
        """Those of the activation."""
        return slots(array, offset, num_slots, N, self.stage_blocks)


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> Plan | None:
    """The kernel and its grid; None where the rings do not fit into shared memory."""
    p, rows = problem, pass_rows(problem.K)
    blocks = _stage_blocks(problem.N, rows)
    stage = WARPGROUPS * (blocks * (rows * BLOCK_K + p.n_tiles * TILE_BYTES) + 2 * BARRIER_BYTES)
    room = device.smem_optin_bytes - _fixed_bytes(p)
    tokens, sums = p.max_slots // p.topk, rows * SUM_BYTES
    if room < MIN_STAGES * stage:
        return None
    stages = min(max((room - tokens * sums) // stage, MIN_STAGES), MAX_STAGES)
    inside = min((room - stages * stage) // sums, tokens)
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
        STAGES=stages,
        STAGE_BLOCKS=blocks,
        ROWS=rows,
        SHARED_TOKENS=inside,
    )
    all_passes = -(-p.K // rows)
    passes = -(-all_passes // device.num_sms)
    grid = -(-all_passes // passes)
    ring = stages * (stage - WARPGROUPS * 2 * BARRIER_BYTES)
    behind = ring - blocks * p.n_tiles * TILE_BYTES + (WGMMA_ROWS - rows) * BLOCK_K
    smem = max(_fixed_bytes(p) + stages * stage + inside * sums, behind)
    launch = LaunchSpec(grid, THREADS, smem, overlap=True)
    return Plan(Step(kernel, "moe_down_decode_fp8", launch, ABI), passes, rows, blocks, inside)


def pass_rows(K: int) -> int:
    """The fewest, of 16 to 64, with which the CTAs of an H200 own all columns at a time.

    A kernel must not depend on the number of SMs, or nobody could build it without the GPU.
    """
    return next((n for n in (16, 32, 48) if n * H200.num_sms >= K), 64)


def _stage_blocks(N: int, rows: int) -> int:
    most = MAX_STAGE_BLOCKS + (rows <= 32)
    return next(n for n in range(most, 0, -1) if N // BLOCK_K % n == 0)


def _fixed_bytes(p: Problem) -> int:
    of_slot = scale_pitch(p.N) * 4 + ROUTE_BYTES
    head = TILE_SLOTS * p.n_tiles * of_slot + 4 * p.N // BLOCK_K * 4
    heads = WARPGROUPS * HEADS * (head + 2 * BARRIER_BYTES)
    return heads + chunks_bytes(p.max_slots, p.num_local_experts, p.n_tiles)
