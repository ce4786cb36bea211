"""The experts in float64, without any rounding: what the quantized ops approximate."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cumoe.reference.arrays import bf16_values, e4m3_values, float_values
from cumoe.reference.block_gemm import BLOCK
from cumoe.reference.e4m3 import Array
from cumoe.reference.routing import local_experts_of_weights

F64 = NDArray[np.float64]


@np.errstate(all="ignore")
def fused_experts_float64(
    x: Array,
    w1: Array,
    w2: Array,
    topk_weights: Array,
    topk_ids: Array,
    *,
    w1_scale: Array,
    w2_scale: Array,
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    num_experts: int | None = None,
    expert_map: Array | None = None,
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float = 1.0,
) -> F64:
    """[M, K] float64 of the algebra of ``fused_experts_fp8``, with x as it is and nothing rounded.

    Arguments as there, except that N and K need not be multiples of 128: a scale grid then has
    one more, partial, block.
    """
    local = local_experts_of_weights(topk_ids, num_experts, expert_map, len(w1))
    weights = float_values("topk_weights", topk_weights).astype(np.float64)
    tokens = bf16_values("x", x).astype(np.float64)
    total = np.zeros(tokens.shape)
    for expert in np.unique(local[local >= 0]):
        up_gate = dequantize_blocks(e4m3_values("w1", w1)[expert], w1_scale[expert])
        down = dequantize_blocks(e4m3_values("w2", w2)[expert], w2_scale[expert])
        for j in range(local.shape[1]):
            token = np.flatnonzero(local[:, j] == expert)
            weight = weights[token, j, None]
            before, after = (weight, 1.0) if apply_router_weight_on_input else (1.0, weight)
            h = (tokens[token] * before) @ up_gate.T
            y = _swiglu(h, swiglu_limit, swiglu_alpha, swiglu_beta)
            total[token] += after * (y @ down.T)
    return total * routed_scaling_factor


def dequantize_blocks(w: Array, scale: Array) -> F64:
    """[N, K] float64 of e4m3 [N, K] and one scale for each block of 128 x 128."""
    rows, columns = w.shape
    spread = np.repeat(np.repeat(scale.astype(np.float64), BLOCK, axis=0), BLOCK, axis=1)
    return w.astype(np.float64) * spread[:rows, :columns]


def _swiglu(h: F64, limit: float | None, alpha: float, beta: float) -> F64:
    gate, up = np.split(h, 2, axis=1)
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1.0 + np.exp(-alpha * gate)) * (up + beta)
