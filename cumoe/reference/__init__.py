"""The measuring stick: every op in NumPy, with the names and signatures of the public ones."""

from __future__ import annotations

from cumoe.reference.fused_experts_fp8 import fused_experts_fp8
from cumoe.reference.moe_align_block_size import moe_align_block_size
from cumoe.reference.per_token_group_quant_fp8 import per_token_group_quant_fp8
from cumoe.reference.silu_and_mul_quant_fp8 import silu_and_mul_quant_fp8

__all__ = [
    "fused_experts_fp8",
    "moe_align_block_size",
    "per_token_group_quant_fp8",
    "silu_and_mul_quant_fp8",
]
