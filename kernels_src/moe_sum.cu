// moe_sum: the top-k combine.
//
//   out[m, k] = bf16(factor * sum over j, ascending, of weight[m, j] * d[m * TOPK + j, k])
//
// fp32, each product rounded before it is added. Slots that are not computed on this rank are
// skipped, not multiplied by 0: their rows of d and their weights may hold anything.
#include "common/routing.cuh"
#include "common/vec.cuh"
#include "ptx/pdl.cuh"

static_assert(K % 8 == 0, "a thread owns 8 columns");
static_assert(TOPK >= 1 && TOPK <= 64, "topk is 1 to 64");
static_assert(WEIGHT >= -1 && WEIGHT <= FP32, "weights are absent (-1) or a FloatType");
static_assert(IDS == INT32_IDS || IDS == INT64_IDS, "topk_ids is int32 or int64");

// No __restrict__: a load marked as invariant could be moved above the wait for the predecessor.
extern "C" __global__ void __launch_bounds__(256) moe_sum(
    const u16* d,               // [M * TOPK, K] bf16
    const void* topk_weights,   // [M, TOPK] WEIGHT type, or unused
    const void* topk_ids,       // [M, TOPK] IDS type
    const i32* expert_map,      // [num_experts] or unused
    u16* out,                   // [M, K] bf16, rows out_row_stride apart
    i64 out_row_stride,                      // elements
    i64 M,
    i64 num_experts,
    i64 num_local_experts,
    float factor) {
    release_successor();
    wait_for_predecessor();
    const i64 thread = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    const i64 token = thread / (K / 8);
    const int column = int(thread % (K / 8)) * 8;
    if (token >= M) return;
    float sum[8] = {};
    for (int j = 0; j < TOPK; j++) {
        const i64 slot = token * TOPK + j;
        if (local_expert<IDS, MAP>(topk_ids, slot, expert_map, num_experts, num_local_experts) < 0)
            continue;
        float w = 1.0f;
        if constexpr (WEIGHT >= 0) w = load_float<WEIGHT>(topk_weights, slot);
        float v[8];
        load_f32<BF16, true>(d, slot * K + column, v);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = sum[i] + w * v[i];
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] *= factor;
    u16* to = out + token * out_row_stride + column;
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = round_bf16x2(sum[2 * i], sum[2 * i + 1]);
    store_bf16x2<ALIGNED>(to, pairs);
}
