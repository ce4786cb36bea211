"""``cumoe doctor``: what is installed, what would run, what is wrong."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cumoe.cli.output import print_json, print_rows

if TYPE_CHECKING:
    from cumoe.doctor import Diagnosis

_DESCRIPTION = """\
Looks at GPU, driver, CuPy, NVRTC and cache, and says what would run for each op. Each finding comes
with its remedy. Exit status 1 if something would not work.
"""


def add_to(subparsers: Any) -> None:
    """Adds the command's parser."""
    p = subparsers.add_parser("doctor", help="find what is wrong here", description=_DESCRIPTION)
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    from cumoe.doctor import diagnose

    diagnosis = diagnose()
    if args.json:
        print_json(as_json(diagnosis))
        return 0 if diagnosis.ok else 1
    result = "ok" if diagnosis.ok else "FAILED"
    print_rows([*diagnosis.facts, *diagnosis.ops, ("result", result)])
    for finding in diagnosis.findings:
        kind = "error" if finding.is_fatal else "warning"
        print(f"cumoe: {kind}: {finding.problem}\n  {finding.remedy}", file=sys.stderr)
    return 0 if diagnosis.ok else 1


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as one JSON object; a fact has as many values as there are such things."""
    facts: dict[str, list[str]] = {}
    for name, value in diagnosis.facts:
        facts.setdefault(name, []).append(value)
    return {
        "ok": diagnosis.ok,
        "facts": facts,
        "ops": dict(diagnosis.ops),
        "findings": [asdict(finding) for finding in diagnosis.findings],
    }
