"""Plan of moe_gate_up_decode_fp8: as many CTAs as SMs, which claim its items from a counter."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cumoe.plan.codes import ID_TYPE
from cumoe.plan.decode_tile import (
    BARRIER_BYTES,
    BLOCK_K,
    CONSUMERS,
    TILE_BYTES,
    TILE_SLOTS,
    chunks_bytes,
    scale_pitch,
    slots,
)
from cumoe.plan.device import DeviceInfo
from cumoe.plan.scales import ceil_to
from cumoe.plan.spec import LaunchSpec, Step, kernel_spec
from cumoe.plan.tensor_map import TensorMap

ABI = "TTTTPPPPqqqPPqqqfff"
THREADS = CONSUMERS + 96
STAGE_BLOCKS = 4
"""128-blocks of K in a stage."""
ITEM_GROUPS = 4
"""Of 8 gate and 8 up rows each."""
HEADS, QUEUE = 2, 4
"""Items whose scales, and which, are known ahead."""
MAX_STAGES = 5
"""A longer ring gained nothing (docs/decisions/0003)."""


class Problem(NamedTuple):
    """The gate and up products, and the activation, of up to max_slots slots."""

    max_slots: int
    K: int
    N: int
    num_local_experts: int
    n_tiles: int
    """8 slots each, that one pass over an expert's weights serves."""
    ids: str
    has_map: bool
    clamp: int
    scaled: bool


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> Step | None:
    """The kernel and its grid; None where two stages do not fit into shared memory."""
    p = problem
    stage, fixed = _stage_bytes(p.n_tiles), _fixed_bytes(p)
    stages = min((device.smem_optin_bytes - fixed) // stage, MAX_STAGES)
    if stages < 2:
        return None
    kernel = kernel_spec(
        "moe_gate_up_decode_fp8",
        device.arch,
        K=p.K,
        N=p.N,
        EXPERTS=p.num_local_experts,
        MAX_SLOTS=p.max_slots,
        IDS=ID_TYPE[p.ids],
        MAP=p.has_map,
        CLAMP=p.clamp,
        SCALED=p.scaled,
        N_TILES=p.n_tiles,
        STAGES=stages,
    )
    launch = LaunchSpec(device.num_sms, THREADS, fixed + stages * stage, overlap=True)
    return Step(kernel, "moe_gate_up_decode_fp8", launch, ABI)


def _stage_bytes(n_tiles: int) -> int:
    rows = 2 * TILE_SLOTS * ITEM_GROUPS
    return STAGE_BLOCKS * (rows * BLOCK_K + n_tiles * TILE_BYTES) + 2 * BARRIER_BYTES


def _fixed_bytes(p: Problem) -> int:
    scales = TILE_SLOTS * p.n_tiles * scale_pitch(p.K) + ceil_to(2 * p.K // BLOCK_K, 4)
    exchange = 2 * p.n_tiles * 128 * 16
    queues = (HEADS + QUEUE) * 2 * BARRIER_BYTES + QUEUE * 8
    chunks = chunks_bytes(p.max_slots, p.num_local_experts, p.n_tiles)
    return HEADS * scales * 4 + exchange + queues + chunks


def weights(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[TensorMap, ...]:
    """w1 [E, 2N, K] as [E, N / 8, 2, 8, K], groups of 8 gate and 8 up rows; boxes of 4, 2 and 1."""
    E, rows, K = shape
    row = strides[1]
    apart = strides[0] if E > 1 else rows * row  # of one expert it says nothing
    dims, steps = (K, 8, 2, rows // 16, E), (row, rows // 2 * row, 8 * row, apart)
    return tuple(TensorMap("w1", dims, steps, (BLOCK_K, 8, 2, n, 1)) for n in (ITEM_GROUPS, 2, 1))


def tokens(array: str, offset: int, num_slots: int, K: int) -> TensorMap:
    """The tokens' codes, once for each slot."""
    return slots(array, offset, num_slots, K, STAGE_BLOCKS)
