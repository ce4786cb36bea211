"""The number formats: every rounding of the reference happens here, and always from float32.

e4m3 is e4m3fn: largest finite value 448, no infinity, NaN codes 0x7F and 0xFF. A cast by ml_dtypes
alone would not do: it turns what lies above 464 into NaN, keeps the sign of a NaN, and rounds twice
when it starts from float64.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cumoe.errors import DTypeError

Array = NDArray[Any]
F32 = NDArray[np.float32]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3_MAX = np.float32(448)
E4M3_NAN_CODE = 0x7F
AMAX_FLOOR = np.float32(1e-10)
UE8M0_SCALE_FLOOR = np.float32(1e-10)
FP32_MANTISSA_BITS = 23


def to_e4m3(values: F32) -> Array:
    """Nearest e4m3, ties to even, saturating at +-448; code 0x7F for every NaN."""
    _require_float32(values)
    is_nan = np.isnan(values)
    numbers = np.where(is_nan, np.float32(0), values)
    codes = np.clip(numbers, -E4M3_MAX, E4M3_MAX).astype(E4M3)
    codes.view(np.uint8)[is_nan] = E4M3_NAN_CODE
    return codes


@np.errstate(over="ignore", invalid="ignore")
def to_bf16(values: F32) -> Array:
    """Nearest bf16, ties to even; what lies beyond the largest bf16 becomes an infinity."""
    _require_float32(values)
    return values.astype(BF16)


def group_amax(groups: F32) -> F32:
    """Largest magnitude along the last axis, at least 1e-10. NaN does not take part."""
    _require_float32(groups)
    return np.asarray(np.fmax.reduce(np.abs(groups), axis=-1, initial=AMAX_FLOOR))


def fp32_scale(amax: F32) -> F32:
    """amax / 448."""
    _require_float32(amax)
    return amax / E4M3_MAX


def ue8m0_scale(amax: F32) -> F32:
    """Smallest power of two that is at least amax / 448 and at least 1e-10; +inf for +inf."""
    scale = np.maximum(fp32_scale(amax), UE8M0_SCALE_FLOOR)
    # Adding a full mantissa carries into the exponent unless the mantissa was zero: a ceiling.
    mantissa = np.uint32((1 << FP32_MANTISSA_BITS) - 1)
    return ((scale.view(np.uint32) + mantissa) & ~mantissa).view(np.float32)


def ue8m0_bytes(scale: F32) -> NDArray[np.uint8]:
    """The biased exponents of powers of two (127 for 1.0, 255 for +inf)."""
    return (scale.view(np.uint32) >> FP32_MANTISSA_BITS).astype(np.uint8)


def _require_float32(values: Array) -> None:
    if values.dtype != np.float32:
        raise DTypeError(
            f"values must be float32, got {values.dtype}: any other type would be rounded twice"
        )
