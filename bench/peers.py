"""The peers, each an optional import; an absent one is named as absent and its column left out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

Act = Callable[[Any], Any]


def vllm_context() -> Any:
    """vLLM wants a current configuration while its kernels are built and called."""
    try:
        from vllm.config import VllmConfig, set_current_vllm_config
    except ImportError as error:
        print(f"vllm: absent ({error})")
        return nullcontext()
    return set_current_vllm_config(VllmConfig())


def activation_peers(
    H: int, rows: int, limit: float, ue8m0: bool, topk_ids: Any, expert_map: Any
) -> dict[str, Act]:
    """vLLM's clamped activation followed by its quantizer, and its fused, unclamped op.

    With an expert_map the activation skips rows as ours does; the quantizer knows no filter and
    takes all rows.
    """
    try:
        import torch
        import vllm._custom_ops as ops
        from vllm.model_executor.layers.fused_moe.activation import silu_and_mul_with_clamp
        from vllm.model_executor.layers.quantization.utils.fp8_utils import (
            per_token_group_quant_fp8,
        )
    except ImportError:
        return {}
    middle = torch.zeros(rows, H, device="cuda", dtype=torch.bfloat16)

    def two_kernels(x: Any) -> Any:
        silu_and_mul_with_clamp(middle, x, limit, topk_ids, expert_map)
        return per_token_group_quant_fp8(middle, 128, use_ue8m0=ue8m0)

    def fused(x: Any) -> Any:
        return ops.silu_and_mul_per_block_quant(x, 128, torch.float8_e4m3fn)

    return {"vllm-two-kernel": two_kernels, "vllm-fused": fused}


def two_kernels(x: Any, limit: float | None, ue8m0: bool) -> Any:
    """vLLM's activation, clamped or not, then its quantizer."""
    import torch
    from vllm.model_executor.layers.fused_moe.activation import silu_and_mul_with_clamp
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    middle = torch.empty(x.shape[0], x.shape[1] // 2, device="cuda", dtype=torch.bfloat16)
    if limit is None:
        torch.ops._C.silu_and_mul(middle, x)
    else:
        silu_and_mul_with_clamp(middle, x, limit)
    return per_token_group_quant_fp8(middle, 128, use_ue8m0=ue8m0)


def quantizer_peers(ue8m0: bool) -> dict[str, Act]:
    """vLLM's group quantizer."""
    try:
        from vllm.model_executor.layers.quantization.utils.fp8_utils import (
            per_token_group_quant_fp8,
        )
    except ImportError:
        return {}
    return {"vllm-quant": lambda x: per_token_group_quant_fp8(x, 128, use_ue8m0=ue8m0)}
