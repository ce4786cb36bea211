"""Group quantization on every backend: exactly the codes and the scales of the reference.

A GPU takes another kernel from 2,048 groups of 128 on: sizes lie on both sides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers import cases
from tests.helpers.backends import NumpyBackend
from tests.helpers.calls import quantize_by_reference, quantize_on
from tests.helpers.compare import assert_bitwise_equal

BF16 = cases.BF16
DTYPES = {"bf16": BF16, "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}
SCALES = [
    ("fp32", "row"), ("fp32", "column"), ("fp32", "tma"),
    ("ue8m0", "row"), ("ue8m0", "column"), ("ue8m0", "tma"), ("ue8m0", "packed"),
]  # fmt: skip
ODD_M = (1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129)


def check(backend: NumpyBackend, x: np.ndarray, **options: Any) -> None:
    """The op equals the reference, byte for byte."""
    for got, want in zip(
        quantize_on(backend, x, **options), quantize_by_reference(x, **options), strict=True
    ):
        assert_bitwise_equal(got, want)


def values(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    """Normal values; groups differ in size by up to 2^12."""
    x = rng.standard_normal(shape)
    size = np.exp2(rng.uniform(-8, 4, (*shape[:-1], shape[-1] // 128)))
    return (x * np.repeat(size, 128, axis=-1)).astype(np.float32).astype(DTYPES[dtype])


def group(*first: float, dtype: str = "bf16") -> np.ndarray:
    """[1, 128] that begins with these values; the rest is 0."""
    x = np.zeros((1, 128), np.float32)
    x[0, : len(first)] = first
    return x.astype(DTYPES[dtype])


BY_HAND = {
    "ties": ("bf16", "fp32", [448, 17, 19, 168, 184, 400, 402, 432, -17], 1.0,
             "7E 58 5A 72 74 7C 7D 7E D8"),
    "division_not_reciprocal": ("bf16", "fp32", [1.078125, 0.404296875, 0.80859375], None,
                                "7E 72 7A"),
    "no_cast_through_fp16": ("bf16", "fp32", [1.015625, 0.6171875], None, "7E 79"),
    "power_448": ("bf16", "ue8m0", [448], 1.0, "7E"),
    "power_224": ("bf16", "ue8m0", [224], 0.5, "7E"),
    "power_1.75": ("bf16", "ue8m0", [1.75], 2.0**-8, "7E"),
    "power_0.4375": ("bf16", "ue8m0", [0.4375], 2.0**-10, "7E"),
    "above_a_power": ("bf16", "ue8m0", [1.7578125], 2.0**-7, "76"),
    "floor_of_ue8m0": ("bf16", "ue8m0", [1.0011718e-08], 2.0**-33, "6B"),
    "fp16_reciprocal_overflows": ("fp16", "ue8m0", [2.0**-9], 2.0**-17, "78"),
    "all_bf16_subnormal": ("bf16", "fp32", [1e-39, -1e-39], np.float32(1e-10) / np.float32(448),
                           "00 80"),
    "negative_zero": ("bf16", "fp32", [-0.0, 448], 1.0, "80 7E"),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_by_hand(backend, case):
    dtype, scale_format, first, scale, codes = BY_HAND[case]
    q, got = quantize_on(backend, group(*first, dtype=dtype), scale_format=scale_format)
    want = np.float32(first[0]) / np.float32(448) if scale is None else scale
    assert got.tolist() == [[want]]
    assert q[0, : len(first)].tobytes() == bytes.fromhex(codes)
    assert not q[0, len(first) :].any()


def test_constant_group(backend):
    q, scale = quantize_on(backend, np.full((1, 128), 0.1, np.float32).astype(BF16))
    assert scale.tolist() == [[np.float32(2.2343227e-04)]]
    assert (q == 0x7E).all()


@pytest.mark.parametrize(
    ("scale_format", "floor"), [("fp32", np.float32(2.2321428e-13)), ("ue8m0", 2.0**-33)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_group_gets_the_floor_and_leaves_the_others_alone(
    backend, rng, dtype, scale_format, floor
):
    x = values(rng, dtype, 2, 256)
    clean_q, clean_scale = quantize_on(backend, x, scale_format=scale_format)
    x[1, 128:] = 0
    q, scale = quantize_on(backend, x, scale_format=scale_format)
    assert scale[1, 1] == floor
    assert not q[1, 128:].any()
    clean_q[1, 128:], clean_scale[1, 1] = 0, floor
    assert_bitwise_equal(q, clean_q)
    assert_bitwise_equal(scale, clean_scale)


@pytest.mark.parametrize("shape", [(1, 128), (3, 640), (7, 128), (130, 1024), (301, 1024)])
@pytest.mark.parametrize(("scale_format", "scale_layout"), SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_reference(backend, rng, dtype, scale_format, scale_layout, shape):
    x = values(rng, dtype, *shape)
    check(backend, x, scale_format=scale_format, scale_layout=scale_layout)


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_value_there_is(backend, rng, dtype, scale_format):
    """In any order, and next to their neighbours, where a group holds one binade only."""
    ordered = np.arange(1 << 16, dtype=np.uint16)
    bits = np.concatenate([ordered, *(rng.permutation(ordered) for _ in range(4))])
    x = bits.view(DTYPES[dtype]).reshape(-1, 1024)
    check(backend, x, scale_format=scale_format)
    check(backend, x[:100], scale_format=scale_format)


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_any_fp32_bits(backend, rng, scale_format):
    bits = rng.integers(0, 1 << 32, (300, 1024), np.uint32)
    bits[32:] = (bits[32:] & 0x807FFFFF) | rng.integers(100, 140, (268, 1024), np.uint32) << 23
    check(backend, bits.view(np.float32), scale_format=scale_format)
    check(backend, bits[:64].view(np.float32), scale_format=scale_format)


@pytest.mark.parametrize(("scale_format", "scale_layout"), [("fp32", "row"), ("ue8m0", "packed")])
def test_rows_do_not_depend_on_their_number(backend, rng, scale_format, scale_layout):
    options = {"scale_format": scale_format, "scale_layout": scale_layout}
    x = values(rng, "bf16", max(ODD_M), 640)
    all_q, all_scale = quantize_by_reference(x, **options)
    for num_rows in ODD_M:
        q, scale = quantize_on(backend, x[:num_rows], **options)
        assert_bitwise_equal(q, all_q[:num_rows], f"{num_rows} rows")
        assert_bitwise_equal(scale, all_scale[:num_rows], f"scales of {num_rows} rows")


NON_FINITE = {
    "nan": ([np.nan], 1.0, [0x7F]),
    "negative_nan": ([-np.nan], 1.0, [0x7F]),
    "two_nans": ([np.nan, 1, np.nan, -448], 1.0, [0x7F, 0x38, 0x7F, 0xFE]),
    "inf": ([np.inf, 1, -1, 0], np.inf, [0x7F, 0x00, 0x80, 0x00]),
    "negative_inf": ([-np.inf, -3e4], np.inf, [0x7F, 0x80]),
    "nan_and_inf": ([np.inf, np.nan, -np.inf, -2], np.inf, [0x7F, 0x7F, 0x7F, 0x80]),
}


@pytest.mark.parametrize("case", NON_FINITE)
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [2, 1200])
def test_what_is_not_finite_stays_in_its_group(backend, rng, num_rows, dtype, scale_format, case):
    first, scale, codes = NON_FINITE[case]
    x = values(rng, dtype, num_rows, 256)
    want_q, want_scale = quantize_on(backend, x, scale_format=scale_format)
    x[1, :128] = group(*first, dtype=dtype)
    x[1, 100] = 0 if np.isinf(scale) else 448
    q, got = quantize_on(backend, x, scale_format=scale_format)
    want_q[1, :128] = 0
    want_q[1, 100] = 0 if np.isinf(scale) else 0x7E
    want_q[1, : len(codes)], want_scale[1, 0] = codes, scale
    assert_bitwise_equal(q, want_q)
    assert_bitwise_equal(got, want_scale)


def test_infinite_scale_is_exponent_255(backend):
    _, scale = quantize_on(backend, group(np.inf), scale_format="ue8m0", scale_layout="packed")
    assert scale.tolist() == [[255]]


def test_group_of_nothing_but_nan(backend):
    q, scale = quantize_on(backend, np.full((1, 128), np.nan, np.float32).astype(BF16))
    assert (q == 0x7F).all()
    assert scale[0, 0] == np.float32(1e-10) / np.float32(448)
