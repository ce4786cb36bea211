"""The examples as their readers start them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def start(
    name: str, *path: Path, warnings: str = "error", **env: str
) -> subprocess.CompletedProcess[str]:
    """An example that has ended. ``path``: folders to import from, before the checkout."""
    places = os.pathsep.join(map(str, (*path, ROOT, *filter(None, [os.environ.get("PYTHONPATH")]))))
    return subprocess.run(
        [sys.executable, "-W", warnings, str(EXAMPLES / name)],
        env=os.environ | {"PYTHONPATH": places} | env,
        capture_output=True,
        text=True,
    )


def output(name: str, *path: Path, **env: str) -> str:
    """What an example prints; it ends well, without a warning."""
    done = start(name, *path, **env)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def lines_of_code(source: str) -> int:
    """Lines that hold something other than a docstring, a comment or nothing."""
    tree = ast.parse(source)
    strings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in strings
        for number, line in enumerate(source.splitlines(), 1)
    )
