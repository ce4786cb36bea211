"""Plan of silu_and_mul_quant_fp8: all at once where a call is small, persistent CTAs elsewhere."""

from __future__ import annotations

from functools import lru_cache
from struct import pack, unpack
from typing import NamedTuple

from cumoe.plan.codes import ID_TYPE
from cumoe.plan.device import DeviceInfo, has_dependent_launch
from cumoe.plan.scales import GROUP_SIZE, ceil_to
from cumoe.plan.spec import LaunchSpec, Step, kernel_spec

ABI = "PqPPPPqqqqqqqfff"

NO_CLAMP, BF16_CLAMP, FP32_CLAMP = CLAMPS = (0, 1, 2)
"""`Clamp` of ``kernels_src/common/swiglu.cuh``."""

AT_ONCE_THREADS, AT_ONCE_LANES = 128, 32
PERSISTENT_THREADS, PERSISTENT_LANES = 256, 8
CTAS_PER_SM = 4
"""57 registers a thread: 4 CTAs of 256 fill an SM's register file."""
AT_ONCE_GROUPS = {False: 2048, True: 2048}
"""Largest call, in groups of 128, for the at-once kernel: without and with a filter."""
MAX_CHUNK_ROWS = 32
"""A warp tests one row a lane."""


class Problem(NamedTuple):
    """One activation of a [rows, 2H] matrix."""

    rows: int
    """Rows of the scale array, padding included."""
    H: int
    scale_format: str
    packed: bool
    clamp: int
    scaled: bool
    """Whether alpha or beta differ from 1 and 0."""
    ids: str | None
    """Type of topk_ids, or None where all rows are computed."""
    has_map: bool
    aligned: bool
    """Whether every row of gate_up starts at a multiple of 16 bytes, and q at one of 8."""


class Plan(NamedTuple):
    """One launch, and the rows that a persistent CTA takes at a time."""

    step: Step
    chunk_rows: int


def clamp_kind(limit: float | None) -> int:
    """How a limit is compiled: packed bf16 arithmetic wants a bound that bf16 holds."""
    if limit is None:
        return NO_CLAMP
    (bits,) = unpack("I", pack("f", limit))
    return FP32_CLAMP if bits & 0xFFFF else BF16_CLAMP


def group_count(p: Problem) -> int:
    """Groups of 128 values, padding included."""
    groups = p.H // GROUP_SIZE
    return p.rows * (ceil_to(groups, 4) if p.packed else groups)


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> Plan:
    """The kernel and its grid."""
    p = problem
    persistent = group_count(p) > AT_ONCE_GROUPS[p.ids is not None]
    threads = PERSISTENT_THREADS if persistent else AT_ONCE_THREADS
    lanes = PERSISTENT_LANES if persistent else AT_ONCE_LANES
    kernel = kernel_spec(
        "silu_and_mul_quant_fp8",
        device.arch,
        H=p.H,
        UE8M0=p.scale_format == "ue8m0",
        PACKED=p.packed,
        CLAMP=p.clamp,
        SCALED=p.scaled,
        IDS=ID_TYPE[p.ids],
        MAP=p.has_map,
        ALIGNED=p.aligned,
        PERSISTENT=persistent,
        THREADS=threads,
        LANES=lanes,
        CTAS_PER_SM=CTAS_PER_SM,
    )
    if persistent:
        grid, chunk_rows = persistent_grid(p.rows, device.num_sms * CTAS_PER_SM)
    else:
        grid, chunk_rows = -(-group_count(p) * lanes // threads), 1
    step = Step(
        kernel,
        "silu_and_mul_quant_fp8",
        LaunchSpec(grid, threads, overlap=has_dependent_launch(device.arch)),
        ABI,
    )
    return Plan(step, chunk_rows)


def persistent_grid(rows: int, resident: int) -> tuple[int, int]:
    """CTAs, at most the resident ones, and rows per chunk so that all take as many chunks."""
    turns = -(-rows // (resident * MAX_CHUNK_ROWS))
    chunk_rows = max(1, -(-rows // (resident * max(1, turns))))
    return min(resident, -(-rows // chunk_rows)), chunk_rows


def representative_rows(H: int) -> tuple[int, ...]:
    """Numbers of rows that reach every kernel of this size: few, and more than a crossover."""
    return 1, max(AT_ONCE_GROUPS.values()) * GROUP_SIZE // H + 1
