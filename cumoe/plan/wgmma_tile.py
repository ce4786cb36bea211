"""The tile of the two products for many tokens, as ``kernels_src/common/wgmma_tile.cuh`` has it."""

from __future__ import annotations

BLOCK_M, BLOCK_N, BLOCK_K = 64, 256, 128
THREADS = 384
"""Two warpgroups that multiply, one that loads."""
WARPS = 8
"""That multiply."""
A_BYTES, B_BYTES = BLOCK_M * BLOCK_K, BLOCK_N * BLOCK_K
"""Of slots and of weight rows in a stage."""
STAGING_BYTES = WARPS * 16 * (2 * 128 + 16)
"""Results on their way to global memory: of each warp 16 rows by 128 columns of bf16."""
BARRIERS_BYTES = 16
"""Of a stage: full and empty."""
