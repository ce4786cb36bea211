"""A scalar is no matrix."""

from __future__ import annotations

import numpy as np
import pytest

from cumoe import ArgumentError, reference
from tests.helpers.cases import BF16


def test_a_scalar_cannot_be_quantized():
    with pytest.raises(ArgumentError, match=r"x must be \[\.\.\., K\], got a scalar"):
        reference.per_token_group_quant_fp8(np.array(1, np.float32))


def test_a_scalar_has_no_gate_and_up():
    with pytest.raises(ArgumentError, match=r"gate_up must be \[\.\.\., 2 \* H\], got shape \[\]"):
        reference.silu_and_mul_quant_fp8(np.array(1, BF16))
