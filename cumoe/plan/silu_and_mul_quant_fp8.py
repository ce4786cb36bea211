"""Plan of silu_and_mul_quant_fp8: 16 lanes a group, 16 groups a CTA."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cumoe.plan.codes import ID_TYPE
from cumoe.plan.scales import GROUP_SIZE, ceil_to
from cumoe.plan.spec import LaunchSpec, Step, kernel_spec

ABI = "PqPPPPqqqqqqfff"
THREADS = 256
GROUPS_PER_CTA = THREADS // 16


class Problem(NamedTuple):
    """One activation of a [rows, 2H] matrix."""

    rows: int
    """Rows of the scale array, padding included."""
    H: int
    scale_format: str
    packed: bool
    clamp: bool
    scaled: bool
    """Whether alpha or beta differ from 1 and 0."""
    ids: str | None
    """Type of topk_ids, or None where all rows are computed."""
    has_map: bool
    aligned: bool
    """Whether every row of gate_up starts at a multiple of 16 bytes, and q at one of 8."""


@lru_cache(4096)
def plan(problem: Problem, arch: str) -> Step:
    """The kernel and its grid."""
    p = problem
    groups = p.H // GROUP_SIZE
    kernel = kernel_spec(
        "silu_and_mul_quant_fp8",
        arch,
        H=p.H,
        UE8M0=p.scale_format == "ue8m0",
        PACKED=p.packed,
        CLAMP=p.clamp,
        SCALED=p.scaled,
        IDS=ID_TYPE[p.ids],
        MAP=p.has_map,
        ALIGNED=p.aligned,
    )
    items = p.rows * (ceil_to(groups, 4) if p.packed else groups)
    return Step(
        kernel, "silu_and_mul_quant_fp8", LaunchSpec(-(-items // GROUPS_PER_CTA), THREADS), ABI
    )
