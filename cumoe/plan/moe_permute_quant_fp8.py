"""Plan of moe_permute_quant_fp8: a CTA for each token."""

from __future__ import annotations

from typing import NamedTuple

from cumoe.plan.codes import FLOAT_TYPE, ID_TYPE
from cumoe.plan.scales import GROUP_SIZE, ceil_to
from cumoe.plan.spec import LaunchSpec, Step, kernel_spec

ABI = "PqPPPPPPPqqq"
LANES = 8
"""That hold a group."""
MIN_THREADS, MAX_THREADS = 128, 512
MANY_SLOTS = 16
"""Of a token: more of them want the registers of half the threads."""


class Problem(NamedTuple):
    """The tokens of a call, each quantized once and written once for each of its slots."""

    M: int
    K: int
    topk: int
    ids: str
    has_map: bool
    scale_format: str
    aligned: bool
    """Whether every row of x starts at a multiple of 16 bytes."""
    weight: str
    """Type of topk_weights."""
    on_input: bool
    """Whether x is multiplied by them."""


def plan(problem: Problem, arch: str) -> Step:
    """The kernel and its grid. It overlaps nothing: its successors read what ran before it."""
    p = problem
    most = MAX_THREADS if p.topk <= MANY_SLOTS else MAX_THREADS // 2
    threads = min(max(ceil_to(p.K // GROUP_SIZE * LANES, 32), MIN_THREADS), most)
    kernel = kernel_spec(
        "moe_permute_quant_fp8",
        arch,
        K=p.K,
        TOPK=p.topk,
        IDS=ID_TYPE[p.ids],
        MAP=p.has_map,
        UE8M0=p.scale_format == "ue8m0",
        ALIGNED=p.aligned,
        WEIGHT=FLOAT_TYPE[p.weight],
        ON_INPUT=p.on_input,
        THREADS=threads,
    )
    return Step(kernel, "moe_permute_quant_fp8", LaunchSpec(p.M, threads), ABI)
