"""What the plans of the two decode products share, as ``kernels_src/common`` has it.

scale_pitch.cuh, expert_chunks.cuh, decode_tile.cuh and route.cuh.
"""

from __future__ import annotations

from cumoe.plan.scales import GROUP_SIZE, ceil_to
from cumoe.plan.tensor_map import TensorMap

BLOCK_K = GROUP_SIZE
TILE_SLOTS = 8
TILE_BYTES = TILE_SLOTS * BLOCK_K
CONSUMERS = 256
"""Threads that multiply."""
BARRIER_BYTES = 8
ROUTE_BYTES = 8
"""Of what a token's combine wants to know of a slot."""


def scale_pitch(size: int) -> int:
    """Floats from one slot's scales to the next, of rows of `size` codes."""
    return (size // GROUP_SIZE + 3) // 8 * 8 + 4


def chunks_bytes(max_slots: int, num_local_experts: int, n_tiles: int) -> int:
    """The list of chunks, 8 bytes each, and a count for each expert and 32 warps."""
    most = min(max_slots, num_local_experts + max_slots // (TILE_SLOTS * n_tiles))
    return ceil_to(most * 8 + (num_local_experts + 32) * 4, 16)


def slots(array: str, offset: int, num_slots: int, size: int, stage_blocks: int) -> TensorMap:
    """[num_slots, size] codes, in boxes of 8 slots by some 128-blocks, block by block."""
    dims = (BLOCK_K, num_slots, size // BLOCK_K)
    return TensorMap(array, dims, (size, BLOCK_K), (BLOCK_K, TILE_SLOTS, stage_blocks), offset)
