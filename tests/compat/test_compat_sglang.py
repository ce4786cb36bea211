"""cumoe.compat.sglang: SGLang's argument lists and layouts, our ops' bytes, and what is refused."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import cumoe
from cumoe import ArgumentError, CumoeError, DTypeError
from cumoe.compat import sglang
from tests.helpers import cases, child, oracles
from tests.helpers.backends import TorchBackend
from tests.helpers.torch_ops import require_same

FP8 = torch.float8_e4m3fn
WANTED = inspect.Parameter.empty
QUANTIZER: dict[str, Any] = {
    "x": WANTED, "group_size": WANTED, "eps": 1e-10, "column_major_scales": False,
    "scale_tma_aligned": False, "scale_ue8m0": False, "fuse_silu_and_mul": False,
    "masked_m": None, "output_q": None, "output_s": None,
}  # fmt: skip
# File and parameters of each function in the wheel of SGLang 0.5.23.
SIGNATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "fused_experts": ("srt/layers/moe/moe_runner/triton_utils/fused_moe.py", {
        "hidden_states": WANTED, "w1": WANTED, "w2": WANTED, "topk_output": WANTED,
        "moe_runner_config": WANTED, "b1": None, "b2": None, "use_fp8_w8a8": False,
        "use_int8_w8a8": False, "use_int8_w8a16": False, "use_int4_w4a16": False,
        "per_channel_quant": False, "w1_scale": None, "w2_scale": None, "w1_zp": None,
        "w2_zp": None, "a1_scale": None, "a2_scale": None, "block_shape": None, "a1_q": None,
        "fuse_swiglu_interleaved": False}),
    "moe_align_block_size": ("srt/layers/moe/moe_runner/triton_utils/moe_align_block_size.py", {
        "topk_ids": WANTED, "block_size": WANTED, "num_experts": WANTED,
        "ignore_invalid_expert": False, "return_inactive_prefix_count": False,
        "pad_expert_ids": False}),
    "per_token_group_quant_fp8": ("kernels/ops/quantization/fp8_kernel.py", QUANTIZER),
    "sglang_per_token_group_quant_fp8": ("kernels/ops/quantization/fp8_kernel.py", QUANTIZER),
    "silu_and_mul_contig_post_quant": ("kernels/ops/activation/silu_and_mul_clamp.py", {
        "input": WANTED, "output": WANTED, "output_scale": WANTED, "quant_group_size": WANTED,
        "scale_ue8m0": False, "transposed": False, "swiglu_limit": None, "swizzle": False}),
}  # fmt: skip
BY_NAME = {"return_inactive_prefix_count", "pad_expert_ids", "output_q", "output_s"}
LAYOUTS = {
    (False, False, False): ("fp32", "row"), (False, True, False): ("fp32", "row"),
    (True, False, False): ("fp32", "column"), (True, True, False): ("fp32", "tma"),
    (False, False, True): ("ue8m0", "row"), (True, True, True): ("ue8m0", "packed"),
}  # fmt: skip
"""column_major_scales, scale_tma_aligned, scale_ue8m0."""
NUM_EXPERTS = 8


def bf16(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return TorchBackend("cpu").put(cases.activations(rng, *shape))


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_parameters_are_those_of_sglang(name):
    parameters = inspect.signature(getattr(sglang, name)).parameters
    ours = [(p.name, p.default) for p in parameters.values()]
    assert ours == list(SIGNATURES[name][1].items()), SIGNATURES[name][0]
    assert {n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY} == BY_NAME & set(
        parameters
    )


def test_all_functions_are_listed():
    assert sorted(sglang.__all__) == sorted(SIGNATURES)


def test_importing_loads_neither_sglang_nor_torch():
    code = (
        "import sys, cumoe.compat.sglang\nassert 'torch' not in sys.modules\n"
        "assert 'sglang' not in sys.modules\nprint('done')"
    )
    out, errors = (running := child.start(code)).communicate()
    assert (running.returncode, out, errors) == (0, "done\n", "")


# The quantizer and the activation


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("how", LAYOUTS)
def test_quantizer(rng, how, is_fused):
    x = bf16(rng, 6, 1280)
    fmt, layout = LAYOUTS[how]
    column, aligned, ue8m0 = how
    got = sglang.sglang_per_token_group_quant_fp8(
        x, 128, column_major_scales=column, scale_tma_aligned=aligned, scale_ue8m0=ue8m0,
        fuse_silu_and_mul=is_fused,
    )  # fmt: skip
    op = cumoe.silu_and_mul_quant_fp8 if is_fused else cumoe.per_token_group_quant_fp8
    want = op(x, scale_format=fmt, scale_layout=layout)
    require_same(got, want)
    assert [t.stride() for t in got] == [t.stride() for t in want]
    assert got[1].dtype == (torch.int32 if layout == "packed" else torch.float32)


def test_scales_have_the_leading_dimensions_of_x(rng):
    x = bf16(rng, 2, 3, 256)
    q, scale = sglang.per_token_group_quant_fp8(x, 128)
    assert (q.shape, scale.shape) == ((2, 3, 256), (2, 3, 2))
    want = cumoe.per_token_group_quant_fp8(x.view(6, 256))
    require_same((q.view(6, 256), scale.view(6, 2)), want)


def outputs(M: int, H: int, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.full((M, H), 0xAA, dtype=torch.uint8).view(FP8)
    if packed:
        padded = torch.full((-(-H // 512), -(-M // 4) * 4), 123, dtype=torch.int32)
        return q, padded.T[:M]
    return q, torch.full((M, H // 128), 123.0)


def test_given_outputs_are_filled_and_returned(rng):
    x = bf16(rng, 3, 256)
    q, scale = outputs(3, 256, False)
    result = sglang.sglang_per_token_group_quant_fp8(x, 128, output_q=q, output_s=scale)
    assert result[0] is q
    assert result[1] is scale
    require_same(result, cumoe.per_token_group_quant_fp8(x))


@pytest.mark.parametrize(("ue8m0", "packed"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("limit", [None, 1.5])
def test_activation_into_outputs(rng, ue8m0, packed, limit):
    x = bf16(rng, 6, 2048)
    result = outputs(6, 1024, packed)
    returned = sglang.silu_and_mul_contig_post_quant(x, *result, 128, ue8m0, packed, limit)
    assert returned is None
    fmt, layout = "ue8m0" if ue8m0 else "fp32", "packed" if packed else "row"
    want = cumoe.silu_and_mul_quant_fp8(x, limit=limit, scale_format=fmt, scale_layout=layout)
    require_same(result, want)


def test_a_dropped_clamp_would_be_seen(rng):
    x, (q, scale) = bf16(rng, 6, 2048), outputs(6, 1024, False)
    sglang.silu_and_mul_contig_post_quant(x, q, scale, 128)
    with pytest.raises(AssertionError, match="bytes of result 0 differ"):
        require_same((q, scale), cumoe.silu_and_mul_quant_fp8(x, limit=0.5))


# The sort


@pytest.mark.parametrize(("num_tokens", "topk"), [(0, 2), (1, 2), (3, 2), (33, 4)])
@pytest.mark.parametrize("block_size", [1, 16])
def test_slots_of_no_expert_come_first(rng, num_tokens, topk, block_size):
    ids = cases.with_minus_one(rng, num_tokens, NUM_EXPERTS, topk)
    slots, experts, used = sglang.moe_align_block_size(
        torch.from_numpy(ids), block_size, NUM_EXPERTS
    )
    want_slots, want_experts, count = oracles.align_by_loops(ids + 1, block_size, NUM_EXPERTS + 1)
    assert {t.dtype for t in (slots, experts, used)} == {torch.int32}
    assert used.tolist() == [count]
    assert slots.tolist() == want_slots + [ids.size] * (len(slots) - count)
    blocks = [e - 1 for e in want_experts]
    assert experts.tolist() == blocks + [-1] * (len(experts) - len(blocks))
    assert len(experts) * block_size == len(slots)


# The experts


def runner_config(**change: Any) -> SimpleNamespace:
    """The defaults of SGLang's MoeRunnerConfig, as far as they are read."""
    return SimpleNamespace(**{
        "activation": "silu", "is_gated": True, "apply_router_weight_on_input": False,
        "inplace": True, "no_combine": False, "no_combine_keep_router_weight": False,
        "routed_scaling_factor": None, "gemm1_alpha": None, "gemm1_beta": None,
        "gemm1_clamp_limit": None, "swiglu_limit": None, "gate_up_interleaved": True,
        "silu_mul_keep_fp32": False, **change,
    })  # fmt: skip


def layer_call(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of ours, and of SGLang's without a config."""
    c = cases.experts_case(rng, routing="with_minus_one", num_tokens=5, topk=2, intermediate=128)
    put = TorchBackend("cpu").put
    ours = {
        "x": put(c.x), "w1": put(c.experts.w1), "w2": put(c.experts.w2),
        "topk_weights": put(c.weights), "topk_ids": put(c.ids),
        **{k: put(v) for k, v in c.experts.scales.items()},
    }  # fmt: skip
    topk = SimpleNamespace(topk_weights=ours["topk_weights"], topk_ids=ours["topk_ids"])
    theirs = {k: ours[k] for k in ("w1", "w2", "w1_scale", "w2_scale")} | {
        "hidden_states": ours["x"].clone(), "topk_output": topk, "use_fp8_w8a8": True,
        "block_shape": [128, 128],
    }  # fmt: skip
    return ours, theirs


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {}),
        ({"swiglu_limit": 0.5}, {"swiglu_limit": 0.5}),
        ({"routed_scaling_factor": 2.5}, {"routed_scaling_factor": 2.5}),
        (
            {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 0.5, "gate_up_interleaved": False},
            {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 0.5},
        ),
    ],
)
@pytest.mark.parametrize("inplace", [True, False])
def test_experts(rng, config, options, inplace):
    ours, theirs = layer_call(rng)
    want = cumoe.fused_experts_fp8(**ours, **options)
    result = sglang.fused_experts(
        **theirs, moe_runner_config=runner_config(inplace=inplace, **config)
    )
    require_same((result,), (want,))
    assert (result is theirs["hidden_states"]) == inplace
    if not inplace:
        require_same((theirs["hidden_states"],), (ours["x"],))


# Refusals


def right_arguments(function: str) -> dict[str, Any]:
    x, (q, scale) = torch.zeros(4, 512).bfloat16(), outputs(4, 256, False)
    if function == "fused_experts":
        return layer_call(np.random.default_rng(0))[1] | {"moe_runner_config": runner_config()}
    ids = {"topk_ids": torch.zeros(4, 2, dtype=torch.int32), "block_size": 16, "num_experts": 8}
    return {
        "moe_align_block_size": ids,
        "sglang_per_token_group_quant_fp8": {"x": x, "group_size": 128},
        "silu_and_mul_contig_post_quant": {
            "input": x, "output": q, "output_scale": scale, "quant_group_size": 128,
        },
    }[function]  # fmt: skip


QUANT, SILU, SORT, EXPERTS = (
    "sglang_per_token_group_quant_fp8", "silu_and_mul_contig_post_quant", "moe_align_block_size",
    "fused_experts",
)  # fmt: skip
CUBE = torch.zeros(2, 4, 512).bfloat16()
REFUSALS: list[tuple[str, dict[str, Any], type[CumoeError], str]] = [
    (QUANT, {"eps": 1e-6}, ArgumentError, "eps: want 1e-10"),
    (QUANT, {"group_size": 64}, ArgumentError, "group_size: want|64"),
    (QUANT, {"masked_m": torch.ones(1)}, ArgumentError, "masked_m: want None, got 'Tensor'"),
    (QUANT, {"scale_ue8m0": 1}, DTypeError, "scale_ue8m0: want True or False"),
    (QUANT, {"scale_tma_aligned": 1}, DTypeError, "scale_tma_aligned: want True or False"),
    (QUANT, {"column_major_scales": 1}, DTypeError, "column_major_scales: want True or False"),
    (QUANT, {"fuse_silu_and_mul": 1}, DTypeError, "fuse_silu_and_mul: want True or False"),
    (
        QUANT, {"scale_ue8m0": True, "column_major_scales": True}, ArgumentError,
        "scale_tma_aligned: want True with scale_ue8m0 and column_major_scales",
    ),
    (QUANT, {"x": CUBE, "column_major_scales": True}, ArgumentError, "x: want 2 dimensions|column"),
    (QUANT, {"x": CUBE, "fuse_silu_and_mul": True}, ArgumentError, "x: want 2 dimensions|fuse"),
    (QUANT, {"x": CUBE, "output_s": torch.ones(8, 4)}, ArgumentError, "x: want 2 dimensions|outp"),
    (QUANT, {"output_q": torch.zeros(4, 128).to(FP8)}, ArgumentError, "output_q: want|[4, 128]"),
    (QUANT, {"output_s": torch.zeros(4, 3)}, ArgumentError, "output_s: want|[4, 3]"),
    (SILU, {"swizzle": True}, ArgumentError, "swizzle: want False, got True|interleaved"),
    (SILU, {"transposed": True}, ArgumentError, "scale_ue8m0: want True for transposed"),
    (SILU, {"swiglu_limit": 0.0}, ArgumentError, "swiglu_limit: want a positive|0.0"),
    (SILU, {"quant_group_size": 64}, ArgumentError, "quant_group_size: want|64"),
    (SILU, {"output": torch.zeros(4, 8).to(FP8)}, ArgumentError, "output: want|[4, 8]"),
    (SILU, {"output_scale": torch.zeros(4, 3)}, ArgumentError, "output_scale: want|[4, 3]"),
    (SILU, {"input": torch.zeros(4, 512)}, DTypeError, "input: want bf16, got fp32"),
    (SORT, {"ignore_invalid_expert": True}, ArgumentError, "ignore_invalid_expert: want False"),
    (
        SORT, {"return_inactive_prefix_count": True}, ArgumentError,
        "return_inactive_prefix_count: want False",
    ),
    (SORT, {"num_experts": 8.0}, DTypeError, "num_experts: want a whole number"),
    (EXPERTS, {"use_fp8_w8a8": False}, ArgumentError, "use_fp8_w8a8: want True, got False"),
    (EXPERTS, {"use_int8_w8a8": True}, ArgumentError, "use_int8_w8a8: want False, got True"),
    (EXPERTS, {"per_channel_quant": True}, ArgumentError, "per_channel_quant: want False"),
    (EXPERTS, {"fuse_swiglu_interleaved": True}, ArgumentError, "fuse_swiglu_interleaved: want"),
    (EXPERTS, {"b1": torch.ones(1)}, ArgumentError, "b1: want None, got 'Tensor'; leave it out"),
    (EXPERTS, {"a1_q": torch.ones(1)}, ArgumentError, "a1_q: want None, got 'Tensor'"),
    (EXPERTS, {"block_shape": None}, ArgumentError, "block_shape: want [128, 128], got None"),
    (EXPERTS, {"block_shape": [64, 64]}, ArgumentError, "block_shape: want|64"),
    (EXPERTS, {"topk_output": (1, 2)}, ArgumentError, "topk_output: want a StandardTopKOutput"),
    (EXPERTS, {"moe_runner_config": None}, ArgumentError, "moe_runner_config: want a MoeRunnerC"),
    (EXPERTS, {"hidden_states": torch.ones(5, 512)}, DTypeError, "hidden_states: want bf16"),
]  # fmt: skip
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"activation": "gelu"}, "activation: want silu, got 'gelu'; use SGLang's own"),
    ({"is_gated": False}, "is_gated: want True, got False"),
    ({"no_combine": True}, "no_combine: want False, got True"),
    ({"silu_mul_keep_fp32": True}, "silu_mul_keep_fp32: want False, got True"),
    ({"gemm1_clamp_limit": 7.0}, "gemm1_clamp_limit: want None, got 7.0; a clamp before"),
    ({"gemm1_beta": 1.0}, "gemm1_beta: want None, got 1.0"),
    ({"gemm1_alpha": 1.7}, "gate_up_interleaved: want False, got True; store gate before up"),
    (
        {"gemm1_alpha": 1.7, "gate_up_interleaved": False},
        "gemm1_clamp_limit: want a number with gemm1_alpha, got None; pass one, or inf",
    ),
    (
        {"gemm1_alpha": 1.7, "gate_up_interleaved": False, "swiglu_limit": 7.0},
        "swiglu_limit: want None, got 7.0",
    ),
    (
        {"gemm1_alpha": 1.7, "gate_up_interleaved": False, "gemm1_beta": 0.5},
        "gemm1_beta: want 1.0 or None, got 0.5",
    ),
    ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor: want"),
]


@pytest.mark.parametrize(("function", "change", "error", "says"), REFUSALS)
def test_what_the_ops_do_not_have_is_refused_by_sglangs_name(function, change, error, says):
    given = right_arguments(function)
    getattr(sglang, function)(**given)
    with pytest.raises(error) as told:
        getattr(sglang, function)(**given | change)
    assert str(told.value).startswith(says.split("|")[0])
    assert all(part in str(told.value) for part in says.split("|"))


@pytest.mark.parametrize(("change", "says"), CONFIGS)
def test_a_config_that_asks_for_more_is_refused(change, says):
    given = right_arguments("fused_experts") | {"moe_runner_config": runner_config(**change)}
    with pytest.raises(ArgumentError) as told:
        sglang.fused_experts(**given)
    assert str(told.value).startswith(f"moe_runner_config.{says}")
