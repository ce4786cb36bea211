"""cumoe.compat.vllm: the experts with a quant config, and every refusal of all functions."""

from __future__ import annotations

import enum
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import cumoe
from cumoe import ArgumentError, CumoeError, DTypeError
from cumoe.compat import vllm
from tests.helpers import cases, compare, oracles
from tests.helpers.backends import TorchBackend
from tests.helpers.torch_ops import require_same

FP8 = torch.float8_e4m3fn


class MoEActivation(enum.Enum):
    SILU = "silu"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    GELU = "gelu"


def quant_config(**change: Any) -> SimpleNamespace:
    """What `fused_experts` reads of vLLM's FusedMoEQuantConfig, without scales."""
    absent = (
        "a1_scale a2_scale a1_gscale a2_gscale g1_alphas g2_alphas w1_zp w2_zp w1_bias w2_bias "
        "w1_scale w2_scale gemm1_alpha gemm1_beta gemm1_clamp_limit"
    )
    block = {"quant_dtype": FP8, "weight_quant_dtype": FP8, "block_shape": [128, 128]}
    return SimpleNamespace(**{**dict.fromkeys(absent.split()), **block, **change})


def layer_call(rng: np.random.Generator, **config: Any) -> tuple[dict[str, Any], SimpleNamespace]:
    """Arguments of either function but the scales, which the config has."""
    c = cases.experts_case(rng, num_tokens=5, topk=2, intermediate=128)
    put = TorchBackend("cpu").put
    arrays = {"x": c.x, "w1": c.experts.w1, "w2": c.experts.w2, "topk_weights": c.weights}
    call = {name: put(a) for name, a in (arrays | {"topk_ids": c.ids}).items()}
    scales = {name: put(a) for name, a in c.experts.scales.items()}
    return call, quant_config(**{**scales, **config})


def experts(call: dict[str, Any], config: Any, *more: Any, **options: Any) -> torch.Tensor:
    x, *others = call.values()
    return vllm.fused_experts(x, *others, *more, quant_config=config, **options)


@pytest.mark.parametrize("activation", ["silu", MoEActivation.SILU, "swigluoai_uninterleave"])
@pytest.mark.parametrize("limit", [0.5, None])
def test_experts(rng, activation, limit):
    is_silu, options = activation in ("silu", MoEActivation.SILU), {}
    if not is_silu:
        options = {"gemm1_alpha": 1.702, "gemm1_beta": 1.0}
        limit = np.inf if limit is None else limit
    call, config = layer_call(rng, gemm1_clamp_limit=limit, **options)
    result = experts(call, config, activation)
    swiglu = {"alpha": 1.0, "beta": 0.0} if is_silu else {"alpha": 1.702, "beta": 1.0}
    ours = {f"swiglu_{k}": v for k, v in swiglu.items()} | {"swiglu_limit": limit}
    scales = {"w1_scale": config.w1_scale, "w2_scale": config.w2_scale}
    require_same((result,), (cumoe.fused_experts_fp8(**call, **scales, **ours),))
    host = [t.float().numpy() if t.dtype == torch.bfloat16 else t for t in call.values()]
    host[1:3] = (t.view(torch.uint8).numpy() for t in host[1:3])
    host[3:], scales = map(np.asarray, host[3:]), {k: v.numpy() for k, v in scales.items()}
    exact = oracles.experts_by_token(
        *host, **scales, **swiglu, limit=np.inf if limit is None else limit
    )
    compare.assert_total_close(result.float().numpy(), exact, 0.06, cosine=0.998)


def test_experts_without_a_clamp_would_be_seen(rng):
    call, config = layer_call(rng, gemm1_clamp_limit=0.5)
    want, config.gemm1_clamp_limit = experts(call, config), None
    with pytest.raises(AssertionError, match="bytes of result 0 differ"):
        require_same((experts(call, config),), (want,))


def test_experts_of_a_rank(rng):
    call, config = layer_call(rng)
    scales = {"w1_scale": config.w1_scale, "w2_scale": config.w2_scale}
    table = torch.full((12,), -1, dtype=torch.int32)
    table[2:10] = torch.arange(8)
    want = cumoe.fused_experts_fp8(**call, **scales, expert_map=table)
    for num_experts in (-1, 12):
        got = experts(call, config, "silu", False, num_experts, table)
        require_same((got,), (want,))


def test_experts_with_the_weight_on_the_input(rng):
    call, config = layer_call(rng)
    call |= {n: call[n][:, :1].contiguous() for n in ("topk_weights", "topk_ids")}
    scales = {"w1_scale": config.w1_scale, "w2_scale": config.w2_scale}
    want = cumoe.fused_experts_fp8(**call, **scales, apply_router_weight_on_input=True)
    require_same((experts(call, config, "silu", True),), (want,))


@pytest.mark.parametrize("is_used", [False, True])
def test_the_scale_format_is_that_of_the_vllm_that_is_loaded(rng, monkeypatch, is_used):
    loaded = SimpleNamespace(is_deep_gemm_e8m0_used=lambda: is_used)
    monkeypatch.setitem(sys.modules, "vllm.utils.deep_gemm", loaded)
    call, config = layer_call(rng)
    fmt = "ue8m0" if is_used else "fp32"
    scales = {"w1_scale": config.w1_scale, "w2_scale": config.w2_scale}
    want = cumoe.fused_experts_fp8(**call, **scales, scale_format=fmt)
    require_same((experts(call, config),), (want,))


# Refusals


def right_arguments(function: str) -> dict[str, Any]:
    """A call that each function takes."""
    x, gate_up = torch.zeros(4, 256).bfloat16(), torch.zeros(4, 512).bfloat16()
    if function == "fused_experts":
        scales = {"w1_scale": torch.ones(2, 2, 1), "w2_scale": torch.ones(2, 1, 1)}
        return {
            "hidden_states": x[:, :128], "w1": torch.zeros(2, 256, 128).to(FP8),
            "w2": torch.zeros(2, 128, 128).to(FP8), "topk_weights": torch.ones(4, 2),
            "topk_ids": torch.zeros(4, 2, dtype=torch.int32),
            "quant_config": quant_config(**scales),
        }  # fmt: skip
    ids = {"topk_ids": torch.zeros(4, 2, dtype=torch.int32), "block_size": 16, "num_experts": 8}
    return {
        "moe_align_block_size": ids,
        "per_token_group_quant_fp8": {"x": x, "group_size": 128},
        "per_token_group_quant_fp8_packed_for_deepgemm": {"x": x, "group_size": 128},
        "silu_and_mul_per_block_quant": {"input": gate_up, "group_size": 128, "quant_dtype": FP8},
        "silu_mul_per_token_group_quant_fp8_colmajor": {"input": gate_up},
        "silu_mul_quant_fp8_packed_triton": {"input": gate_up},
    }[function]


QUANTIZER, PACKED_QUANTIZER = (
    "per_token_group_quant_fp8",
    "per_token_group_quant_fp8_packed_for_deepgemm",
)
ACTIVATION, COLMAJOR, PACKED = (
    "silu_and_mul_per_block_quant",
    "silu_mul_per_token_group_quant_fp8_colmajor",
    "silu_mul_quant_fp8_packed_triton",
)
MAP = torch.zeros(8, dtype=torch.int32)
REFUSALS: list[tuple[str, dict[str, Any], type[CumoeError], str]] = [
    (QUANTIZER, {"eps": 1e-6}, ArgumentError, "eps: want 1e-10|got 1e-06|leave it out"),
    (QUANTIZER, {"eps": torch.ones(1)}, DTypeError, "eps: want a number"),
    (QUANTIZER, {"group_size": 64}, ArgumentError, "group_size: want|128|64"),
    (QUANTIZER, {"dtype": torch.int8}, DTypeError, "dtype: want torch.float8_e4m3fn|torch.int8"),
    (QUANTIZER, {"column_major_scales": 1}, DTypeError, "column_major_scales: want True or False"),
    (QUANTIZER, {"tma_aligned_scales": 1}, DTypeError, "tma_aligned_scales: want True or False"),
    (QUANTIZER, {"use_ue8m0": 1}, DTypeError, "use_ue8m0: want True or False"),
    (QUANTIZER, {"out_q": torch.zeros(4, 128).to(FP8)}, ArgumentError, "out_q: want|[4, 128]"),
    (QUANTIZER, {"x": torch.zeros(4, 100)}, ArgumentError, "x: |128|100"),
    (
        QUANTIZER, {"x": torch.zeros(2, 4, 256), "column_major_scales": True}, ArgumentError,
        "x: want 2 dimensions [M, K] for column_major_scales|[2, 4, 256]|reshape",
    ),
    (PACKED_QUANTIZER, {"eps": 0.0}, ArgumentError, "eps: want 1e-10|got 0.0"),
    (PACKED_QUANTIZER, {"use_ue8m0": False}, ArgumentError, "use_ue8m0: want True|got False"),
    (PACKED_QUANTIZER, {"out_q": torch.zeros(4, 256)}, DTypeError, "out_q: want e4m3|fp32"),
    (ACTIVATION, {"group_size": 64}, ArgumentError, "group_size: want|128|64"),
    (ACTIVATION, {"quant_dtype": torch.int8}, DTypeError, "quant_dtype: want torch.float8_e4m3fn"),
    (ACTIVATION, {"scale_ub": torch.ones(1)}, ArgumentError, "scale_ub: want None|got Tensor"),
    (ACTIVATION, {"is_scale_transposed": 1}, DTypeError, "is_scale_transposed: want True or False"),
    (ACTIVATION, {"clamp_limit": 0.0}, ArgumentError, "clamp_limit: want a positive|0.0"),
    (ACTIVATION, {"alpha": 0.0}, ArgumentError, "alpha: want|0.0"),
    (ACTIVATION, {"input": torch.zeros(4, 512)}, DTypeError, "input: want bf16, got fp32"),
    (ACTIVATION, {"input": torch.zeros(2, 4, 512)}, ArgumentError, "input: want 2 dimensions"),
    (COLMAJOR, {"eps": 1e-6}, ArgumentError, "eps: want 1e-10"),
    (COLMAJOR, {"clamp_limit": -1.0}, ArgumentError, "clamp_limit: want a positive|-1.0"),
    (COLMAJOR, {"output": torch.zeros(4, 8).to(FP8)}, ArgumentError, "output: want|[4, 8]"),
    (PACKED, {"clamp_limit": "10"}, DTypeError, "clamp_limit: want a number|'10'"),
    (PACKED, {"output_q": torch.zeros(4, 8).to(FP8)}, ArgumentError, "output_q: want|[4, 8]"),
    ("moe_align_block_size", {"pad_sorted_ids": 1}, DTypeError, "pad_sorted_ids: want True"),
    (
        "moe_align_block_size", {"ignore_invalid_experts": None}, DTypeError,
        "ignore_invalid_experts: want True or False, got None",
    ),
    (
        "moe_align_block_size", {"expert_map": MAP[:4]}, ArgumentError,
        "num_experts: want 4, the length of expert_map, got 8",
    ),
    ("moe_align_block_size", {"expert_map": MAP.long()}, DTypeError, "expert_map: want int32"),
    ("fused_experts", {"hidden_states": torch.ones(4, 128)}, DTypeError, "hidden_states: want"),
    ("fused_experts", {"activation": MoEActivation.GELU}, ArgumentError, "activation: want|'gelu'"),
    ("fused_experts", {"activation": "swigluoai"}, ArgumentError, "activation: want|'swigluoai'"),
    ("fused_experts", {"global_num_experts": 0}, ArgumentError, "global_num_experts: want|got 0"),
    ("fused_experts", {"global_num_experts": 9}, ArgumentError, "global_num_experts: want|got 9"),
    (
        "fused_experts", {"apply_router_weight_on_input": True}, ArgumentError,
        "apply_router_weight_on_input: wants topk 1, got 2",
    ),
    ("fused_experts", {"quant_config": None}, ArgumentError, "quant_config: want|NoneType|pass"),
    (
        "fused_experts", {"activation": "swigluoai_uninterleave"}, ArgumentError,
        "quant_config.gemm1_clamp_limit: want a number|got None",
    ),
]  # fmt: skip
BAD_FIELDS: list[tuple[str, Any, type[CumoeError], str]] = [
    ("quant_dtype", None, DTypeError, "want torch.float8_e4m3fn, got None"),
    ("weight_quant_dtype", "int4", DTypeError, "want torch.float8_e4m3fn, got int4"),
    ("block_shape", [64, 64], ArgumentError, "(128, 128)|(64, 64)"),
    ("block_shape", None, DTypeError, "(128, 128)|None"),
    ("w1_scale", None, DTypeError, "NoneType"),
    ("w1_scale", torch.ones(2, 2, 1).double(), DTypeError, "want fp32, got float64"),
    ("w2_scale", torch.ones(2, 1, 2), ArgumentError, "[2, 1, 1]|[2, 1, 2]"),
    ("gemm1_alpha", 1.702, ArgumentError, "want 1.0|(1.702, 0.0)|swigluoai_uninterleave"),
    ("gemm1_clamp_limit", 0.0, ArgumentError, "want a positive|0.0"),
    ("gemm1_clamp_limit", torch.ones(2), DTypeError, "want a number"),
    *(
        (name, torch.ones(1), ArgumentError, "want None, got a Tensor")
        for name in (
            "a1_scale", "a2_scale", "a1_gscale", "a2_gscale", "g1_alphas", "g2_alphas", "w1_zp",
            "w2_zp", "w1_bias", "w2_bias",
        )
    ),
]  # fmt: skip


def check_refusal(function: str, given: dict[str, Any], error: type[CumoeError], says: str) -> None:
    with pytest.raises(error) as caught:
        getattr(vllm, function)(**given)
    begins, *parts = says.split("|")
    assert type(caught.value) is error
    assert str(caught.value).startswith(begins)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize("function", vllm.__all__)
def test_right_arguments_are_taken(function):
    getattr(vllm, function)(**right_arguments(function))


@pytest.mark.parametrize(("function", "change", "error", "says"), REFUSALS)
def test_refuses(function, change, error, says):
    check_refusal(function, right_arguments(function) | change, error, says)


@pytest.mark.parametrize(("field", "value", "error", "says"), BAD_FIELDS)
def test_refuses_the_config(field, value, error, says):
    given = right_arguments("fused_experts")
    setattr(given["quant_config"], field, value)
    check_refusal("fused_experts", given, error, f"quant_config.{field}|{says}")


@pytest.mark.parametrize("field", list(vars(quant_config())))
def test_a_config_that_lacks_a_field_is_refused(field):
    """So that a config of another version, with its clamp elsewhere, is not run without one."""
    given = right_arguments("fused_experts")
    delattr(given["quant_config"], field)
    check_refusal("fused_experts", given, ArgumentError, f"quant_config: want|without {field};")


def test_a_map_elsewhere_is_refused():
    given = right_arguments("moe_align_block_size") | {"expert_map": MAP.to("meta")}
    with pytest.raises(CumoeError, match="expert_map: want"):
        vllm.moe_align_block_size(**given)


def test_other_arrays_in_a_message_have_the_names_of_vllm():
    given = right_arguments("fused_experts")
    given["hidden_states"] = given["hidden_states"].T.contiguous().T
    with pytest.raises(ArgumentError, match=r"hidden_states: .*pass hidden_states\.contiguous\(\)"):
        vllm.fused_experts(**given)
