"""The few names of vLLM 0.26 that the plugin uses, as modules; behaviour as there, kernels none."""

from __future__ import annotations

import enum
import sys
from abc import ABC, abstractmethod
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
BLOCK_FP8 = ("kFp8Static128BlockSym", "kFp8Dynamic128Sym")


class Activation(enum.Enum):
    SILU = "silu"
    GELU = "gelu"
    SWIGLUOAI = "swigluoai"


class Format(enum.Enum):
    Standard = "standard"
    BatchedExperts = "batched"


class Backend(enum.Enum):
    DEEPGEMM = "DEEPGEMM"
    FLASHINFER_CUTLASS = "FLASHINFER_CUTLASS"
    TRITON = "TRITON"


class ExpertsModular(ABC):
    """What of ``FusedMoEExpertsModular`` a subclass must define, or inherits."""

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config

    @staticmethod
    @abstractmethod
    def activation_format() -> Format: ...

    @staticmethod
    @abstractmethod
    def _supports_current_device() -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_no_act_and_mul() -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_activation(activation: Any) -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool: ...

    @abstractmethod
    def workspace_shapes(self, *args: Any) -> Any: ...

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> Any: ...

    @abstractmethod
    def apply(self, *args: Any, **kwargs: Any) -> None: ...


class Theirs:
    """Stands for any of vLLM's classes of experts."""

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config

    @staticmethod
    def is_supported_config(*args: Any) -> tuple[bool, str | None]:
        return True, None


class EngineArgs:
    """Makes the config that it was given."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> Any:
        return self.config


def install(monkeypatch: pytest.MonkeyPatch, *, capability: tuple[int, int] = (9, 0)) -> Any:
    """Puts the modules into sys.modules; returns the oracle's."""
    major_minor = SimpleNamespace(major=capability[0], minor=capability[1])
    platform = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: major_minor)
    tables: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.26.0"},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.platforms": {"current_platform": platform},
        "vllm.utils.deep_gemm": {"is_deep_gemm_e8m0_used": lambda: False},
        "vllm.engine.arg_utils": {"EngineArgs": type("EngineArgs", (EngineArgs,), {
            "create_engine_config": EngineArgs.create_engine_config})},
        "vllm.model_executor.layers.quantization.utils.quant_utils": {k: k for k in BLOCK_FP8},
        f"{FUSED_MOE}.modular_kernel": {
            "FusedMoEExpertsModular": ExpertsModular, "FusedMoEActivationFormat": Format},
        f"{FUSED_MOE}.topk_weight_and_reduce": {"TopKWeightAndReduceNoOP": type("NoOP", (), {})},
        f"{FUSED_MOE}.experts.triton_moe": {"TritonExperts": Theirs},
        f"{FUSED_MOE}.oracle.fp8": {"Fp8MoeBackend": Backend},
    }  # fmt: skip
    for name, table in tables.items():
        module = ModuleType(name)
        vars(module).update(table)
        monkeypatch.setitem(sys.modules, name, module)
    oracle = sys.modules[f"{FUSED_MOE}.oracle.fp8"]
    _define_oracle(oracle)
    return oracle


def _define_oracle(oracle: Any) -> None:
    """Its three functions; they find each other by their module, as in vLLM."""

    def _get_priority_backends(moe_config: Any, weight_key: Any, activation_key: Any) -> Any:
        return [Backend.FLASHINFER_CUTLASS, Backend.DEEPGEMM, Backend.TRITON]

    def backend_to_kernel_cls(backend: Any) -> Any:
        return [Theirs]

    def select_fp8_moe_backend(config: Any, weight_key: Any, activation_key: Any) -> Any:
        batched = config.moe_parallel_config.use_batched_activation_format
        layout = Format.BatchedExperts if batched else Format.Standard
        for backend in oracle._get_priority_backends(config, weight_key, activation_key):
            for cls in oracle.backend_to_kernel_cls(backend):
                if cls.is_supported_config(cls, config, weight_key, activation_key, layout)[0]:
                    return backend, cls
        raise NotImplementedError

    for function in (_get_priority_backends, backend_to_kernel_cls, select_fp8_moe_backend):
        setattr(oracle, function.__name__, function)


def moe_config(**change: Any) -> SimpleNamespace:
    """What the plugin reads of a ``FusedMoEConfig``; a layer that it takes."""
    ranks = {
        n: change.pop(n, v)
        for n, v in (
            ("dp_size", 1),
            ("use_all2all_kernels", False),
            ("use_batched_activation_format", False),
        )
    }
    return SimpleNamespace(**{
        "moe_backend": "auto", "activation": Activation.SILU, "has_bias": False,
        "is_lora_enabled": False, "in_dtype": torch.bfloat16, "num_experts": 8,
        "num_local_experts": 8, "experts_per_token": 2, "hidden_dim": 256,
        "intermediate_size_per_partition": 128, "swiglu_limit": None, "swiglu_alpha": None,
        "swiglu_beta": None, "device": "cpu", "moe_parallel_config": SimpleNamespace(**ranks),
    } | change)  # fmt: skip


def quant_config(**change: Any) -> SimpleNamespace:
    """What the plugin reads of a ``FusedMoEQuantConfig``; weights that it takes."""
    absent = (
        "a1_scale a2_scale a1_gscale a2_gscale g1_alphas g2_alphas w1_zp w2_zp w1_bias w2_bias "
        "gemm1_alpha gemm1_beta gemm1_clamp_limit"
    )
    fp8, scale = torch.float8_e4m3fn, torch.ones(8, 2, 2)
    block = {"quant_dtype": fp8, "weight_quant_dtype": fp8, "block_shape": [128, 128]}
    scales = {"w1_scale": scale, "w2_scale": scale}
    return SimpleNamespace(**{**dict.fromkeys(absent.split()), **block, **scales, **change})


def vllm_config(hf_config: dict[str, Any], **change: Any) -> SimpleNamespace:
    """What the plugin reads of a ``VllmConfig``."""
    ranks = {"tensor_parallel_size": 1, "data_parallel_size": 1, "enable_expert_parallel": False}
    backend = change.pop("moe_backend", "auto")
    return SimpleNamespace(
        kernel_config=SimpleNamespace(moe_backend=backend),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: hf_config)),
        parallel_config=SimpleNamespace(**{**ranks, **change}),
    )
