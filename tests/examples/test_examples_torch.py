"""The example of torch.compile runs, and says that the graph gives the eager bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_layer_inside_torch_compile():
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "torch_compile.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"{tokens} tokens: torch.bfloat16[{tokens}, 512], as eager: True" for tokens in (4, 7, 64)
    ]
