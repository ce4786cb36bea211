"""Plan of silu_and_mul_quant_fp8: all at once where a call is small, persistent CTAs elsewhere."""

from __future__ import annotations

from functools import lru_cache
from struct import pack, unpack
from typing import NamedTuple

from cumoe.plan.codes import ID_TYPE
from cumoe.plan.device import DeviceInfo, has_dependent_launch
from cumoe.plan.scales import GROUP_SIZE, ceil_to
from cumoe.plan.spec import LaunchSpec, Step, kernel_spec

ABI = "PqPPPPPqqqqqqqfff"

NO_CLAMP, BF16_CLAMP, FP32_CLAMP = CLAMPS = (0, 1, 2)
"""`Clamp` of ``kernels_src/common/swiglu.cuh``."""

BOTH, ACTIVATE, QUANTIZE = STEPS = (0, 1, 2)
"""`Step` of the kernel: fused, or one of the two halves that pass the activation through memory."""

MAX_CHUNK_ROWS = 32
"""A warp tests one row a lane."""


class Strategy(NamedTuple):
    """How the groups of a call are dealt out, and up to which size."""

    max_groups: int
    lanes: int
    """Of a warp, per group of 128."""
    threads: int
    ctas_per_sm: int = 0
    """Of a persistent kernel; 0 deals all groups out at once."""


# us per call on H200 (driver 580, NVRTC 13.0), 2026-11-30, four rotated inputs in a CUDA graph. The
# sweep itself was not recorded; `python -m bench activation` times what was chosen from it:
# lanes x threads at once 32x128, 32x256, 16x128; persistent 8x128, 8x256, 8x512, 16x256.
#   groups    32     0.99  1.04  1.03  1.28  1.26  1.31  1.13
#           2048     1.50  1.45  1.34  1.63  1.68  1.66  1.62
#           4096     2.11  1.83  1.82  2.06  1.83  1.82  1.93
#           8192     2.85  2.37  2.45  2.51  2.34  2.39  2.56
#          12288     4.07  3.27  3.19  3.03  3.24  2.88  2.88
#          98304        -     -     -  17.06 17.26 17.27 17.37
#        1048576        -     -     -  169.1 167.9 166.2 167.3
UNFILTERED = (
    Strategy(1024, lanes=32, threads=128),
    Strategy(5000, lanes=16, threads=128),
    Strategy(10_000, lanes=8, threads=256, ctas_per_sm=4),
    Strategy(40_000, lanes=8, threads=512, ctas_per_sm=2),
    Strategy(150_000, lanes=8, threads=128, ctas_per_sm=8),
    Strategy(2**63, lanes=8, threads=512, ctas_per_sm=2),
)
# The same with an expert_map that keeps 1/8 of the rows.
#   groups    96     1.32  1.36  1.35  1.73  1.72  1.80  1.73
#           6144     2.22  1.76  1.71  2.06  2.15  2.19  2.15
#          12288     4.20  2.70  2.21  2.42  2.44  2.46  2.56
#          24576     8.11  4.33  4.22  3.05  3.01  2.72  3.06
#          98304        -     -     -  5.22  5.07  4.95  5.74
FILTERED = (
    Strategy(1024, lanes=32, threads=128),
    Strategy(14_000, lanes=16, threads=128),
    Strategy(2**63, lanes=8, threads=512, ctas_per_sm=2),
)


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
    step: int = BOTH


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
    table = UNFILTERED if p.ids is None else FILTERED
    chosen = next(s for s in table if group_count(p) <= s.max_groups)
    kernel = kernel_spec(
        "silu_and_mul_quant_fp8",
        device.arch,
        H=p.H,
        UE8M0=p.step != ACTIVATE and p.scale_format == "ue8m0",
        PACKED=p.step != ACTIVATE and p.packed,
        CLAMP=p.clamp if p.step != QUANTIZE else NO_CLAMP,
        SCALED=p.step != QUANTIZE and p.scaled,
        IDS=ID_TYPE[p.ids],
        MAP=p.has_map,
        ALIGNED=p.aligned,
        LANES=chosen.lanes,
        THREADS=chosen.threads,
        PERSISTENT=chosen.ctas_per_sm > 0,
        CTAS_PER_SM=max(1, chosen.ctas_per_sm),
        STEP=p.step,
    )
    grid, chunk_rows = -(-group_count(p) * chosen.lanes // chosen.threads), 1
    if chosen.ctas_per_sm:
        grid, chunk_rows = persistent_grid(p.rows, device.num_sms * chosen.ctas_per_sm)
    launch = LaunchSpec(grid, chosen.threads, overlap=has_dependent_launch(device.arch))
    return Plan(Step(kernel, "silu_and_mul_quant_fp8", launch, ABI), chunk_rows)


def persistent_grid(rows: int, resident: int) -> tuple[int, int]:
    """CTAs, at most the resident ones, and rows per chunk so that all take as many chunks."""
    turns = -(-rows // (resident * MAX_CHUNK_ROWS))
    chunk_rows = max(1, -(-rows // (resident * max(1, turns))))
    return min(resident, -(-rows // chunk_rows)), chunk_rows


def representative_rows(H: int) -> tuple[int, ...]:
    """Numbers of rows that reach every kernel of this size: one beyond each crossover."""
    crossovers = {s.max_groups for s in (*UNFILTERED, *FILTERED) if s.max_groups < 2**63}
    return 1, *sorted(groups * GROUP_SIZE // H + 1 for groups in crossovers)
