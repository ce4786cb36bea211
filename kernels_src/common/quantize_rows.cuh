// Group quantization of a few bf16 rows into shared memory, by the first THREADS threads of a CTA.
#pragma once
#include "common/group_quant.cuh"
#include "common/vec.cuh"

// Row i of [rows <= MAX_ROWS, GROUPS * 128]: codes at codes + i * CODE_STRIDE, scales at scales + i * GROUPS.
// `from(i)` is its address. Rows start at multiples of 16 bytes.
template <int THREADS, int MAX_ROWS, int GROUPS, int CODE_STRIDE, bool UE8M0, class FROM>
DEVICE void quantize_rows(int rows, FROM from, u8* codes, float* scales) {
    constexpr int LANES = 8, WARP = 32 / LANES;        // groups of a warp
    typedef Lane<LANES> L;
    constexpr int TEAMS = THREADS / LANES, MOST = 8;
    constexpr int EACH = ceil_div(MAX_ROWS * GROUPS, TEAMS);
    constexpr int BATCH = ceil_div(EACH, ceil_div(EACH, MOST));  // so many groups are in flight at once
    const int groups = rows * GROUPS, team = threadIdx.x % 32 / LANES;
    for (int first = threadIdx.x / 32 * WARP; first < groups; first += BATCH * TEAMS) {
        u32 v[BATCH][L::RUNS][L::RUN / 2];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (first + b * TEAMS >= groups) break;    // a whole warp
            const int i = min(first + b * TEAMS + team, groups - 1);
            const u16* row = from(i / GROUPS) + i % GROUPS * GROUP;
#pragma unroll
            for (int r = 0; r < L::RUNS; r++) load_bf16x2<true>(row, L::column(r), v[b][r]);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int i = first + b * TEAMS + team;
            if (first + b * TEAMS >= groups) break;
            float amax = 0.0f;
#pragma unroll
            for (int r = 0; r < L::RUNS; r++) amax = fmaxf(amax, amax_bf16x2(v[b][r]));
            const float s = group_scale<UE8M0, true>(group_amax<LANES>(amax, 0xFFFFFFFFu));
            if (i >= groups) break;
            const Divider<UE8M0, true> divide(s);
            u8* to = codes + i / GROUPS * CODE_STRIDE + i % GROUPS * GROUP;
#pragma unroll
            for (int r = 0; r < L::RUNS; r++) {
                u32 q[L::RUN / 4];
#pragma unroll
                for (int j = 0; j < L::RUN / 4; j++) {
                    const u32 low = v[b][r][2 * j], high = v[b][r][2 * j + 1];
                    q[j] = e4m3x4(divide(low_f32(low)), divide(high_f32(low)), divide(low_f32(high)),
                                  divide(high_f32(high)));
                }
                store_codes<true>(to + L::column(r), q);
            }
            if (L::index() == 0) scales[i] = s;
        }
    }
}
