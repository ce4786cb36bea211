"""The number formats against truth tables and exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumoe.errors import DTypeError
from cumoe.reference import e4m3
from tests.helpers import oracles
from tests.helpers.compare import assert_bitwise_equal

ALL_BF16 = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def codes(*values: float) -> list[int]:
    return e4m3.to_e4m3(np.array(values, np.float32)).view(np.uint8).tolist()


def test_oracle_decodes_like_ml_dtypes():
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(oracles.E4M3_VALUES, values)


def test_every_code_survives_a_round_trip():
    got = codes(*oracles.E4M3_VALUES)
    want = list(range(256))
    want[0xFF] = 0x7F
    assert got == want


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (448, 0x7E),
        (463.99997, 0x7E),
        (464, 0x7E),
        (464.00003, 0x7E),
        (465, 0x7E),
        (480, 0x7E),
        (3.4e38, 0x7E),
        (np.inf, 0x7E),
        (-448, 0xFE),
        (-480, 0xFE),
        (-np.inf, 0xFE),
        (0.0, 0x00),
        (-0.0, 0x80),
        (np.nan, 0x7F),
        (-np.nan, 0x7F),
    ],
)
def test_saturation_zero_and_nan(value, code):
    assert codes(value) == [code]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (17, 0x58),  # between 16 and 18
        (19, 0x5A),  # between 18 and 20
        (168, 0x72),  # between 160 and 176
        (184, 0x74),  # between 176 and 192
        (400, 0x7C),  # between 384 and 416
        (432, 0x7E),  # between 416 and 448
        (2.0**-10, 0x00),  # between 0 and the smallest subnormal
        (-(2.0**-10), 0x80),
        (3 * 2.0**-10, 0x02),
        (2.0**-6 - 2.0**-10, 0x08),  # between the largest subnormal and the smallest normal
    ],
)
def test_ties_go_to_the_even_code(value, code):
    assert codes(value) == [code]


def test_a_cast_through_fp16_would_differ():
    assert codes(1.0625001, 400.199585, 272.156555) == [0x39, 0x7D, 0x79]


def test_to_e4m3_of_every_bf16_is_the_nearest_code():
    values = ALL_BF16.astype(np.float32)
    assert_bitwise_equal(e4m3.to_e4m3(values).view(np.uint8), oracles.nearest_e4m3(values))


@pytest.mark.parametrize("ulps", [-2, -1, 0, 1, 2])
def test_to_e4m3_next_to_every_tie_is_the_nearest_code(ulps):
    finite = oracles.E4M3_VALUES[:0x7F]
    middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    values = (middle.view(np.int32) + ulps).view(np.float32)
    assert_bitwise_equal(e4m3.to_e4m3(values).view(np.uint8), oracles.nearest_e4m3(values))


@given(st.lists(finite_floats, min_size=1, max_size=64))
def test_to_e4m3_is_the_nearest_code(values):
    values = np.array(values, np.float32)
    assert_bitwise_equal(e4m3.to_e4m3(values).view(np.uint8), oracles.nearest_e4m3(values))


@given(st.lists(finite_floats, min_size=1, max_size=64))
def test_to_bf16_rounds_to_even(values):
    values = np.array(values, np.float32)
    assert_bitwise_equal(e4m3.to_bf16(values).view(np.uint16), oracles.nearest_bf16_bits(values))


def test_to_bf16_ties_and_limits():
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 2**-134, 3.3961776e38, -np.inf], np.float32)
    assert e4m3.to_bf16(values).astype(np.float64).tolist() == [
        1.0,
        1 + 2**-6,
        0.0,
        np.inf,
        -np.inf,
    ]


@pytest.mark.parametrize("cast", [e4m3.to_e4m3, e4m3.to_bf16, e4m3.group_amax, e4m3.ue8m0_scale])
def test_float64_is_refused(cast):
    with pytest.raises(DTypeError, match="float32"):
        cast(np.ones(4))


def test_group_amax_ignores_nan_and_has_a_floor():
    groups = np.array([[1, -3, 2], [np.nan, 1, -2], [np.nan] * 3, [0, 0, 0], [-np.inf, np.nan, 1]])
    got = e4m3.group_amax(groups.astype(np.float32))
    assert got.tolist() == [3, 2, np.float32(1e-10), np.float32(1e-10), np.inf]


def exact_ue8m0_exponent(amax: float) -> int:
    """ceil(log2(max(amax / 448, floor))) in rational arithmetic; the floor is fp32(1e-10)."""
    scale = max(Fraction(amax) / 448, Fraction(float(np.float32(1e-10))))
    exponent = scale.numerator.bit_length() - scale.denominator.bit_length() - 1
    while Fraction(2) ** exponent < scale:
        exponent += 1
    return exponent


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "fp16"])
def test_ue8m0_scale_of_every_finite_amax_is_exact(dtype):
    amax = np.arange(1 << 15, dtype=np.uint16).view(dtype).astype(np.float32)
    amax = amax[np.isfinite(amax)]
    got = e4m3.ue8m0_scale(amax)
    want = np.array([exact_ue8m0_exponent(float(a)) for a in amax])
    assert_bitwise_equal(got, np.exp2(want).astype(np.float32))
    assert_bitwise_equal(e4m3.ue8m0_bytes(got), (want + 127).astype(np.uint8))


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (448, 1.0),
        (224, 0.5),
        (1.75, 2.0**-8),
        (1.7578125, 2.0**-7),
        (0.4375, 2.0**-10),
        (0, 2.0**-33),
        (1.0011718e-08, 2.0**-33),
        (np.inf, np.inf),
    ],
)
def test_ue8m0_scale_by_hand(amax, scale):
    assert e4m3.ue8m0_scale(np.array([amax], np.float32)).tolist() == [scale]


def test_ue8m0_byte_of_infinity_is_255():
    assert e4m3.ue8m0_bytes(np.array([1.0, np.inf], np.float32)).tolist() == [127, 255]


@given(st.floats(min_value=0, width=32, allow_infinity=False, allow_nan=False))
def test_ue8m0_scale_of_fp32_is_the_ceiling_of_the_fp32_quotient(amax):
    scale = e4m3.ue8m0_scale(np.array([amax], np.float32))[0]
    quotient = max(np.float32(amax) / np.float32(448), np.float32(1e-10))
    assert np.frexp(scale)[0] == 0.5
    assert scale / 2 < quotient <= scale
