"""Plan of silu_and_mul_quant_fp8: all at once where a call is small, persistent CTAs elsewhere."""

from __future__ import annotations

from functools import lru_cache
from struct import pack, unpack
from typing import NamedTuple

from cumoe.plan.codes import ID_TYPE
from cumoe.plan.device import DeviceInfo, has_dependent_launch
from cumoe.plan.scales import GROUP_SIZE, ceil_to
from cumoe.plan.spec import LaunchSpec, Step, kernel_spec

ABI = "PqPPPPPqqqqqqqqqfff"

NO_CLAMP, BF16_CLAMP, FP32_CLAMP = CLAMPS = (0, 1, 2)
"""`Clamp` of ``kernels_src/common/swiglu.cuh``."""

BOTH, ACTIVATE, QUANTIZE = STEPS = (0, 1, 2)
"""`Step` of the kernel: fused, or one of the two halves that pass the activation through memory."""

AT_ONCE, EAGER, WALK = 0, 1, 2
"""`Deal` of the kernel: how groups are dealt out."""

MAX_CHUNK_ROWS = 32
"""Of a walk over rows that are all computed."""
MAX_HELD_EXPERTS = 1024
"""Of an expert_map that a warp holds: a bit for each, in a word per lane."""


class Strategy(NamedTuple):
    """How the groups of a call are dealt out, and up to which size."""

    max_groups: int
    lanes: int
    """Of a warp, per group of 128."""
    threads: int
    deal: int = AT_ONCE
    ctas_per_sm: int = 1
    """Resident ones: the grid of a walk, and in any case a bound on registers."""
    listers: int = 32
    """Threads that list a walk's valid rows for their CTA; with 32 each warp lists for itself."""
    scan: int = 1
    """Ids that a lister tests, at most: so many rows times the listers make a chunk."""


# bench/results/h200/activation_sweep.json (`python -m bench.sweep --quick`) has every candidate at
# every size. By groups of 128, us of the chosen one and of the fastest of the rest:
#    32   0.95  0.96 (32x256)       8192   2.26   2.29 (8x256 walk 4)
#   512   1.02  1.03 (16x128)      12288   2.74   2.89 (8x128, 12 CTAs an SM)
#  1536   1.17  1.15 (16x256)      16384   3.22   3.20 (8x256 walk 4)
#  3072   1.41  1.49 (8x64)        24576   5.31   5.49 (8x128)
#  6144   2.05  2.11 (8x128)       98304  16.51  16.69 (8x128)
#                                1048576 154.98 153.80 (8x128)
UNFILTERED = (
    Strategy(1000, lanes=32, threads=128),
    Strategy(5000, lanes=16, threads=128),
    Strategy(7100, lanes=8, threads=128, ctas_per_sm=12),
    Strategy(14_000, lanes=8, threads=512, deal=WALK, ctas_per_sm=2),
    Strategy(160_000, lanes=16, threads=256),
    Strategy(1_100_000, lanes=8, threads=128, ctas_per_sm=12),
    Strategy(2**63, lanes=8, threads=512, deal=WALK, ctas_per_sm=2),
)
# The same with an expert_map that keeps 1/8 of the rows:
#     96  1.03  1.05 (16x128 eager)              24576   1.87   1.92 (16x512 walk 1, 512 list 2)
#   1536  1.23  1.22 (16x128 eager)              49152   2.36   2.42 (8x512 walk 2, 512 list 1)
#   6144  1.49  1.50 (16x256 walk 1, 32 list 1)  98304   3.01   3.14 (8x512 walk 2, 512 list 4)
#  12288  1.65  1.74 (8x512 walk 1, 512 list 2) 1048512 24.53 24.75 (8x1024 walk 1, 1024 list 6)
FILTERED = (
    Strategy(4300, lanes=32, threads=128, deal=EAGER),
    Strategy(17_000, lanes=16, threads=256, deal=WALK, listers=256),
    Strategy(35_000, lanes=8, threads=256, deal=WALK, ctas_per_sm=2, scan=4),
    Strategy(140_000, lanes=8, threads=256, deal=WALK, ctas_per_sm=4, listers=256),
    Strategy(2**63, lanes=8, threads=512, deal=WALK, ctas_per_sm=2, listers=512, scan=4),
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
    num_experts: int = 0
    """Length of the expert_map; 0 where it is unknown, or there is none."""


class Walk(NamedTuple):
    """How CTAs walk rows: arguments of the kernel."""

    chunk_rows: int = 1
    """Rows that are taken at a time."""
    squad_ctas: int = 1
    """CTAs that take a chunk together, where rows are filtered."""
    squad_reciprocal: int = 1 << 32
    """2^32 / squad_ctas, rounded up: the kernel divides by multiplying."""


class Plan(NamedTuple):
    """One launch, and the arguments that go with its grid."""

    step: Step
    walk: Walk


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


def held_experts(p: Problem) -> int:
    """Length of a map that a warp can hold; 0 where it stays in memory."""
    return p.num_experts if p.has_map and p.num_experts <= MAX_HELD_EXPERTS else 0


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> Plan:
    """The kernel and its grid."""
    return plan_with(strategy(problem), problem, device)


def strategy(problem: Problem) -> Strategy:
    """The first one of its table that takes so many groups."""
    groups = group_count(problem)
    table = UNFILTERED if problem.ids is None else FILTERED
    return next(s for s in table if groups <= s.max_groups)


def plan_with(strategy: Strategy, problem: Problem, device: DeviceInfo) -> Plan:
    """The kernel and its grid by this strategy, whatever the size."""
    s, p = strategy, problem
    filtered = p.ids is not None
    listed = filtered and s.deal == WALK
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
        HELD_EXPERTS=held_experts(p),
        ALIGNED=p.aligned,
        LANES=s.lanes,
        THREADS=s.threads,
        DEAL=s.deal if filtered or s.deal != EAGER else AT_ONCE,
        LISTERS=s.listers if listed else 32,
        SCAN=s.scan if listed else 1,
        CTAS_PER_SM=s.ctas_per_sm,
        STEP=p.step,
    )
    grid, walk = -(-group_count(p) * s.lanes // s.threads), Walk()
    if listed:
        grid, walk = squads(p.rows, s.listers * s.scan, device.num_sms * s.ctas_per_sm)
    elif s.deal == WALK:
        grid, chunk_rows = persistent_grid(p.rows, device.num_sms * s.ctas_per_sm)
        walk = Walk(chunk_rows)
    launch = LaunchSpec(grid, s.threads, overlap=has_dependent_launch(device.arch))
    return Plan(Step(kernel, "silu_and_mul_quant_fp8", launch, ABI), walk)


def squads(rows: int, capacity: int, resident: int) -> tuple[int, Walk]:
    """CTAs in squads of one size, a squad for each chunk of at most ``capacity`` rows.

    Where there are more chunks than CTAs, each CTA is a squad and takes as many as the others.
    """
    least = max(1, -(-rows // capacity))
    if least > resident:
        chunks = ceil_to(least, resident)
    else:
        chunks = next(n for n in range(least, resident + 1) if resident % n == 0)
    members = max(1, resident // chunks)
    walk = Walk(max(1, -(-rows // chunks)), members, -(-(1 << 32) // members))
    return (resident if rows else 0), walk


def persistent_grid(rows: int, resident: int) -> tuple[int, int]:
    """CTAs, at most the resident ones, and rows per chunk so that all take as many chunks."""
    turns = -(-rows // (resident * MAX_CHUNK_ROWS))
    chunk_rows = max(1, -(-rows // (resident * max(1, turns))))
    return min(resident, -(-rows // chunk_rows)), chunk_rows


def representative_rows(H: int) -> tuple[int, ...]:
    """Numbers of rows that reach every kernel of this size: one beyond each crossover."""
    crossovers = {s.max_groups for s in (*UNFILTERED, *FILTERED) if s.max_groups < 2**63}
    return 1, *sorted(groups * GROUP_SIZE // H + 1 for groups in crossovers)
