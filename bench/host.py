"""Host time of eager calls, each beside its bar: ``python -m bench host --out FILE``.

The forms of an op take turns, 16 calls each, the GPU idle when a turn starts; the figure is the
median over the rounds. What torch.ops adds is the median of its differences to the function.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.harness import CALLS
from bench.host_forms import SIZES, Form, all_forms
from bench.record import Record, Row

ROUNDS = 41


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table; 1 where a bar is missed or a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench host", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args(argv)
    from bench.environment import environment

    record = Record(arguments.out, environment(), keep=False)
    rows = []
    for op, forms in all_forms("cuda"):
        for row in measured(op, forms):
            record.add(row)
            rows.append(row)
    show(rows)
    return int(any("error" in row or not row["is_met"] for row in rows))


def measured(op: str, forms: list[Form], rounds: int = ROUNDS) -> Iterator[Row]:
    """A row for each form. The first one's result is what the others must give, byte for byte."""
    want = forms[0].bytes()
    right = [form for form in forms if form.bytes() == want]
    times = interleaved({form.name: form.call for form in right}, rounds)
    for form in forms:
        key = {"op": op, "size": SIZES[op], "form": form.name, "bar_us": form.bar_us}
        if form.name not in times:
            yield key | {"error": "other bytes than the first form's: not timed"}
            continue
        us = statistics.median(times[form.name])
        found = {"host_us": round(us, 2), "over": form.over}
        if form.over is not None:
            pairs = zip(times[form.name], times[form.over], strict=True)
            us = statistics.median(a - b for a, b in pairs)
            found["over_us"] = round(us, 2)
        yield key | found | {"is_met": form.bar_us is None or us <= form.bar_us}


def interleaved(
    calls: dict[str, Callable[[], Any]], rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Microseconds per call of each, in each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(CALLS):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_turn_us(call))
    return times


def _turn_us(call: Callable[[], Any]) -> float:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def show(rows: Iterable[Row], console: Console | None = None) -> None:
    """One table; a missed bar is red."""
    made = Table(title="Host time of an eager call, us", box=SIMPLE, title_justify="left")
    for heading in ("op", "size", "form", "us", "more than", "by", "bar"):
        made.add_column(heading, justify="left" if heading in ("op", "form") else "right")
    for row in rows:
        made.add_row(row["op"], row["size"], row["form"], *_figures(row))
    (console or Console(width=150)).print(made)


def _figures(row: Row) -> list[str]:
    if "error" in row:
        return [f"[red]{row['error']}[/]"]
    bar = "-" if row["bar_us"] is None else f"{row['bar_us']:g}"
    by = f"{row['over_us']:.2f}" if row["over"] else "-"
    color = "green" if row["is_met"] else "red"
    return [f"{row['host_us']:.2f}", row["over"] or "-", by, f"[{color}]{bar}[/]"]
