"""The experts of a Mixture-of-Experts layer: two block-scaled products around a SwiGLU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cumoe.errors import ArgumentError
from cumoe.reference.arrays import (
    bf16_output,
    bf16_values,
    e4m3_values,
    float_values,
    require_float32,
    require_ndim,
    require_shape,
)
from cumoe.reference.block_gemm import BLOCK, block_scaled_matmul
from cumoe.reference.e4m3 import BF16, F32, Array, to_bf16
from cumoe.reference.per_token_group_quant_fp8 import quantize_groups
from cumoe.reference.routing import local_experts_of_weights
from cumoe.reference.scales import require_format
from cumoe.reference.silu_and_mul_quant_fp8 import swiglu, swiglu_constants


@np.errstate(all="ignore")
def fused_experts_fp8(
    x: Array,
    w1: Array,
    w2: Array,
    topk_weights: Array,
    topk_ids: Array,
    *,
    w1_scale: Array,
    w2_scale: Array,
    block_shape: tuple[int, int] = (128, 128),
    scale_format: str = "fp32",
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    num_experts: int | None = None,
    expert_map: Array | None = None,
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float = 1.0,
    out: Array | None = None,
) -> Array:
    """``out = sum over j of topk_weights[:, j] * expert[topk_ids[:, j]](x)``.

    Args:
        x: [M, K] bf16.
        w1: [E, 2N, K] e4m3, gate rows first. w2: [E, K, N] e4m3. N and K are multiples of 128.
        topk_weights: [M, topk] fp32, bf16 or fp16. topk_ids: [M, topk] int32 or int64.
        w1_scale: [E, 2N/128, K/128] fp32. w2_scale: [E, K/128, N/128] fp32. Any strides.
        scale_format: that of the scales of the activations, "fp32" or "ue8m0".
        num_experts: size of the id space; by default the length of ``expert_map``, else E.
        expert_map: [num_experts] int32, global id to local; entries outside [0, E) are elsewhere.
        apply_router_weight_on_input: scale x instead of the result; needs topk = 1.
        out: [M, K] bf16 to write to; may be x.

    Returns:
        out [M, K] bf16; exact zeros for a token without a local expert.

    Raises:
        ArgumentError: shapes that do not fit, N or K no multiple of 128, a constant out of range.
        DTypeError: an element type that is none of the above.

    Rounding: x and the activation to e4m3, the first product and the activation to bf16, each
    slot's result to bf16; weights times results are summed in fp32, j ascending, then scaled by
    ``routed_scaling_factor`` and rounded to bf16.
    """
    if tuple(block_shape) != (BLOCK, BLOCK):
        raise ArgumentError(f"block_shape must be ({BLOCK}, {BLOCK}), got {tuple(block_shape)}")
    _check_shapes(x, topk_weights, topk_ids, (w1, w2, w1_scale, w2_scale))
    require_format(scale_format)
    constants = swiglu_constants(swiglu_limit, swiglu_alpha, swiglu_beta, prefix="swiglu_")
    if not np.isfinite(np.float32(routed_scaling_factor)):
        raise ArgumentError(f"routed_scaling_factor must be finite, got {routed_scaling_factor}")
    local = local_experts_of_weights(topk_ids, num_experts, expert_map, len(w1))
    weights = float_values("topk_weights", topk_weights)
    tokens = bf16_values("x", x)
    if apply_router_weight_on_input:
        tokens, weights = _weigh_input(tokens, weights)
    out, result = bf16_output("out", out, x.shape)

    w1, w2 = e4m3_values("w1", w1), e4m3_values("w2", w2)
    w1_scale = require_float32("w1_scale", w1_scale)
    w2_scale = require_float32("w2_scale", w2_scale)
    a, a_scale = quantize_groups(tokens, BLOCK, scale_format)
    slots = np.zeros((*local.shape, x.shape[1]), BF16)
    for expert in np.unique(local[local >= 0]):
        token, j = np.nonzero(local == expert)
        h = block_scaled_matmul(a[token], a_scale[token], w1[expert], w1_scale[expert])
        y = swiglu(to_bf16(h).astype(np.float32), *constants).astype(np.float32)
        q, q_scale = quantize_groups(y, BLOCK, scale_format)
        slots[token, j] = to_bf16(block_scaled_matmul(q, q_scale, w2[expert], w2_scale[expert]))
    result[...] = combine(slots, weights, local >= 0, np.float32(routed_scaling_factor))
    return out


def combine(slots: Array, weights: F32, valid: NDArray[np.bool_], factor: np.float32) -> Array:
    """bf16 [M, K] of bf16 slots [M, topk, K]; a slot that is not valid is left out altogether."""
    total = np.zeros((slots.shape[0], slots.shape[2]), np.float32)
    for j in range(slots.shape[1]):
        weighted = weights[:, j, None] * slots[:, j].astype(np.float32)
        total = np.where(valid[:, j, None], total + weighted, total)
    return to_bf16(total * factor)


def _weigh_input(tokens: F32, weights: F32) -> tuple[F32, F32]:
    if weights.shape[1] != 1:
        raise ArgumentError(
            f"apply_router_weight_on_input needs topk = 1, got topk_weights of shape "
            f"{list(weights.shape)}: leave it False"
        )
    rounded = to_bf16(weights).astype(np.float32)
    return to_bf16(tokens * rounded).astype(np.float32), np.ones_like(weights)


def _check_shapes(
    x: Array, topk_weights: Array, topk_ids: Array, weights: tuple[Array, Array, Array, Array]
) -> None:
    w1, w2, w1_scale, w2_scale = weights
    require_ndim("x", x, 2, "[M, K]")
    require_ndim("w2", w2, 3, "[E, K, N]")
    require_ndim("topk_ids", topk_ids, 2, "[M, topk]")
    (num_tokens, depth), (num_experts, _, width) = x.shape, w2.shape
    for name, size in (("N", width), ("K", depth)):
        if size % BLOCK:
            raise ArgumentError(
                f"{name} is {size}, which is not a multiple of {BLOCK}: pad the weights and their "
                f"scales with cumoe.pad_experts, and x with zeros"
            )
    require_shape("w1", w1, num_experts, 2 * width, depth)
    require_shape("w2", w2, num_experts, depth, width)
    require_shape("w1_scale", w1_scale, num_experts, 2 * width // BLOCK, depth // BLOCK)
    require_shape("w2_scale", w2_scale, num_experts, depth // BLOCK, width // BLOCK)
    require_shape("topk_ids", topk_ids, num_tokens, topk_ids.shape[1])
    require_shape("topk_weights", topk_weights, *topk_ids.shape)
