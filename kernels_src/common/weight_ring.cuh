// A warp's own stream of weights: a ring of stages in shared memory that the copy engine fills ahead of
// the warp that multiplies them. No warp waits for another one.
#pragma once
#include "ptx/bulk_copy.cuh"

template <int STAGES, int STAGE_BYTES>
struct WeightRing {
    u8* stages;      // of this warp
    u32 barriers;    // of this warp, 8 bytes apart
    int stage, parity;

    static constexpr int BYTES = STAGES * STAGE_BYTES;

    // `smem` and `all_barriers` are those of all warps.
    DEVICE WeightRing(u8* smem, u64* all_barriers)
        : stages(smem + threadIdx.x / 32 * BYTES),
          barriers(smem_address(all_barriers) + threadIdx.x / 32 * STAGES * 8), stage(0), parity(0) {
        if (threadIdx.x % 32 == 0) {
#pragma unroll
            for (int i = 0; i < STAGES; i++) mbarrier_init(barriers + i * 8, 1);
            mbarrier_init_fence();
        }
        __syncwarp();
    }

    // Stage i gets `bytes` contiguous bytes.
    DEVICE void fill(int i, int bytes, const u8* from) const {
        if (threadIdx.x % 32 == 0) {
            mbarrier_arrive_expect(barriers + i * 8, bytes);
            bulk_copy(smem_address(stages + i * STAGE_BYTES), from, bytes, barriers + i * 8);
        }
    }

    // Stage i gets `bytes` of each of some rows, one after another.
    DEVICE void fill_rows(int i, int rows, int bytes, const u8* from, i64 row_stride) const {
        if (threadIdx.x % 32 == 0) mbarrier_arrive_expect(barriers + i * 8, rows * bytes);
        __syncwarp();
        for (int r = threadIdx.x % 32; r < rows; r += 32)
            bulk_copy(smem_address(stages + i * STAGE_BYTES + r * bytes), from + r * row_stride, bytes, barriers + i * 8);
    }

    // The current stage, once it is there.
    DEVICE const u8* wait() const {
        mbarrier_wait(barriers + stage * 8, parity);
        return stages + stage * STAGE_BYTES;
    }

    // After all lanes have read the current stage.
    DEVICE void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};
