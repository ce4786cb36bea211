"""Refusals that depend on where arrays lie, and on what float32 can hold."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import cumoe
from cumoe import ArgumentError
from tests.helpers.backends import NumpyBackend, TorchBackend
from tests.helpers.calls import RIGHT_ARGUMENTS, Arguments, placed
from tests.helpers.cases import BF16, E4M3
from tests.helpers.layouts import aligned_bytes, reinterpreted


def zeros(*shape, dtype=np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def check_overlap(op: str, argument: str, other: str, arguments: Arguments) -> None:
    with pytest.raises(ArgumentError, match=f"^{argument}: must not overlap {other}"):
        getattr(cumoe, op)(**arguments)


@pytest.mark.parametrize("op", ["per_token_group_quant_fp8", "silu_and_mul_quant_fp8"])
def test_outputs_of_a_quantizer_must_not_overlap_its_input(backend, op):
    (name, x), *_ = placed(backend, RIGHT_ARGUMENTS[op]()).items()
    size = 4 * 256
    out = reinterpreted(x.reshape(-1), "uint8")[-size:].reshape(4, 256)
    check_overlap(op, "out", name, {name: x, "out": out})
    scale = reinterpreted(x.reshape(-1)[:16], "float32").reshape(4, 2)
    check_overlap(op, "out_scale", name, {name: x, "out_scale": scale})


def test_outputs_of_the_activation_must_not_overlap_ids_or_map(backend):
    op = "silu_and_mul_quant_fp8"
    arguments = placed(backend, RIGHT_ARGUMENTS[op]())
    out = backend.put(zeros(4, 256, dtype=np.uint8))
    words = reinterpreted(out.reshape(-1), "int32")
    check_overlap(op, "out", "topk_ids", {**arguments, "out": out, "topk_ids": words[8:12]})
    ids = backend.put(zeros(4, dtype=np.int32))
    with_map = {**arguments, "topk_ids": ids, "expert_map": words[-8:]}
    check_overlap(op, "out", "expert_map", {**with_map, "out": out})


@pytest.mark.parametrize(
    "name", ["w1", "w2", "w1_scale", "w2_scale", "topk_ids", "topk_weights", "expert_map"]
)
def test_out_must_not_overlap_an_input_of_the_experts(backend, name):
    arguments = {**RIGHT_ARGUMENTS["fused_experts_fp8"](), "expert_map": zeros(8, dtype=np.int32)}
    shape, dtype = arguments[name].shape, arguments[name].dtype
    size = max(arguments[name].nbytes, 4 * 256 * 2)
    memory = aligned_bytes(backend, size)
    as_type = "uint8" if dtype == E4M3 else dtype.name
    array = reinterpreted(memory[: arguments[name].nbytes], as_type).reshape(shape)
    out = reinterpreted(memory[: 4 * 256 * 2], "bfloat16").reshape(4, 256)
    check_overlap(
        "fused_experts_fp8", "out", name, {**placed(backend, arguments), name: array, "out": out}
    )


def test_out_must_be_x_or_apart_from_it(backend):
    base = backend.put(zeros(5, 256, dtype=BF16))
    arguments = placed(backend, RIGHT_ARGUMENTS["fused_experts_fp8"]())
    shifted = {**arguments, "x": base[:4], "out": base[1:]}
    check_overlap("fused_experts_fp8", "out", "x", shifted)
    wide = backend.put(zeros(8, 256, dtype=BF16))
    denser = {**arguments, "x": wide[:4], "out": wide[::2]}
    check_overlap("fused_experts_fp8", "out", "x", denser)


def test_workspace_must_not_overlap_an_array(backend):
    op = "fused_experts_fp8"
    arguments = placed(backend, RIGHT_ARGUMENTS[op]())
    memory = aligned_bytes(backend, 1 << 20)
    w2 = memory[: 8 * 256 * 128].reshape(8, 256, 128)
    check_overlap(op, "workspace", "w2", {**arguments, "w2": w2, "workspace": memory})
    bf16 = reinterpreted(memory[-4 * 256 * 2 :], "bfloat16").reshape(4, 256)
    check_overlap(op, "workspace", "x", {**arguments, "x": bf16, "workspace": memory})
    check_overlap(op, "workspace", "out", {**arguments, "out": bf16, "workspace": memory})


TOO_LARGE, TOO_SMALL = 1e39, 1e-60
"""Finite and positive in Python, but infinity and zero as the float32 that a kernel takes."""


@pytest.mark.parametrize(
    ("op", "name", "bad"),
    [
        ("silu_and_mul_quant_fp8", "limit", TOO_SMALL),
        ("silu_and_mul_quant_fp8", "alpha", TOO_SMALL),
        ("silu_and_mul_quant_fp8", "alpha", TOO_LARGE),
        ("silu_and_mul_quant_fp8", "beta", TOO_LARGE),
        ("fused_experts_fp8", "swiglu_limit", TOO_SMALL),
        ("fused_experts_fp8", "swiglu_alpha", TOO_SMALL),
        ("fused_experts_fp8", "swiglu_alpha", TOO_LARGE),
        ("fused_experts_fp8", "swiglu_beta", -TOO_LARGE),
        ("fused_experts_fp8", "routed_scaling_factor", TOO_LARGE),
    ],
)
def test_refuses_constants_that_float32_cannot_hold(backend, op, name, bad):
    arguments = placed(backend, RIGHT_ARGUMENTS[op]())
    with pytest.raises(ArgumentError, match=rf"^{name}\b.*{re.escape(repr(bad))}"):
        getattr(cumoe, op)(**arguments, **{name: bad})


@pytest.mark.parametrize("op", RIGHT_ARGUMENTS)
def test_frameworks_of_one_device_may_be_mixed(op):
    """NumPy and torch on the CPU; the results have the framework of the first array."""
    first, *others = RIGHT_ARGUMENTS[op]().items()
    torch_cpu, numpy = TorchBackend("cpu"), NumpyBackend()
    mixed = {**placed(torch_cpu, dict([first])), **placed(numpy, dict(others))}
    results = getattr(cumoe, op)(**mixed)
    results = results if isinstance(results, tuple) else (results,)
    assert [type(r) for r in results] == [torch.Tensor] * len(results)


def test_the_kernels_want_an_aligned_workspace(backend):
    arguments = placed(backend, RIGHT_ARGUMENTS["fused_experts_fp8"]())
    arguments["workspace"] = aligned_bytes(backend, 1 << 22)[1:]
    if backend.is_gpu:
        with pytest.raises(ArgumentError, match=r"workspace: want an address .* multiple of 256"):
            cumoe.fused_experts_fp8(**arguments)
    else:  # the reference uses none
        assert cumoe.fused_experts_fp8(**arguments).shape == arguments["x"].shape
