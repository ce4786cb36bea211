"""Plan of fused_experts_fp8: `experts_tiny`, `experts_decode` or `experts_prefill`, by tokens.

Where none of them can run six launches: quantize x; sort slots (1, or 3 for the most slots); GEMM1;
activate and quantize; GEMM2; combine.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cumoe.errors import ArgumentError
from cumoe.plan import (
    experts_decode,
    experts_ends,
    experts_prefill,
    experts_tiny,
    moe_align_block_size,
    moe_gemm_fp8,
    per_token_group_quant_fp8,
    silu_and_mul_quant_fp8,
)
from cumoe.plan.device import DeviceInfo
from cumoe.plan.scales import GROUP_SIZE
from cumoe.plan.spec import Step
from cumoe.plan.workspace import offsets


class Problem(NamedTuple):
    """One call, without its pointers."""

    M: int
    K: int
    N: int
    num_experts: int
    num_local_experts: int
    topk: int
    ids: str
    weight: str
    has_map: bool
    scale_format: str
    clamp: int
    """A kind of `silu_and_mul_quant_fp8.clamp_kind`."""
    scaled: bool
    weight_on_input: bool
    x_aligned: bool
    out_aligned: bool
    down_contiguous: bool = True
    """Whether [K, N] of each expert in w2 is."""
    weights_mappable: bool = True
    """Whether tensor maps can hold w1 and w2: no stride is 0, negative, or 2^40 bytes."""
    whole_M: int | None = None
    """Tokens of the call that this is a part of: they choose the chain, so that parts and the whole
    give the same bytes. None where it is the whole."""


class Workspace(NamedTuple):
    """Byte offsets of the regions; ``slots`` holds GEMM1's output, then GEMM2's."""

    a: int
    a_scale: int
    counts: int
    bases: int
    sorted_token_ids: int
    expert_ids: int
    num_tokens_post_padded: int
    slots: int
    q: int
    q_scale: int
    total: int


class Plan(NamedTuple):
    """The launches in their order, and the workspace they share."""

    quantize: Step
    align: moe_align_block_size.Plan
    align_problem: moe_align_block_size.Problem
    gemm1: Step
    activate: silu_and_mul_quant_fp8.Plan
    gemm2: Step
    combine: Step
    block_m: int
    workspace: Workspace

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every launch, in order."""
        experts = (self.gemm1, self.activate.step, self.gemm2, self.combine)
        return (self.quantize, *self.align.steps, *experts)


AnyPlan = experts_tiny.Plan | experts_decode.Plan | experts_prefill.Plan | Plan


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> AnyPlan:
    """The whole call. ``M`` chooses the chain, tiles and grids, nothing else."""
    return (
        experts_tiny.plan(problem, device)
        or experts_decode.plan(problem, device)
        or experts_prefill.plan(problem, device)
        or _plan_of_any(problem, device)
    )


def _plan_of_any(problem: Problem, device: DeviceInfo) -> Plan:
    p, arch = problem, device.arch
    num_slots = p.M * p.topk
    block_m = moe_gemm_fp8.choose_block_m(num_slots, p.num_experts)
    align_problem = moe_align_block_size.Problem(
        num_slots, block_m, p.num_experts, p.num_local_experts, p.ids, p.has_map
    )
    align = moe_align_block_size.plan(align_problem, device)
    gemm1 = moe_gemm_fp8.Problem(align.max_blocks, 2 * p.N, p.K, p.topk, block_m)
    gemm2 = moe_gemm_fp8.Problem(align.max_blocks, p.K, p.N, 1, block_m)
    return Plan(
        quantize=experts_ends.quantize_x(p, arch),
        align=align,
        align_problem=align_problem,
        gemm1=moe_gemm_fp8.plan(gemm1, device),
        activate=silu_and_mul_quant_fp8.plan(
            silu_and_mul_quant_fp8.Problem(
                num_slots,
                p.N,
                p.scale_format,
                packed=False,
                clamp=p.clamp,
                scaled=p.scaled,
                ids=p.ids,
                has_map=p.has_map,
                aligned=True,
                num_experts=p.num_experts if p.has_map else 0,
            ),
            device,
        ),
        gemm2=moe_gemm_fp8.plan(gemm2, device),
        combine=experts_ends.combine(p, arch),
        block_m=block_m,
        workspace=workspace(p, align),
    )


def few_tokens(num_experts: int, topk: int, K: int, N: int) -> tuple[int, ...]:
    """The most tokens of each regime of few tokens, where the GPU and the arrays allow it."""
    regimes = experts_decode.regimes(num_experts)
    return (experts_tiny.max_tokens(topk, K, N), *(r.max_slots // topk for r in regimes))


def representative_token_counts(problem: Problem) -> tuple[int, ...]:
    """Numbers of tokens with one in each regime: their plans name all kernels that M can choose."""
    slots = {
        *moe_gemm_fp8.representative_slot_counts(problem.num_experts),
        *silu_and_mul_quant_fp8.representative_rows(problem.N),
        *per_token_group_quant_fp8.representative_rows(problem.N),
        *moe_align_block_size.representative_slot_counts(),
    }
    tokens = {1, *(-(-count // problem.topk) for count in slots)}
    tokens |= {*experts_tiny.sizes(problem.topk, problem.K, problem.N)}
    for end in few_tokens(problem.num_experts, problem.topk, problem.K, problem.N):
        tokens |= {end, end + 1}
    tokens |= {*per_token_group_quant_fp8.representative_rows(problem.K)}
    return tuple(sorted(tokens - {0}))


def workspace(p: Problem, align: moe_align_block_size.Plan) -> Workspace:
    """Offsets of the regions. In bytes, with S = M * topk and G = 128:

    M K (1 + 4/G) + S N (1 + 4/G) + 2 S max(2N, K) + 4 (capacity + blocks + 1),
    and 4 (chunks + 1) E where the sort takes three launches
    """
    S = p.M * p.topk
    sizes = (
        p.M * p.K,
        p.M * (p.K // GROUP_SIZE) * 4,
        *moe_align_block_size.counts_bytes(align, p.num_local_experts),
        align.capacity * 4,
        align.max_blocks * 4,
        4,
        S * max(2 * p.N, p.K) * 2,
        S * p.N,
        S * (p.N // GROUP_SIZE) * 4,
    )
    return Workspace(*offsets(sizes))


def part(problem: Problem, tokens: int) -> Problem:
    """Some of the tokens of a call."""
    return problem._replace(M=tokens, whole_M=problem.M) if tokens < problem.M else problem


@lru_cache(4096)
def tokens_per_call(problem: Problem, device: DeviceInfo, max_workspace_bytes: int | None) -> int:
    """Most tokens, at most M, whose workspace fits into ``max_workspace_bytes``."""

    def needed(tokens: int) -> int:
        return plan(part(problem, tokens), device).workspace.total

    if max_workspace_bytes is None or needed(problem.M) <= max_workspace_bytes:
        return problem.M
    if needed(1) > max_workspace_bytes:
        raise ArgumentError(
            f"max_workspace_bytes: one token of this shape wants {needed(1)} bytes, "
            f"got {max_workspace_bytes}; allow at least that much"
        )
    low, high = 1, problem.M  # needed(low) fits, needed(high) does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= max_workspace_bytes else (low, middle)
    return low
