// silu_and_mul_quant_fp8: [R, 2H] bf16 gate | up -> e4m3 codes and one scale per 128 values.
//
//   g = bf16(min(gate, limit))      u = clamp(up, -limit, limit), kept in fp32
//   s = bf16(g / (1 + exp(-alpha g)))
//   y = bf16(s (u + beta))          q, scale = group quantization of y
//
// Row r is one (token, slot) pair. With IDS only the rows of experts on this rank are computed; the
// others keep the bytes they had. 16 lanes own a group; a CTA owns 16 groups.
#include "common/group_quant.cuh"
#include "common/routing.cuh"
#include "common/vec.cuh"

static_assert(H > 0 && H % GROUP == 0, "H is a positive multiple of the group size");
static_assert(!PACKED || UE8M0, "only power-of-two scales fit into exponent bytes");
static_assert(!MAP || IDS, "an expert map needs ids to map");

constexpr u32 NEGATIVE_INFINITY = 0xFF800000u;  // bits
constexpr int GROUPS = H / GROUP;
constexpr int GROUPS_PADDED = PACKED ? ceil_div(GROUPS, 4) * 4 : GROUPS;

// Comparisons, not fminf: a NaN must stay NaN.
DEVICE float clamp_above(float v, float limit) { return v > limit ? limit : v; }
DEVICE float clamp_below(float v, float limit) { return v < limit ? limit : v; }

DEVICE float activate(float gate, float up, float limit, float alpha, float beta) {
    const float g = CLAMP ? round_bf16(clamp_above(gate, limit)) : gate;
    const float u = CLAMP ? clamp_below(clamp_above(up, limit), -limit) : up;
    const float sigmoid_inverse = 1.0f + expf(SCALED ? -alpha * g : -g);
    // -inf / (1 + exp(inf)) would be NaN; its limit is -0.
    const float s = __float_as_uint(g) == NEGATIVE_INFINITY ? -0.0f : g / sigmoid_inverse;
    // u + 0 turns -0 into +0, so the addition stays when beta is 0.
    return round_bf16(round_bf16(s) * (u + (SCALED ? beta : 0.0f)));
}

extern "C" __global__ void __launch_bounds__(256) silu_and_mul_quant_fp8(
    const u16* __restrict__ gate_up,       // [R, 2H] bf16, rows gate_up_row_stride apart
    i64 gate_up_row_stride,                // elements
    const void* __restrict__ topk_ids,     // [R] IDS type, or unused
    const i32* __restrict__ expert_map,    // [num_experts] or unused
    u8* __restrict__ q,                    // [R, H] e4m3
    void* __restrict__ scale,              // [R_padded, GROUPS_PADDED] fp32 or exponent bytes
    i64 scale_row_stride,                  // elements
    i64 scale_group_stride,                // elements
    i64 R,
    i64 R_padded,
    i64 num_experts,
    i64 num_local_experts,
    float limit,
    float alpha,
    float beta) {
    const i64 item = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / GROUP_LANES;
    const i64 row = item / GROUPS_PADDED;
    const int group = int(item % GROUPS_PADDED);
    const int lane = threadIdx.x % GROUP_LANES;
    if (row >= R_padded) return;
    if (row < R && IDS != NO_IDS &&
        local_expert<IDS, MAP>(topk_ids, row, expert_map, num_experts, num_local_experts) < 0)
        return;
    if (row >= R || group >= GROUPS) {
        if (lane == 0)
            store_scale<PACKED>(scale, row, group, scale_row_stride, scale_group_stride, 0.0f);
        return;
    }

    float gate[LANE_VALUES], up[LANE_VALUES];
    const int column = group * GROUP + lane * LANE_VALUES;
    load8<BF16, ALIGNED>(gate_up, row * gate_up_row_stride + column, gate);
    load8<BF16, ALIGNED>(gate_up, row * gate_up_row_stride + H + column, up);
#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++) gate[i] = activate(gate[i], up[i], limit, alpha, beta);
    const float s = group_scale<UE8M0>(group_amax(gate));
    store8<ALIGNED>(q + row * H + column, quantize_lane(gate, s));
    if (lane == 0) store_scale<PACKED>(scale, row, group, scale_row_stride, scale_group_stride, s);
}
