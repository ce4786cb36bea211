"""Time against size, on log axes: ours, the floor, a kernel that only reads, and the peers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bench.record import Row, comparable

Points = list[tuple[float, float]]

OURS, FLOOR, READ_ONLY = "cumoe", "floor", "a kernel that only reads the input"
LABELS = {
    "vllm-triton": "vLLM Triton",
    "vllm-deepgemm": "vLLM DeepGEMM",
    "vllm-marlin": "vLLM Marlin (16-bit activations)",
    "vllm-two-kernel": "vLLM, two kernels",
    "vllm-fused": "vLLM, fused (no clamp, no filter)",
}
COLUMNS = 3
STYLES: dict[str, dict[str, Any]] = {
    FLOOR: {"color": "#8a8f98", "linestyle": (0, (5, 3)), "linewidth": 1.2},
    READ_ONLY: {"color": "#8a8f98", "linestyle": (0, (1, 2)), "linewidth": 1.6},
    "vllm-triton": {"color": "#2b6cb0", "marker": "s"},
    "vllm-deepgemm": {"color": "#6b46c1", "marker": "^"},
    "vllm-marlin": {"color": "#b7791f", "marker": "D"},
    "vllm-two-kernel": {"color": "#2b6cb0", "marker": "s"},
    "vllm-fused": {"color": "#b7791f", "marker": "D"},
    OURS: {"color": "#c53030", "marker": "o", "linewidth": 2.6, "markersize": 5.5, "zorder": 5},
}
"""In the order of the legend; a line not named here is drawn in black."""


class Panel(NamedTuple):
    """One pair of axes: lines by name, each with its points in ascending order."""

    title: str
    x_label: str
    lines: dict[str, Points]


def draw(record: dict[str, Any], out: Path) -> None:
    """Writes a PNG. Raises ValueError where no row can be drawn."""
    made = panels(record["rows"])
    if not made:
        raise ValueError("plot: want rows of at least two sizes, got none; measure more sizes")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = 2 if len(made) == 4 else min(COLUMNS, len(made))
    rows = -(-len(made) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(4.9 * columns, 3.9 * rows + 0.7), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for panel, axes in zip(made, grid.flat, strict=False):
        _draw_panel(panel, axes)
    for axes in grid.flat[len(made) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel("µs per call, in a CUDA graph", fontsize=9)
    where = record["environment"]
    figure.suptitle(f"{where['device']}, {where['date'][:10]}", fontsize=10, color="#555555")
    _draw_legend(figure, grid.flat)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def _draw_legend(figure: Any, every: Iterable[Any]) -> None:
    lines = {line.get_label(): line for axes in every for line in axes.get_lines()}
    names = sorted(lines, key=_rank)
    figure.legend(
        [lines[name] for name in names], [LABELS.get(name, name) for name in names],
        loc="outside lower center", ncols=len(names), frameon=False, fontsize=9,
    )  # fmt: skip


def panels(rows: Iterable[Row]) -> list[Panel]:
    """A panel per shape of the experts, and per hidden size and filter of the activation."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if (key := _panel_of(row)) is not None:
            groups.setdefault(key, []).append(row)
    made = [Panel(*key, _lines(group)) for key, group in groups.items()]
    return [panel for panel in made if len(panel.lines[OURS]) > 1]


def _panel_of(row: Row) -> tuple[str, str] | None:
    """Title and x label; None for a row that is not drawn."""
    if "shape" in row:
        return (row["shape"], "tokens") if comparable(row) else None
    if row["op"] != "silu_and_mul_quant_fp8":
        return None
    if row["filter"]:
        return f"activation, hidden {row['hidden']}, 1/8 of the experts local", "rows"
    return (f"activation, hidden {row['hidden']}", "rows") if comparable(row) else None


def _lines(rows: list[Row]) -> dict[str, Points]:
    lines: dict[str, Points] = {}
    for row in sorted(rows, key=_size):
        ours = {OURS: row["us"], FLOOR: row["floor_us"], READ_ONLY: row["read_only_us"]}
        if row.get("filter"):  # there it reads the rows of all experts
            del ours[READ_ONLY]
        for name, us in {**ours, **row["peers"]}.items():
            if us:  # a floor may be unknown, or 0.00
                lines.setdefault(name, []).append((_size(row), us))
    return lines


def _size(row: Row) -> int:
    return int(row["m"] if "shape" in row else row["rows"])


def _draw_panel(panel: Panel, axes: Any) -> None:
    for name in sorted(panel.lines, key=_rank):
        style = {"linewidth": 1.5, "markersize": 4, "color": "black", **STYLES.get(name, {})}
        axes.plot(*zip(*panel.lines[name], strict=True), label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = [x for x, _ in panel.lines[OURS]]
    ticks = x_ticks(sizes)
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks], fontsize=7.5)
    axes.minorticks_off()
    low, high = y_range(panel.lines)
    axes.set_ylim(low, high)
    ticks = y_ticks(low, high)
    axes.set_yticks(ticks, [f"{y:g}" for y in ticks], fontsize=8)
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(panel.x_label)
    axes.set_title(panel.title, fontsize=10)


def x_ticks(sizes: list[float]) -> list[float]:
    """The sizes, without those too near to the one before to have a label."""
    kept = sizes[:1]
    for size in sizes[1:]:
        if size >= 1.8 * kept[-1]:
            kept.append(size)
    return kept


def y_range(lines: dict[str, Points]) -> tuple[float, float]:
    """Room around all lines but for a floor far below ours, which leaves the panel."""
    every = [y for points in lines.values() for _, y in points]
    ours = min(y for _, y in lines[OURS])
    return max(min(every), ours / 2) / 1.25, max(every) * 1.25


def y_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... inside the range."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [t for d in decades for t in (10.0**d, 2 * 10.0**d, 5 * 10.0**d) if low <= t <= high]


def _rank(name: str) -> tuple[int, str]:
    """Ours first in the legend and drawn among the first; then the peers, then the limits."""
    order = [OURS, *(n for n in STYLES if n.startswith("vllm")), READ_ONLY, FLOOR]
    return (order.index(name) if name in order else len(STYLES), name)
