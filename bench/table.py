"""Rows on the terminal: ours, the floor, a kernel that only reads, and each peer with its ratio."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import exp, log
from statistics import mean

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.record import Row, comparable, name_of
from cumoe.checkpoint.accuracy import FLOAT64_ROW

WIDTH = 190
WRONG = FLOAT64_ROW
"""A peer that is further off than quantization explains computes something else."""
_BYTES = {"silu_and_mul_quant_fp8": 4 + 1 + 4 / 128, "per_token_group_quant_fp8": 2 + 1 + 4 / 128}
"""Read and written for each output, with an fp32 scale for 128 of them."""


def show(rows: list[Row], console: Console | None = None) -> None:
    """A table for each shape, routing and scale format, and a line for each peer."""
    console = console or Console(width=WIDTH)
    for title, group in groupby(rows, _title):
        console.print(table(title, list(group)))
    for line in summary(rows):
        console.print(line)


def table(title: str, rows: list[Row]) -> Table:
    """Times in microseconds. A ratio in red is a loss."""
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    made = Table(title=title, box=SIMPLE, title_justify="left", title_style="bold")
    for heading in (
        *_key(rows[0]), "us", "p20-p80", "floor", "of floor", "read only", "x read", "TB/s",
        "TFLOP/s", "host", "host alloc", *names,
    ):  # fmt: skip
        made.add_column(heading, justify="right")
    for row in rows:
        made.add_row(*_key(row).values(), *_times(row), *(_peer(row, name) for name in names))
    return made


def summary(rows: list[Row]) -> list[str]:
    """For each peer the geometric mean over comparable rows, the extremes, and all losses."""
    names = dict.fromkeys(name for row in rows for name in row["peers"])
    return [line for name in names for line in _peer_summary(name, rows)]


def _peer_summary(name: str, rows: list[Row]) -> Iterator[str]:
    ratios = [(row["peers"][name] / row["us"], row) for row in rows if name in row["peers"]]
    compared = [ratio for ratio, row in ratios if comparable(row)]
    if compared:
        average = exp(mean(log(ratio) for ratio in compared))
        yield (
            f"{name}: {average:.2f}x our time, the geometric mean of {len(compared)} rows "
            f"({min(compared):.2f}x to {max(compared):.2f}x)"
        )
    wrong = [
        name_of(row) for _, row in ratios if row.get("peers_row_error", {}).get(name, 0) > WRONG
    ]
    if wrong:
        yield f"{name}: row error above {WRONG:.0%}, another result: {', '.join(wrong)}"
    losses = [f"{name_of(row)} ({ratio:.2f}x)" for ratio, row in ratios if ratio < 1]
    if losses:
        yield f"{name}: faster than ours in {len(losses)} rows: {', '.join(losses)}"


def _title(row: Row) -> str:
    if "shape" not in row:
        return str(row["op"])
    limit = "" if row["limit"] is None else f", limit {row['limit']:g}"
    return f"{row['shape']}: {row['routing']} routing, {row['scale_format']} scales{limit}"


def _key(row: Row) -> dict[str, str]:
    if "shape" in row:
        return {"M": str(row["m"]), "active": f"{row['active']:.1f}"}
    names = ("hidden", "rows", "filter", "scale_format")
    return {name: str(row[name] or "") for name in names}


def _times(row: Row) -> list[str]:
    us, floor, read = row["us"], row["floor_us"], row["read_only_us"]
    return [
        f"{us:.2f}", f"{row['p20']:.2f}-{row['p80']:.2f}",
        "-" if floor is None else f"{floor:.2f}",
        "-" if floor is None else f"{floor / us:.0%}",
        f"{read:.2f}", f"{us / read:.2f}x",
        f"{_tbytes_s(row):.2f}", f"{row['tflops']:.0f}" if "tflops" in row else "-",
        f"{row['host_us']:.1f}",
        f"{row['host_us_allocating']:.1f}" if "host_us_allocating" in row else "-",
    ]  # fmt: skip


def _tbytes_s(row: Row) -> float:
    if "tbytes_s" in row:
        return float(row["tbytes_s"])
    rows = row.get("local_rows", row["rows"])
    return float(rows * row["hidden"] * _BYTES[row["op"]] / row["us"] / 1e6)


def _peer(row: Row, name: str) -> str:
    if name not in row["peers"]:
        return "-"
    ratio = row["peers"][name] / row["us"]
    style = "red" if ratio < 1 else "green"
    return f"{row['peers'][name]:.2f} [{style}]{ratio:.2f}x[/]"
