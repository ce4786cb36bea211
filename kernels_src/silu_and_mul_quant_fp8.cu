// silu_and_mul_quant_fp8: [R, 2H] bf16 gate | up -> e4m3 codes and one scale per 128 values.
//
//   y = swiglu(gate, up), rounded to bf16 (common/swiglu.cuh)
//   q, scale = group quantization of y (common/group_quant.cuh)
//
// Row r is one (token, slot) pair. With IDS only the rows of experts on this rank are computed; the
// others keep the bytes they had. STEP selects both stages, which pass y in registers, or one of them,
// which pass it through memory. Two strategies; all of these give the same bytes:
//
//   all groups at once, the shortest way through a small call
//   PERSISTENT: CTAs walk chunks of rows, of which they first list the valid ones
#include "common/group_quant.cuh"
#include "common/routing.cuh"
#include "common/swiglu.cuh"
#include "common/vec.cuh"
#include "ptx/pdl.cuh"

static_assert(H > 0 && H % GROUP == 0, "H is a positive multiple of the group size");
enum Step { BOTH = 0, ACTIVATE = 1, QUANTIZE = 2 };

static_assert(THREADS % 32 == 0 && 32 % LANES == 0, "whole warps, whole groups");
static_assert(!PACKED || UE8M0, "only power-of-two scales fit into exponent bytes");
static_assert(!MAP || IDS, "an expert map needs ids to map");
static_assert(STEP >= BOTH && STEP <= QUANTIZE, "which stages are compiled");
static_assert(CLAMP >= NO_CLAMP && CLAMP <= FP32_CLAMP, "how the clamp is compiled");

constexpr int GROUPS = H / GROUP;
constexpr int GROUPS_PADDED = PACKED ? ceil_div(GROUPS, 4) * 4 : GROUPS;

struct Arguments {
    const u16* gate_up;        // [R, 2H] bf16
    i64 gate_up_row_stride;
    const void* topk_ids;      // [R]
    const i32* expert_map;     // [num_experts]
    u16* y;                    // [R, H] bf16
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

// y of this lane: from gate and up, or from memory; to memory if that is all there is to do.
template <int LANES>
DEVICE void activate_lane(const Arguments& a, i64 row, int group,
                          u32 (&y)[Lane<LANES>::RUNS][Lane<LANES>::RUN / 2]) {
    typedef Lane<LANES> L;
    u16* y_row = a.y + row * H + group * GROUP;
    if constexpr (STEP == QUANTIZE) {
#pragma unroll
        for (int r = 0; r < L::RUNS; r++) load_bf16x2<true>(y_row, L::column(r), y[r]);
        return;
    }
    const u16* gate_row = a.gate_up + row * a.gate_up_row_stride + group * GROUP;
    u32 gate[L::RUNS][L::RUN / 2], up[L::RUNS][L::RUN / 2];
#pragma unroll
    for (int r = 0; r < L::RUNS; r++) {
        load_bf16x2<ALIGNED>(gate_row, L::column(r), gate[r]);
        load_bf16x2<ALIGNED>(gate_row, H + L::column(r), up[r]);
    }
#pragma unroll
    for (int r = 0; r < L::RUNS; r++) swiglu_lane<CLAMP, SCALED>(gate[r], up[r], a.swiglu, y[r]);
    if constexpr (STEP == ACTIVATE) {
#pragma unroll
        for (int r = 0; r < L::RUNS; r++) store_bf16x2<true>(y_row + L::column(r), y[r]);
    }
}

// One group by the LANES lanes that call it together; padding gets the scale 0.
DEVICE void compute_group(const Arguments& a, i64 row, int group) {
    typedef Lane<LANES> L;
    float s = 0.0f;
    if (row < a.R && group < GROUPS) {
        u32 y[L::RUNS][L::RUN / 2];
        activate_lane<LANES>(a, row, group, y);
        if constexpr (STEP == ACTIVATE) return;
        float amax = 0.0f;
#pragma unroll
        for (int r = 0; r < L::RUNS; r++) amax = fmaxf(amax, amax_bf16x2(y[r]));
        s = group_scale<UE8M0, true>(group_amax<LANES>(amax));
        const Divider<UE8M0, true> divide(s);
        u8* q = a.q + row * H + group * GROUP;
#pragma unroll
        for (int r = 0; r < L::RUNS; r++) {
            u32 codes[L::RUN / 4];
#pragma unroll
            for (int i = 0; i < L::RUN / 4; i++) {
                codes[i] = e4m3x4(divide(low_f32(y[r][2 * i])), divide(high_f32(y[r][2 * i])),
                                  divide(low_f32(y[r][2 * i + 1])), divide(high_f32(y[r][2 * i + 1])));
            }
            store_codes<ALIGNED>(q + L::column(r), codes);
        }
    }
    if (STEP != ACTIVATE && L::index() == 0)
        store_scale<PACKED>(a.scale, row, group, a.scale_row_stride, a.scale_group_stride, s);
}

// The shortest way through a small call.
DEVICE void compute_at_once(const Arguments& a) {
    const u32 item = (blockIdx.x * THREADS + threadIdx.x) / LANES;
    const u32 row = item / GROUPS_PADDED;
    if (row < a.R_padded && is_valid(a, row)) compute_group(a, row, item % GROUPS_PADDED);
}

// CTAs walk chunks of up to 32 rows: each warp lists the valid rows of the chunk, and teams of
// LANES lanes share their groups evenly over the CTA.
DEVICE void compute_by_chunks(const Arguments& a, i64 chunk_rows) {
    constexpr int TEAMS = THREADS / LANES;
    __shared__ u8 lists[THREADS / 32][32];
    u8* list = lists[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    for (i64 first = blockIdx.x * chunk_rows; first < a.R_padded; first += gridDim.x * chunk_rows) {
        int rows = int(min(chunk_rows, a.R_padded - first));
        if constexpr (IDS != NO_IDS) {
            const bool counts = lane < rows && is_valid(a, first + lane);
            const u32 valid = __ballot_sync(0xFFFFFFFFu, counts);
            if (counts) list[__popc(valid & ((1u << lane) - 1))] = u8(lane);
            rows = __popc(valid);
            __syncwarp();
        }
        for (u32 item = threadIdx.x / LANES; item < rows * GROUPS_PADDED; item += TEAMS) {
            const u32 row = item / GROUPS_PADDED;
            compute_group(a, first + (IDS == NO_IDS ? row : list[row]), item % GROUPS_PADDED);
        }
        if (IDS != NO_IDS) __syncwarp();  // the list is read before it is made anew
    }
}

// No __restrict__: a load marked as invariant could be moved above the wait for the predecessor.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) silu_and_mul_quant_fp8(
    const u16* gate_up,       // [R, 2H] bf16, rows gate_up_row_stride apart
    i64 gate_up_row_stride,                // elements
    const void* topk_ids,     // [R] IDS type, or unused
    const i32* expert_map,    // [num_experts] or unused
    u16* y,                   // [R, H] bf16, or unused if STEP is BOTH
    u8* q,                    // [R, H] e4m3
    void* scale,              // [R_padded, GROUPS_PADDED] fp32 or exponent bytes
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
    const Arguments a{gate_up, gate_up_row_stride, topk_ids, expert_map, y, q, scale, scale_row_stride,
                      scale_group_stride, R, R_padded, num_experts, num_local_experts,
                      Swiglu{limit, alpha, beta}};
    release_successor();
    wait_for_predecessor();
    if constexpr (PERSISTENT) {
        compute_by_chunks(a, chunk_rows);
    } else {
        compute_at_once(a);
    }
}
