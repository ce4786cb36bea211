"""Plans for few tokens: they fit, agree with the sources, and come from a set that is known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumoe.checkpoint import accuracy
from cumoe.plan import experts_decode as decode
from cumoe.plan import experts_prefill as prefill
from cumoe.plan import experts_tiny as tiny
from cumoe.plan import fused_experts_fp8 as fused
from cumoe.plan import moe_down_decode_fp8 as down
from cumoe.plan import moe_gate_up_decode_fp8 as gate_up
from cumoe.plan.decode_tile import ROUTE_BYTES, chunks_bytes, scale_pitch
from cumoe.plan.device import H200, DeviceInfo
from cumoe.plan.enumerate import steps_in
from cumoe.plan.spec import Step
from cumoe.plan.tensor_map import is_mappable
from tests.helpers import tolerances
from tests.helpers.regions import assert_regions

SOURCES = Path(__file__).parents[2] / "kernels_src"
L40S = DeviceInfo("sm_89", 142, 101_376)
RTX = DeviceInfo("sm_120a", 188, 101_376)
B200 = DeviceInfo("sm_100a", 148, 232_448)
MODELS = {
    "glm_tp8": (256, 8, 6144, 256),
    "step_tp8": (288, 8, 4096, 256),
    "qwen_tp1": (512, 10, 4096, 1024),
    "qwen_tp2": (256, 8, 2048, 512),
    "deepseek_tp1": (256, 6, 4096, 2048),
    "ragged": (64, 6, 5120, 1536),
    "topk_16": (512, 16, 1280, 384),
    "small": (8, 2, 512, 128),
    "one_expert": (1, 1, 128, 128),
    "more_slots_than_experts": (8, 8, 7168, 384),
}


def problem_of(E: int, topk: int, K: int, N: int, M: int = 1) -> fused.Problem:
    return fused.Problem(
        M, K, N, E, E, topk, "int32", "fp32", has_map=False, scale_format="fp32", clamp=0,
        scaled=False, weight_on_input=False, x_aligned=True, out_aligned=True,
    )  # fmt: skip


def token_counts(E: int, topk: int, K: int, N: int) -> list[int]:
    """One, and those on both sides of each boundary among few tokens."""
    ends = fused.few_tokens(E, topk, K, N)
    return sorted({1, *ends, *(end + 1 for end in ends)} - {0})


def problems() -> st.SearchStrategy[fused.Problem]:
    """Any legal problem of few tokens, beside boundaries more often than elsewhere."""

    @st.composite
    def draw(d: st.DrawFn) -> fused.Problem:
        experts, topk = d(st.integers(1, 600)), d(st.integers(1, 16))
        mapped = d(st.booleans())
        K, N = 128 * d(st.integers(1, 64)), 128 * d(st.integers(1, 20))
        beside = token_counts(experts, topk, K, N)
        end = max(*fused.few_tokens(experts, topk, K, N)[1:], 1)
        return problem_of(
            experts, topk, K, N,
            d(st.one_of(st.sampled_from(beside), st.integers(1, end))),
        )._replace(
            num_local_experts=d(st.integers(1, experts)) if mapped else experts,
            has_map=mapped,
            ids=d(st.sampled_from(["int32", "int64"])),
            weight=d(st.sampled_from(["fp32", "bf16", "fp16"])),
            scale_format=d(st.sampled_from(["fp32", "ue8m0"])),
            clamp=d(st.sampled_from([0, 1, 2])),
            scaled=d(st.booleans()),
            weight_on_input=topk == 1 and d(st.booleans()),
            x_aligned=d(st.booleans()),
            out_aligned=d(st.booleans()),
        )  # fmt: skip

    return draw()


def steps_of(plan: decode.Plan) -> list[Step]:
    return list(plan.steps)


def constants(step: Step) -> dict[str, int]:
    return dict(step.kernel.constants)


def source(name: str) -> str:
    return (SOURCES / name).read_text()


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def chunks_in_the_source(c: dict[str, int]) -> int:
    """`chunks_bytes` of expert_chunks.cuh."""
    slots, experts, columns = c["MAX_SLOTS"], c["EXPERTS"], 8 * c["N_TILES"]
    most = min(slots, experts + slots // columns)
    return (most * 8 + (experts + 32) * 4 + 15) // 16 * 16


def pitch_in_the_source(blocks: int) -> int:
    return (blocks + 3) // 8 * 8 + 4


def gate_up_smem(c: dict[str, int]) -> int:
    """The end of the last region of `Shared`, in its order."""
    k_blocks, columns = c["K"] // 128, 8 * c["N_TILES"]
    stages = c["STAGES"] * 4 * (4 * 2 * 1024 + c["N_TILES"] * 1024)
    heads = 2 * (columns * pitch_in_the_source(k_blocks) + up(2 * k_blocks, 4)) * 4
    exchange = 2 * c["N_TILES"] * 128 * 16
    barriers = 2 * (c["STAGES"] + 2 + 4) * 8
    return stages + heads + exchange + barriers + 4 * 8 + chunks_in_the_source(c)


def chunks_at_a_time(c: dict[str, int]) -> int:
    return min(64 // c["ROWS"], 8 // c["N_TILES"])


def stage_of_down(c: dict[str, int]) -> int:
    return chunks_at_a_time(c) * c["STAGE_BLOCKS"] * (c["ROWS"] * 128 + c["N_TILES"] * 1024)


def down_smem(c: dict[str, int]) -> int:
    n_blocks, group = c["N"] // 128, chunks_at_a_time(c)
    columns, stage = 8 * group * c["N_TILES"], stage_of_down(c)
    head = columns * pitch_in_the_source(n_blocks) * 4 + columns * 8 + 4 * n_blocks * 4
    num_heads = 8 if group == 1 else 4
    heads, barriers = 2 * num_heads * head, 4 * (c["STAGES"] + num_heads) * 8
    turns = 2 * group * (c["ROWS"] // 16) * 8
    sums = c["SHARED_TOKENS"] * c["ROWS"] * 4
    ring = 2 * c["STAGES"] * stage
    last = ring - stage  # whose products read 64 rows of each block
    parts = heads, barriers, turns, chunks_in_the_source(c)
    assert all(part % 16 == 0 for part in parts)  # of a sum's accesses
    regions = ring + sum(parts) + sums
    return max(regions, last + c["STAGE_BLOCKS"] * 64 * 128)


def test_formulas_agree_with_the_sources():
    chunks = source("common/expert_chunks.cuh")
    assert "u16 expert, first, count, unused;" in chunks
    assert "(EXPERTS + 32) * 4 + 15) / 16 * 16" in chunks
    assert "return (blocks + 3) / 8 * 8 + 4;" in source("common/scale_pitch.cuh")
    first, second = source("moe_gate_up_decode_fp8.cu"), source("moe_down_decode_fp8.cu")
    assert f"THREADS = CONSUMERS + {gate_up.THREADS - 256};" in first
    assert f"THREADS = CONSUMERS + {down.THREADS - 256};" in second
    assert f"STAGE_BLOCKS = {gate_up.STAGE_BLOCKS}," in first
    assert f"constexpr int ITEM_GROUPS = {gate_up.ITEM_GROUPS}," in first
    assert f"constexpr int HEADS = {gate_up.HEADS}, QUEUE = {gate_up.QUEUE};" in first
    assert f"int HEADS = GROUP == 1 ? {down.HEADS} : {down.GROUP_HEADS};" in second
    assert "u16 token, repeat; " in source("common/route.cuh")
    assert ROUTE_BYTES == 2 + 2 + 4
    for blocks in range(1, 70):
        assert scale_pitch(128 * blocks) == pitch_in_the_source(blocks) >= blocks
        assert scale_pitch(128 * blocks) % 8 == 4
    for slots, experts, tiles in ((8, 1, 1), (256, 256, 1), (4096, 513, 4)):
        c = {"MAX_SLOTS": slots, "EXPERTS": experts, "N_TILES": tiles}
        assert chunks_bytes(slots, experts, tiles) == chunks_in_the_source(c)


@given(problems())
def test_shared_memory_is_what_the_kernels_lay_out(problem):
    plan = decode.plan(problem, H200)
    if plan is None:
        return
    for step, layout in ((plan.gate_up, gate_up_smem), (plan.down.step, down_smem)):
        c = constants(step)
        assert step.launch.smem_bytes == layout(c) <= H200.smem_optin_bytes
        assert problem.M * problem.topk <= c["MAX_SLOTS"] <= 0xFFFF


def plans(name: str, device: DeviceInfo = H200) -> Iterator[tuple[int, decode.Plan]]:
    """Every number of tokens that takes this chain, with its plan."""
    E, topk, K, N = MODELS[name]
    end = max(fused.few_tokens(E, topk, K, N))
    for M in range(1, end + 2):
        if plan := decode.plan(problem_of(E, topk, K, N, M), device):
            yield M, plan


@pytest.mark.parametrize("E", [1, 8, 60, 256, 512])
@pytest.mark.parametrize("N", [128, 256, 384, 512])
@pytest.mark.parametrize("K", [512, 2048, 4096, 6144, 8192])
def test_most_sums_are_in_shared_memory(E, K, N):
    """Whatever part of the experts is local."""
    for topk in (8, 10, 16):
        *_, last = decode.regimes(E)
        for local in {1, E // 8, E} - {0} if topk <= last.max_slots else ():
            problem = problem_of(E, topk, K, N, last.max_slots // topk)
            plan = decode.plan(problem._replace(num_local_experts=local, has_map=True), H200)
            assert plan.down.shared_tokens >= 0.8 * (last.max_slots // topk)


@pytest.mark.parametrize("name", MODELS)
def test_a_kernel_has_one_size_of_shared_memory(name):
    """The launcher allows a kernel so much when it loads it, once."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for _, plan in plans(name):
        for step in steps_of(plan):
            sizes[step.kernel.text].add(step.launch.smem_bytes)
    assert {k: s for k, s in sizes.items() if len(s) > 1} == {}


@pytest.mark.parametrize("name", MODELS)
def test_no_number_of_tokens_leaves_the_enumerated_kernels(name):
    E, topk, K, N = MODELS[name]
    one = problem_of(E, topk, K, N)
    for device in (H200, RTX):
        known = {
            step.kernel
            for M in fused.representative_token_counts(one)
            for step in steps_in(fused.plan(one._replace(M=M), device))
        }
        for M, _ in plans(name, device):
            assert {s.kernel for s in steps_in(fused.plan(one._replace(M=M), device))} <= known


@pytest.mark.parametrize("name", MODELS)
def test_which_chain_takes_how_many_tokens(name):
    """What the tests on a GPU mean by few tokens."""
    E, topk, K, N = MODELS[name]
    fewest, *_, few = fused.few_tokens(E, topk, K, N)
    for M in range(1, few + 3):
        plan = fused.plan(problem_of(E, topk, K, N, M), H200)
        if fewest >= M:
            assert isinstance(plan, tiny.Plan)
        elif few >= M:
            assert isinstance(plan, decode.Plan)
        else:
            assert isinstance(plan, prefill.Plan)
        sums_in_fp32 = tolerances.experts_row(M, topk, K, N) == tolerances.MMA_ROW
        assert sums_in_fp32 == isinstance(plan, tiny.Plan)
        assert accuracy.reference_row(M, topk, K, N) == tolerances.experts_row(M, topk, K, N)


@pytest.mark.parametrize("name", MODELS)
def test_regimes_ascend_and_have_room(name):
    """The two halves of a call agree on the chunks."""
    E, topk, K, N = MODELS[name]
    found = [(M, constants(p.gate_up), constants(p.down.step)) for M, p in plans(name)]
    _, *ends = fused.few_tokens(E, topk, K, N)
    assert [M for M, _, _ in found] == list(range(1, max(ends) + 1))
    tiles = [c["N_TILES"] for _, c, _ in found]
    assert tiles == sorted(tiles)
    assert tiles == [c["N_TILES"] for _, _, c in found]
    room = [c["MAX_SLOTS"] for _, c, _ in found]
    assert room == sorted(room)
    assert room == [c["MAX_SLOTS"] for _, _, c in found]
    assert 0 not in fused.representative_token_counts(problem_of(*MODELS[name]))


def test_no_tokens_are_no_few_tokens():
    assert decode.plan(problem_of(8, 2, 512, 128, 0), H200) is None


@pytest.mark.parametrize("name", MODELS)
def test_kernels_do_not_depend_on_the_number_of_sms(name):
    """They are built where there is no GPU."""
    E, topk, K, N = MODELS[name]
    for M, plan in plans(name):
        for num_sms in (1, 78, 114, 148):
            other = decode.plan(problem_of(E, topk, K, N, M), H200._replace(num_sms=num_sms))
            assert [s.kernel for s in other.steps] == [s.kernel for s in plan.steps]
            rows = constants(other.down.step)["ROWS"] * other.down.passes
            assert other.down.step.launch.grid * rows >= K
            assert other.down.step.launch.grid <= num_sms


@given(problems())
def test_only_the_first_launch_waits_for_all_before_it(problem):
    plan = decode.plan(problem, H200)
    if plan is None:
        return
    steps = steps_of(plan)
    assert [s.launch.overlap for s in steps] == [False] + [True] * (len(steps) - 1)
    assert [s.entry for s in steps] == [
        "moe_permute_quant_fp8", "moe_gate_up_decode_fp8", "per_token_group_quant_fp8",
        "moe_down_decode_fp8",
    ]  # fmt: skip


@given(problems())
def test_the_rings_have_stages_and_the_grid_all_columns(problem):
    plan = decode.plan(problem, H200)
    if plan is None:
        return
    c, d, launch = constants(plan.gate_up), constants(plan.down.step), plan.down.step.launch
    assert 2 <= c["STAGES"] <= gate_up.MAX_STAGES
    weights = 2 * chunks_at_a_time(d) * d["STAGE_BLOCKS"] * d["ROWS"] * 128
    assert d["STAGES"] == down.MIN_STAGES or d["STAGES"] * weights <= 98_304
    assert d["STAGES"] >= down.MIN_STAGES
    assert d["N"] % (128 * d["STAGE_BLOCKS"]) == 0
    assert launch.grid <= H200.num_sms
    rows = d["ROWS"] * plan.down.passes  # of a CTA
    assert (launch.grid - 1) * rows < problem.K <= launch.grid * rows
    most = d["MAX_SLOTS"] // d["TOPK"]
    assert 0 <= d["SHARED_TOKENS"] <= most
    assert d["SHARED_TOKENS"] == most or d["STAGES"] == down.MIN_STAGES
    assert plan.down.memory_bytes(d["SHARED_TOKENS"]) == 0
    # What the last product reads behind its rows lies in shared memory.
    last = (2 * d["STAGES"] - 1) * stage_of_down(d)
    assert last + d["STAGE_BLOCKS"] * 64 * 128 <= launch.smem_bytes


@given(problems())
def test_tensor_maps_are_legal(problem):
    plan = decode.plan(problem, H200)
    if plan is None:
        return
    p, slots = problem, problem.M * problem.topk
    E, K, N = p.num_local_experts, p.K, p.N
    maps = [
        *gate_up.weights((E, 2 * N, K), (2 * N * (K + 16), K + 16)),
        gate_up.tokens("workspace", plan.workspace.a, slots, K),
        plan.down.weights((E, K, N), (K * (N + 48) + 64, N + 48)),
        plan.down.codes("workspace", plan.workspace.q, slots, N),
    ]
    for m in maps:
        assert is_mappable(m.dims, m.strides), m
        assert len(m.dims) == len(m.box) == len(m.strides) + 1 <= 5
        assert all(0 < n <= 256 for n in m.box)
        assert m.box[0] == 128
        assert m.offset % 256 == 0


@given(problems())
def test_regions_of_the_workspace_are_disjoint_aligned_and_large_enough(problem):
    plan = decode.plan(problem, H200)
    if plan is None:
        return
    p, slots = problem, problem.M * problem.topk
    d = constants(plan.down.step)
    outside = max(p.M - d["SHARED_TOKENS"], 0)
    sizes = {
        "a": slots * p.K, "a_scale": 4 * slots * pitch_in_the_source(p.K // 128),
        "routes": 8 * slots, "counter": 4, "y": 2 * slots * p.N, "q": slots * p.N,
        "q_scale": 4 * slots * pitch_in_the_source(p.N // 128),
        "sums": 4 * plan.down.step.launch.grid * outside * d["ROWS"],
    }  # fmt: skip
    assert_regions(plan.workspace, sizes)


@pytest.mark.parametrize("name", MODELS)
def test_more_tokens_never_want_less_workspace(name):
    """Parts of a call of many tokens as well: the split searches by bisection."""
    E, topk, K, N = MODELS[name]
    end = max(fused.few_tokens(E, topk, K, N))

    def totals(whole: fused.Problem) -> list[int]:
        parts = (fused.part(whole, M) for M in range(1, min(whole.M, end + 4)))
        return [fused.plan(p, H200).workspace.total for p in parts]

    for whole in (problem_of(E, topk, K, N, M) for M in (end, 2 * end + 3)):
        sizes = totals(whole)
        assert sizes == sorted(sizes)
        for index in {0, len(sizes) // 3, len(sizes) - 1} if sizes else ():
            fits = fused.tokens_per_call(whole, H200, sizes[index])
            assert fits >= index + 1
            assert fused.plan(fused.part(whole, fits), H200).workspace.total <= sizes[index]
            more = fused.plan(fused.part(whole, fits + 1), H200).workspace.total
            assert more > sizes[index]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", [L40S, RTX, B200], ids=lambda d: d.arch)
def test_other_gpus_get_another_chain(name, device):
    E, topk, K, N = MODELS[name]
    for M in token_counts(E, topk, K, N):
        plan = fused.plan(problem_of(E, topk, K, N, M), device)
        assert all(s.launch.smem_bytes <= device.smem_optin_bytes for s in steps_in(plan))
        assert not isinstance(plan, decode.Plan | prefill.Plan)
        if device.arch == "sm_89":
            assert isinstance(plan, fused.Plan)
            assert not any(s.launch.overlap for s in steps_in(plan))


@given(problems())
def test_weights_that_no_tensor_map_holds_take_another_chain(problem):
    assert decode.plan(problem._replace(weights_mappable=False), H200) is None
