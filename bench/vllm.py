"""vLLM with the plugin and without it: ``python -m bench vllm --out FILE``.

A layer is vLLM's modular kernel, with the experts that its oracle chooses. An engine is a model
with random weights; both arms are up at once and generate in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench import shapes, vllm_engine, vllm_layer
from bench.record import Record, Row

PARTS = ("layer", "engine")
LAYERS = ["glm-5.3-tp8", "glm-5.3-flash-tp8", "e128-top8-k2048-n768"]
_COLUMNS = {
    vllm_layer.OP: {
        "us, vLLM": "us_vllm", "us, cumoe": "us_cumoe", "ratio": "ratio",
        "row difference": "row_difference", "vLLM's class": "vllm_class",
    },
    vllm_engine.OP: {
        "tokens/s, vLLM": "tokens_s_vllm", "tokens/s, cumoe": "tokens_s_cumoe", "ratio": "ratio",
        "same tokens": "same_tokens", "of": "tokens", "equal sequences": "equal_sequences",
        "logprob difference": "logprob_difference", "logprob error": "logprob_error",
    },
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Prints rows as they come, then a table; 1 where a row is wrong or vLLM is absent."""
    arguments = parser().parse_args(argv)
    if find_spec("vllm") is None:
        print("vllm: absent, nothing measured; pip install 'cumoe[vllm]'")
        return 1
    from bench import peers
    from bench.environment import environment

    where = environment() | {"peers": peers.versions()}
    record = Record(arguments.out, where, keep=arguments.keep)
    rows = []
    for row in measured(arguments):
        record.add(row)
        rows.append(row)
        print(row, flush=True)
    show([row for row in rows if "error" not in row])
    return int(any("error" in row for row in rows))


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m bench vllm", description=__doc__)
    made.add_argument("--part", choices=PARTS, action="append", help="by default both")
    made.add_argument("--shape", action="append", help="of a layer; by default three")
    made.add_argument("--model", action="append", choices=vllm_engine.MODELS, help="of an engine")
    made.add_argument("--layers", type=int, default=36, help="of an engine's model")
    made.add_argument("--out", type=Path, help="JSON file to write")
    made.add_argument("--keep", action="store_true", help="keep the other rows of --out")
    return made


def measured(arguments: argparse.Namespace) -> Iterator[Row]:
    """The rows of the parts that were asked for."""
    parts = arguments.part or PARTS
    if "engine" in parts:  # before the layers fill this process's GPU memory
        for model in arguments.model or list(vllm_engine.MODELS)[:1]:
            yield from vllm_engine.rows(model, arguments.layers)
    if "layer" in parts:
        for name in arguments.shape or LAYERS:
            yield from vllm_layer.rows(name, shapes.shape(name))


def show(rows: list[Row], console: Console | None = None) -> None:
    """A table for each part. A ratio above 1 says that the plugin is faster; below, it is red."""
    console = console or Console(width=150)
    for op in _COLUMNS:
        if found := [row for row in rows if row["op"] == op]:
            console.print(table(op, found))


def table(op: str, rows: list[Row]) -> Table:
    """The rows of one part."""
    made = Table(title=op, box=SIMPLE, title_justify="left", title_style="bold")
    count = "M" if op == vllm_layer.OP else "batch"
    for heading in ("shape", count, *_COLUMNS[op]):
        made.add_column(heading, justify="right")
    for row in rows:
        cells = (_cell(key, row[key]) for key in _COLUMNS[op].values())
        made.add_row(row["shape"], str(row["m"]), *cells)
    return made


def _cell(key: str, value: float | int | str | None) -> str:
    if key == "ratio":
        return f"[{'red' if float(value or 0) < 1 else 'green'}]{value:.2f}x[/]"
    if isinstance(value, float):
        return f"{value:.1f}" if key.startswith(("us", "tokens")) else f"{value:.4f}"
    return "-" if value is None else str(value)
