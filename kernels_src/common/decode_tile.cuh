// What the two decode products share: weights are the M of wgmma, the slots of a chunk its N, and a ring
// of stages in shared memory that the copy engine fills.
#pragma once
#include "common/expert_chunks.cuh"
#include "common/ring.cuh"
#include "common/scale_pitch.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tensor_map.cuh"
#include "ptx/wgmma.cuh"

constexpr int BLOCK_K = 128;                        // of the depth: one scale each
constexpr int TILE = 8 * BLOCK_K;                   // bytes of 8 rows of a block, as a box lays them down
constexpr int COLUMNS = 8 * N_TILES;                // slots of a chunk
static_assert(N_TILES == 1 || N_TILES == 2 || N_TILES == 4, "an instruction's columns");

DEVICE int tiles_of(const Chunk& chunk) { return (chunk.count + 7) / 8; }

// The slots of a chunk, 8 at a time: each box is BLOCKS tiles, one of each block of the depth.
template <int BLOCKS>
DEVICE void load_slots(u32 smem, const TensorMap& map, const Chunk& chunk, int block, u32 barrier) {
    const int tiles = tiles_of(chunk);
    mbarrier_arrive_expect(barrier, tiles * BLOCKS * TILE);
    for (int t = 0; t < tiles; t++)
        copy_box_3d(smem + t * BLOCKS * TILE, map, 0, chunk.first + t * 8, block, barrier);
}

// acc = 64 rows at `a` times the slots at `b`, over one block of which b's stage has BLOCKS.
template <int TILES, int BLOCKS>
DEVICE void multiply_block(float (&acc)[4 * TILES], u32 a, u32 b) {
    wgmma_m64k128_e4m3<TILES>(acc, wgmma_operand(a, TILE), wgmma_operand(b, BLOCKS * TILE));
}
