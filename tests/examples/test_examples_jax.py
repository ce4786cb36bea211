"""The example with JAX arrays runs, and its numbers are sane."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_layer_on_jax_arrays():
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "jax_arrays.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    line = re.fullmatch(
        r"bfloat16\[8, 512\] on cpu:0, float8_e4m3fn within ([0-9.]+)\n", done.stdout
    )
    assert line, done.stdout
    assert 0 < float(line[1]) < 1 / 16
