"""The example with JAX arrays runs, and its numbers are sane."""

from __future__ import annotations

import re

from tests.helpers import examples


def test_a_layer_on_jax_arrays():
    printed = examples.output("jax_arrays.py", JAX_PLATFORMS="cpu")
    line = re.fullmatch(r"bfloat16\[8, 512\] on cpu:0, float8_e4m3fn within ([0-9.]+)\n", printed)
    assert line, printed
    assert 0 < float(line[1]) < 1 / 16
