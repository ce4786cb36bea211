"""Plan of per_token_group_quant_fp8: a warp a group in small calls, 8 lanes elsewhere."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cumoe.plan.codes import ABSENT, FLOAT_TYPE
from cumoe.plan.device import has_dependent_launch
from cumoe.plan.scales import GROUP_SIZE, ceil_to
from cumoe.plan.spec import LaunchSpec, Step, kernel_spec

ABI = "PqPPPqqqqq"
SMALL_GROUPS = 2048
"""Largest call, in groups of 128, for a warp a group: more lanes, a shorter latency."""
SMALL_THREADS, LARGE_THREADS = 128, 256


class Problem(NamedTuple):
    """One quantization of an [M, K] matrix."""

    rows: int
    """Rows of the scale array, padding included."""
    K: int
    x_type: str
    scale_format: str
    packed: bool
    aligned: bool
    """Whether every row of x starts at a multiple of 16 bytes, and q at one of 8."""
    row_weight: str | None = None
    """Type of the weights that multiply the rows first."""


@lru_cache(4096)
def plan(problem: Problem, arch: str) -> Step:
    """The kernel and its grid."""
    p = problem
    groups = p.K // GROUP_SIZE
    items = p.rows * (ceil_to(groups, 4) if p.packed else groups)
    lanes, threads = (32, SMALL_THREADS) if items <= SMALL_GROUPS else (8, LARGE_THREADS)
    kernel = kernel_spec(
        "per_token_group_quant_fp8",
        arch,
        K=p.K,
        X_TYPE=FLOAT_TYPE[p.x_type],
        UE8M0=p.scale_format == "ue8m0",
        PACKED=p.packed,
        ALIGNED=p.aligned,
        ROW_WEIGHT=ABSENT if p.row_weight is None else FLOAT_TYPE[p.row_weight],
        LANES=lanes,
        THREADS=threads,
    )
    launch = LaunchSpec(-(-items * lanes // threads), threads, overlap=has_dependent_launch(arch))
    return Step(kernel, "per_token_group_quant_fp8", launch, ABI)


def representative_rows(K: int) -> tuple[int, ...]:
    """Numbers of rows that reach every kernel of this width: few, and more than the crossover."""
    return 1, SMALL_GROUPS * GROUP_SIZE // K + 1
