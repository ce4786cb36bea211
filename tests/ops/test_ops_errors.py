"""Every refusal of the public ops: its type, and a message with the argument, wanted and got."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import cumoe
from cumoe import ArgumentError, CumoeError, DTypeError
from tests.helpers.calls import RIGHT_ARGUMENTS, Arguments, placed
from tests.helpers.cases import BF16, E4M3


class Refusal(NamedTuple):
    """A change to arguments that are right, and what comes of it."""

    change: Arguments
    error: type[CumoeError]
    says: tuple[str, ...]
    """What the message holds; the first is the argument's name, with which it begins."""


def wrong(error: type[CumoeError], says: str, **change: Any) -> Refusal:
    """``says`` is the parts of the message, separated by ``|``."""
    return Refusal(change, error, tuple(says.split("|")))


def value(says: str, **change: Any) -> Refusal:
    return wrong(ArgumentError, says, **change)


def dtype(says: str, **change: Any) -> Refusal:
    return wrong(DTypeError, says, **change)


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def slice_of(array: np.ndarray, *index: Any) -> Callable[..., Any]:
    """A view of the array, cut on the backend."""
    return lambda backend: backend.put(array)[index]


COLUMNS_FIRST = slice_of(zeros(256, 4, dtype=BF16).T, Ellipsis)
EVERY_OTHER = slice(None, None, 2)

QUANTIZER = {
    "no_array": dtype("x|NumPy, torch or CuPy array|list", x=[[0.0] * 128]),
    "no_array_but_none": dtype("x|NumPy, torch or CuPy array|None", x=None),
    "integers": dtype("x|bf16 or fp16 or fp32|int32", x=zeros(4, 256, dtype=np.int32)),
    "doubles": dtype("x|bf16 or fp16 or fp32|float64", x=zeros(4, 256, dtype=np.float64)),
    "scalar": value(
        "x|at least 1 dimension|scalar", x=lambda backend: backend.put(zeros(1)).reshape(())
    ),
    "K_100": value("x|128|100", x=zeros(4, 100)),
    "K_192": value("x|128|192", x=zeros(4, 192)),
    "K_288": value("x|128|288", x=zeros(4, 288)),
    "K_320": value("x|128|320", x=zeros(4, 320)),
    "K_0": value("x|128|0", x=zeros(4, 0)),
    "columns_first": value("x|contiguous|[1, 4]", x=COLUMNS_FIRST),
    "every_other": value("x|contiguous|[512, 2]", x=slice_of(zeros(4, 512), ..., EVERY_OTHER)),
    "not_rows": value(
        "x|flatten to rows|[4, 2, 256]|[768, 256, 1]",
        x=slice_of(zeros(4, 3, 256), slice(None), slice(2)),
    ),
    "group_size": value("group_size|[128]|64", group_size=64),
    "format": value("scale_format|fp32|ue8m0|'e8m0'", scale_format="e8m0"),
    "layout": value("scale_layout|row|packed|'diagonal'", scale_layout="diagonal"),
    "packed_fp32": value("scale_layout|ue8m0|'fp32'", scale_layout="packed"),
    "out_list": dtype("out|array|list", out=[1]),
    "out_dtype": dtype("out|e4m3|fp32", out=zeros(4, 256)),
    "out_shape": value("out|[4, 256]|[4, 128]", out=zeros(4, 128, dtype=E4M3)),
    "out_ndim": value("out|[4, 256]|[1024]", out=zeros(1024, dtype=E4M3)),
    "out_gaps": value(
        "out|contiguous|[384, 1]",
        out=slice_of(zeros(4, 384, dtype=E4M3), slice(None), slice(256)),
    ),
    "scale_dtype": dtype("out_scale|fp32|float64", out_scale=zeros(4, 2, dtype=np.float64)),
    "scale_shape": value("out_scale|[4, 2]|[4, 1]", out_scale=zeros(4, 1)),
    "scale_strides": value(
        "out_scale|strides [1, 4]|[2, 1]", out_scale=zeros(4, 2), scale_layout="column"
    ),
    "scale_strides_row": value(
        "out_scale|strides [2, 1]|[1, 4]", out_scale=slice_of(zeros(2, 4).T, ...)
    ),
    "scale_packed_dtype": dtype(
        "out_scale|int32|fp32",
        out_scale=zeros(4, 1), scale_format="ue8m0", scale_layout="packed",
    ),
}  # fmt: skip

IDS, MAP = zeros(4, dtype=np.int32), zeros(8, dtype=np.int32)

CONSTANTS = {
    "limit_0": ("limit", 0, "positive"),
    "limit_negative": ("limit", -1.0, "positive"),
    "limit_minus_infinity": ("limit", -np.inf, "positive"),
    "limit_nan": ("limit", np.nan, "positive"),
    "alpha_0": ("alpha", 0.0, "positive"),
    "alpha_negative": ("alpha", -1.702, "positive"),
    "alpha_infinite": ("alpha", np.inf, "finite"),
    "alpha_nan": ("alpha", np.nan, "finite"),
    "beta_infinite": ("beta", -np.inf, "finite"),
    "beta_nan": ("beta", np.nan, "finite"),
}

ACTIVATION = {
    **{k: value(f"{n}|{want}|{v!r}", **{n: v}) for k, (n, v, want) in CONSTANTS.items()},
    "no_array": dtype("gate_up|NumPy, torch or CuPy array|list", gate_up=[[0.0] * 256]),
    "fp16": dtype("gate_up|bf16|fp16", gate_up=zeros(4, 512, dtype=np.float16)),
    "fp32": dtype("gate_up|bf16|fp32", gate_up=zeros(4, 512)),
    "H_192": value("gate_up|128|384", gate_up=zeros(4, 384, dtype=BF16)),
    "H_288": value("gate_up|128|576", gate_up=zeros(4, 576, dtype=BF16)),
    "H_320": value("gate_up|128|640", gate_up=zeros(4, 640, dtype=BF16)),
    "H_64": value("gate_up|128|128", gate_up=zeros(4, 128, dtype=BF16)),
    "odd": value("gate_up|128|257", gate_up=zeros(4, 257, dtype=BF16)),
    "columns_first": value("gate_up|contiguous|[1, 4]", gate_up=COLUMNS_FIRST),
    "group_size": value("group_size|[128]|32", group_size=32),
    "format": value("scale_format|ue8m0|'fp8'", scale_format="fp8"),
    "layout": value("scale_layout|row|'rows'", scale_layout="rows"),
    "packed_fp32": value("scale_layout|ue8m0|'fp32'", scale_layout="packed"),
    "ids_dtype": dtype("topk_ids|int32 or int64|fp32", topk_ids=zeros(4)),
    "ids_narrow": dtype("topk_ids|int32 or int64|int16", topk_ids=zeros(4, dtype=np.int16)),
    "ids_count": value("topk_ids|4|[3]", topk_ids=zeros(3, dtype=np.int32)),
    "ids_count_2d": value("topk_ids|4|[4, 2]", topk_ids=zeros(4, 2, dtype=np.int32)),
    "ids_gaps": value("topk_ids|contiguous|[2]", topk_ids=slice_of(MAP, EVERY_OTHER)),
    "map_alone": value("expert_map|topk_ids", expert_map=MAP),
    "map_dtype": dtype("expert_map|int32|int64", topk_ids=IDS, expert_map=zeros(8, dtype=np.int64)),
    "map_ndim": value("expert_map|1 dim|[8, 1]", topk_ids=IDS, expert_map=MAP.reshape(8, 1)),
    "map_gaps": value(
        "expert_map|contiguous|[2]", topk_ids=IDS, expert_map=slice_of(MAP, EVERY_OTHER)
    ),
    "map_length": value("num_experts|8|9", topk_ids=IDS, expert_map=MAP, num_experts=9),
    "no_experts": value("num_experts|at least 1|0", topk_ids=IDS, num_experts=0),
    "negative_experts": value("num_experts|at least 1|-5", topk_ids=IDS, num_experts=-5),
    "empty_map": value("num_experts|at least 1|0", topk_ids=IDS, expert_map=MAP[:0]),
    "out_shape": value("out|[4, 256]|[4, 512]", out=zeros(4, 512, dtype=E4M3)),
    "out_dtype": dtype("out|e4m3|bf16", out=zeros(4, 256, dtype=BF16)),
    "scale_shape": value("out_scale|[4, 2]|[4, 4]", out_scale=zeros(4, 4)),
    "scale_dtype": dtype("out_scale|fp32|fp16", out_scale=zeros(4, 2, dtype=np.float16)),
}

SORT = {
    "no_array": dtype("topk_ids|NumPy, torch or CuPy array|list", topk_ids=[[0, 1]]),
    "ids_dtype": dtype("topk_ids|int32 or int64|fp32", topk_ids=zeros(4, 2)),
    "ids_ndim": value("topk_ids|[M, topk]|[8]", topk_ids=MAP),
    "topk_0": value("topk_ids|topk from 1 to 64|0", topk_ids=zeros(4, 0, dtype=np.int32)),
    "topk_65": value("topk_ids|topk from 1 to 64|65", topk_ids=zeros(4, 65, dtype=np.int32)),
    "ids_transposed": value(
        "topk_ids|contiguous|[1, 2]", topk_ids=slice_of(zeros(4, 2, dtype=np.int32).T, ...)
    ),
    "block_size_0": value("block_size|positive|0", block_size=0),
    "block_size_negative": value("block_size|positive|-16", block_size=-16),
    "no_experts": value("num_experts|at least 1|0", num_experts=0),
    "too_many_experts": value("num_experts|at most 4096|4097", num_experts=4097),
    "map_dtype": dtype("expert_map|int32|int64", expert_map=zeros(8, dtype=np.int64)),
    "map_length": value("num_experts|7|8", expert_map=MAP[:7].copy()),
    "map_ndim": value("expert_map|1 dim|[2, 4]", expert_map=MAP.reshape(2, 4)),
    "too_many_slots": value("topk_ids|2^31", block_size=1 << 30),
}

CODES = zeros(8, 256, 256, dtype=E4M3)
PADDING = "pad_experts"

EXPERTS = {
    **{
        k: value(f"swiglu_{n}|{want}|{v!r}", **{f"swiglu_{n}": v})
        for k, (n, v, want) in CONSTANTS.items()
    },
    "no_array": dtype("x|NumPy, torch or CuPy array|list", x=[[0.0] * 256]),
    "x_dtype": dtype("x|bf16|fp16", x=zeros(4, 256, dtype=np.float16)),
    "x_fp32": dtype("x|bf16|fp32", x=zeros(4, 256)),
    "x_tokens": value("x|[4, 256]|[5, 256]", x=zeros(5, 256, dtype=BF16)),
    "x_depth": value("x|[4, 256]|[4, 128]", x=zeros(4, 128, dtype=BF16)),
    "x_ndim": value("x|[4, 256]|[4, 1, 256]", x=zeros(4, 1, 256, dtype=BF16)),
    "x_columns_first": value("x|contiguous|[1, 4]", x=COLUMNS_FIRST),
    "w1_no_array": dtype("w1|NumPy, torch or CuPy array|NoneType", w1=None),
    "w1_dtype": dtype("w1|e4m3|int8", w1=zeros(8, 256, 256, dtype=np.int8)),
    "w1_fp32": dtype("w1|e4m3|fp32", w1=zeros(8, 256, 256)),
    "w1_half": value("w1|[8, 256, 256]|[8, 128, 256]", w1=zeros(8, 128, 256, dtype=E4M3)),
    "w1_experts": value("w1|[8, 256, 256]|[7, 256, 256]", w1=CODES[:7].copy()),
    "w1_ndim": value("w1|3 dim|[2048, 256]", w1=CODES.reshape(2048, 256)),
    "w1_transposed": value("w1|contiguous|[65536, 1, 256]", w1=slice_of(CODES.swapaxes(1, 2), ...)),
    "w1_rows_of_257": value(
        "w1|16 bytes|[65792, 257, 1]",
        w1=slice_of(zeros(8, 256, 257, dtype=E4M3), ..., slice(256)),
    ),
    "w1_at_8": value(
        "w1|16 bytes|[69632, 272, 1]",
        w1=slice_of(zeros(8, 256, 272, dtype=E4M3), ..., slice(8, 264)),
    ),
    "w2_dtype": dtype("w2|e4m3|bf16", w2=zeros(8, 256, 128, dtype=BF16)),
    "w2_ndim": value("w2|[E, K, N]|[2048, 128]", w2=zeros(2048, 128, dtype=E4M3)),
    **{
        f"N_{n}": value(
            f"w2|N|128|{n}|{PADDING}",
            w1=zeros(8, 2 * n, 256, dtype=E4M3), w2=zeros(8, 256, n, dtype=E4M3),
        )
        for n in (192, 288, 320)
    },
    "K_192": value(
        f"w2|K|128|192|{PADDING}",
        x=zeros(4, 192, dtype=BF16),
        w1=zeros(8, 256, 192, dtype=E4M3), w2=zeros(8, 192, 128, dtype=E4M3),
    ),
    "w1_scale_dtype": dtype("w1_scale|fp32|bf16", w1_scale=zeros(8, 2, 2, dtype=BF16)),
    "w1_scale_shape": value("w1_scale|[8, 2, 2]|[8, 2, 1]", w1_scale=zeros(8, 2, 1)),
    "w1_scale_per_expert": value("w1_scale|[8, 2, 2]|[8]", w1_scale=zeros(8)),
    "w2_scale_dtype": dtype("w2_scale|fp32|float64", w2_scale=zeros(8, 2, 1, dtype=np.float64)),
    "w2_scale_shape": value("w2_scale|[8, 2, 1]|[8, 1, 2]", w2_scale=zeros(8, 1, 2)),
    "weights_dtype": dtype(
        "topk_weights|fp32 or bf16 or fp16|int32", topk_weights=zeros(4, 2, dtype=np.int32)
    ),
    "weights_shape": value("topk_weights|[4, 2]|[4, 3]", topk_weights=zeros(4, 3)),
    "weights_gaps": value(
        "topk_weights|contiguous|[3, 1]", topk_weights=slice_of(zeros(4, 3), ..., slice(2))
    ),
    "ids_dtype": dtype("topk_ids|int32 or int64|fp32", topk_ids=zeros(4, 2)),
    "ids_ndim": value("topk_ids|[M, topk]|[8]", topk_ids=MAP),
    "ids_gaps": value(
        "topk_ids|contiguous|[3, 1]",
        topk_ids=slice_of(zeros(4, 3, dtype=np.int32), ..., slice(2)),
    ),
    "topk_65": value(
        "topk_ids|topk from 1 to 64|65",
        topk_ids=zeros(4, 65, dtype=np.int32), topk_weights=zeros(4, 65),
    ),
    "map_dtype": dtype("expert_map|int32|int64", expert_map=zeros(8, dtype=np.int64)),
    "map_ndim": value("expert_map|1 dim|[8, 1]", expert_map=MAP.reshape(8, 1)),
    "map_length": value("num_experts|8|9", expert_map=MAP, num_experts=9),
    "more_experts_than_weights": value("num_experts|8|9|expert_map", num_experts=9),
    "no_experts": value("num_experts|at least 1|0", num_experts=0),
    "weight_on_input": value("apply_router_weight_on_input|topk 1|2",
                             apply_router_weight_on_input=True),
    "block_shape": value("block_shape|(128, 128)|(64, 128)", block_shape=(64, 128)),
    "block_shape_list": value("block_shape|(128, 128)|(128, 64)", block_shape=[128, 64]),
    "format": value("scale_format|fp32|ue8m0|'e8m0'", scale_format="e8m0"),
    "factor_nan": value("routed_scaling_factor|finite|nan", routed_scaling_factor=np.nan),
    "factor_infinite": value("routed_scaling_factor|finite|inf", routed_scaling_factor=np.inf),
    "out_dtype": dtype("out|bf16|fp32", out=zeros(4, 256)),
    "out_shape": value("out|[4, 256]|[4, 128]", out=zeros(4, 128, dtype=BF16)),
    "out_columns_first": value("out|contiguous|[1, 4]", out=COLUMNS_FIRST),
    "workspace_dtype": dtype("workspace|uint8|fp32", workspace=zeros(1 << 16)),
    "workspace_gaps": value(
        "workspace|contiguous|[2]",
        workspace=slice_of(zeros(1 << 16, dtype=np.uint8), EVERY_OTHER),
    ),
}  # fmt: skip

PADDER = {
    "multiple_0": value("multiple|128|0", multiple=0),
    "multiple_100": value("multiple|128|100", multiple=100),
    "w1_dtype": dtype("w1|e4m3|fp32", w1=zeros(2, 384, 128)),
    "w1_shape": value("w1|[2, 384, 128]|[2, 192, 128]", w1=zeros(2, 192, 128, dtype=E4M3)),
    "w2_ndim": value("w2|[E, K, N]|[128, 192]", w2=zeros(128, 192, dtype=E4M3)),
    "w2_dtype": dtype("w2|e4m3|bf16", w2=zeros(2, 128, 192, dtype=BF16)),
    "w1_scale_shape": value("w1_scale|[2, 4, 1]|[2, 3, 1]", w1_scale=zeros(2, 3, 1)),
    "w1_scale_dtype": dtype("w1_scale|fp32|fp16", w1_scale=zeros(2, 4, 1, dtype=np.float16)),
    "w2_scale_shape": value("w2_scale|[2, 1, 2]|[2, 2, 1]", w2_scale=zeros(2, 2, 1)),
    "w2_scale_dtype": dtype("w2_scale|fp32|int32", w2_scale=zeros(2, 1, 2, dtype=np.int32)),
    "no_array": dtype("w1|NumPy, torch or CuPy array|list", w1=[1]),
}

REFUSALS = {
    "per_token_group_quant_fp8": QUANTIZER,
    "silu_and_mul_quant_fp8": ACTIVATION,
    "moe_align_block_size": SORT,
    "fused_experts_fp8": EXPERTS,
    "pad_experts": PADDER,
}
ALL = [(op, name) for op, table in REFUSALS.items() for name in table]


@pytest.mark.parametrize("op", RIGHT_ARGUMENTS)
def test_the_unchanged_arguments_are_right(backend, op):
    getattr(cumoe, op)(**placed(backend, RIGHT_ARGUMENTS[op]()))


@pytest.mark.parametrize(("op", "name"), ALL, ids=[f"{op}-{name}" for op, name in ALL])
def test_refuses(backend, op, name):
    refusal = REFUSALS[op][name]
    arguments = placed(backend, {**RIGHT_ARGUMENTS[op](), **refusal.change})
    with pytest.raises(CumoeError) as caught:
        getattr(cumoe, op)(**arguments)
    message = str(caught.value)
    assert type(caught.value) is refusal.error
    assert isinstance(caught.value, TypeError if refusal.error is DTypeError else ValueError)
    argument, *parts = refusal.says
    assert message.startswith(f"{argument}: "), message
    for part in parts:
        if backend.name == "cupy":  # which holds bf16 as its bits
            part = part.replace("bf16", "uint16") if part == parts[-1] else part
        assert part in message.removeprefix(argument), (part, message)
