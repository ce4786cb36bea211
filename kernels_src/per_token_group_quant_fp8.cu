// per_token_group_quant_fp8: [M, K] -> e4m3 codes and one scale per 128 values of a row.
//
//   q[m, k] = e4m3(x[m, k] / scale[m, k / 128])      scale from the largest |x| of the group
//
// LANES lanes own a group. Scales may be row-major, column-major, column-major
// with a padded leading dimension, or packed exponent bytes: padding is written as 0.
// With ROW_WEIGHT, row m is first multiplied by bf16(weight[m]) and rounded to bf16.
#include "common/group_quant.cuh"
#include "common/vec.cuh"
#include "ptx/pdl.cuh"

static_assert(K > 0 && K % GROUP == 0, "K is a positive multiple of the group size");
static_assert(THREADS % LANES == 0, "a CTA holds whole groups");
static_assert(X_TYPE >= BF16 && X_TYPE <= FP32, "x is bf16, fp16 or fp32");
static_assert(!PACKED || UE8M0, "only power-of-two scales fit into exponent bytes");
static_assert(ROW_WEIGHT >= -1 && ROW_WEIGHT <= FP32, "weights are absent (-1) or a FloatType");

typedef Lane<LANES> L;
constexpr int GROUPS = K / GROUP;
constexpr int GROUPS_PADDED = PACKED ? ceil_div(GROUPS, 4) * 4 : GROUPS;

// No __restrict__: a load marked as invariant could be moved above the wait for the predecessor.
extern "C" __global__ void __launch_bounds__(THREADS) per_token_group_quant_fp8(
    const void* x,            // [M, K] X_TYPE, rows x_row_stride apart
    i64 x_row_stride,                      // elements
    const void* row_weight,   // [M] ROW_WEIGHT type, or unused
    u8* q,                    // [M, K] e4m3
    void* scale,              // [M_padded, GROUPS_PADDED] fp32 or exponent bytes
    i64 scale_row_stride,                  // elements
    i64 scale_group_stride,                // elements
    i64 M,
    i64 M_padded,
    i64 late) {               // whether no predecessor writes x: then it is waited for at the end
    release_successor();
    if (!late) wait_for_predecessor();
    // The row of the CTA's first item in 64 bits, the rest in 32.
    const i64 first = i64(blockIdx.x) * (THREADS / LANES);
    const u32 item = u32(first % GROUPS_PADDED) + threadIdx.x / LANES;
    const i64 row = first / GROUPS_PADDED + item / GROUPS_PADDED;
    const int group = item % GROUPS_PADDED;
    if (row >= M_padded) {
        if (late) wait_for_predecessor();
        return;
    }

    float s = 0.0f;
    if (row < M && group < GROUPS) {
        const i64 offset = row * x_row_stride + group * GROUP;
        float v[L::RUNS][L::RUN];
#pragma unroll
        for (int r = 0; r < L::RUNS; r++) load_f32<X_TYPE, ALIGNED>(x, offset + L::column(r), v[r]);
        if constexpr (ROW_WEIGHT >= 0) {
            const float w = round_bf16(load_float<ROW_WEIGHT>(row_weight, row));
#pragma unroll
            for (int i = 0; i < L::VALUES; i++) v[i / L::RUN][i % L::RUN] = round_bf16(v[i / L::RUN][i % L::RUN] * w);
        }
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < L::VALUES; i++) amax = fmaxf(amax, fabsf(v[i / L::RUN][i % L::RUN]));
        s = group_scale<UE8M0, X_TYPE != FP32>(group_amax<LANES>(amax));
        const Divider<UE8M0, X_TYPE != FP32> divide(s);
#pragma unroll
        for (int r = 0; r < L::RUNS; r++) {
            u32 codes[L::RUN / 4];
#pragma unroll
            for (int i = 0; i < L::RUN; i += 4) {
                codes[i / 4] = e4m3x4(divide(v[r][i]), divide(v[r][i + 1]), divide(v[r][i + 2]),
                                      divide(v[r][i + 3]));
            }
            store_codes<ALIGNED>(q + row * K + group * GROUP + L::column(r), codes);
        }
    }
    if (L::index() == 0)
        store_scale<PACKED>(scale, row, group, scale_row_stride, scale_group_stride, s);
    if (late) wait_for_predecessor();
}
