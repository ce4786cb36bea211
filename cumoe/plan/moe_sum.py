"""Plan of moe_sum, the top-k combine: a thread owns 8 columns of a token."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cumoe.plan.codes import ABSENT, FLOAT_TYPE, ID_TYPE
from cumoe.plan.device import has_dependent_launch
from cumoe.plan.spec import LaunchSpec, Step, kernel_spec

ABI = "PPPPPqqqqf"
THREADS = 256
COLUMNS_PER_THREAD = 8


class Problem(NamedTuple):
    """One combine of [M, topk, K] slots."""

    M: int
    K: int
    topk: int
    weight: str | None
    """Type of topk_weights, or None where they were applied before."""
    ids: str
    has_map: bool
    aligned: bool
    """Whether every row of out starts at a multiple of 16 bytes."""


@lru_cache(4096)
def plan(problem: Problem, arch: str) -> Step:
    """The kernel and its grid."""
    p = problem
    kernel = kernel_spec(
        "moe_sum",
        arch,
        K=p.K,
        TOPK=p.topk,
        WEIGHT=ABSENT if p.weight is None else FLOAT_TYPE[p.weight],
        IDS=ID_TYPE[p.ids],
        MAP=p.has_map,
        ALIGNED=p.aligned,
    )
    threads = p.M * (p.K // COLUMNS_PER_THREAD)
    overlap = has_dependent_launch(arch)
    launch = LaunchSpec(-(-threads // THREADS), THREADS, overlap=overlap)
    return Step(kernel, "moe_sum", launch, ABI)
