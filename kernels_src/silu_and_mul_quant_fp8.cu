// silu_and_mul_quant_fp8: [R, 2H] bf16 gate | up -> e4m3 codes and one scale per 128 values.
//
//   y = swiglu(gate, up), rounded to bf16 (common/swiglu.cuh)
//   q, scale = group quantization of y (common/group_quant.cuh)
//
// Row r is one (token, slot) pair. With IDS only the rows of experts on this rank are computed; the
// others keep the bytes they had. STEP selects both stages, which pass y in registers, or one of them,
// which pass it through memory. All ways to deal the groups out give the same bytes:
//
//   AT_ONCE  a team of LANES lanes for each group: the shortest way
//   EAGER    the same; gate and up are read before it is known whether the row is computed
//   WALK     CTAs walk chunks of rows; of filtered rows they first list the valid ones
#include "common/group_quant.cuh"
#include "common/row_filter.cuh"
#include "common/swiglu.cuh"
#include "common/vec.cuh"
#include "ptx/pdl.cuh"

enum Step { BOTH = 0, ACTIVATE = 1, QUANTIZE = 2 };
enum Deal { AT_ONCE = 0, EAGER = 1, WALK = 2 };

static_assert(H > 0 && H % GROUP == 0, "H is a positive multiple of the group size");
static_assert(THREADS % 32 == 0 && 32 % LANES == 0, "whole warps, whole groups");
static_assert(!PACKED || UE8M0, "only power-of-two scales fit into exponent bytes");
static_assert(!MAP || IDS, "an expert map needs ids to map");
static_assert(STEP >= BOTH && STEP <= QUANTIZE, "which stages are compiled");
static_assert(DEAL >= AT_ONCE && DEAL <= WALK, "how groups are dealt out");
static_assert(CLAMP >= NO_CLAMP && CLAMP <= FP32_CLAMP, "how the clamp is compiled");
static_assert(LISTERS % 32 == 0 && LISTERS <= THREADS, "who makes a list: each warp, or some for all");

constexpr int GROUPS = H / GROUP;
constexpr int GROUPS_PADDED = PACKED ? ceil_div(GROUPS, 4) * 4 : GROUPS;
constexpr u32 TEAMS = THREADS / LANES;

typedef Lane<LANES> L;
typedef RowFilter<IDS, MAP, HELD_EXPERTS> Filter;
typedef RowList<Filter, THREADS, LISTERS, SCAN> List;

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

// How CTAs walk rows: squads of squad_ctas CTAs take chunks of chunk_rows rows.
struct Walk {
    i64 chunk_rows, squad_ctas, squad_reciprocal;  // of 2^32, rounded up

    // n / squad_ctas, or more where n is beyond 2^32 / squad_ctas.
    DEVICE u32 per_member(u32 n) const { return u32(n * u64(squad_reciprocal) >> 32); }
};

// One group, as the LANES lanes see it that compute it together. It is made without access to memory;
// whole warps load and finish theirs, also those lanes whose group does not count.
struct Group {
    static constexpr int PAIRS = L::VALUES / 2, RUN_PAIRS = L::RUN / 2;
    typedef u32 (&Run)[RUN_PAIRS];

    u32 row, index;  // index: among the row's groups
    const u16* source;  // gate, or, if STEP is QUANTIZE, the activation that an earlier launch made
    bool is_padding;
    u32 gate[PAIRS], up[PAIRS];

    DEVICE Group(const Arguments& a, u32 row, u32 index) : row(row), index(index) {
        is_padding = row >= u32(a.R) || index >= GROUPS;  // it then loads its neighbour
        const u32 r = min(row, u32(a.R) - 1), i = min(index, GROUPS - 1);
        source = STEP == QUANTIZE ? a.y + (u64(r) * H + i * GROUP)
                                  : a.gate_up + (r * a.gate_up_row_stride + i * GROUP);
        source += L::column(0);
    }

    DEVICE static Run run(u32 (&values)[PAIRS], int r) {
        return reinterpret_cast<Run>(values[r * RUN_PAIRS]);
    }

    DEVICE void load() {
#pragma unroll
        for (int r = 0; r < L::RUNS; r++) {
            const int column = L::column(r) - L::column(0);
            load_bf16x2<STEP == QUANTIZE || ALIGNED>(source, column, run(gate, r));
            if (STEP != QUANTIZE) load_bf16x2<ALIGNED>(source, H + column, run(up, r));
        }
    }

    // From what was loaded to the outputs, if this group `counts`; padding gets the scale 0.
    DEVICE void finish(const Arguments& a, bool counts) {
        u32 y[PAIRS];
        if constexpr (STEP != QUANTIZE) swiglu_lane<CLAMP, SCALED>(gate, up, a.swiglu, y);
        const bool stores = counts && !is_padding;
        if constexpr (STEP == ACTIVATE) {
            if (stores) store_y(a, y);
            return;
        }
        const float s = quantize(a, STEP == QUANTIZE ? gate : y, stores);
        if (counts && L::index() == 0)
            store_scale<PACKED>(a.scale, row, index, a.scale_row_stride, a.scale_group_stride,
                                is_padding ? 0.0f : s);
    }

    DEVICE u64 column() const { return u64(row) * H + index * GROUP + L::column(0); }

    DEVICE void store_y(const Arguments& a, u32 (&y)[PAIRS]) const {
#pragma unroll
        for (int r = 0; r < L::RUNS; r++)
            store_bf16x2<true>(a.y + column() + (L::column(r) - L::column(0)), run(y, r));
    }

    // Stores the codes of y; its scale.
    DEVICE float quantize(const Arguments& a, const u32 (&y)[PAIRS], bool stores) const {
        const float s = group_scale<UE8M0, true>(group_amax<LANES>(amax_bf16x2(y), ALL_LANES));
        const Divider<UE8M0, true> divide(s);
        u32 codes[L::RUNS][RUN_PAIRS / 2];
#pragma unroll
        for (int i = 0; i < PAIRS / 2; i++) {
            const u32 low = y[2 * i], high = y[2 * i + 1];
            codes[i / (RUN_PAIRS / 2)][i % (RUN_PAIRS / 2)] =
                e4m3x4(divide(low_f32(low)), divide(high_f32(low)), divide(low_f32(high)),
                       divide(high_f32(high)));
        }
        if (!stores) return s;
#pragma unroll
        for (int r = 0; r < L::RUNS; r++)
            store_codes<ALIGNED>(a.q + column() + (L::column(r) - L::column(0)), codes[r]);
        return s;
    }
};

// A team for each group: the shortest way. Teams beyond the last group repeat it.
DEVICE void compute_at_once(const Arguments& a) {
    const u32 last = u32(a.R_padded) * GROUPS_PADDED - 1;
    const u32 item = min(blockIdx.x * TEAMS + threadIdx.x / LANES, last);
    Group group(a, item / GROUPS_PADDED, item % GROUPS_PADDED);
    Filter filter(a.topk_ids, a.expert_map, a.num_experts, a.num_local_experts);
    if constexpr (IDS == NO_IDS) {
        wait_for_predecessor_with(group.source);
        group.load();
        group.finish(a, true);
    } else {
        const bool is_row = group.row < u32(a.R);
        wait_for_predecessor_with(group.source, filter.lanes_entry);
        const Filter::Id id = filter.read(filter.address(group.row), is_row);
        if (DEAL == EAGER && is_row) group.load();
        filter.read_map();
        const bool counts = filter.takes(id) || !is_row;
        if (!__any_sync(ALL_LANES, counts)) return;
        if (DEAL != EAGER && counts) group.load();
        group.finish(a, counts);
    }
}

// Which groups of some rows a warp computes: it starts at its `first`, and goes on by `stride`. The warps
// of a CTA lie far apart, so that all CTAs have as many groups.
struct Share {
    u32 first, stride;

    DEVICE Share(u32 cta, u32 ctas)
        : first((threadIdx.x / 32 * ctas + cta) * (32 / LANES)), stride(ctas * TEAMS) {}
};

// This warp's share of the groups of `rows` rows, which `row_of` numbers.
template <class RowOf>
DEVICE void compute_rows(const Arguments& a, u32 rows, Share share, RowOf row_of) {
    const u32 items = rows * GROUPS_PADDED, team = threadIdx.x / LANES % (32 / LANES);
    for (u32 first = share.first; first < items; first += share.stride) {
        const u32 item = min(first + team, items - 1);  // beyond the last: the same once more
        Group group(a, row_of(item / GROUPS_PADDED), item % GROUPS_PADDED);
        group.load();
        group.finish(a, true);
    }
}

// CTAs walk chunks of rows; the lanes of a CTA share its groups evenly.
DEVICE void compute_chunks(const Arguments& a, u32 chunk_rows) {
    const Share share(0, 1);
    wait_for_predecessor();
    for (u32 first = blockIdx.x * chunk_rows; first < u32(a.R_padded); first += gridDim.x * chunk_rows) {
        const u32 rows = min(chunk_rows, u32(a.R_padded) - first);
        compute_rows(a, rows, share, [&](u32 row) { return first + row; });
    }
}

// Squads of CTAs walk chunks of rows; all CTAs of a squad list the valid rows, and share their groups.
DEVICE void compute_listed_chunks(const Arguments& a, Walk walk) {
    __shared__ List::Shared lists[LISTERS == 32 ? THREADS / 32 : 1];
    List list(lists[LISTERS == 32 ? threadIdx.x / 32 : 0]);
    Filter filter(a.topk_ids, a.expert_map, a.num_experts, a.num_local_experts);
    const u32 R = u32(a.R), R_padded = u32(a.R_padded), chunk_rows = u32(walk.chunk_rows);
    const u32 squad = walk.per_member(blockIdx.x), ctas = u32(walk.squad_ctas);
    const Share share(blockIdx.x - squad * ctas, ctas);
    u32 first = squad * chunk_rows;
    const Filter::Id* id = filter.address(first + list.row());
    wait_for_predecessor_with(filter.lanes_entry, id, share.first, share.stride);
    list.read(filter, id, min(first + chunk_rows, R) - first);
    filter.read_map();
    for (;;) {
        const u32 last = min(first + chunk_rows, R_padded), end = min(max(R, first), last);
        const u32 rows = list.fill(filter, end - first, last - end);
        compute_rows(a, rows, share, [&](u32 row) { return first + list.shared.rows[row]; });
        first += walk.per_member(gridDim.x) * chunk_rows;
        if (first >= R_padded) return;
        List::synchronize();  // the list is read before it is made anew
        list.read(filter, filter.address(first + list.row()), min(first + chunk_rows, R) - first);
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
    i64 chunk_rows,                        // if DEAL is WALK
    i64 squad_ctas,                        // if the rows that are walked are filtered
    i64 squad_reciprocal,                  // 2^32 / squad_ctas, rounded up
    float limit,
    float alpha,
    float beta) {
    const Arguments a{gate_up, gate_up_row_stride, topk_ids, expert_map, y, q, scale, scale_row_stride,
                      scale_group_stride, R, R_padded, num_experts, num_local_experts,
                      Swiglu{limit, alpha, beta}};
    release_successor();
    if constexpr (DEAL != WALK)
        compute_at_once(a);
    else if constexpr (IDS == NO_IDS)
        compute_chunks(a, u32(chunk_rows));
    else
        compute_listed_chunks(a, Walk{chunk_rows, squad_ctas, squad_reciprocal});
}
