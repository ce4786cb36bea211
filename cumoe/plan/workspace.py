"""Scratch memory of a call: regions one after another."""

from __future__ import annotations

from collections.abc import Iterable

from cumoe.plan.scales import ceil_to

ALIGNMENT = 256
"""Of every region of the workspace, in bytes: what cudaMalloc gives."""


def offsets(sizes: Iterable[int]) -> list[int]:
    """Where regions of these sizes start, in bytes, and last the size of all."""
    found = [0]
    for size in sizes:
        found.append(ceil_to(found[-1] + size, ALIGNMENT))
    return found
