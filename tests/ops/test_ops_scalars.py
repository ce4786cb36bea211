"""Scalars are values: of the right type, compared as numbers, of this call alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumoe
from cumoe import ArgumentError, DTypeError
from tests.helpers.backends import BF16, E4M3


def activation(**change: Any) -> Any:
    return cumoe.silu_and_mul_quant_fp8(np.full((1, 256), 8, BF16), **change)


def experts(**change: Any) -> Any:
    arrays = {
        "x": np.ones((2, 128), BF16),
        "w1": np.ones((2, 256, 128), E4M3),
        "w2": np.ones((2, 128, 128), E4M3),
        "topk_weights": np.ones((2, 1), np.float32),
        "topk_ids": np.zeros((2, 1), np.int32),
        "w1_scale": np.ones((2, 2, 1), np.float32),
        "w2_scale": np.ones((2, 1, 1), np.float32),
    }
    return cumoe.fused_experts_fp8(**arrays | change)


def sort(**change: Any) -> Any:
    return cumoe.moe_align_block_size(
        **{"topk_ids": np.zeros((1, 1), np.int32), "block_size": 4, "num_experts": 2} | change
    )


WRONG = [
    (activation, "limit", "7"),
    (activation, "limit", np.array(7.0)),
    (activation, "alpha", None),
    (activation, "beta", "0"),
    (activation, "beta", True),
    (activation, "group_size", [128]),
    (activation, "scale_format", ["fp32"]),
    (activation, "scale_layout", None),
    (activation, "num_experts", 2.5),
    (experts, "swiglu_limit", "7"),
    (experts, "swiglu_alpha", None),
    (experts, "swiglu_beta", [0.0]),
    (experts, "routed_scaling_factor", None),
    (experts, "block_shape", 128),
    (experts, "scale_format", None),
    (experts, "num_experts", True),
    (experts, "apply_router_weight_on_input", "no"),
    (experts, "max_workspace_bytes", "1"),
    (sort, "block_size", "4"),
    (sort, "block_size", True),
    (sort, "block_size", 2.0),
    (sort, "num_experts", "2"),
]


@pytest.mark.parametrize(
    ("op", "name", "value"),
    WRONG,
    ids=[f"{op.__name__}-{name}-{value}" for op, name, value in WRONG],
)
def test_a_scalar_of_another_type_is_refused_by_name(op, name, value):
    with pytest.raises(DTypeError, match=rf"^{name}: want .*, got "):
        op(**{name: value})


def test_a_torch_scalar_is_no_number():
    import torch

    with pytest.raises(DTypeError, match=r"^limit: want a number, got tensor\(7\.\)"):
        activation(limit=torch.tensor(7.0))


@pytest.mark.parametrize("value", [10**400, float("inf"), None])
def test_a_limit_beyond_all_numbers_is_none(value):
    assert float(activation(limit=value)[1][0, 0]) == float(activation()[1][0, 0])


@pytest.mark.parametrize("number", [7, 7.0, np.float32(7), np.int64(7)])
def test_numbers_of_any_kind_are_equal(number):
    assert float(activation(limit=number)[1][0, 0]) == float(activation(limit=7.0)[1][0, 0])


def test_minus_zero_is_zero():
    up = np.full((1, 256), 1, BF16)
    up[:, 128:] = -0.0
    codes = [
        cumoe.silu_and_mul_quant_fp8(up, beta=beta)[0].view(np.uint8).max() for beta in (0.0, -0.0)
    ]
    assert codes == [0, 0]


@pytest.mark.parametrize("factors", [(0.0, -0.0), (-0.0, 0.0)])
def test_a_factor_of_minus_zero_is_zero(factors):
    outputs = [experts(routed_scaling_factor=factor).view(np.uint16) for factor in factors]
    assert (outputs[0] == outputs[1]).all()


def test_no_experts_are_refused():
    with pytest.raises(ArgumentError, match="w1: want at least 1 and at most 4096 experts"):
        experts(
            w1=np.ones((0, 256, 128), E4M3), w2=np.ones((0, 128, 128), E4M3),
            w1_scale=np.ones((0, 2, 1), np.float32), w2_scale=np.ones((0, 1, 1), np.float32),
        )  # fmt: skip


def test_outputs_may_not_share_memory():
    buffer = np.zeros(512, np.uint8)
    out, scale = buffer.reshape(2, 256), buffer[:16].view(np.float32).reshape(2, 2)
    with pytest.raises(ArgumentError, match="out_scale: must not overlap out"):
        cumoe.per_token_group_quant_fp8(np.ones((2, 256), BF16), out=out, out_scale=scale)
    with pytest.raises(ArgumentError, match="out_scale: must not overlap out"):
        cumoe.silu_and_mul_quant_fp8(np.ones((2, 512), BF16), out=out, out_scale=scale)


@pytest.mark.parametrize("stride", [0, 2, 254])
def test_rows_of_out_may_not_overlap(stride):
    out = np.lib.stride_tricks.as_strided(np.zeros(512, BF16), (2, 128), (stride, 2))
    with pytest.raises(ArgumentError, match="out: want rows of 128 elements that do not overlap"):
        experts(out=out)


def test_outputs_must_be_writeable():
    x, out = np.ones((2, 256), BF16), np.zeros((2, 256), np.uint8)
    out.flags.writeable = False
    with pytest.raises(ArgumentError, match="out: want a writeable array"):
        cumoe.per_token_group_quant_fp8(x, out=out)
    scale = np.zeros((2, 2), np.float32)
    scale.flags.writeable = False
    with pytest.raises(ArgumentError, match="out_scale: want a writeable array"):
        cumoe.per_token_group_quant_fp8(x, out_scale=scale)
    tokens = np.zeros((2, 128), BF16)
    tokens.flags.writeable = False
    with pytest.raises(ArgumentError, match="out: want a writeable array"):
        experts(out=tokens)
