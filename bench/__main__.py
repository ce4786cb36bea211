"""``python -m bench activation --out FILE``: measures, prints a table, writes JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def main() -> int:
    """Runs one of the measurements."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("what", choices=["activation"])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="the main sizes only")
    arguments = parser.parse_args()
    from bench import activation
    from bench.environment import environment

    rows = activation.run(arguments)
    show(rows)
    if arguments.out:
        record = {"environment": environment(), "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def show(rows: list[dict[str, Any]]) -> None:
    """A table: ours, the floor, a kernel that only reads, and each peer with its ratio."""
    names = sorted({name for row in rows for name in row["peers"]})
    table = Table(
        "op", "hidden", "rows", "filter", "us", "p20-p80", "floor", "read", "host", *names
    )
    for r in rows:
        ratios = [
            f"{r['peers'][n]:.2f} ({r['peers'][n] / r['us']:.2f}x)" if n in r["peers"] else "-"
            for n in names
        ]
        table.add_row(
            r["op"].split("_")[0], str(r["hidden"]), str(r["rows"]), r["filter"] or "",
            f"{r['us']:.2f}", f"{r['p20']:.2f}-{r['p80']:.2f}", str(r["floor_us"]),
            f"{r['read_only_us']:.2f}", f"{r['host_us']:.1f}", *ratios,
        )  # fmt: skip
    Console(width=160).print(table)


if __name__ == "__main__":
    sys.exit(main())
