"""Which layers of vLLM are ours: each condition alone, with the line that says why not."""

from __future__ import annotations

import math

import pytest
import torch

from cumoe import ArgumentError
from cumoe.vllm_plugin import conditions
from tests.helpers.fake_vllm import Activation, moe_config, quant_config

H200 = conditions.Machine(is_cuda=True, capability=(9, 0), is_batch_invariant=False)


def why(machine=H200, is_block_fp8=True, **change):
    layer = moe_config(**change)
    return conditions.why_not_layer(layer, is_block_fp8=is_block_fp8, machine=machine)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"swiglu_limit": 10.0},
        {"swiglu_alpha": 1.0, "swiglu_beta": 0.0},
        {"num_experts": 8, "num_local_experts": 2},
    ],
)
def test_layers_that_are_ours(change):
    assert why(**change) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_backend": "triton"}, "moe_backend: want auto, got triton"),
        ({"is_block_fp8": False}, "quantization: want FP8 in blocks of 128 x 128, got another"),
        ({"activation": Activation.GELU}, "activation: want silu, got gelu"),
        ({"activation": Activation.SWIGLUOAI}, "activation: want silu, got swigluoai"),
        ({"swiglu_limit": math.inf}, "clamp: want none or a finite positive one, got inf"),
        ({"swiglu_limit": math.nan}, "clamp: want none or a finite positive one, got nan"),
        ({"swiglu_limit": 0.0}, "clamp: want none or a finite positive one, got 0.0"),
        ({"swiglu_alpha": 1.702}, "alpha of silu: want 1.0 or None, got 1.702"),
        ({"swiglu_beta": 1.0}, "beta of silu: want 0.0 or None, got 1.0"),
        ({"has_bias": True}, "bias: want none, got one"),
        ({"is_lora_enabled": True}, "LoRA: want none, got LoRA"),
        ({"in_dtype": torch.float16}, "activations: want torch.bfloat16, got torch.float16"),
        ({"dp_size": 2}, "ranks: want tensor or expert parallelism alone, got exchanged tokens"),
        ({"use_all2all_kernels": True}, "ranks: want tensor or expert parallelism alone"),
        ({"num_local_experts": 3}, "experts of a rank: want an equal share, got 3 of 8"),
        ({"hidden_dim": 200}, "hidden size: want a multiple of 128, got 200"),
        (
            {"intermediate_size_per_partition": 192},
            "intermediate size of a rank: want a multiple of 128, got 192",
        ),
        ({"num_experts": 8192}, "experts: want <= 4096, got 8192"),
        ({"experts_per_token": 9}, "experts per token: want 1 to 8, got 9"),
        ({"machine": H200._replace(is_cuda=False)}, "platform: want CUDA, got another"),
        ({"machine": H200._replace(capability=(8, 9))}, "capability: want 9.0, got (8, 9)"),
        ({"machine": H200._replace(is_batch_invariant=True)}, "VLLM_BATCH_INVARIANT: want 0"),
    ],
)
def test_layers_that_are_left(change, message):
    assert message in why(**change)


def test_weights_that_are_ours():
    assert conditions.why_not_weights(quant_config()) is None
    assert conditions.why_not_weights(quant_config(gemm1_clamp_limit=7.0)) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_shape": [64, 128]}, "block_shape: want [128, 128], got [64, 128]"),
        ({"block_shape": None}, "block_shape: want [128, 128], got []"),
        ({"quant_dtype": torch.int8}, "quant_dtype: want torch.float8_e4m3fn, got torch.int8"),
        ({"weight_quant_dtype": None}, "weight_quant_dtype: want torch.float8_e4m3fn, got None"),
        ({"w1_bias": torch.zeros(1)}, "w1_bias: want none, got Tensor"),
        ({"a2_scale": torch.zeros(1)}, "a2_scale: want none, got Tensor"),
        ({"w2_scale": torch.zeros(1).bfloat16()}, "w2_scale: want torch.float32, got"),
        ({"gemm1_alpha": 1.702}, "alpha of silu: want 1.0 or None, got 1.702"),
        ({"gemm1_clamp_limit": math.inf}, "clamp: want none or a finite positive one, got inf"),
    ],
)
def test_weights_that_are_left(change, message):
    assert message in conditions.why_not_weights(quant_config(**change))


@pytest.mark.parametrize(
    ("layer", "weights", "applied"),
    [(None, None, None), (10.0, 10.0, 10.0), (10.0, None, 10.0), (None, 7.0, 7.0)],
)
def test_a_clamp_is_applied_wherever_it_is_stated(layer, weights, applied):
    found = conditions.clamp(
        moe_config(swiglu_limit=layer), quant_config(gemm1_clamp_limit=weights)
    )
    assert found == applied


def test_two_clamps_are_refused():
    with pytest.raises(ArgumentError, match=r"want one clamp, got 10.0 .* and 7.0 .*CUMOE_VLLM=0"):
        conditions.clamp(moe_config(swiglu_limit=10.0), quant_config(gemm1_clamp_limit=7.0))
