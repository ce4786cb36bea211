"""Plans for few tokens: they fit, agree with the sources, and come from a set that is known."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumoe.plan import experts_decode as decode
from cumoe.plan import experts_prefill as prefill
from cumoe.plan import fused_experts_fp8 as fused
from cumoe.plan import moe_down_decode_fp8 as down
from cumoe.plan import moe_gate_up_decode_fp8 as gate_up
from cumoe.plan.device import H200, DeviceInfo
from cumoe.plan.enumerate import steps_in
from cumoe.plan.slot_table import table_bytes
from cumoe.plan.spec import Step
from cumoe.plan.workspace import ALIGNMENT

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


def token_counts(E: int, topk: int) -> list[int]:
    return sorted(decode.representative_token_counts(problem_of(E, topk, 512, 128)))


def problems() -> st.SearchStrategy[fused.Problem]:
    """Any legal problem of few tokens, beside boundaries more often than elsewhere."""

    @st.composite
    def draw(d: st.DrawFn) -> fused.Problem:
        experts, topk = d(st.integers(1, 600)), d(st.integers(1, 16))
        mapped = d(st.booleans())
        end = 8 * max(experts, topk) // topk
        beside = token_counts(experts, topk)
        return problem_of(
            experts, topk, 128 * d(st.integers(1, 64)), 128 * d(st.integers(1, 20)),
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


def source_constant(text: str, name: str) -> int:
    found = re.findall(rf"constexpr int {name} = (\d+);", text)
    assert len(found) == 1, name
    return int(found[0])


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def table_in_the_source(slots: int, experts: int) -> int:
    """`slot_table_bytes`, from the fields of Chunk and SlotTable in the order of slot_table_at."""
    chunk, u16, u32 = 4 * 2, 2, 4
    counts = slots * chunk
    starts = counts + experts * u32
    warp_sums = starts + experts * u32
    num_chunks = warp_sums + 32 * u32
    first = num_chunks + 4 * u32
    return up(first + 3 * slots * u16, 16)


def gate_up_smem(c: dict[str, int]) -> int:
    """The end of the last region of the kernel."""
    slots = c["MAX_SLOTS"]
    row = c["STAGE_BLOCKS"] * 128 + 64
    columns = 8 * c["N_TILES"]
    half = 8 * c["M_TILES"] * row
    b_bytes, b_scales = (0, 0) if c["QUANTIZE"] else (columns * row, columns * c["STAGE_BLOCKS"])
    stage = up(2 * half + b_bytes + (2 * c["STAGE_BLOCKS"] + b_scales) * 4, 16)
    reduction = c["STAGES"] * stage
    barriers = reduction + 2 * c["WARPS"] * c["M_TILES"] * c["N_TILES"] * 32 * 16
    table = barriers + 2 * c["STAGES"] * 8
    codes = table + table_in_the_source(slots, c["EXPERTS"])
    if not c["QUANTIZE"]:
        return codes
    tokens = slots // c["TOPK"]
    return codes + tokens * (c["K"] + 64) + tokens * c["K"] // 128 * 4


def down_smem(c: dict[str, int]) -> int:
    slots = c["MAX_SLOTS"]
    rings = c["WARPS"] * c["STAGES"]
    barriers = rings * 16 * c["ITEM_TILES"] * c["STAGE_BLOCKS"] * 128
    d = barriers + up(rings, 2) * 8
    table = d + slots * 16 * c["PASS_TILES"] * 2
    codes = table + table_in_the_source(slots, c["EXPERTS"])
    return codes + (slots * (c["N"] + 64 + c["N"] // 128 * 4) if c["QUANTIZE"] else 0)


def test_formulas_of_the_table_agree_with_the_source():
    text = source("common/slot_table.cuh")
    assert "u16 expert, first, count, unused;" in text
    assert (
        "(MAX_SLOTS * int(sizeof(Chunk) + 3 * sizeof(u16)) + (2 * EXPERTS + 36) * 4 + 15) / 16 * 16"
        in text
    )
    for slots in (1, 7, 64, 4096):
        for experts in (1, 3, 256, 513):
            assert table_bytes(slots, experts) == table_in_the_source(slots, experts)


def test_constants_agree_with_the_sources():
    block = source("common/block_mma.cuh")
    assert source_constant(block, "BLOCK_K") == 128
    assert source_constant(block, "ROW_PADDING") == gate_up.ROW_PADDING == down.ROW_PADDING
    text = source("moe_gate_up_decode_fp8.cu")
    assert f"THREADS = CONSUMERS + {32 * gate_up.PRODUCER_WARPS};" in text


@given(problems())
def test_shared_memory_is_what_the_kernels_lay_out(problem):
    plan = decode.plan(problem, H200)
    if plan is None:
        return
    for step, layout in ((plan.gate_up, gate_up_smem), (plan.down.step, down_smem)):
        c = constants(step)
        assert step.launch.smem_bytes == layout(c) <= H200.smem_optin_bytes
        assert problem.M * problem.topk <= c["MAX_SLOTS"] <= 0xFFFF
        assert c["MAX_SLOTS"] % c["TOPK"] == 0


def plans(name: str, device: DeviceInfo = H200) -> Iterator[tuple[int, decode.Plan]]:
    """Every number of tokens that takes this chain, with its plan."""
    E, topk, K, N = MODELS[name]
    end = max(r.max_slots for r in decode.regimes(E, topk)) // topk
    for M in range(1, end + 2):
        if plan := decode.plan(problem_of(E, topk, K, N, M), device):
            yield M, plan


@pytest.mark.parametrize("device", [H200, B200, RTX], ids=lambda d: d.arch)
@pytest.mark.parametrize("name", MODELS)
def test_a_kernel_has_one_size_of_shared_memory(name, device):
    """The launcher allows a kernel so much when it loads it, once."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for _, plan in plans(name, device):
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


ENDS = {
    "glm_tp8": 256,
    "step_tp8": 288,  # more slots than fit beside the rings
    "qwen_tp2": 256,
    "small": 32,
    "one_expert": 8,
    "more_slots_than_experts": 8,
}


@pytest.mark.parametrize("name", ENDS)
def test_the_last_number_of_tokens(name):
    """What the tests on a GPU mean by few tokens: all up to here."""
    E, topk, K, N = MODELS[name]
    assert [M for M, _ in plans(name)] == list(range(1, ENDS[name] + 1))
    beyond = fused.plan(problem_of(E, topk, K, N, ENDS[name] + 1), H200)
    assert isinstance(beyond, prefill.Plan)
    assert isinstance(fused.plan(problem_of(E, topk, K, N), H200), decode.Plan)


@pytest.mark.parametrize("name", MODELS)
def test_regimes_ascend_and_have_room(name):
    """Among those that some call takes; the two halves of a call agree on the chunks."""
    E, topk, _, _ = MODELS[name]
    end = max(r.max_slots for r in decode.regimes(E, topk)) // topk
    found = [(M, constants(p.gate_up), constants(p.down.step)) for M, p in plans(name)]
    assert [M for M, _, _ in found] == list(range(1, len(found) + 1))  # then the other chain
    assert found[-1][0] <= end
    tiles = [c["N_TILES"] for _, c, _ in found]
    assert tiles == sorted(tiles)
    assert tiles == [c["N_TILES"] for _, _, c in found]
    room = [c["MAX_SLOTS"] for _, _, c in found]
    assert room == sorted(room)
    assert 0 not in token_counts(E, topk)


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
            rows = 16 * constants(other.down.step)["PASS_TILES"] * other.down.passes
            assert other.down.step.launch.grid * rows >= K
            assert other.down.step.launch.grid <= num_sms


@given(problems())
def test_only_the_first_launch_waits_for_all_before_it(problem):
    plan = decode.plan(problem, H200)
    if plan is None:
        return
    steps = steps_of(plan)
    assert [s.launch.overlap for s in steps] == [False] + [True] * (len(steps) - 1)
    names = [s.entry for s in steps]
    quantizer = "per_token_group_quant_fp8"
    wanted = [quantizer] * (plan.quantize_x is not None) + ["moe_gate_up_decode_fp8"]
    wanted += [quantizer] * (plan.quantize_y is not None) + ["moe_down_decode_fp8"]
    assert names == wanted
    assert (plan.quantize_x is None) == constants(plan.gate_up)["QUANTIZE"]
    assert (plan.quantize_y is None) == constants(plan.down.step)["QUANTIZE"]


@given(problems())
def test_the_order_of_sums_does_not_depend_on_the_plan(problem):
    """Warp w takes the 128-blocks w, w + 8, ... of K; N is walked in order."""
    plan = decode.plan(problem, H200)
    if plan is None:
        return
    c = constants(plan.gate_up)
    assert c["WARPS"] == gate_up.WARPS == 8
    assert c["STAGE_BLOCKS"] % c["WARPS"] == 0
    assert c["STAGES"] >= 2
    d, launch = constants(plan.down.step), plan.down.step.launch
    assert d["N"] % (128 * d["STAGE_BLOCKS"]) == 0
    assert d["PASS_TILES"] % d["ITEM_TILES"] == 0
    assert d["STAGES"] >= 1
    assert launch.block == 32 * d["WARPS"] <= 1024
    assert launch.grid <= H200.num_sms
    rows = 16 * d["PASS_TILES"] * plan.down.passes  # of a CTA
    assert (launch.grid - 1) * rows < problem.K <= launch.grid * rows
    # Both kernels make the same chunks.
    assert c["N_TILES"] == d["N_TILES"]


@given(problems())
def test_the_copies_of_a_stage_are_fewer_bytes_than_a_barrier_counts(problem):
    plan = decode.plan(problem, H200)
    if plan is None:
        return
    c, d = constants(plan.gate_up), constants(plan.down.step)
    rows = 16 * c["M_TILES"] + (0 if c["QUANTIZE"] else 8 * c["N_TILES"])
    assert rows * c["STAGE_BLOCKS"] * 128 < 1 << 20
    assert 16 * d["ITEM_TILES"] * d["STAGE_BLOCKS"] * 128 < 1 << 20


@given(problems())
def test_regions_of_the_workspace_are_disjoint_aligned_and_large_enough(problem):
    plan = decode.plan(problem, H200)
    if plan is None:
        return
    p, slots = problem, problem.M * problem.topk
    sizes = {
        "a": p.M * p.K, "a_scale": p.M * p.K // 32, "y": 2 * slots * p.N, "q": slots * p.N,
        "q_scale": slots * p.N // 32,
    }  # fmt: skip
    offsets = plan.workspace._asdict()
    order = list(offsets)
    assert order == [*sizes, "total"]
    for name, size in sizes.items():
        start, end = offsets[name], offsets[order[order.index(name) + 1]]
        assert start % ALIGNMENT == 0
        assert end - start >= size, name


@pytest.mark.parametrize("name", MODELS)
def test_more_tokens_never_want_less_workspace(name):
    """Parts of a call of many tokens as well: the split searches by bisection."""
    E, topk, K, N = MODELS[name]
    end = max(r.max_slots for r in decode.regimes(E, topk)) // topk

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
def test_other_gpus_get_a_plan_or_the_other_chain(name, device):
    E, topk, K, N = MODELS[name]
    for M in token_counts(E, topk):
        plan = fused.plan(problem_of(E, topk, K, N, M), device)
        assert all(s.launch.smem_bytes <= device.smem_optin_bytes for s in steps_in(plan))
        if device.arch == "sm_89":
            assert isinstance(plan, fused.Plan)
            assert not any(s.launch.overlap for s in steps_in(plan))


def test_a_gpu_with_little_shared_memory_has_both():
    small = {M: isinstance(p, decode.Plan) for M, p in plans("small", RTX)}
    assert small[1]
    assert list(plans("glm_tp8", RTX)) == []


@given(problems())
def test_weights_of_down_that_lie_apart_take_the_other_chain(problem):
    apart = problem._replace(down_contiguous=False)
    assert decode.plan(apart, H200) is None
    assert isinstance(fused.plan(apart, H200), prefill.Plan)
