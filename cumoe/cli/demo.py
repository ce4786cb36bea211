"""``cumoe demo``: a small checkpoint, written, run and verified."""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

from cumoe.cli.output import print_rows, seconds
from cumoe.cli.run import conclude, rows

_DESCRIPTION = """\
Writes a checkpoint of 3 MB with random weights, and runs and verifies its layer as `cumoe run`
does. Without a GPU it verifies the NumPy reference, and compiles every kernel of the layer (for
sm_90a, or the architecture in CUMOE_ARCH).
"""


def add_to(subparsers: Any) -> None:
    """Adds the command's parser."""
    p = subparsers.add_parser(
        "demo", help="write, run and verify a small checkpoint", description=_DESCRIPTION
    )
    p.add_argument("--keep", metavar="DIR", help="write the checkpoint to this folder and keep it")
    p.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    if args.keep is not None:
        return _demo(args.keep)
    with tempfile.TemporaryDirectory(prefix="cumoe-demo-") as folder:
        return _demo(folder)


def _demo(folder: str) -> int:
    from cumoe.checkpoint.demo import write_demo
    from cumoe.checkpoint.run import run_layer

    report = run_layer(write_demo(folder))
    found, failures = rows(report), list(report.errors.failures)
    if report.backend == "cpu":
        kernels, refused = _compile(folder)
        found.append(("kernels", kernels))
        failures += refused
    print_rows([*found, ("result", "FAILED" if failures else "ok")])
    return conclude(report.file, failures)


def _compile(folder: str) -> tuple[str, tuple[str, ...]]:
    """Compiles the layer's kernels where there is a compiler: what to say, and the failures."""
    from cumoe.errors import UnsupportedDeviceError
    from cumoe.prebuild import prebuild

    try:
        built = prebuild(config=folder)
    except UnsupportedDeviceError as error:
        return f"not compiled: {error}", ()
    what = f"{len(built.kernels)} for {', '.join(built.archs)}, {built.num_bytes:,} bytes"
    if built.is_compiled:  # a cache that cannot be written leaves nothing unverified
        for cause in built.causes:
            print(f"cumoe: warning: {cause}", file=sys.stderr)
        return f"{what}, compiled or in the cache, {seconds(built.seconds)}", ()
    return f"{what}, {built.count('failed')} failed, {seconds(built.seconds)}", built.causes
