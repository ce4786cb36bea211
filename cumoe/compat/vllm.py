"""Functions with the names and argument lists of vLLM 0.26.0, computed by the ops of cumoe.

    fused_experts                                  fused_moe/fused_moe.py
    moe_align_block_size                           fused_moe/moe_align_block_size.py
    per_token_group_quant_fp8                      quantization/utils/fp8_utils.py
    per_token_group_quant_fp8_packed_for_deepgemm  quantization/utils/fp8_utils.py
    silu_and_mul_per_block_quant                   _custom_ops.py, where it has no clamp
    silu_mul_per_token_group_quant_fp8_colmajor    quantization/utils/fp8_utils.py
    silu_mul_quant_fp8_packed_triton               quantization/utils/fp8_utils.py

vLLM is not imported. Shapes, element types and strides of results are vLLM's, values those of our
ops; what an argument asks for and our ops do not have is an error that names it. What differs
(docs/compat-vllm.md has the reasons):

- A clamp is applied: `fused_experts` takes ``quant_config.gemm1_clamp_limit``, which vLLM's drops,
  and `silu_and_mul_per_block_quant` takes ``clamp_limit``, ``alpha``, ``beta`` by keyword besides.
- Where ``use_ue8m0`` is None, and in `fused_experts`, the vLLM that this process has loaded says
  whether scales are powers of two; they are not where none is loaded.
- Values are rounded as docs/numerics.md says; slots keep their order inside an expert.
- Activations are bf16, groups 128; nothing is copied to make it contiguous.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any

from cumoe.arrays.check import require_ndim, require_same_device
from cumoe.arrays.exchange import view
from cumoe.compat._shared import named, require_e4m3, require_eps
from cumoe.errors import ArgumentError
from cumoe.ops import _inputs
from cumoe.ops.fused_experts_fp8 import fused_experts_fp8
from cumoe.ops.moe_align_block_size import moe_align_block_size as _align
from cumoe.ops.per_token_group_quant_fp8 import per_token_group_quant_fp8 as _quantize
from cumoe.ops.silu_and_mul_quant_fp8 import silu_and_mul_quant_fp8 as _activate

__all__ = [
    "fused_experts", "moe_align_block_size", "per_token_group_quant_fp8",
    "per_token_group_quant_fp8_packed_for_deepgemm", "silu_and_mul_per_block_quant",
    "silu_mul_per_token_group_quant_fp8_colmajor", "silu_mul_quant_fp8_packed_triton",
]  # fmt: skip


def fused_experts(
    hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any,
    activation: Any = "silu", apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1, expert_map: Any = None, quant_config: Any = None,
) -> Any:  # fmt: skip
    """`cumoe.fused_experts_fp8` of a ``FusedMoEQuantConfig`` with e4m3 in blocks of 128 x 128."""
    config = _block_fp8(quant_config)
    _require_activation(activation, *(config[f"swiglu_{n}"] for n in ("limit", "alpha", "beta")))
    theirs = {ours: f"quant_config.{name}" for ours, name in _FIELDS.items()}
    with named(x="hidden_states", num_experts="global_num_experts", **theirs):
        return fused_experts_fp8(
            hidden_states, w1, w2, topk_weights, topk_ids, scale_format=_scale_format(None),
            num_experts=None if global_num_experts == -1 else global_num_experts,
            expert_map=expert_map, apply_router_weight_on_input=apply_router_weight_on_input,
            **config,
        )  # fmt: skip


def moe_align_block_size(
    topk_ids: Any, block_size: int, num_experts: int, expert_map: Any = None,
    pad_sorted_ids: bool = False, ignore_invalid_experts: bool = False,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """`cumoe.moe_align_block_size`; without ignore_invalid_experts slots are sorted by global id.

    Then expert_ids is ``expert_map`` of the global ids: -1 where an expert is elsewhere, and in
    unused blocks the map's last entry, as in vLLM.
    """
    is_padded = _inputs.truth(pad_sorted_ids, "pad_sorted_ids")
    is_local = _inputs.truth(ignore_invalid_experts, "ignore_invalid_experts")
    local_map = expert_map if is_local else None
    slots, experts, used = _align(topk_ids, block_size, num_experts, local_map)
    if expert_map is not None and not is_local:
        ids, table = view(topk_ids, "topk_ids").facts, view(expert_map, "expert_map").facts
        _inputs.require_expert_map(table)
        _inputs.id_space(num_experts, table, default=num_experts)
        require_same_device([("topk_ids", ids), ("expert_map", table)])
        experts = expert_map[experts]
    num_slots = prod(topk_ids.shape)
    length = num_slots + num_experts * (block_size - 1)
    return slots if is_padded or num_slots < num_experts else slots[:length], experts, used


def per_token_group_quant_fp8(
    x: Any, group_size: int, eps: float = 1e-10, dtype: Any = None,
    column_major_scales: bool = False, tma_aligned_scales: bool = False, out_q: Any = None,
    use_ue8m0: bool | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """`cumoe.per_token_group_quant_fp8`; scales [..., K / 128] fp32, powers of two for ue8m0.

    Column-major scales are of a matrix x; tma_aligned_scales without them means nothing.
    """
    require_eps(eps)
    if dtype is not None:
        require_e4m3(dtype, "dtype")
    is_aligned, layout = _inputs.truth(tma_aligned_scales, "tma_aligned_scales"), "row"
    if _inputs.truth(column_major_scales, "column_major_scales"):
        require_ndim(view(x, "x").facts, "x", 2, "[M, K] for column_major_scales")
        layout = "tma" if is_aligned else "column"
    with named(out="out_q"):
        q, scale = _quantize(
            x, group_size, scale_format=_scale_format(use_ue8m0), scale_layout=layout, out=out_q
        )
    return q, scale if len(x.shape) == 2 else scale.reshape(*x.shape[:-1], scale.shape[-1])


def per_token_group_quant_fp8_packed_for_deepgemm(
    x: Any, group_size: int, eps: float = 1e-10, use_ue8m0: bool | None = None, out_q: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """`cumoe.per_token_group_quant_fp8` with "packed" scales: [M, ceil(K / 512)] int32."""
    require_eps(eps)
    if use_ue8m0 is not None and not _inputs.truth(use_ue8m0, "use_ue8m0"):
        raise ArgumentError("use_ue8m0: want True or None for packed scales, got False; pass True")
    with named(out="out_q"):
        return _quantize(x, group_size, scale_format="ue8m0", scale_layout="packed", out=out_q)


def silu_and_mul_per_block_quant(
    input: Any, group_size: int, quant_dtype: Any, scale_ub: Any = None,
    is_scale_transposed: bool = False, *, clamp_limit: float | None = None, alpha: float = 1.0,
    beta: float = 0.0,
) -> tuple[Any, Any]:  # fmt: skip
    """`cumoe.silu_and_mul_quant_fp8`; scales [M, H / 128] fp32, transposed with strides (1, M)."""
    require_e4m3(quant_dtype, "quant_dtype")
    if scale_ub is not None:
        got = type(scale_ub).__name__
        raise ArgumentError(f"scale_ub: want None, scales have no bound, got {got}; leave it out")
    layout = "column" if _inputs.truth(is_scale_transposed, "is_scale_transposed") else "row"
    return _silu(input, group_size, "fp32", layout, clamp_limit, alpha, beta)


def silu_mul_per_token_group_quant_fp8_colmajor(
    input: Any, output: Any = None, use_ue8m0: bool | None = None, eps: float = 1e-10,
    clamp_limit: float | None = None, group_size: int = 128, alpha: float = 1.0,
    beta: float = 0.0,
) -> tuple[Any, Any]:  # fmt: skip
    """`cumoe.silu_and_mul_quant_fp8`, scales [M, H / 128] fp32 with strides (1, M); M is any."""
    require_eps(eps)
    fmt = _scale_format(use_ue8m0)
    with named(out="output"):
        return _silu(input, group_size, fmt, "column", clamp_limit, alpha, beta, output)


def silu_mul_quant_fp8_packed_triton(
    input: Any, group_size: int = 128, output_q: Any = None, clamp_limit: float | None = None,
    alpha: float = 1.0, beta: float = 0.0,
) -> tuple[Any, Any]:  # fmt: skip
    """`cumoe.silu_and_mul_quant_fp8` with "packed" scales: [M, ceil(H / 512)] int32."""
    with named(out="output_q"):
        return _silu(input, group_size, "ue8m0", "packed", clamp_limit, alpha, beta, output_q)


def _silu(
    x: Any, group_size: int, fmt: str, layout: str, limit: Any, alpha: Any, beta: Any,
    out: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    require_ndim(view(x, "input").facts, "input", 2, "[M, 2H]")
    with named(gate_up="input", limit="clamp_limit"):
        return _activate(
            x, limit=limit, alpha=alpha, beta=beta, group_size=group_size, scale_format=fmt,
            scale_layout=layout, out=out,
        )  # fmt: skip


_FIELDS = {
    "w1_scale": "w1_scale", "w2_scale": "w2_scale", "block_shape": "block_shape",
    "swiglu_limit": "gemm1_clamp_limit", "swiglu_alpha": "gemm1_alpha", "swiglu_beta": "gemm1_beta",
}  # fmt: skip
_OF_SILU = {"swiglu_alpha": 1.0, "swiglu_beta": 0.0}
_ABSENT = (
    "a1_scale", "a2_scale", "a1_gscale", "a2_gscale", "g1_alphas", "g2_alphas", "w1_zp", "w2_zp",
    "w1_bias", "w2_bias",
)  # fmt: skip


def _block_fp8(config: Any) -> dict[str, Any]:
    """Our arguments of a config; refuses what is not block FP8."""
    for name in ("quant_dtype", "weight_quant_dtype"):
        require_e4m3(_field(config, name), f"quant_config.{name}")
    for name in _ABSENT:
        if (value := _field(config, name)) is not None:
            got = type(value).__name__
            raise ArgumentError(f"quant_config.{name}: want None, got a {got}; leave it out")
    given = {ours: _field(config, name) for ours, name in _FIELDS.items()}
    return {**given, **{n: v for n, v in _OF_SILU.items() if given[n] is None}}


def _require_activation(activation: Any, limit: Any, alpha: Any, beta: Any) -> None:
    """One that a clamp, an alpha and a beta say all about; silu has no alpha and no beta."""
    name, number = getattr(activation, "value", activation), _inputs.number
    if name not in ("silu", "swigluoai_uninterleave"):
        raise ArgumentError(
            f"activation: want silu or swigluoai_uninterleave, got {name!r}; use vLLM's own"
        )
    found = number(alpha, "quant_config.gemm1_alpha"), number(beta, "quant_config.gemm1_beta")
    if name == "silu" and found != (1.0, 0.0):
        raise ArgumentError(
            f"quant_config.gemm1_alpha, gemm1_beta: want 1.0, 0.0 or None with activation silu, "
            f"got {found}; pass activation='swigluoai_uninterleave'"
        )
    if name != "silu" and limit is None:
        raise ArgumentError(
            f"quant_config.gemm1_clamp_limit: want a number with {name}, got None; pass one or inf"
        )


def _field(config: Any, name: str) -> Any:
    try:
        return getattr(config, name)
    except AttributeError as error:
        raise ArgumentError(
            f"quant_config: want a FusedMoEQuantConfig of vLLM 0.26, got a "
            f"{type(config).__name__} without {name}; pass fp8_w8a8_moe_quant_config("
            f"w1_scale=..., w2_scale=..., block_shape=[128, 128])"
        ) from error


def _scale_format(use_ue8m0: Any) -> str:
    if use_ue8m0 is None:
        loaded = sys.modules.get("vllm.utils.deep_gemm")
        use_ue8m0 = loaded is not None and bool(loaded.is_deep_gemm_e8m0_used())
    return "ue8m0" if _inputs.truth(use_ue8m0, "use_ue8m0") else "fp32"
