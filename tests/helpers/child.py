"""Real processes that do something at the same moment, or die while they do it.

A child runs a piece of code. It may call `at_barrier()` to wait for its parent and `report(...)` to
hand facts back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]

Child = subprocess.Popen


def start(code: str, *args: object, cwd: Path | None = None, **env: str) -> Child[str]:
    """Starts `code` with `args` as sys.argv[1:] and `env` on top of this environment."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(_ROOT), **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_ready(child: Child[str]) -> None:
    """Returns once the child stands at its barrier."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if line != "ready\n":
        raise AssertionError(f"child said {line!r}: {child.communicate()[1]}")


def release(children: Iterable[Child[str]]) -> None:
    """Lets children that are all at their barrier go on, as nearly together as can be."""
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()


def result(child: Child[str], timeout_s: float = 60.0) -> dict[str, Any]:
    """What the child reported, once it has ended well."""
    out, err = child.communicate(timeout=timeout_s)
    if child.returncode != 0:
        raise AssertionError(f"child ended with {child.returncode}: {err}")
    facts: dict[str, Any] = json.loads(out.splitlines()[-1])
    return facts


def end(child: Child[str]) -> None:
    """Kills the child at once, as SIGKILL does, and cleans up after it."""
    child.kill()
    child.communicate()


def at_barrier() -> None:
    """In the child: waits until the parent releases it."""
    print("ready", flush=True)
    if not sys.stdin.readline():
        raise SystemExit("the parent is gone")


def report(**facts: object) -> None:
    """In the child: the facts that `result` gives the parent."""
    print(json.dumps(facts), flush=True)
