"""The comparison helpers: each must pass what is right and fail on one wrong value."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import cases, compare, oracles, tolerances


@pytest.fixture
def want(rng) -> np.ndarray:
    return rng.standard_normal((4096, 64)).astype(np.float32)


def test_two_zeroed_rows_fail_although_all_rows_together_pass(want):
    got = want.copy()
    got[[7, 4000]] = 0
    assert compare.assert_total_close(got, want, 3e-2) < 1
    with pytest.raises(AssertionError, match=r"2 of 4096 rows .* row 7 "):
        compare.assert_rows_close(got, want, tolerances.MMA_ROW)


def test_rows_report_the_share_of_the_tolerance(want):
    got = want.copy()
    got[5] *= 1 + 1e-3
    assert compare.assert_rows_close(got, want, 4e-3) == pytest.approx(0.25, rel=1e-3)
    assert compare.assert_rows_close(want, want, 4e-3) == 0
    assert compare.assert_rows_close(want[:0], want[:0], 4e-3) == 0


def test_rows_name_the_worst_coordinate(want):
    got = want.copy()
    got[3, 11] += 100
    with pytest.raises(AssertionError, match=r"\(3, 11\)"):
        compare.assert_rows_close(got, want, 1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_fails(want, bad):
    got = want.copy()
    got[3, 11] = bad
    for check in (compare.assert_rows_close, compare.assert_total_close):
        with pytest.raises(AssertionError):
            check(got, want, 1e9)


def test_a_missing_nan_fails_and_the_same_nan_passes(want):
    other = want.copy()
    other[3, 11] = np.nan
    assert compare.assert_rows_close(other, other, 1e-3) == 0
    with pytest.raises(AssertionError):
        compare.assert_rows_close(want, other, 1e9)


def test_a_row_that_should_be_zero_must_be_zero(want):
    zeroed = want.copy()
    zeroed[3] = 0
    assert compare.assert_rows_close(zeroed, zeroed, 1e-3) == 0
    with pytest.raises(AssertionError, match="row 3 "):
        compare.assert_rows_close(want, zeroed, 1e9)


def test_total_and_cosine(want):
    assert compare.assert_total_close(want * 1.01, want, 0.02, cosine=0.999) == pytest.approx(
        0.5, 0.01
    )
    with pytest.raises(AssertionError, match="total error"):
        compare.assert_total_close(want * 1.03, want, 0.02)
    with pytest.raises(AssertionError, match="cosine"):
        compare.assert_total_close(want[::-1], want, 10, cosine=0.5)


def test_elementwise_bound(want):
    got = want + 0.5
    assert compare.assert_within(got, want, np.full_like(want, 1)) == pytest.approx(0.5, 1e-4)
    got[2, 3] = want[2, 3] + 5
    with pytest.raises(AssertionError, match=r"1 of .* \(2, 3\)"):
        compare.assert_within(got, want, np.full_like(want, 1))
    got[2, 3] = np.nan
    with pytest.raises(AssertionError, match=r"\(2, 3\)"):
        compare.assert_within(got, want, np.full_like(want, 1))


def test_bitwise_reports_the_first_difference(want):
    compare.assert_bitwise_equal(want, want.copy())
    compare.assert_bitwise_equal(np.asfortranarray(want), want)
    got = want.copy()
    got.view(np.uint32)[9, 2] ^= 1
    got[10] = 0
    with pytest.raises(AssertionError, match=r"65 of .* \(9, 2\): got .*0x.* want .*0x"):
        compare.assert_bitwise_equal(got, want)


def test_bitwise_tells_zeros_apart_and_nan_alike():
    nan = np.array([np.nan], np.float32)
    compare.assert_bitwise_equal(nan, nan.copy())
    with pytest.raises(AssertionError, match="80000000"):
        compare.assert_bitwise_equal(np.array([-0.0], np.float32), np.zeros(1, np.float32))


def test_bitwise_wants_shape_and_type(want):
    with pytest.raises(AssertionError, match="shape"):
        compare.assert_bitwise_equal(want[:1], want)
    with pytest.raises(AssertionError, match="element type"):
        compare.assert_bitwise_equal(want.view(np.int32), want)


def test_codes_may_be_off_by_one_here_and_there():
    want = np.full(10_000, 0x40, np.uint8)
    got = want.copy()
    got[17] += 1
    assert compare.assert_codes_close(got, want, tolerances.SILU_CODE_SHARE) == 1e-4
    got[18] -= 1
    with pytest.raises(AssertionError, match="off by one"):
        compare.assert_codes_close(got, want, tolerances.SILU_CODE_SHARE)


@pytest.mark.parametrize(("got", "want"), [(0x42, 0x40), (0x7F, 0x7E), (0xFF, 0x7F), (0x01, 0x81)])
def test_codes_further_apart_fail(got, want):
    one = np.array([[want]], np.uint8)
    with pytest.raises(AssertionError, match=r"\(0, 0\)"):
        compare.assert_codes_close(np.array([[got]], np.uint8), one, 1.0)


def test_routings_keep_their_promises(rng):
    ids = {name: routing(rng, 64, 16, 4) for name, routing in cases.ROUTINGS.items()}
    for name in ("uniform", "zipf"):
        assert all(len(set(row)) == 4 for row in ids[name].tolist())
    assert np.bincount(ids["zipf"].ravel(), minlength=16)[0] > 40
    assert len(set(ids["one_expert"].ravel())) == 1
    assert set(np.bincount(ids["round_robin"].ravel())) == {16}
    assert (ids["with_duplicates"][:, 0] == ids["with_duplicates"][:, 3]).all()
    assert (ids["with_minus_one"][0] == -1).all()
    assert {16, -1} <= set(ids["out_of_range"].ravel().tolist())
    assert all(a.dtype == np.int32 and a.shape == (64, 4) for a in ids.values())


def test_weights_dequantize_to_what_they_should(rng):
    w, scale = cases.quantize_weights(rng, 2, 256, 384)
    assert (w.shape, scale.shape) == ((2, 256, 384), (2, 2, 3))
    full = np.stack([oracles.dequantize(w[e], scale[e]) for e in range(2)])
    norms = np.linalg.norm(full, axis=2)
    assert 0.5 < norms.min() < norms.max() < 2
    blocks = np.abs(w.astype(np.float32)).reshape(2, 2, 128, 3, 128)
    assert (blocks.max(axis=(2, 4)) == 448).all()


@pytest.mark.parametrize("layout", ["row", "column", "tma", "packed"])
def test_poison_fills_the_padding_too(layout):
    scale = cases.poisoned_scales(5, 3, layout)
    assert scale.shape == (5, 1 if layout == "packed" else 3)
    storage = scale if scale.base is None else scale.base
    assert len(set(storage.ravel().tolist())) == 1
