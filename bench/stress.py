"""The experts where they could be at a loss: ``python -m bench stress``.

Numbers of experts, sizes, routings and clamps in eight layers that hold every pair of values, each
with every number of tokens. Times are taken with less effort than elsewhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

from bench import peers
from bench.experts import Case, compile_layers, layer_rows
from bench.harness import QUICK
from bench.shapes import ROUTINGS

EXPERTS, HIDDEN, INTERMEDIATE, CLAMPS = (256, 288), (4096, 6144), (256, 2048), ("", "-limit10")


def layers() -> list[tuple[str, str]]:
    """Shape and routing of each: an orthogonal array of one factor of four values, four of two."""
    return [
        (
            f"e{EXPERTS[c]}-top8-k{HIDDEN[a ^ c]}-n{INTERMEDIATE[b ^ c]}{CLAMPS[a ^ b ^ c]}",
            ROUTINGS[2 * a + b],
        )
        for a, b, c in product((0, 1), repeat=3)
    ]


def run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows as those of `bench.experts`."""
    chosen = layers()
    compile_layers([name for name, _ in chosen], ["fp32"])
    with peers.vllm_context() if arguments.peers else nullcontext():
        for name, routing in chosen:
            cases = [Case(name, m, routing) for m in arguments.m]
            yield from layer_rows(cases, arguments.peers, QUICK)
