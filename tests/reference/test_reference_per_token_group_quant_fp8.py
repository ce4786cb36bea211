"""Group quantization: blocks worked out by hand, layouts, non-finite values, refusals."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumoe.errors import ArgumentError, DTypeError
from cumoe.reference import per_token_group_quant_fp8
from tests.helpers import cases, oracles, tolerances
from tests.helpers.compare import assert_bitwise_equal, assert_within

BF16, E4M3 = cases.BF16, cases.E4M3


def row(*values: float, size: int = 128, dtype=BF16) -> np.ndarray:
    """[1, size] that begins with the values; the rest is 0."""
    x = np.zeros((1, size), np.float32)
    x[0, : len(values)] = values
    return x.astype(dtype)


def quantize(x: np.ndarray, **options) -> tuple[np.ndarray, np.ndarray]:
    q, scale = per_token_group_quant_fp8(x, **options)
    return q.view(np.uint8), scale


def as_hex(codes: np.ndarray, count: int) -> str:
    return codes.reshape(-1)[:count].tobytes().hex(" ").upper()


@pytest.mark.parametrize(
    ("values", "codes"),
    [
        ([448, 17, 19, 168, 184, 400, 402, 432, -17], "7E 58 5A 72 74 7C 7D 7E D8"),
        ([1.078125, 0.404296875, 0.80859375], "7E 72 7A"),
        ([1.015625, 0.6171875], "7E 79"),
    ],
    ids=["ties", "true_division", "no_fp16"],
)
def test_fp32_scale_by_hand(values, codes):
    q, scale = quantize(row(*values))
    assert as_hex(q, len(values)) == codes
    assert not q[0, len(values) :].any()
    assert scale[0, 0] == np.float32(values[0]) / np.float32(448)


@pytest.mark.parametrize(
    ("amax", "scale", "code"),
    [
        (448, 1.0, "7E"),
        (224, 0.5, "7E"),
        (1.75, 2.0**-8, "7E"),
        (0.4375, 2.0**-10, "7E"),
        (1.7578125, 2.0**-7, "76"),
        (1.0011718e-08, 2.0**-33, "6B"),
    ],
)
def test_ue8m0_scale_by_hand(amax, scale, code):
    q, got = quantize(row(amax), scale_format="ue8m0")
    assert (got[0, 0], as_hex(q, 1)) == (scale, code)


def test_fp16_scale_whose_reciprocal_overflows_half():
    q, scale = quantize(row(2.0**-9, dtype=np.float16), scale_format="ue8m0")
    assert (scale[0, 0], as_hex(q, 1)) == (2.0**-17, "78")


def test_constant_group():
    x = np.full((1, 128), 0.1, np.float32).astype(BF16)
    q, scale = quantize(x)
    assert scale[0, 0] == np.float32(2.2343227e-04)
    assert (q == 0x7E).all()


@pytest.mark.parametrize(
    ("scale_format", "floor"), [("fp32", np.float32(2.2321428e-13)), ("ue8m0", 2.0**-33)]
)
def test_zero_group_gets_the_floor_and_leaves_the_others_alone(rng, scale_format, floor):
    x = cases.activations(rng, 2, 256)
    clean = quantize(x, scale_format=scale_format)
    x[1, 128:] = 0
    q, scale = quantize(x, scale_format=scale_format)
    assert scale[1, 1] == floor
    assert not q[1, 128:].any()
    assert_others_equal((q, scale), clean, (1, 1))


def assert_others_equal(got, want, group: tuple[int, int]) -> None:
    """Codes and scales equal everywhere but in one group."""
    keep = np.ones(want[1].shape, bool)
    keep[group] = False
    assert_bitwise_equal(got[1][keep], want[1][keep])
    assert_bitwise_equal(
        got[0].reshape(*keep.shape, 128)[keep], want[0].reshape(*keep.shape, 128)[keep]
    )


@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_nan_gets_its_code_and_spares_its_group(rng, nan):
    x = cases.activations(rng, 2, 256)
    x[1, 5] = 0
    clean = quantize(x)
    x[1, 5] = nan
    q, scale = quantize(x)
    assert q[1, 5] == 0x7F
    q[1, 5] = clean[0][1, 5]
    assert_bitwise_equal(q, clean[0])
    assert_bitwise_equal(scale, clean[1])


def test_group_of_nan_has_the_floor_scale():
    q, scale = quantize(np.full((1, 128), np.nan, np.float32))
    assert (q == 0x7F).all()
    assert scale[0, 0] == np.float32(1e-10) / np.float32(448)


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_infinity_makes_the_scale_infinite(scale_format):
    q, scale = quantize(row(np.inf, -np.inf, 1.0, -1.0, np.nan), scale_format=scale_format)
    assert as_hex(q, 6) == "7F 7F 00 80 7F 00"
    assert scale[0, 0] == np.inf


def test_packed_byte_of_an_infinite_scale_is_255():
    _, scale = quantize(row(np.inf), scale_format="ue8m0", scale_layout="packed")
    assert scale.tolist() == [[255]]


@pytest.mark.parametrize("shape", [(3, 640), (1, 128), (7, 128), (5, 1024)])
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32], ids=["bf16", "fp16", "fp32"])
def test_random_groups_equal_the_nearest_codes(rng, shape, dtype):
    x = cases.activations(rng, *shape).astype(np.float32).astype(dtype)
    q, scale = quantize(x)
    groups = x.astype(np.float32).reshape(shape[0], -1, 128)
    assert_bitwise_equal(scale, np.abs(groups).max(axis=2) / np.float32(448))
    want = oracles.nearest_e4m3(groups / scale[..., None])
    assert_bitwise_equal(q, want.reshape(shape))


@given(
    st.lists(st.integers(0, 0xFFFF), min_size=128, max_size=128),
    st.sampled_from(["fp32", "ue8m0"]),
)
def test_any_bf16_bits_give_codes_within_half_a_step(bits, scale_format):
    x = np.array([bits], np.uint16)
    values = x.view(BF16).astype(np.float32)
    q, scale = quantize(x, scale_format=scale_format)
    assert_bitwise_equal(q == 0x7F, np.isnan(values) | np.isinf(values))
    if np.isfinite(scale[0, 0]):
        numbers, s = values[~np.isnan(values)], np.float64(scale[0, 0])
        back = oracles.E4M3_VALUES[q[~np.isnan(values)]] * s
        half_step = np.maximum(np.abs(numbers) * tolerances.E4M3_ROUNDING, s * 2.0**-10)
        assert_within(back, numbers, half_step * (1 + 2.0**-22))


@pytest.mark.parametrize("num_rows", [1, 2, 4, 5])
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_column_and_tma_hold_the_row_scales(rng, num_rows, scale_format):
    x = cases.activations(rng, num_rows, 640)
    q, want = quantize(x, scale_format=scale_format)
    padded = -(-num_rows // 4) * 4
    for layout, leading in (("column", num_rows), ("tma", padded)):
        codes, scale = quantize(x, scale_format=scale_format, scale_layout=layout)
        assert_bitwise_equal(codes, q)
        assert_bitwise_equal(scale, want)
        assert scale.strides == (4, 4 * leading)


def test_column_by_hand():
    x = np.repeat(448 * np.exp2([[0, 2], [1, 3]]), 128, axis=1).astype(BF16)
    q, scale = quantize(x, scale_layout="column")
    assert scale.tolist() == [[1, 4], [2, 8]]
    assert scale.strides == (4, 8)
    assert (q == 0x7E).all()


@pytest.mark.parametrize(("num_rows", "num_groups"), [(1, 1), (3, 5), (4, 8), (6, 3)])
def test_packed_holds_the_exponents_and_zero_padding(rng, num_rows, num_groups):
    x = cases.activations(rng, num_rows, 128 * num_groups)
    _, row_scale = quantize(x, scale_format="ue8m0")
    _, scale = quantize(x, scale_format="ue8m0", scale_layout="packed")
    padded_rows, words = -(-num_rows // 4) * 4, -(-num_groups // 4)
    assert (scale.shape, scale.strides) == ((num_rows, words), (4, 4 * padded_rows))
    assert scale.dtype == np.int32
    want = np.zeros((words, padded_rows, 4), np.uint8)
    for m, g in np.ndindex(num_rows, num_groups):
        want[g // 4, m, g % 4] = np.log2(row_scale[m, g]) + 127
    assert_bitwise_equal(whole_storage(scale, padded_rows).view(np.uint8), want.reshape(words, -1))


def test_tma_padding_is_zero(rng):
    _, scale = quantize(cases.activations(rng, 5, 256), scale_layout="tma")
    assert not whole_storage(scale, 8)[:, 5:].any()


def whole_storage(scale: np.ndarray, padded_rows: int) -> np.ndarray:
    """[columns, padded_rows]: what lies in memory, padding included."""
    assert scale.base is not None
    return scale.base.reshape(scale.shape[1], padded_rows)


@pytest.mark.parametrize("layout", ["row", "column", "tma", "packed"])
def test_out_is_written_and_returned(rng, layout):
    x = cases.activations(rng, 5, 640)
    want = quantize(x, scale_format="ue8m0", scale_layout=layout)
    out, out_scale = cases.poisoned_codes(5, 640), cases.poisoned_scales(5, 5, layout)
    q, scale = per_token_group_quant_fp8(
        x, scale_format="ue8m0", scale_layout=layout, out=out, out_scale=out_scale
    )
    assert q is out
    assert scale is out_scale
    assert_bitwise_equal(q.view(np.uint8), want[0])
    assert_bitwise_equal(scale, want[1])


def test_out_may_be_bytes(rng):
    x = cases.activations(rng, 2, 128)
    out = cases.poisoned_codes(2, 128).view(np.uint8)
    assert per_token_group_quant_fp8(x, out=out)[0] is out
    assert_bitwise_equal(out, quantize(x)[0])


def test_bits_and_strides_of_the_input_do_not_matter(rng):
    x = cases.activations(rng, 6, 256)
    want = quantize(x)
    sliced = np.repeat(x, 2, axis=0)[::2]
    for same in (x.view(np.uint16), sliced, np.asfortranarray(x)):
        for got, expected in zip(quantize(same), want, strict=True):
            assert_bitwise_equal(got, expected)


def test_leading_dimensions_flatten_into_rows(rng):
    x = cases.activations(rng, 2, 3, 256)
    q, scale = quantize(x)
    flat_q, flat_scale = quantize(x.reshape(6, 256))
    assert_bitwise_equal(q, flat_q.reshape(2, 3, 256))
    assert_bitwise_equal(scale, flat_scale)
    assert quantize(x[0, 0])[1].shape == (1, 2)


def test_no_rows():
    q, scale = quantize(np.zeros((0, 7168), BF16))
    assert (q.shape, scale.shape) == ((0, 7168), (0, 56))


def test_group_size_other_than_128(rng):
    x = cases.activations(rng, 2, 128)
    q, scale = quantize(x, group_size=64)
    for half in (slice(0, 64), slice(64, 128)):
        padded = np.zeros((2, 128), BF16)
        padded[:, :64] = x[:, half]
        want_q, want_scale = quantize(padded)
        assert_bitwise_equal(q[:, half], want_q[:, :64])
        assert_bitwise_equal(scale[:, half.start // 64], want_scale[:, 0])


@pytest.mark.parametrize("size", [100, 192, 288, 320])
def test_refuses_sizes_that_are_no_multiple(size):
    with pytest.raises(ArgumentError, match="128"):
        per_token_group_quant_fp8(np.zeros((2, size), BF16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "group_size"),
        ({"scale_format": "fp8"}, "scale_format"),
        ({"scale_layout": "diagonal"}, "scale_layout"),
        ({"scale_layout": "packed"}, "ue8m0"),
        ({"out": np.zeros((2, 128), E4M3)}, "out"),
        ({"out_scale": np.zeros((1, 2), np.float32)}, "out_scale"),
    ],
)
def test_refuses_arguments_that_do_not_fit(options, message):
    with pytest.raises(ArgumentError, match=message):
        per_token_group_quant_fp8(np.zeros((1, 128), BF16), **options)


@pytest.mark.parametrize(
    ("x", "options", "name"),
    [
        (np.zeros((1, 128)), {}, "x"),
        (np.zeros((1, 128), np.int8), {}, "x"),
        (row(1), {"out": np.zeros((1, 128), ml_dtypes.float8_e5m2)}, "out"),
        (row(1), {"out_scale": np.zeros((1, 1))}, "out_scale"),
    ],
)
def test_refuses_other_element_types(x, options, name):
    with pytest.raises(DTypeError, match=f"^{name} must"):
        per_token_group_quant_fp8(x, **options)
