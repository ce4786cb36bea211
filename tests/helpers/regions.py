"""What every workspace must hold."""

from __future__ import annotations

from typing import Any

from cumoe.plan.workspace import ALIGNMENT


def assert_regions(workspace: Any, sizes: dict[str, int]) -> None:
    """These regions in this order, aligned, each at least as large as it must be, and a total."""
    offsets = workspace._asdict()
    assert list(offsets) == [*sizes, "total"]
    starts = list(offsets.values())
    for (name, size), start, end in zip(sizes.items(), starts, starts[1:], strict=False):
        assert start % ALIGNMENT == 0, name
        assert end - start >= size, name
