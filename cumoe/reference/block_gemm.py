"""The matrix product of two block-scaled e4m3 matrices, one fp32 promotion per 128 of depth."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cumoe.reference.e4m3 import E4M3, F32, Array

F64 = NDArray[np.float64]

BLOCK = 128
_VALUE_OF_CODE: F64 = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float64)


def block_scaled_matmul(a: Array, a_scale: F32, w: Array, w_scale: F32) -> F32:
    """[T, N] float32 of a [T, D] e4m3, a_scale [T, D/128], w [N, D] e4m3, w_scale [N/128, D/128].

    ``sum over blocks, ascending, of (a_scale * w_scale) * (a . w)``, each operation rounded to
    float32. The product inside a block is formed in float64, where it is exact in any order:
    terms are multiples of 2^-18 and 128 * 448^2 < 2^25, 43 bits in all. So the result does not
    depend on the BLAS, and the block's sum is rounded once.
    """
    total = np.zeros((len(a), len(w)), np.float32)
    for block in range(w_scale.shape[1]):
        depth = slice(block * BLOCK, (block + 1) * BLOCK)
        dot = (_decode(a[:, depth]) @ _decode(w[:, depth]).T).astype(np.float32)
        scale = a_scale[:, block, None] * np.repeat(w_scale[:, block], BLOCK)
        total += scale * dot
    return total


def _decode(codes: Array) -> F64:
    return np.take(_VALUE_OF_CODE, codes.view(np.uint8))
