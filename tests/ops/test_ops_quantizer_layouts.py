"""Where the arrays of the quantizer lie: layouts of scales, odd addresses, shapes, types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cumoe
from tests.helpers import cases
from tests.helpers.calls import quantize_by_reference
from tests.helpers.cases import BF16
from tests.helpers.compare import assert_bitwise_equal
from tests.helpers.layouts import address_of, embedded, padded_columns, scale_buffer, strides_of

SCALES = [
    ("fp32", "row"), ("fp32", "column"), ("fp32", "tma"),
    ("ue8m0", "row"), ("ue8m0", "column"), ("ue8m0", "tma"), ("ue8m0", "packed"),
]  # fmt: skip
DTYPES = {"bf16": BF16, "fp16": np.float16, "fp32": np.float32}


@pytest.mark.parametrize(("scale_format", "scale_layout"), SCALES)
def test_each_scale_lies_where_its_layout_says(backend, scale_format, scale_layout):
    """x[t, g] = 448 * 2^(t + 2g): no two groups share a scale."""
    want = np.exp2(np.arange(3)[:, None] + 2 * np.arange(5)).astype(np.float32)
    x = np.repeat(448 * want, 128, axis=1).astype(BF16)
    q, scale = cumoe.per_token_group_quant_fp8(
        backend.put(x), scale_format=scale_format, scale_layout=scale_layout
    )
    assert (backend.codes(q) == 0x7E).all()
    strides = {"row": (5, 1), "column": (1, 3), "tma": (1, 4), "packed": (1, 4)}[scale_layout]
    assert strides_of(scale) == strides
    raw = backend.raw(scale)
    if scale_layout == "packed":
        exponents = np.ascontiguousarray(raw).view(np.uint8)
        assert (raw.dtype, exponents.shape) == (np.int32, (3, 8))
        assert not exponents[:, 5:].any()
        raw = np.exp2(exponents[:, :5].astype(np.float32) - 127)
    assert_bitwise_equal(np.ascontiguousarray(raw), want)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 127, 301])
@pytest.mark.parametrize(("scale_format", "scale_layout"), [("fp32", "tma"), ("ue8m0", "packed")])
def test_padding_is_zero(backend, rng, scale_format, scale_layout, num_rows):
    x = cases.activations(rng, num_rows, 1024)
    _, scale = cumoe.per_token_group_quant_fp8(
        backend.put(x), scale_format=scale_format, scale_layout=scale_layout
    )
    storage = padded_columns(backend, scale)
    assert_bitwise_equal(storage[:, :num_rows].T.copy(), backend.raw(scale)[:, :-1].copy())
    assert not storage[:, num_rows:].any()


@pytest.mark.parametrize("offset", [0, 1, 3, 7, 8])
@pytest.mark.parametrize("gap", [0, 1, 8, 127])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [5, 1100])
def test_rows_may_lie_anywhere(backend, rng, num_rows, dtype, gap, offset):
    x = cases.activations(rng, num_rows, 256).astype(DTYPES[dtype])
    placed = embedded(backend, x, offset=offset, gap=gap)
    q, scale = cumoe.per_token_group_quant_fp8(placed.view)
    for got, want in zip(
        (backend.codes(q), backend.raw(scale)), quantize_by_reference(x), strict=True
    ):
        assert_bitwise_equal(got, want)


@pytest.mark.parametrize("offset", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("x_offset", [0, 1])
@pytest.mark.parametrize("num_rows", [5, 1100])
def test_codes_may_go_anywhere_and_nowhere_else(backend, rng, num_rows, offset, x_offset):
    x = cases.activations(rng, num_rows, 256)
    source = embedded(backend, x, offset=x_offset)
    target = embedded(backend, cases.poisoned_codes(num_rows, 256), offset=offset)
    scales = embedded(backend, np.full((num_rows, 2), cases.POISON_SCALE), offset=offset)
    q, scale = cumoe.per_token_group_quant_fp8(source.view, out=target.view, out_scale=scales.view)
    assert (address_of(q), address_of(scale)) == (address_of(target.view), address_of(scales.view))
    for got, want in zip(
        (backend.codes(q), backend.raw(scale)), quantize_by_reference(x), strict=True
    ):
        assert_bitwise_equal(got, want)
    for island in (source, target, scales):
        assert (island.guard(backend) == 0xFF).all()


def test_x_is_not_written(backend, rng):
    x = cases.activations(rng, 5, 256)
    placed = backend.put(x.copy())
    cumoe.per_token_group_quant_fp8(placed)
    assert_bitwise_equal(backend.bf16(placed), x)


@pytest.mark.parametrize("shape", [(256,), (1, 256), (2, 3, 256), (1, 4, 1, 256)])
@pytest.mark.parametrize("scale_layout", ["row", "tma"])
def test_leading_dimensions_flatten_to_rows(backend, rng, shape, scale_layout):
    x = cases.activations(rng, *shape)
    flat_q, flat_scale = quantize_by_reference(x.reshape(-1, 256), scale_layout=scale_layout)
    q, scale = cumoe.per_token_group_quant_fp8(backend.put(x), scale_layout=scale_layout)
    assert_bitwise_equal(backend.codes(q), flat_q.reshape(shape))
    assert_bitwise_equal(backend.raw(scale), flat_scale)


@pytest.mark.parametrize("scale_layout", ["row", "tma"])
def test_leading_dimensions_flatten_into_given_outputs(backend, rng, scale_layout):
    x = cases.activations(rng, 2, 3, 256)
    out = backend.put(cases.poisoned_codes(2, 3, 256))
    out_scale = scale_buffer(backend, 6, 2, scale_layout).view
    cumoe.per_token_group_quant_fp8(
        backend.put(x), scale_layout=scale_layout, out=out, out_scale=out_scale
    )
    want_q, want_scale = quantize_by_reference(x, scale_layout=scale_layout)
    assert_bitwise_equal(backend.codes(out), want_q)
    assert_bitwise_equal(backend.raw(out_scale), want_scale)


@pytest.mark.parametrize(("scale_format", "scale_layout"), SCALES)
def test_no_rows(backend, scale_format, scale_layout):
    x = backend.put(np.zeros((0, 7168), BF16))
    q, scale = cumoe.per_token_group_quant_fp8(
        x, scale_format=scale_format, scale_layout=scale_layout
    )
    columns = 14 if scale_layout == "packed" else 56
    assert (tuple(q.shape), tuple(scale.shape)) == ((0, 7168), (0, columns))


def test_results_have_the_frameworks_own_types(backend, rng):
    x = backend.put(cases.activations(rng, 2, 128))
    q, scale = cumoe.per_token_group_quant_fp8(x)
    fp8 = {"numpy": "float8_e4m3fn", "cupy": "uint8"}.get(backend.name, "torch.float8_e4m3fn")
    assert str(q.dtype) == fp8
    assert str(scale.dtype).removeprefix("torch.") == "float32"
    assert type(q) is type(scale) is type(x)
    assert getattr(q, "device", "cpu") == getattr(x, "device", "cpu")


def test_out_may_be_bytes(backend, rng):
    x = cases.activations(rng, 3, 256)
    out = backend.put(np.full((3, 256), cases.POISON_CODE, np.uint8))
    q, scale = cumoe.per_token_group_quant_fp8(backend.put(x), out=out)
    assert q is out
    for got, want in zip(
        (backend.codes(q), backend.raw(scale)), quantize_by_reference(x), strict=True
    ):
        assert_bitwise_equal(got, want)


def test_numpy_takes_bf16_as_uint16(rng):
    x = cases.activations(rng, 3, 256)
    q, scale = cumoe.per_token_group_quant_fp8(x.view(np.uint16))
    want_q, want_scale = quantize_by_reference(x)
    assert q.dtype == np.dtype(ml_dtypes.float8_e4m3fn)
    assert_bitwise_equal(q.view(np.uint8), want_q)
    assert_bitwise_equal(scale, want_scale)
