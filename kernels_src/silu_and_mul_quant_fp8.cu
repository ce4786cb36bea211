// silu_and_mul_quant_fp8: [R, 2H] bf16 gate | up -> e4m3 codes and one scale per 128 values.
//
//   y = swiglu(gate, up), rounded to bf16 (common/swiglu.cuh)
//   q, scale = group quantization of y (common/group_quant.cuh)
//
// Row r is one (token, slot) pair. With IDS only the rows of experts on this rank are computed; the
// others keep the bytes they had. Two strategies give the same bytes:
//
//   a warp a group, all at once: the shortest way through a small call
//   PERSISTENT: 16 lanes a group, CTAs walk chunks of rows, of which they first find the valid ones
#include "common/group_quant.cuh"
#include "common/routing.cuh"
#include "common/swiglu.cuh"
#include "common/vec.cuh"

static_assert(H > 0 && H % GROUP == 0, "H is a positive multiple of the group size");
static_assert(!PACKED || UE8M0, "only power-of-two scales fit into exponent bytes");
static_assert(!MAP || IDS, "an expert map needs ids to map");
static_assert(CLAMP >= NO_CLAMP && CLAMP <= FP32_CLAMP, "how the clamp is compiled");

constexpr int GROUPS = H / GROUP;
constexpr int GROUPS_PADDED = PACKED ? ceil_div(GROUPS, 4) * 4 : GROUPS;

struct Arguments {
    const u16* gate_up;        // [R, 2H] bf16
    i64 gate_up_row_stride;
    const void* topk_ids;      // [R]
    const i32* expert_map;     // [num_experts]
    u8* q;                     // [R, H] e4m3
    void* scale;
    i64 scale_row_stride, scale_group_stride;
    i64 R, R_padded, num_experts, num_local_experts;
    Swiglu swiglu;
};

DEVICE bool is_valid(const Arguments& a, i64 row) {
    return IDS == NO_IDS || row >= a.R ||
           local_expert<IDS, MAP>(a.topk_ids, row, a.expert_map, a.num_experts,
                                  a.num_local_experts) >= 0;
}

// One group by the LANES lanes of a warp that call it together; padding gets the scale 0.
template <int LANES>
DEVICE void compute_group(const Arguments& a, i64 row, int group) {
    constexpr int VALUES = GROUP / LANES;
    const int lane = threadIdx.x % LANES;
    float s = 0.0f;
    if (row < a.R && group < GROUPS) {
        const int column = group * GROUP + lane * VALUES;
        const i64 offset = row * a.gate_up_row_stride + column;
        u32 gate[VALUES / 2], up[VALUES / 2], y[VALUES / 2], codes[VALUES / 4];
        load_bf16x2<ALIGNED>(a.gate_up, offset, gate);
        load_bf16x2<ALIGNED>(a.gate_up, offset + H, up);
        swiglu_lane<CLAMP, SCALED>(gate, up, a.swiglu, y);
        s = group_scale<UE8M0>(group_amax<LANES>(amax_bf16x2(y)));
        float v[VALUES];
#pragma unroll
        for (int i = 0; i < VALUES / 2; i++) v[2 * i] = low_f32(y[i]), v[2 * i + 1] = high_f32(y[i]);
        quantize_lane<UE8M0, true>(v, s, codes);
        store_codes<ALIGNED>(a.q + row * H + column, codes);
    }
    if (lane == 0)
        store_scale<PACKED>(a.scale, row, group, a.scale_row_stride, a.scale_group_stride, s);
}

// The shortest way through a small call: a warp a group, all of them at once.
DEVICE void compute_at_once(const Arguments& a) {
    const i64 item = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    const i64 row = item / GROUPS_PADDED;
    if (row < a.R_padded && is_valid(a, row)) compute_group<32>(a, row, int(item % GROUPS_PADDED));
}

// CTAs walk chunks of up to 32 rows. Each warp finds the valid rows of a chunk by one ballot; the
// half-warps of the CTA then share the groups of these rows evenly.
DEVICE void compute_by_chunks(const Arguments& a, i64 chunk_rows) {
    const int half_warps = blockDim.x / 16, half_warp = threadIdx.x / 16;
    for (i64 first = blockIdx.x * chunk_rows; first < a.R_padded; first += gridDim.x * chunk_rows) {
        const i64 mine = first + threadIdx.x % 32;
        const bool counts = threadIdx.x % 32 < chunk_rows && mine < a.R_padded && is_valid(a, mine);
        u32 valid = __ballot_sync(0xFFFFFFFFu, counts);
        const int items = __popc(valid) * GROUPS_PADDED;
        for (int item = half_warp, passed = 0; item < items; item += half_warps) {
            for (; passed < item / GROUPS_PADDED; passed++) valid &= valid - 1;
            compute_group<16>(a, first + __ffs(valid) - 1, item % GROUPS_PADDED);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, PERSISTENT ? CTAS_PER_SM : 1) silu_and_mul_quant_fp8(
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
    i64 chunk_rows,                        // 1 to 32, if PERSISTENT
    float limit,
    float alpha,
    float beta) {
    const Arguments a{gate_up, gate_up_row_stride, topk_ids, expert_map, q, scale, scale_row_stride,
                      scale_group_stride, R, R_padded, num_experts, num_local_experts,
                      Swiglu{limit, alpha, beta}};
    if constexpr (PERSISTENT) {
        compute_by_chunks(a, chunk_rows);
    } else {
        compute_at_once(a);
    }
}
