"""Comparisons that say where and by how much, and judge token rows one by one."""

from __future__ import annotations

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
GROUP = 128


def row_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """``norm(got - want) / norm(want)`` of each row of [M, K]; 0 for 0 / 0, inf for NaN or x / 0.

    A row in which both hold NaN or infinities is judged by the rest, if these are the same ones.
    """
    got, want = _float64_rows(got, want)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    reference = np.where(np.isfinite(want), want, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        difference = np.where(same, 0.0, got - want)
        error = np.linalg.norm(difference, axis=1)
        relative = np.where(error == 0, 0.0, error / np.linalg.norm(reference, axis=1))
    return np.where(np.isnan(relative), np.inf, relative)


def assert_rows_close(
    got: np.ndarray, want: np.ndarray, tolerance: float, name: str = "result"
) -> float:
    """Every row within the tolerance. Returns the share of it that the worst row uses."""
    errors = row_errors(got, want)
    if not errors.size:
        return 0.0
    worst = int(errors.argmax())
    share = float(errors[worst] / tolerance)
    if not share <= 1:
        raise AssertionError(
            f"{name}: {(~(errors <= tolerance)).sum()} of {len(errors)} rows are off; row {worst} "
            f"is the worst, error {errors[worst]:.3e}, {share:.1f} x the tolerance "
            f"{tolerance:.1e}; "
            f"{_largest_difference(got, want, worst)}"
        )
    return share


def assert_total_close(
    got: np.ndarray,
    want: np.ndarray,
    tolerance: float,
    *,
    cosine: float | None = None,
    name: str = "result",
) -> float:
    """All rows together within the tolerance, and pointing the same way. Returns the share used."""
    got, want = (a.reshape(1, -1) for a in _float64_rows(got, want))
    error = float(row_errors(got, want)[0])
    if not error <= tolerance:
        raise AssertionError(f"{name}: total error {error:.3e} exceeds {tolerance:.1e}")
    if cosine is not None and want.any():
        found = float((got * want).sum() / np.linalg.norm(got) / np.linalg.norm(want))
        if not found > cosine:
            raise AssertionError(f"{name}: cosine {found:.6f} is not above {cosine}")
    return error / tolerance


def assert_within(
    got: np.ndarray, want: np.ndarray, bound: np.ndarray, name: str = "result"
) -> float:
    """``abs(got - want) <= bound`` for every element. Returns the largest share of a bound used."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    _require_same_shape(got, want)
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.abs(got - want)
        share = np.where(off == 0, 0.0, off / bound)
    share = np.where(np.isnan(share), np.inf, share)
    if not share.size:
        return 0.0
    where = tuple(int(i) for i in np.unravel_index(share.argmax(), share.shape))
    if not share[where] <= 1:
        raise AssertionError(
            f"{name}: {(~(share <= 1)).sum()} of {share.size} elements are off; {where} is the "
            f"worst, got {got[where]!r}, want {want[where]!r}, {share[where]:.1f} x the bound"
        )
    return float(share[where])


def assert_bitwise_equal(got: np.ndarray, want: np.ndarray, name: str = "result") -> None:
    """Same shape, same element type, same bytes. Strides are another matter."""
    _require_same_shape(got, want, name)
    if got.dtype != want.dtype:
        raise AssertionError(f"{name}: element type {got.dtype}, want {want.dtype}")
    differs = _bytes(got) != _bytes(want)
    if differs.any():
        where = tuple(int(i) for i in np.argwhere(differs.any(axis=-1))[0])
        raise AssertionError(
            f"{name}: {differs.any(axis=-1).sum()} of {got.size} elements differ; the first at "
            f"{where}: got {_show(got, where)}, want {_show(want, where)}"
        )


def assert_codes_close(
    got: np.ndarray, want: np.ndarray, share: float, name: str = "codes"
) -> float:
    """All but at most ``share`` of the e4m3 codes equal, those neighbours. Returns the share."""
    _require_same_shape(got, want, name)
    steps = np.abs(_code_order(got) - _code_order(want))
    if (steps > 1).any():
        where = tuple(int(i) for i in np.argwhere(steps > 1)[0])
        raise AssertionError(
            f"{name}: codes at {where} are {steps[where]} apart: got {_show(got, where)}, "
            f"want {_show(want, where)}"
        )
    found = float(np.count_nonzero(steps) / max(steps.size, 1))
    if found > share:
        raise AssertionError(
            f"{name}: {found:.1e} of the codes are off by one, at most {share:.1e}"
        )
    return found


def assert_activations_close(
    got: tuple[np.ndarray, np.ndarray],
    want: tuple[np.ndarray, np.ndarray],
    share: float,
    name: str = "activations",
) -> None:
    """Codes and scales of quantized activations, equal but for a rounding to bf16 here and there.

    An activation that is rounded the other way moves by one bf16 ulp and its code by at most one;
    this may happen to ``share`` of all codes, rounded up to a whole one. Where it is the largest of
    its group, the fp32 scale moves by the same ulp and any code of the group by at most one: that
    counts once. Scales that are powers of two, or their exponents, must be equal.
    """
    (q, scale), (want_q, want_scale) = got, want
    _require_same_shape(scale, want_scale, f"{name}: scales")
    moved = (_bytes(scale) != _bytes(want_scale)).any(axis=-1)
    if moved.any():
        if scale.dtype != np.float32 or not (np.frexp(want_scale[moved])[0] != 0.5).all():
            assert_bitwise_equal(scale, want_scale, f"{name}: scales")
        # A bf16 ulp is at most 2^-7 of the smaller value; both scales are rounded to fp32.
        pair = np.sort([scale[moved], want_scale[moved]], axis=0)
        assert_within(pair[1], pair[0], pair[0] * (2.0**-7 + 2.0**-22), f"{name}: scales")
    assert_codes_close(q, want_q, 1.0, f"{name}: codes")
    off = q.view(np.uint8) != want_q.view(np.uint8)
    if scale.dtype == np.float32:
        off = off.reshape(*moved.shape, GROUP) & ~moved[..., None]
    count, allowed = int(off.sum() + moved.sum()), int(np.ceil(share * q.size))
    if count > allowed:
        raise AssertionError(f"{name}: {count} of {q.size} values are off, at most {allowed}")


def _float64_rows(got: np.ndarray, want: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _require_same_shape(got, want)
    rows = (int(np.prod(want.shape[:-1])), want.shape[-1])
    return got.astype(np.float64).reshape(rows), want.astype(np.float64).reshape(rows)


def _require_same_shape(got: np.ndarray, want: np.ndarray, name: str = "result") -> None:
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {got.shape}, want {want.shape}")


def _largest_difference(got: np.ndarray, want: np.ndarray, row: int) -> str:
    got, want = _float64_rows(got, want)
    with np.errstate(invalid="ignore"):
        off = np.abs(got[row] - want[row])
    column = int(np.where(np.isnan(off), np.inf, off).argmax())
    return f"at ({row}, {column}): got {got[row, column]!r}, want {want[row, column]!r}"


def _bytes(array: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat.reshape(*array.shape, array.itemsize)


def _show(array: np.ndarray, where: tuple[int, ...]) -> str:
    return f"{array[where]} (0x{_bytes(array)[where][::-1].tobytes().hex()})"


def _code_order(codes: np.ndarray) -> np.ndarray:
    """Integers in which neighbouring e4m3 codes differ by one, and NaN is far from all others."""
    bits = codes.view(np.uint8).astype(np.int32)
    magnitude = np.where((bits & 0x7F) == 0x7F, 1000, bits & 0x7F)
    return np.where(bits & 0x80, -1 - magnitude, magnitude)
