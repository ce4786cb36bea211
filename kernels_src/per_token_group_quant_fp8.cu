// per_token_group_quant_fp8: [M, K] -> e4m3 codes and one scale per 128 values of a row.
//
//   q[m, k] = e4m3(x[m, k] / scale[m, k / 128])      scale from the largest |x| of the group
//
// LANES lanes own a group. Scales may be row-major, column-major, column-major
// with a padded leading dimension, or packed exponent bytes: padding is written as 0.
// With ROW_WEIGHT, row m is first multiplied by bf16(weight[m]) and rounded to bf16.
#include "common/group_quant.cuh"
#include "common/vec.cuh"

static_assert(K > 0 && K % GROUP == 0, "K is a positive multiple of the group size");
static_assert(LANES == 16 || LANES == 32, "a lane holds 8 or 4 values");
static_assert(X_TYPE >= BF16 && X_TYPE <= FP32, "x is bf16, fp16 or fp32");
static_assert(!PACKED || UE8M0, "only power-of-two scales fit into exponent bytes");
static_assert(ROW_WEIGHT >= -1 && ROW_WEIGHT <= FP32, "weights are absent (-1) or a FloatType");

constexpr int VALUES = GROUP / LANES;
constexpr int GROUPS = K / GROUP;
constexpr int GROUPS_PADDED = PACKED ? ceil_div(GROUPS, 4) * 4 : GROUPS;

extern "C" __global__ void __launch_bounds__(THREADS) per_token_group_quant_fp8(
    const void* __restrict__ x,            // [M, K] X_TYPE, rows x_row_stride apart
    i64 x_row_stride,                      // elements
    const void* __restrict__ row_weight,   // [M] ROW_WEIGHT type, or unused
    u8* __restrict__ q,                    // [M, K] e4m3
    void* __restrict__ scale,              // [M_padded, GROUPS_PADDED] fp32 or exponent bytes
    i64 scale_row_stride,                  // elements
    i64 scale_group_stride,                // elements
    i64 M,
    i64 M_padded) {
    const i64 item = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / LANES;
    const i64 row = item / GROUPS_PADDED;
    const int group = int(item % GROUPS_PADDED);
    const int lane = threadIdx.x % LANES;
    if (row >= M_padded) return;
    if (row >= M || group >= GROUPS) {
        if (lane == 0)
            store_scale<PACKED>(scale, row, group, scale_row_stride, scale_group_stride, 0.0f);
        return;
    }

    float v[VALUES];
    const int column = group * GROUP + lane * VALUES;
    load_f32<X_TYPE, ALIGNED>(x, row * x_row_stride + column, v);
    if constexpr (ROW_WEIGHT >= 0) {
        const float w = round_bf16(load_float<ROW_WEIGHT>(row_weight, row));
#pragma unroll
        for (int i = 0; i < VALUES; i++) v[i] = round_bf16(v[i] * w);
    }
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES; i++) amax = fmaxf(amax, fabsf(v[i]));
    const float s = group_scale<UE8M0>(group_amax<LANES>(amax));
    u32 codes[VALUES / 4];
    quantize_lane<UE8M0, X_TYPE != FP32>(v, s, codes);
    store_codes<ALIGNED>(q + row * K + column, codes);
    if (lane == 0) store_scale<PACKED>(scale, row, group, scale_row_stride, scale_group_stride, s);
}
