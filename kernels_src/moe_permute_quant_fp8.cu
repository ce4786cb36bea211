// moe_permute_quant_fp8: the tokens of a call, group-quantized, in the order of the experts.
//
//   place = number of slots before s in the order (local expert, slot), if s has a local expert
//   a[place, k], a_scale[place, k / 128] = group quantization of x[s / TOPK]
//   routes[place] = token, weight, and which of the token's slots on that expert it is
//
// With ON_INPUT, x is first multiplied by bf16(weight) and rounded to bf16, and the routes' weights are 1.
// A CTA takes one token: it ranks the token's slots among all and writes its codes once for each.
#include "common/group_quant.cuh"
#include "common/route.cuh"
#include "common/scale_pitch.cuh"
#include "common/routing.cuh"
#include "common/vec.cuh"
#include "ptx/pdl.cuh"

static_assert(K % GROUP == 0, "whole groups");
static_assert(WEIGHT >= BF16 && WEIGHT <= FP32, "a FloatType");
static_assert(TOPK <= 32 && (!ON_INPUT || TOPK == 1), "a lane for each slot; one weight for a row");

constexpr int LANES = 8, TEAMS = THREADS / LANES, GROUPS = K / GROUP;
constexpr int PITCH = scale_pitch(GROUPS);
typedef Lane<LANES> L;
constexpr u32 NOWHERE = 0xFFFFFFFFu;
constexpr int IN_FLIGHT = 6;       // ids that a thread requests before it compares them

struct Group {
    u32 v[L::RUNS][L::RUN / 2];

    DEVICE void load(const u16* row, int g) {
#pragma unroll
        for (int r = 0; r < L::RUNS; r++) load_bf16x2<ALIGNED>(row + g * GROUP, L::column(r), v[r]);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) moe_permute_quant_fp8(
    const u16* x,                   // [M, K] bf16
    i64 x_row_stride,               // elements
    const void* topk_weights,       // [M, TOPK] WEIGHT type
    const void* topk_ids,           // [M, TOPK] IDS type
    const i32* expert_map,          // [num_experts] or unused
    u8* a,                          // [M TOPK, K] e4m3
    float* a_scale,                 // [M TOPK, PITCH]
    Route* routes,                  // [M TOPK]
    i32* counter,                   // [1] becomes 0
    i64 num_slots,
    i64 num_experts,
    i64 num_local_experts) {
    __shared__ u32 places[TOPK];
    release_successor();
    const i64 token = blockIdx.x;
    const u16* row = x + token * x_row_stride;
    const int first = threadIdx.x / LANES;
    Group now;
    if (first < GROUPS) now.load(row, first);
    const auto key_of = [&](i64 slot) {
        const i32 e = local_expert<IDS, MAP>(topk_ids, slot, expert_map, num_experts, num_local_experts);
        return e < 0 ? NOWHERE : u32(e) << 16 | u32(slot);
    };
    u32 keys[TOPK], before[TOPK] = {};
#pragma unroll
    for (int j = 0; j < TOPK; j++) keys[j] = key_of(token * TOPK + j);
    float weight = 1.0f;
    if (threadIdx.x < TOPK) {
        places[threadIdx.x] = 0;
        if constexpr (!ON_INPUT) weight = load_float<WEIGHT>(topk_weights, token * TOPK + threadIdx.x);
    }
    if (token == 0 && threadIdx.x == 0) *counter = 0;
    __syncthreads();
    for (i64 s = threadIdx.x; s < num_slots; s += IN_FLIGHT * THREADS) {
        u32 others[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) others[i] = s + i * THREADS < num_slots ? key_of(s + i * THREADS) : NOWHERE;
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
#pragma unroll
            for (int j = 0; j < TOPK; j++) before[j] += others[i] < keys[j];
        }
    }
#pragma unroll
    for (int j = 0; j < TOPK; j++) {
        const u32 sum = __reduce_add_sync(0xFFFFFFFFu, before[j]);
        if (threadIdx.x % 32 == j % 32 && sum) atomicAdd(&places[j], sum);
    }
    __syncthreads();
    if (threadIdx.x < TOPK) {
        u32 key = keys[0];
#pragma unroll
        for (int j = 1; j < TOPK; j++)
            if (threadIdx.x == j) key = keys[j];
        const u32 same = __match_any_sync(0xFFFFFFFFu >> (32 - TOPK), key >> 16);
        const int repeat = __popc(same & ((1u << threadIdx.x) - 1));
        if (key != NOWHERE) routes[places[threadIdx.x]] = Route{u16(token), u16(repeat), weight};
    }
    for (int g = first; g < GROUPS; g += TEAMS) {
        if (g > first) now.load(row, g);
        if constexpr (ON_INPUT) {
            const float w = round_bf16(load_float<WEIGHT>(topk_weights, token));
#pragma unroll
            for (int i = 0; i < L::VALUES / 2; i++) {
                u32& pair = now.v[i / (L::RUN / 2)][i % (L::RUN / 2)];
                pair = round_bf16x2(low_f32(pair) * w, high_f32(pair) * w);
            }
        }
        float amax = 0.0f;
#pragma unroll
        for (int r = 0; r < L::RUNS; r++) amax = fmaxf(amax, amax_bf16x2(now.v[r]));
        const float s = group_scale<UE8M0, true>(group_amax<LANES>(amax));
        const Divider<UE8M0, true> divide(s);
        u32 q[L::RUNS][L::RUN / 4];
#pragma unroll
        for (int r = 0; r < L::RUNS; r++) {
#pragma unroll
            for (int i = 0; i < L::RUN / 4; i++)
                q[r][i] = e4m3x4(divide(low_f32(now.v[r][2 * i])), divide(high_f32(now.v[r][2 * i])),
                                 divide(low_f32(now.v[r][2 * i + 1])), divide(high_f32(now.v[r][2 * i + 1])));
        }
#pragma unroll
        for (int j = 0; j < TOPK; j++) {
            if (keys[j] == NOWHERE) continue;
            const i64 place = places[j];
#pragma unroll
            for (int r = 0; r < L::RUNS; r++) store_codes<true>(a + place * K + g * GROUP + L::column(r), q[r]);
            if (L::index() == 0) a_scale[place * PITCH + g] = s;
        }
    }
}
