"""The shared memory of ``kernels_src/common/small_table.cuh``."""

from __future__ import annotations

from cumoe.plan.scales import ceil_to

SIZES = (32, 64)
"""Slots of a table: one or two for each lane of a warp."""
MAX_SLOTS = max(SIZES)


def table_slots(most: int) -> int:
    """Slots that the table of a kernel for up to ``most`` has room for."""
    return next(n for n in SIZES if n >= most)


def table_bytes(most: int) -> int:
    """For each slot a chunk of 8 bytes, a number of 1, and a bit; and a word; a multiple of 16."""
    slots = table_slots(most)
    return ceil_to(slots * 9 + slots // 8 + 4, 16)
