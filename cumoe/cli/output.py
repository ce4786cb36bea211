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


def print_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table with a header: a column is as wide as its widest text."""
    if sys.stdout.isatty():
        _print_columns_on_a_terminal(header, rows)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print(
            "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        )


def _print_columns_on_a_terminal(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=None)
    for row in rows:
        table.add_row(*map(Text, row))  # Text: a path may hold [markup]
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


def duration(value: float) -> str:
    """Seconds as a person counts them: ``3 d``, ``5 h``, ``7 min`` or ``9 s``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if value >= 2 * size:
            return f"{value // size:.0f} {unit}"
    return f"{value:.0f} s"
