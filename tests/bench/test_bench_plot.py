"""What is drawn: panels, lines and axes. Drawing itself needs matplotlib, these do not."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from bench import plot
from bench.plot import FLOOR, OURS, READ_ONLY
from bench.record import read

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "h200"


def row(m: int, us: float, *, shape: str = "s", routing: str = "uniform", floor=1.0, **peers):
    return {
        "op": "fused_experts_fp8", "shape": shape, "m": m, "routing": routing, "us": us,
        "scale_format": "fp32", "floor_us": floor, "read_only_us": 2.0, "peers": peers,
    }  # fmt: skip


def test_a_panel_per_shape_with_ascending_points():
    rows = [row(8, 30.0, a=60.0), row(1, 10.0, a=40.0), row(1, 5.0, shape="t"), row(2, 6.0)]
    rows += [row(4, 9.0, shape="t")]
    first, second = plot.panels(rows)
    assert tuple(first) == (
        "s",
        "tokens",
        {
            OURS: [(1, 10.0), (2, 6.0), (8, 30.0)],
            FLOOR: [(1, 1.0), (2, 1.0), (8, 1.0)],
            READ_ONLY: [(1, 2.0), (2, 2.0), (8, 2.0)],
            "a": [(1, 40.0), (8, 60.0)],
        },
    )
    assert (second.title, second.lines[OURS]) == ("t", [(1, 5.0), (4, 9.0)])


def test_rows_that_are_not_compared_are_not_drawn():
    rows = [row(1, 1.0), row(2, 1.0), row(4, 9.0, routing="zipf")]
    rows += [row(8, 9.0) | {"scale_format": "ue8m0"}]
    (panel,) = plot.panels(rows)
    assert panel.lines[OURS] == [(1, 1.0), (2, 1.0)]


@pytest.mark.parametrize("floor", [None, 0.0])
def test_a_floor_that_is_unknown_or_zero_has_no_point(floor):
    (panel,) = plot.panels([row(1, 1.0, floor=floor), row(2, 1.0)])
    assert panel.lines[FLOOR] == [(2, 1.0)]


def test_one_size_is_no_panel_and_none_is_refused(tmp_path):
    assert plot.panels([row(1, 1.0)]) == []
    with pytest.raises(ValueError, match="want rows of at least two sizes"):
        plot.draw({"environment": {}, "rows": []}, tmp_path / "x.png")


def test_panels_of_the_record_in_the_tree():
    panels = plot.panels(read(RESULTS / "activation.json")["rows"])
    titles = [panel.title for panel in panels]
    assert {"activation, hidden 512", "activation, hidden 2048"} <= set(titles)
    for panel in panels:
        assert {OURS, FLOOR, "vllm-two-kernel"} <= panel.lines.keys()
        assert (READ_ONLY in panel.lines) == ("local" not in panel.title)


def test_ticks():
    assert plot.x_ticks([1, 2, 4, 256, 384, 512, 768, 1024]) == [1, 2, 4, 256, 512, 1024]
    assert plot.y_ticks(0.9, 25.0) == [1, 2, 5, 10, 20]
    assert plot.y_ticks(12.0, 18.0) == []


def test_a_floor_far_below_ours_leaves_the_panel_and_all_else_is_inside():
    low, high = plot.y_range({OURS: [(1, 10.0)], FLOOR: [(1, 0.1)], "peer": [(1, 80.0)]})
    assert (low, high) == (4.0, 100.0)
    low, high = plot.y_range({OURS: [(1, 10.0)], FLOOR: [(1, 8.0)], "peer": [(1, 9.0)]})
    assert low < 8.0
    assert high > 10.0


def test_all_but_drawing_works_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    without = importlib.reload(plot)
    assert len(without.panels([row(1, 1.0), row(2, 1.0)])) == 1
