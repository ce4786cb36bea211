"""Tables and summaries of rows that are made up, and of the record in the tree."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from bench.record import read
from bench.table import show, summary

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "h200"


def row(m: int, us: float, *, routing: str = "uniform", errors: dict | None = None, **peers: float):
    return {
        "op": "fused_experts_fp8", "shape": "s-tp8", "m": m, "routing": routing, "limit": 10.0,
        "scale_format": "fp32", "us": us, "p20": us - 1, "p80": us + 1, "floor_us": us / 2,
        "read_only_us": us / 1.25, "host_us": 33.0, "host_us_allocating": 44.0, "tflops": 123.4,
        "tbytes_s": 3.21, "active": 7.9, "peers": peers, "peers_row_error": errors or {},
    }  # fmt: skip


def shown(rows: list[dict]) -> str:
    text = io.StringIO()
    show(rows, Console(file=text, width=190, force_terminal=False))
    return text.getvalue()


def test_a_line_has_every_figure():
    text = shown([row(8, 100.0, a=150.0, b=90.0)])
    assert "s-tp8: uniform routing, fp32 scales, limit 10" in text
    (line,) = [line for line in text.splitlines() if " 7.9 " in line]
    assert line.split() == [
        "8", "7.9", "100.00", "99.00-101.00", "50.00", "50%", "80.00", "1.25x", "3.21", "123",
        "33.0", "44.0", "150.00", "1.50x", "90.00", "0.90x",
    ]  # fmt: skip


def test_a_peer_without_the_row_and_a_gpu_without_a_floor_leave_a_dash():
    rows = [row(1, 10.0, a=20.0), row(2, 10.0) | {"floor_us": None}]
    line = shown(rows).splitlines()[-3].split()
    assert (line[0], line[4], line[5], line[-1]) == ("2", "-", "-", "-")


def test_a_table_for_each_routing():
    text = shown([row(1, 10.0), row(2, 10.0), row(1, 10.0, routing="zipf")])
    assert text.count("uniform routing") == 1
    assert text.count("zipf routing") == 1


def test_losses_are_red(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = io.StringIO()
    console = Console(file=text, width=190, force_terminal=True, color_system="standard")
    show([row(1, 10.0, a=20.0, b=9.0)], console)
    assert "\x1b[32m2.00x" in text.getvalue()
    assert "\x1b[31m0.90x" in text.getvalue()


def test_the_summary_is_a_geometric_mean_of_comparable_rows_and_names_all_losses():
    rows = [row(1, 10.0, a=20.0), row(2, 10.0, a=5.0), row(4, 10.0, routing="zipf", a=1.0)]
    assert summary(rows) == [
        "a: 1.00x our time, the geometric mean of 2 rows (0.50x to 2.00x)",
        "a: faster than ours in 2 rows: s-tp8 M=2 uniform (0.50x), s-tp8 M=4 zipf (0.10x)",
    ]


def test_the_summary_says_where_a_peer_computes_something_else():
    rows = [row(m, 10.0, errors={"a": error}, a=20.0) for m, error in ((1, 0.04), (2, 0.5))]
    assert summary(rows)[1] == "a: row error above 12%, another result: s-tp8 M=2 uniform"


def test_no_peers_no_summary():
    assert summary([row(1, 10.0)]) == []


@pytest.mark.parametrize("name", ["activation.json"])
def test_the_record_in_the_tree_is_shown(name):
    rows = read(RESULTS / name)["rows"]
    text = shown(rows)
    sizes = {str(r["rows"]) for r in rows}
    assert sizes <= set(text.split())
    assert all(f"{name}: " in text for r in rows for name in r["peers"])
