"""The shared memory of ``kernels_src/common/slot_table.cuh``."""

from __future__ import annotations

from cumoe.plan.scales import ceil_to


def table_bytes(num_slots: int, num_local_experts: int) -> int:
    """A chunk and three numbers a slot, two a local expert, and the sums of warps."""
    return ceil_to(num_slots * (8 + 3 * 2) + (2 * num_local_experts + 36) * 4, 16)
