"""What chains of experts begin and end with: the tokens quantized, the slots of each added up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumoe.plan import moe_sum, per_token_group_quant_fp8
from cumoe.plan.spec import Step

if TYPE_CHECKING:
    from cumoe.plan.fused_experts_fp8 import Problem


def quantize_x(p: Problem, arch: str) -> Step:
    """x, times its router weight where that belongs to the input."""
    weight = p.weight if p.weight_on_input else None
    return per_token_group_quant_fp8.plan(
        per_token_group_quant_fp8.Problem(
            p.M, p.K, "bf16", p.scale_format, False, p.x_aligned, weight
        ),
        arch,
    )


def combine(p: Problem, arch: str) -> Step:
    """The slots of each token in memory, weighted and added up."""
    weight = None if p.weight_on_input else p.weight
    return moe_sum.plan(
        moe_sum.Problem(p.M, p.K, p.topk, weight, p.ids, p.has_map, p.out_aligned), arch
    )
