"""The class of experts that vLLM's oracle finds before its Triton experts."""

from __future__ import annotations

import functools
import logging
from importlib import import_module
from typing import Any

from cumoe.errors import ArgumentError
from cumoe.ops.fused_experts_fp8 import fused_experts_fp8
from cumoe.vllm_plugin import conditions
from cumoe.warmup import warmup

log = logging.getLogger("vllm.plugins.cumoe")

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_KEYS = "vllm.model_executor.layers.quantization.utils.quant_utils"


@functools.cache
def experts_class() -> type:
    """Our methods before those of vLLM's ``FusedMoEExpertsModular``."""
    base = import_module(f"{_FUSED_MOE}.modular_kernel").FusedMoEExpertsModular
    return type("CumoeExperts", (_Experts, base), {"__doc__": _Experts.__doc__})


def why_not(moe_config: Any, weight_key: Any, activation_key: Any) -> str | None:
    """Why a layer is left to vLLM, also in its log; the weights are not there yet to be asked."""
    keys = import_module(_KEYS)
    wanted = keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym
    is_block_fp8 = (weight_key, activation_key) == wanted
    why = conditions.why_not_layer(moe_config, is_block_fp8=is_block_fp8, machine=machine())
    if why is not None:
        say_once(f"left to vLLM: {why}")
    return why


def machine() -> conditions.Machine:
    """Of this process, as vLLM sees it; CUDA stays uninitialised."""
    platform, envs = import_module("vllm.platforms").current_platform, import_module("vllm.envs")
    capability = platform.get_device_capability() if platform.is_cuda() else None
    found = None if capability is None else (capability.major, capability.minor)
    return conditions.Machine(platform.is_cuda(), found, bool(envs.VLLM_BATCH_INVARIANT))


class _Experts:
    """Tokens as bf16 in, weighted and added up out: `cumoe.fused_experts_fp8` does all between."""

    moe_config: Any
    quant_config: Any

    def __new__(cls, moe_config: Any, quant_config: Any) -> Any:
        """An instance, or vLLM's Triton experts where the weights turn out to be others."""
        conditions.clamp(moe_config, quant_config)
        why = conditions.why_not_weights(quant_config)
        if why is None:
            return super().__new__(cls)
        conditions.require_no_lost_clamp(moe_config, quant_config)
        say_once(f"left to vLLM's Triton experts: {why}")
        triton = import_module(f"{_FUSED_MOE}.experts.triton_moe").TritonExperts
        return triton(moe_config, quant_config)

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)  # type: ignore[call-arg]
        self.limit = conditions.clamp(moe_config, quant_config)
        deep_gemm = import_module("vllm.utils.deep_gemm")
        self.scale_format = "ue8m0" if deep_gemm.is_deep_gemm_e8m0_used() else "fp32"
        sizes = (
            moe_config.num_experts, moe_config.num_local_experts, moe_config.experts_per_token,
            moe_config.hidden_dim, moe_config.intermediate_size_per_partition,
        )  # fmt: skip
        say_once(
            "experts of cumoe: {} ({} here), {} a token, K={}, N={}".format(*sizes)
            + f", clamp {self.limit}, {self.scale_format} scales"
        )
        if str(moe_config.device).startswith("cuda"):
            _load(*sizes, self.limit, self.scale_format)

    @staticmethod
    def is_supported_config(
        cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, str | None]:
        """Whether the oracle may take this class, else why not."""
        why = why_not(moe_config, weight_key, activation_key)
        if why is None and activation_format != cls.activation_format():
            why = f"activation format: want the standard one, got {activation_format}"
        return why is None, why

    @staticmethod
    def _unasked(*args: Any) -> bool:
        """vLLM asks these single questions in an `is_supported_config` that is not ours."""
        raise NotImplementedError("is_supported_config of cumoe answers for all")

    _supports_current_device = _supports_no_act_and_mul = _supports_quant_scheme = _unasked
    _supports_activation = _supports_parallel_config = _unasked

    @staticmethod
    def activation_format() -> Any:
        """[M, K], not one batch per expert."""
        return import_module(f"{_FUSED_MOE}.modular_kernel").FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        """The quantizer is part of the op."""
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Nothing is left to weigh or add."""
        return import_module(f"{_FUSED_MOE}.topk_weight_and_reduce").TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int,
        expert_tokens_meta: Any, activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:  # fmt: skip
        """Only the output: the op takes its workspace from torch, inside a graph from its pool."""
        return (0,), (0,), (M, K)

    def apply(
        self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any,
        activation: Any, global_num_experts: int, expert_map: Any, a1q_scale: Any, a2_scale: Any,
        workspace13: Any, workspace2: Any, expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        """Writes [M, K] bf16 to ``output``.

        Ids become int32 and weights fp32, which is what they are in vLLM but for the routing
        functions of some models: kernels for others are not loaded ahead. A weight that belongs on
        the input is there already.
        """
        _require_call(activation, a1q_scale)
        if apply_router_weight_on_input:
            topk_weights = topk_weights.new_ones(topk_weights.shape)
        fused_experts_fp8(
            hidden_states, w1, w2, topk_weights.float(), topk_ids.int(),
            w1_scale=self.quant_config.w1_scale, w2_scale=self.quant_config.w2_scale,
            scale_format=self.scale_format, swiglu_limit=self.limit,
            num_experts=None if global_num_experts == -1 else global_num_experts,
            expert_map=expert_map, out=output,
        )  # fmt: skip


def _require_call(activation: Any, a1q_scale: Any) -> None:
    if activation.value != "silu":
        raise ArgumentError(f"activation: want silu as in the layer's config, got {activation}")
    if a1q_scale is not None:
        raise ArgumentError(
            "hidden_states: want bf16, got quantized ones; set CUMOE_VLLM=0 with this way to "
            "dispatch tokens"
        )


@functools.cache
def _load(
    experts: int, local: int, topk: int, K: int, N: int, limit: float | None, fmt: str
) -> None:
    """Loads what calls of such a layer reach: vLLM captures graphs without a call before."""
    count = warmup(
        hidden=K, intermediate=N, experts=experts, top_k=topk, ep=experts // local,
        swiglu_limit=float("inf") if limit is None else limit, scale_format=fmt,
    )  # fmt: skip
    log.info("%d kernels loaded", count)


@functools.cache
def say_once(text: str) -> None:
    """To vLLM's log; a model has many equal layers."""
    log.info("%s", text)
