"""How results are printed: a table on a terminal, plain lines elsewhere, or JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

Row = tuple[str, str]


def print_rows(rows: Sequence[Row]) -> None:
    """One name and one value a line."""
    if sys.stdout.isatty():
        _print_table(rows)
        return
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")


def _print_table(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None)
    for name, value in rows:
        table.add_row(Text(name, "bold"), Text(value))  # Text: a path may hold [markup]
    Console().print(table)


def print_json(value: Any) -> None:
    """JSON in the strict sense: what is no finite number becomes null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def seconds(value: float) -> str:
    """``1.23 s``, ``4.56 ms`` or ``7.89 us``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"
