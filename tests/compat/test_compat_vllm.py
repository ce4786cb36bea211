"""cumoe.compat.vllm: vLLM's argument lists and layouts, our ops' bytes, and what is refused."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import cumoe
from cumoe.compat import vllm
from tests.helpers import cases, child, oracles
from tests.helpers.backends import TorchBackend
from tests.helpers.torch_ops import require_same

FP8 = torch.float8_e4m3fn
WANTED = inspect.Parameter.empty
FUSED_MOE = "model_executor/layers/fused_moe"
FP8_UTILS = "model_executor/layers/quantization/utils/fp8_utils.py"
# File and parameters of each function in the wheel of vLLM 0.26.0. The default of `activation`
# is MoEActivation.SILU there, whose value is "silu".
SIGNATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "fused_experts": (f"{FUSED_MOE}/fused_moe.py", {
        "hidden_states": WANTED, "w1": WANTED, "w2": WANTED, "topk_weights": WANTED,
        "topk_ids": WANTED, "activation": "silu", "apply_router_weight_on_input": False,
        "global_num_experts": -1, "expert_map": None, "quant_config": None}),
    "moe_align_block_size": (f"{FUSED_MOE}/moe_align_block_size.py", {
        "topk_ids": WANTED, "block_size": WANTED, "num_experts": WANTED, "expert_map": None,
        "pad_sorted_ids": False, "ignore_invalid_experts": False}),
    "per_token_group_quant_fp8": (FP8_UTILS, {
        "x": WANTED, "group_size": WANTED, "eps": 1e-10, "dtype": None,
        "column_major_scales": False, "tma_aligned_scales": False, "out_q": None,
        "use_ue8m0": None}),
    "per_token_group_quant_fp8_packed_for_deepgemm": (FP8_UTILS, {
        "x": WANTED, "group_size": WANTED, "eps": 1e-10, "use_ue8m0": None, "out_q": None}),
    "silu_and_mul_per_block_quant": ("_custom_ops.py", {
        "input": WANTED, "group_size": WANTED, "quant_dtype": WANTED, "scale_ub": None,
        "is_scale_transposed": False}),
    "silu_mul_per_token_group_quant_fp8_colmajor": (FP8_UTILS, {
        "input": WANTED, "output": None, "use_ue8m0": None, "eps": 1e-10, "clamp_limit": None,
        "group_size": 128, "alpha": 1.0, "beta": 0.0}),
    "silu_mul_quant_fp8_packed_triton": (FP8_UTILS, {
        "input": WANTED, "group_size": 128, "output_q": None, "clamp_limit": None, "alpha": 1.0,
        "beta": 0.0}),
}  # fmt: skip
NUM_EXPERTS = 8


def bf16(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return TorchBackend("cpu").put(cases.activations(rng, *shape) * cases.BF16.type(3))


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_parameters_are_those_of_vllm(name):
    parameters = inspect.signature(getattr(vllm, name)).parameters.values()
    ours = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(ours.items()) == list(SIGNATURES[name][1].items()), SIGNATURES[name][0]
    more = {p.name: p.default for p in parameters if p.kind is not p.POSITIONAL_OR_KEYWORD}
    clamp = {"clamp_limit": None, "alpha": 1.0, "beta": 0.0}
    assert more == (clamp if name == "silu_and_mul_per_block_quant" else {})


def test_all_functions_are_listed():
    assert sorted(vllm.__all__) == sorted(SIGNATURES)


def test_importing_loads_neither_vllm_nor_torch():
    code = (
        "import sys, cumoe.compat.vllm\nassert 'torch' not in sys.modules\n"
        "assert 'vllm' not in sys.modules\nprint('done')"
    )
    out, errors = (running := child.start(code)).communicate()
    assert (running.returncode, out, errors) == (0, "done\n", "")


# The quantizer


def quantized(x: torch.Tensor, *, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As vLLM documents it, in torch: codes and row-major scales of groups of 128."""
    groups = x.float().reshape(*x.shape[:-1], x.shape[-1] // 128, 128)
    scale = groups.abs().amax(-1).clamp(min=1e-10) / 448
    if ue8m0:
        scale = torch.exp2(torch.ceil(torch.log2(scale.double().clamp(min=1e-10)))).float()
    return (groups / scale[..., None]).clamp(-448, 448).to(FP8).reshape(x.shape), scale


def packed(scale: torch.Tensor) -> torch.Tensor:
    """Exponent bytes of powers of two, four to an int32, the first lowest."""
    exponents = torch.frexp(scale)[1] + 126
    exponents = torch.nn.functional.pad(exponents, (0, -scale.shape[1] % 4)).view(len(scale), -1, 4)
    return (exponents << torch.tensor([0, 8, 16, 24])).sum(-1, dtype=torch.int32)


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize(
    ("column", "tma", "strides"),
    [(False, False, (5, 1)), (False, True, (5, 1)), (True, False, (1, 6)), (True, True, (1, 8))],
)
def test_quantizer(rng, ue8m0, column, tma, strides):
    x = bf16(rng, 6, 640)
    x[2, :128] = 0
    q, scale = vllm.per_token_group_quant_fp8(
        x, 128, column_major_scales=column, tma_aligned_scales=tma, use_ue8m0=ue8m0
    )
    assert (q.dtype, scale.dtype, scale.stride()) == (FP8, torch.float32, strides)
    require_same((q, scale), quantized(x, ue8m0=ue8m0))
    layout = "row" if not column else "tma" if tma else "column"
    fmt = "ue8m0" if ue8m0 else "fp32"
    ours = cumoe.per_token_group_quant_fp8(x, scale_format=fmt, scale_layout=layout)
    require_same((q, scale), ours)


@pytest.mark.parametrize("shape", [(256,), (2, 3, 256), (2, 0, 256)])
def test_scales_have_the_leading_dimensions_of_x(rng, shape):
    x = bf16(rng, *shape)
    require_same(vllm.per_token_group_quant_fp8(x, 128, 1e-10, FP8), quantized(x, ue8m0=False))


def test_packed_quantizer(rng):
    x = bf16(rng, 2, 3, 640)
    q, scale = vllm.per_token_group_quant_fp8_packed_for_deepgemm(x, 128)
    assert scale.stride() == (1, 8)
    want_q, want_scale = quantized(x, ue8m0=True)
    require_same((q, scale), (want_q, packed(want_scale.view(6, 5))))


@pytest.mark.parametrize(
    "name", ["per_token_group_quant_fp8", "per_token_group_quant_fp8_packed_for_deepgemm"]
)
def test_out_q_is_filled_and_returned(rng, name):
    x, out = bf16(rng, 3, 256), torch.full((3, 256), 0xAA, dtype=torch.uint8)
    q, scale = getattr(vllm, name)(x, 128, out_q=out)
    assert q is out
    require_same((q, scale), getattr(vllm, name)(x, 128))


@pytest.mark.parametrize("is_used", [False, True])
def test_none_asks_the_vllm_that_is_loaded(rng, monkeypatch, is_used):
    x = bf16(rng, 3, 256)
    require_same(vllm.per_token_group_quant_fp8(x, 128), quantized(x, ue8m0=False))
    loaded = SimpleNamespace(is_deep_gemm_e8m0_used=lambda: is_used)
    monkeypatch.setitem(sys.modules, "vllm.utils.deep_gemm", loaded)
    require_same(vllm.per_token_group_quant_fp8(x, 128), quantized(x, ue8m0=is_used))


# Activation and quantization


def activated(gate_up: torch.Tensor, limit: float, alpha: float, beta: float) -> torch.Tensor:
    """vLLM's silu_and_mul_with_clamp in torch, for limits that bf16 holds; inf for none."""
    gate, up = gate_up.float().chunk(2, dim=1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    sigmoid_of = (-alpha * gate).double().exp().float()
    return ((gate / (1 + sigmoid_of)).bfloat16().float() * (up + beta)).bfloat16()


SWIGLU = [(None, 1.0, 0.0), (2.0, 1.0, 0.0), (2.0, 1.702, 1.0)]


@pytest.mark.parametrize(("limit", "alpha", "beta"), SWIGLU)
def test_activation(rng, limit, alpha, beta):
    x, options = bf16(rng, 6, 1280), {"clamp_limit": limit, "alpha": alpha, "beta": beta}
    y = activated(x, np.inf if limit is None else limit, alpha, beta)
    fp32, ue8m0 = quantized(y, ue8m0=False), quantized(y, ue8m0=True)
    row = vllm.silu_and_mul_per_block_quant(x, 128, FP8, **options)
    column = vllm.silu_and_mul_per_block_quant(x, 128, FP8, None, True, **options)
    assert (row[1].stride(), column[1].stride()) == ((5, 1), (1, 6))
    require_same((*row, *column), (*fp32, *fp32))
    colmajor = vllm.silu_mul_per_token_group_quant_fp8_colmajor
    for power, want in ((False, fp32), (True, ue8m0)):
        result = colmajor(x, use_ue8m0=power, **options)
        assert result[1].stride() == (1, 6)
        require_same(result, want)
    q, scale = vllm.silu_mul_quant_fp8_packed_triton(x, **options)
    assert scale.stride() == (1, 8)
    require_same((q, scale), (ue8m0[0], packed(ue8m0[1])))
    ours = {"limit": limit, "alpha": alpha, "beta": beta}
    require_same(row, cumoe.silu_and_mul_quant_fp8(x, **ours))


def test_a_dropped_clamp_would_be_seen(rng):
    x = bf16(rng, 6, 512)
    with pytest.raises(AssertionError, match="bytes of result 0 differ"):
        require_same(
            vllm.silu_and_mul_per_block_quant(x, 128, FP8),
            quantized(activated(x, 2.0, 1.0, 0.0), ue8m0=False),
        )


def test_outputs_of_the_activation(rng):
    x = bf16(rng, 3, 512)
    for function, name in (
        (vllm.silu_mul_per_token_group_quant_fp8_colmajor, "output"),
        (vllm.silu_mul_quant_fp8_packed_triton, "output_q"),
    ):
        out = torch.full((3, 256), 0xAA, dtype=torch.uint8)
        result = function(x, **{name: out})
        assert result[0] is out
        require_same(result, function(x))


# The sort


def test_sort_of_vllms_example():
    """The example of its docstring; ids up to 4 want five experts."""
    ids = torch.tensor([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]])
    slots, experts, used = vllm.moe_align_block_size(ids, 4, 5)
    want = [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12]
    assert (slots.tolist(), experts.tolist(), used.tolist()) == (
        [*want, *[12] * 11], [1, 2, 3, 4, -1, -1, -1], [16]
    )  # fmt: skip


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(("num_tokens", "topk"), [(0, 2), (1, 2), (3, 2), (4, 2), (33, 4)])
@pytest.mark.parametrize("block_size", [1, 16, 100])
def test_sort(rng, num_tokens, topk, block_size, is_padded):
    ids = cases.with_minus_one(rng, num_tokens, NUM_EXPERTS, topk)
    result = vllm.moe_align_block_size(
        torch.from_numpy(ids), block_size, NUM_EXPERTS, pad_sorted_ids=is_padded
    )
    length = ids.size + NUM_EXPERTS * (block_size - 1)
    length = -(-length // block_size) * block_size if is_padded else length
    if ids.size < NUM_EXPERTS:
        length = min(ids.size * block_size, length)
    slots, experts, used = oracles.align_by_loops(ids, block_size, NUM_EXPERTS)
    assert {t.dtype for t in result} == {torch.int32}
    assert result[0].tolist() == slots + [ids.size] * (length - used)
    assert result[1].tolist() == experts + [-1] * (-(-length // block_size) - len(experts))
    assert result[2].tolist() == [used]


def test_sort_with_an_expert_map(rng):
    ids = cases.uniform(rng, 9, NUM_EXPERTS, 2)
    table = cases.local_map(NUM_EXPERTS, 2, 3)
    given = torch.from_numpy(ids), 16, NUM_EXPERTS, torch.from_numpy(table)
    plain = cumoe.moe_align_block_size(*given[:3])
    slots, experts, used = vllm.moe_align_block_size(*given, True)
    require_same((slots, used), (plain[0], plain[2]))
    assert experts.dtype == torch.int32
    assert experts.tolist() == [int(table[e]) for e in plain[1].tolist()]
    ours = cumoe.moe_align_block_size(*given)
    require_same(vllm.moe_align_block_size(*given, True, True), ours)
    assert not torch.equal(slots, ours[0])
