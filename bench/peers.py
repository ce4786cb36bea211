"""The peers, each an optional import; an absent one is named as absent and its column left out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from importlib import metadata
from typing import Any, NamedTuple

from bench.shapes import Shape

ACTIVATION = ("vllm-two-kernel", "vllm-fused", "vllm-quant")
Act = Callable[[Any], Any]
Moe = Callable[[Any, Any, Any], Any]
"""(x, topk_weights, topk_ids) to out"""


class Layer(NamedTuple):
    """Weights of the experts on this rank, their scales, and the map from global ids or None."""

    w1: Any
    w2: Any
    w1_scale: Any
    w2_scale: Any
    expert_map: Any


def vllm_context() -> Any:
    """vLLM wants a current configuration while its kernels are built and called.

    Scales are plain fp32 there, unless the environment says otherwise.
    """
    os.environ.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
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


def versions() -> dict[str, str]:
    """The peers that are installed."""
    found = {}
    for name in ("vllm", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def experts_peers(names: Iterable[str], shape: Shape, layer: Layer) -> dict[str, Moe]:
    """The peers of ``names`` that take this layer. Within `vllm_context`."""
    found = {}
    for name in names:
        try:
            found[name] = EXPERTS[name](shape, layer)
        except Exception as error:  # noqa: BLE001 - whatever foreign code raises
            say_once(f"{name}: absent ({type(error).__name__}: {error})")
    return found


@cache
def say_once(text: str) -> None:
    """Prints a line unless it was printed before."""
    print(text)


def _triton(shape: Shape, layer: Layer) -> Moe:
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    return _modular(TritonExperts, shape, layer)


def _deepgemm(shape: Shape, layer: Layer) -> Moe:
    from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts

    return _modular(DeepGemmExperts, shape, layer)


def _modular(experts: Any, shape: Shape, layer: Layer) -> Moe:
    """vLLM's experts between its quantizer and its reduction, as in a model without parallelism."""
    import torch
    from vllm.model_executor.layers.fused_moe import config, modular_kernel
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
        make_moe_prepare_and_finalize_no_dp_ep,
    )
    from vllm.v1.worker import workspace

    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("cuda"))
    silu = MoEActivation.SILU
    quantization = config.fp8_w8a8_moe_quant_config(
        w1_scale=layer.w1_scale, w2_scale=layer.w2_scale, block_shape=[128, 128],
        gemm1_clamp_limit=shape.limit,
    )  # fmt: skip
    moe = config.FusedMoEConfig(
        num_experts=shape.E, experts_per_token=shape.topk, hidden_dim=shape.K,
        intermediate_size=shape.N, num_local_experts=len(layer.w1), num_logical_experts=shape.E,
        activation=silu, device="cuda", routing_method=config.RoutingMethodType.TopK,
        moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16, max_num_tokens=65_536, swiglu_limit=shape.limit,
    )  # fmt: skip
    kernel = modular_kernel.FusedMoEKernel(
        make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=False),
        experts(moe_config=moe, quant_config=quantization),
    )

    def call(x: Any, weights: Any, ids: Any) -> Any:
        return kernel.apply(
            x, layer.w1, layer.w2, weights, ids, silu, shape.E, layer.expert_map, False
        )

    return call


def _marlin(shape: Shape, layer: Layer) -> Moe:
    """16-bit activations; the weights repacked beforehand, which needs their memory again."""
    from types import SimpleNamespace

    import torch
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import (
        prepare_fp8_moe_layer_for_marlin,
    )
    from vllm.scalar_type import scalar_types

    described = SimpleNamespace(
        num_experts=len(layer.w1), hidden_size=shape.K, intermediate_size_per_partition=shape.N,
        weight_block_size=[128, 128], orig_dtype=torch.bfloat16, w13_weight=layer.w1,
    )  # fmt: skip
    w1, w2, w1_scale, w2_scale = prepare_fp8_moe_layer_for_marlin(described, *layer[:4])

    def call(x: Any, weights: Any, ids: Any) -> Any:
        return fused_marlin_moe(
            x, w1, w2, None, None, w1_scale, w2_scale, weights, ids,
            quant_type_id=scalar_types.float8_e4m3fn.id, global_num_experts=shape.E,
            expert_map=layer.expert_map, workspace=described.workspace, clamp_limit=shape.limit,
        )  # fmt: skip

    return call


EXPERTS = {"vllm-triton": _triton, "vllm-deepgemm": _deepgemm, "vllm-marlin": _marlin}
