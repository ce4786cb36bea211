// Products of a tile of 16 rows of weights with one of 8 columns of tokens over 128-blocks of K, on e4m3
// rows in shared memory.
//
// A dot product does not care in which order k is walked, so the k of a fragment are permuted: lane l
// reads bytes 16 (l % 4) ... + 15 of each half (64 bytes) of a block, of rows l / 4 and l / 4 + 8 and of
// column l / 4. Codes become f16, which holds each of their values, so products are exact and their
// sum is fp32. Rows that lie an odd number of 64 bytes apart keep the lanes of a load in different banks.
#pragma once
#include "ptx/mma.cuh"

constexpr int BLOCK_K = 128;
constexpr int ROW_PADDING = 64;

DEVICE int lane_id() { return threadIdx.x % 32; }
DEVICE int lane_row() { return lane_id() / 4; }
DEVICE int lane_byte() { return lane_id() % 4 * 16; }

DEVICE uint4 load_codes(const u8* p) { return *reinterpret_cast<const uint4*>(p); }

// The f16 values of 16 codes.
struct F16x16 {
    u32 v[8];

    DEVICE F16x16() {}
    DEVICE explicit F16x16(uint4 codes) {
        f16x2_of_e4m3(codes.x, v[0], v[1]);
        f16x2_of_e4m3(codes.y, v[2], v[3]);
        f16x2_of_e4m3(codes.z, v[4], v[5]);
        f16x2_of_e4m3(codes.w, v[6], v[7]);
    }
};

// part += products over one block. low and high are the lane's addresses in rows lane_row() and
// lane_row() + 8, columns(half) its codes of the column tile.
template <class COLUMNS_OF>
DEVICE void multiply_block(float (&part)[4], const u8* low, const u8* high, COLUMNS_OF columns) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const F16x16 column(columns(half)), upper(load_codes(low + half * 64)), lower(load_codes(high + half * 64));
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const u32 rows[4] = {upper.v[j], lower.v[j], upper.v[j + 1], lower.v[j + 1]};
            mma_m16n8k16_f16(part, rows, column.v[j], column.v[j + 1]);
        }
    }
}
