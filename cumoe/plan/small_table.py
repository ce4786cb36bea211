"""The shared memory of ``kernels_src/common/small_table.cuh``."""

from __future__ import annotations

MAX_SLOTS = 32
"""A lane each."""
TABLE_BYTES = 304
"""A chunk of 8 bytes and a number of 1 for each slot, and two words; a multiple of 16."""
