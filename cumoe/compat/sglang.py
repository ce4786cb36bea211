"""Functions with the names and argument lists of SGLang 0.5.23, computed by the ops of cumoe.

    fused_experts                     srt/layers/moe/moe_runner/triton_utils/fused_moe.py
    moe_align_block_size              srt/layers/moe/moe_runner/triton_utils/moe_align_block_size.py
    per_token_group_quant_fp8         kernels/ops/quantization/fp8_kernel.py
    sglang_per_token_group_quant_fp8  the same, which is the other's name on CUDA
    silu_and_mul_contig_post_quant    kernels/ops/activation/silu_and_mul_clamp.py

SGLang is not imported. Results have its shapes, element types and strides, values are those of our
ops; what an argument asks for and our ops do not have is an error that names it. What differs
(docs/compat-sglang.md has the reasons):

- A clamp is applied before the activation: ``swiglu_limit`` of any size, and ``gemm1_clamp_limit``
  with ``gemm1_alpha``. Without an alpha SGLang clamps the activated gate: that is refused.
- Values are rounded as docs/numerics.md says; slots keep their order inside an expert.
- Activations are bf16, groups 128; nothing is copied to make it contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cumoe.arrays.check import require_ndim
from cumoe.arrays.exchange import view
from cumoe.compat._shared import named, require_eps, require_value
from cumoe.errors import ArgumentError
from cumoe.ops import _inputs
from cumoe.ops.fused_experts_fp8 import fused_experts_fp8
from cumoe.ops.moe_align_block_size import moe_align_block_size as _align
from cumoe.ops.per_token_group_quant_fp8 import per_token_group_quant_fp8 as _quantize
from cumoe.ops.silu_and_mul_quant_fp8 import silu_and_mul_quant_fp8 as _activate

__all__ = [
    "fused_experts", "moe_align_block_size", "per_token_group_quant_fp8",
    "sglang_per_token_group_quant_fp8", "silu_and_mul_contig_post_quant",
]  # fmt: skip

_OWN = "use SGLang's own"


def fused_experts(
    hidden_states: Any, w1: Any, w2: Any, topk_output: Any, moe_runner_config: Any,
    b1: Any = None, b2: Any = None, use_fp8_w8a8: bool = False, use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False, use_int4_w4a16: bool = False, per_channel_quant: bool = False,
    w1_scale: Any = None, w2_scale: Any = None, w1_zp: Any = None, w2_zp: Any = None,
    a1_scale: Any = None, a2_scale: Any = None, block_shape: Any = None, a1_q: Any = None,
    fuse_swiglu_interleaved: bool = False,
) -> Any:  # fmt: skip
    """`cumoe.fused_experts_fp8` of e4m3 in blocks of 128 x 128; ids are local, others -1.

    With ``inplace`` in the config, as by default, hidden_states is the output and is returned.
    """
    require_value(use_fp8_w8a8, True, "use_fp8_w8a8", "pass block-FP8 weights")
    for name, value in {
        "use_int8_w8a8": use_int8_w8a8, "use_int8_w8a16": use_int8_w8a16,
        "use_int4_w4a16": use_int4_w4a16, "per_channel_quant": per_channel_quant,
        "fuse_swiglu_interleaved": fuse_swiglu_interleaved,
    }.items():  # fmt: skip
        require_value(value, False, name, _OWN)
    for name, value in {
        "b1": b1, "b2": b2, "w1_zp": w1_zp, "w2_zp": w2_zp, "a1_scale": a1_scale,
        "a2_scale": a2_scale, "a1_q": a1_q,
    }.items():  # fmt: skip
        require_value(value, None, name, "leave it out")
    if block_shape is None:
        raise ArgumentError("block_shape: want [128, 128], got None; pass that one")
    weights, ids = (
        _field(topk_output, name, "topk_output") for name in ("topk_weights", "topk_ids")
    )
    options, is_inplace = _of_config(moe_runner_config)
    with named(x="hidden_states", topk_weights="topk_output.topk_weights",
               topk_ids="topk_output.topk_ids", **_THEIRS):  # fmt: skip
        return fused_experts_fp8(
            hidden_states, w1, w2, weights, ids, w1_scale=w1_scale, w2_scale=w2_scale,
            block_shape=block_shape, out=hidden_states if is_inplace else None, **options,
        )  # fmt: skip


def moe_align_block_size(
    topk_ids: Any, block_size: int, num_experts: int, ignore_invalid_expert: bool = False, *,
    return_inactive_prefix_count: bool = False, pad_expert_ids: bool = False,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """`cumoe.moe_align_block_size` in which -1 is an expert too, the first one.

    So slots of -1 come first, in blocks whose expert id is -1. Unused blocks have -1 as well.
    """
    require_value(ignore_invalid_expert, False, "ignore_invalid_expert", _OWN)
    require_value(return_inactive_prefix_count, False, "return_inactive_prefix_count", _OWN)
    _inputs.truth(pad_expert_ids, "pad_expert_ids")  # they always are
    count = _inputs.whole_number(num_experts, "num_experts")
    slots, experts, used = _align(topk_ids + 1, block_size, count + 1)
    return slots, (experts - 1).clamp(min=-1), used


def sglang_per_token_group_quant_fp8(
    x: Any, group_size: int, eps: float = 1e-10, column_major_scales: bool = False,
    scale_tma_aligned: bool = False, scale_ue8m0: bool = False, fuse_silu_and_mul: bool = False,
    masked_m: Any = None, *, output_q: Any = None, output_s: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """`cumoe.per_token_group_quant_fp8`, or `cumoe.silu_and_mul_quant_fp8` of gate and up.

    Scales [..., K / 128] fp32; with ``scale_ue8m0`` powers of two, and where they are column-major
    and aligned [M, ceil(K / 512)] int32. Other layouts than rows are of a matrix.
    """
    require_eps(eps)
    require_value(masked_m, None, "masked_m", "call once for each expert")
    fmt, layout = _scales(column_major_scales, scale_tma_aligned, scale_ue8m0)
    is_fused, facts = _inputs.truth(fuse_silu_and_mul, "fuse_silu_and_mul"), view(x, "x").facts
    for name, needs in (
        ("fuse_silu_and_mul", is_fused), ("column_major_scales", layout != "row"),
        ("output_s", output_s is not None),
    ):  # fmt: skip
        if needs:
            require_ndim(facts, "x", 2, f"[M, K] for {name}")
    op: Callable[..., Any] = _activate if is_fused else _quantize
    scales = {"group_size": group_size, "scale_format": fmt, "scale_layout": layout}
    with named(gate_up="x", out="output_q", out_scale="output_s"):
        q, scale = op(x, out=output_q, out_scale=output_s, **scales)
    return q, scale if len(x.shape) == 2 else scale.reshape(*x.shape[:-1], scale.shape[-1])


per_token_group_quant_fp8 = sglang_per_token_group_quant_fp8


def silu_and_mul_contig_post_quant(
    input: Any, output: Any, output_scale: Any, quant_group_size: int, scale_ue8m0: bool = False,
    transposed: bool = False, swiglu_limit: float | None = None, swizzle: bool = False,
) -> None:  # fmt: skip
    """`cumoe.silu_and_mul_quant_fp8` into [M, H] e4m3 and its scales.

    These are [M, H / 128] fp32, or for ``transposed`` [M, ceil(H / 512)] int32 with strides (1, M
    up to a multiple of 4), which wants ``scale_ue8m0``.
    """
    require_value(swizzle, False, "swizzle", "gate and up must not be interleaved")
    is_power = _inputs.truth(scale_ue8m0, "scale_ue8m0")
    is_packed = _inputs.truth(transposed, "transposed")
    if is_packed and not is_power:
        raise ArgumentError("scale_ue8m0: want True for transposed scales, got False; pass True")
    with named(gate_up="input", limit="swiglu_limit", out="output", out_scale="output_scale",
               group_size="quant_group_size"):  # fmt: skip
        _activate(
            input, limit=swiglu_limit, group_size=quant_group_size,
            scale_format="ue8m0" if is_power else "fp32",
            scale_layout="packed" if is_packed else "row", out=output, out_scale=output_scale,
        )  # fmt: skip


def _scales(column_major: Any, aligned: Any, ue8m0: Any) -> tuple[str, str]:
    """Our format and layout."""
    is_column = _inputs.truth(column_major, "column_major_scales")
    is_aligned = _inputs.truth(aligned, "scale_tma_aligned")
    if not _inputs.truth(ue8m0, "scale_ue8m0"):
        return "fp32", ("tma" if is_aligned else "column") if is_column else "row"
    if is_column and not is_aligned:
        raise ArgumentError(
            "scale_tma_aligned: want True with scale_ue8m0 and column_major_scales, got False; "
            "pass True"
        )
    return "ue8m0", "packed" if is_column else "row"


_CONFIG = "moe_runner_config"
_THEIRS = {"swiglu_alpha": f"{_CONFIG}.gemm1_alpha"} | {
    name: f"{_CONFIG}.{name}" for name in ("routed_scaling_factor", "apply_router_weight_on_input")
}
_PLAIN: dict[str, Any] = {
    "activation": "silu", "is_gated": True, "no_combine": False,
    "no_combine_keep_router_weight": False, "silu_mul_keep_fp32": False,
}  # fmt: skip
"""What a config must say."""


def _of_config(config: Any) -> tuple[dict[str, Any], bool]:
    """Our arguments of a ``MoeRunnerConfig``, and whether the output is the input."""
    for name, wanted in _PLAIN.items():
        require_value(_field(config, name, _CONFIG), wanted, f"{_CONFIG}.{name}", _OWN)
    factor = _field(config, "routed_scaling_factor", _CONFIG)
    return {
        **_swiglu(config),
        "routed_scaling_factor": 1.0 if factor is None else factor,
        "apply_router_weight_on_input": _field(config, "apply_router_weight_on_input", _CONFIG),
    }, _inputs.truth(_field(config, "inplace", _CONFIG), f"{_CONFIG}.inplace")


def _swiglu(config: Any) -> dict[str, Any]:
    """Clamp, alpha and beta; SGLang adds 1 to the up of a layer that has an alpha."""
    names = "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit"
    alpha, beta, clamp, limit = (_field(config, name, _CONFIG) for name in names)
    if alpha is None:
        remedy = f"a clamp before the activation is swiglu_limit, else {_OWN}"
        require_value(clamp, None, f"{_CONFIG}.gemm1_clamp_limit", remedy)
        require_value(beta, None, f"{_CONFIG}.gemm1_beta", "leave it out")
        return {"swiglu_limit": limit}
    interleaved = _field(config, "gate_up_interleaved", _CONFIG)
    require_value(interleaved, False, f"{_CONFIG}.gate_up_interleaved", "store gate before up")
    require_value(limit, None, f"{_CONFIG}.swiglu_limit", "leave it out with gemm1_alpha")
    if beta not in (None, 1.0):
        raise ArgumentError(f"{_CONFIG}.gemm1_beta: want 1.0 or None, got {beta!r}; {_OWN}")
    if clamp is None:
        raise ArgumentError(
            f"{_CONFIG}.gemm1_clamp_limit: want a number with gemm1_alpha, got None; pass one, or "
            f"inf"
        )
    return {"swiglu_limit": clamp, "swiglu_alpha": alpha, "swiglu_beta": 1.0}


def _field(owner: Any, name: str, argument: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        kind = {_CONFIG: "MoeRunnerConfig", "topk_output": "StandardTopKOutput"}[argument]
        raise ArgumentError(
            f"{argument}: want a {kind} of SGLang 0.5.23, got a {type(owner).__name__} without "
            f"{name}; pass that one"
        ) from error
