"""Which layers get our experts: every condition, and the line that says why one is not met."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from cumoe.errors import ArgumentError
from cumoe.plan.moe_align_block_size import MAX_EXPERTS, MAX_TOPK
from cumoe.plan.scales import GROUP_SIZE

CAPABILITIES = ((9, 0),)
"""Where the kernels are tested and measured beside vLLM's; elsewhere they are only compiled."""

_BLOCK = [GROUP_SIZE, GROUP_SIZE]
_ABSENT = (
    "a1_scale", "a2_scale", "a1_gscale", "a2_gscale", "g1_alphas", "g2_alphas", "w1_zp", "w2_zp",
    "w1_bias", "w2_bias",
)  # fmt: skip


class Machine(NamedTuple):
    """What is asked of the process, not of the layer."""

    is_cuda: bool
    capability: tuple[int, int] | None
    is_batch_invariant: bool
    """VLLM_BATCH_INVARIANT: our sums depend on whether tokens are few or many."""


class Condition(NamedTuple):
    """One thing that must hold."""

    holds: bool
    what: str
    wanted: str
    got: Any

    def __str__(self) -> str:
        return f"{self.what}: want {self.wanted}, got {self.got}"


def why_not_layer(moe: Any, *, is_block_fp8: bool, machine: Machine) -> str | None:
    """Why a layer of this ``FusedMoEConfig`` is left to vLLM; None where it is not."""
    return _first_unmet(_of_layer(moe, is_block_fp8, machine))


def why_not_weights(quant: Any) -> str | None:
    """Why weights of this ``FusedMoEQuantConfig`` are left to vLLM; None where they are not."""
    return _first_unmet(_of_weights(quant))


def clamp(moe: Any, quant: Any) -> float | None:
    """The clamp of a layer, which vLLM states twice.

    Raises: ArgumentError where the two are different clamps.
    """
    stated = {c for c in (moe.swiglu_limit, quant.gemm1_clamp_limit) if c is not None}
    if len(stated) > 1:
        raise ArgumentError(
            f"swiglu_limit: want one clamp, got {moe.swiglu_limit} in the layer's config and "
            f"{quant.gemm1_clamp_limit} in gemm1_clamp_limit of its weights; correct the model, or "
            f"set CUMOE_VLLM=0"
        )
    return stated.pop() if stated else None


def require_no_lost_clamp(moe: Any, quant: Any) -> None:
    """Refuses weights for vLLM's own experts that do not say the clamp of their layer."""
    if moe.swiglu_limit is not None and quant.gemm1_clamp_limit is None:
        raise ArgumentError(
            f"gemm1_clamp_limit: want the layer's swiglu_limit {moe.swiglu_limit}, got None, so "
            f"that vLLM's experts would drop the clamp; use a block-FP8 checkpoint, or set "
            f"CUMOE_VLLM=0"
        )


def _first_unmet(conditions: Iterator[Condition]) -> str | None:
    return next((str(condition) for condition in conditions if not condition.holds), None)


def _of_layer(moe: Any, is_block_fp8: bool, machine: Machine) -> Iterator[Condition]:
    yield from _of_machine(machine)
    backend, activation = moe.moe_backend, moe.activation.value
    yield Condition(backend == "auto", "moe_backend", "auto", backend)
    yield Condition(is_block_fp8, "quantization", "FP8 in blocks of 128 x 128", "another")
    yield Condition(activation == "silu", "activation", "silu", activation)
    yield from _of_swiglu(moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta)
    yield Condition(not moe.has_bias, "bias", "none", "one")
    yield Condition(not moe.is_lora_enabled, "LoRA", "none", "LoRA")
    dtype = str(moe.in_dtype)
    yield Condition(dtype == "torch.bfloat16", "activations", "torch.bfloat16", dtype)
    yield from _of_ranks(moe)
    yield from _of_sizes(moe)


def _of_machine(machine: Machine) -> Iterator[Condition]:
    known = " or ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
    yield Condition(machine.is_cuda, "platform", "CUDA", "another")
    has_kernels = machine.capability in CAPABILITIES
    yield Condition(has_kernels, "compute capability", known, machine.capability)
    varies = machine.is_batch_invariant
    yield Condition(not varies, "VLLM_BATCH_INVARIANT", "0", "1")


def _of_swiglu(limit: Any, alpha: Any, beta: Any) -> Iterator[Condition]:
    is_clamp = limit is None or (math.isfinite(limit) and limit > 0)
    yield Condition(is_clamp, "clamp", "none or a finite positive one", limit)
    yield Condition(alpha in (None, 1.0), "alpha of silu", "1.0 or None", alpha)
    yield Condition(beta in (None, 0.0), "beta of silu", "0.0 or None", beta)


def _of_ranks(moe: Any) -> Iterator[Condition]:
    ranks = moe.moe_parallel_config
    stays = ranks.dp_size == 1 and not ranks.use_all2all_kernels
    yield Condition(stays, "ranks", "tensor or expert parallelism alone", "exchanged tokens")
    even = moe.num_experts % moe.num_local_experts == 0
    spread = f"{moe.num_local_experts} of {moe.num_experts}"
    yield Condition(even, "experts of a rank", "an equal share", spread)


def _of_sizes(moe: Any) -> Iterator[Condition]:
    N, multiple = moe.intermediate_size_per_partition, f"a multiple of {GROUP_SIZE}"
    K, topk, most = moe.hidden_dim, moe.experts_per_token, min(MAX_TOPK, moe.num_experts)
    yield Condition(K % GROUP_SIZE == 0, "hidden size", multiple, K)
    yield Condition(N % GROUP_SIZE == 0, "intermediate size of a rank", multiple, N)
    yield Condition(moe.num_experts <= MAX_EXPERTS, "experts", f"<= {MAX_EXPERTS}", moe.num_experts)
    yield Condition(1 <= topk <= most, "experts per token", f"1 to {most}", topk)


def _of_weights(quant: Any) -> Iterator[Condition]:
    for name in ("quant_dtype", "weight_quant_dtype"):
        dtype = str(getattr(quant, name))
        is_e4m3 = dtype == "torch.float8_e4m3fn"
        yield Condition(is_e4m3, name, "torch.float8_e4m3fn", dtype)
    block = list(quant.block_shape or ())
    yield Condition(block == _BLOCK, "block_shape", str(_BLOCK), block)
    yield from _of_swiglu(quant.gemm1_clamp_limit, quant.gemm1_alpha, quant.gemm1_beta)
    for name in _ABSENT:
        value = getattr(quant, name)
        yield Condition(value is None, name, "none", type(value).__name__)
    for name in ("w1_scale", "w2_scale"):
        dtype = str(getattr(getattr(quant, name), "dtype", None))
        yield Condition(dtype == "torch.float32", name, "torch.float32", dtype)
