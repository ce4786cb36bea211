"""Plans of the kernels for at most 64 slots: they fit, and agree with the sources."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumoe.errors import CompileError
from cumoe.plan import experts_tiny as tiny
from cumoe.plan import fused_experts_fp8 as fused
from cumoe.plan import moe_down_tiny_fp8 as down
from cumoe.plan import moe_gate_up_tiny_fp8 as gate_up
from cumoe.plan.device import H200, DeviceInfo
from cumoe.plan.small_table import MAX_SLOTS, table_bytes, table_slots
from cumoe.plan.spec import Step
from cumoe.store import nvrtc
from cumoe.store.flags import nvrtc_flags
from cumoe.store.source import read_source

B200 = DeviceInfo("sm_100a", 148, 232_448)
RTX = DeviceInfo("sm_120a", 188, 101_376)
DEVICES = (H200, B200, RTX)


def gate_up_of(tokens: int, topk: int, K: int, N: int) -> gate_up.Problem:
    return gate_up.Problem(tokens, K, N, topk, "int32", False, "fp32", 0, False)


def down_of(tokens: int, topk: int, K: int, N: int) -> down.Problem:
    return down.Problem(tokens, K, N, topk, "int32", False, "fp32", "fp32", True)


def constants(step: Step) -> dict[str, int]:
    return dict(step.kernel.constants)


@st.composite
def shapes(d: st.DrawFn) -> tuple[int, int, int, int]:
    """Most tokens, topk, K, N."""
    topk = d(st.integers(1, MAX_SLOTS))
    tokens = d(st.integers(1, MAX_SLOTS // topk))
    return tokens, topk, 128 * d(st.integers(1, 128)), 128 * d(st.integers(1, 40))


@given(shapes(), st.sampled_from(DEVICES))
def test_the_order_of_sums_does_not_depend_on_the_plan(shape, device):
    """Warp w takes the 128-blocks w, w + 8, ... of K; N is walked in order."""
    first, second = (
        gate_up.plan(gate_up_of(*shape), device),
        down.plan(down_of(*shape), device),
    )
    if first:
        c = constants(first)
        assert c["WARPS"] == gate_up.WARPS == 8
        assert c["STAGE_BLOCKS"] % c["WARPS"] == 0
        assert c["STAGES"] >= 2
    if second:
        c = constants(second)
        assert c["N"] % (128 * c["STAGE_BLOCKS"]) == 0


@given(shapes(), st.sampled_from(DEVICES))
def test_launches_fit_the_gpu(shape, device):
    first, second = gate_up.plan(gate_up_of(*shape), device), down.plan(down_of(*shape), device)
    for step in (first, second):
        if step is None:
            continue
        c = constants(step)
        assert step.launch.smem_bytes <= device.smem_optin_bytes
        assert step.launch.block <= 1024
        assert shape[0] <= c["MAX_TOKENS"] <= MAX_SLOTS // c["TOPK"]
        assert 16 * c["STAGE_BLOCKS"] * 128 < 1 << 20  # more bytes than a barrier counts
    if first:
        assert (first.launch.grid, first.launch.overlap) == (device.num_sms, False)
    if second:
        rows = 16 * constants(second)["TILES"]
        assert second.launch.overlap
        assert (second.launch.grid - 1) * rows < shape[2] <= second.launch.grid * rows


def layout_check(step: Step, smem_bytes: int) -> str:
    """The source, which compiles where its layout and its threads are these."""
    c = constants(step)
    slots = c["MAX_TOKENS"] * c["TOPK"]
    return read_source(step.kernel) + (
        f"static_assert(sizeof(Shared) == {smem_bytes} && THREADS == {step.launch.block});\n"
        f"static_assert(sizeof(Table) == {table_bytes(slots)});\n"
        f"static_assert(sizeof(Table::slots) == {table_slots(slots)});\n"
    )


LAYOUTS = {
    "glm_tp8": (4, 8, 6144, 256),
    "odd_sizes": (3, 10, 1152, 384),
    "one_token": (1, 32, 128, 128),
    "most_tokens": (32, 1, 2048, 640),
    "long_rows": (2, 16, 8192, 1536),
    "glm_tp8_of_64_slots": (8, 8, 6144, 256),
    "odd_sizes_of_33_slots": (3, 11, 1152, 384),
    "widest_of_64_slots": (4, 16, 2048, 768),
    "one_token_of_64_slots": (1, 64, 128, 128),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_shared_memory_is_what_the_kernels_lay_out(name):
    shape = LAYOUTS[name]
    for step in (gate_up.plan(gate_up_of(*shape), H200), down.plan(down_of(*shape), H200)):
        text = layout_check(step, step.launch.smem_bytes)
        assert nvrtc.compile(text, f"{step.entry}.cu", nvrtc_flags("sm_90a"))


@pytest.mark.parametrize("module", [gate_up, down], ids=["gate_up", "down"])
def test_the_check_of_the_layout_fails_for_a_byte_more(module):
    shape = (3, 8, 512, 128)
    step = module.plan(gate_up_of(*shape) if module is gate_up else down_of(*shape), H200)
    text = layout_check(step, step.launch.smem_bytes + 1)
    with pytest.raises(CompileError, match="assert"):
        nvrtc.compile(text, f"{step.entry}.cu", nvrtc_flags("sm_90a"))


@given(shapes(), st.sampled_from([1, 78, 114, 148]))
def test_kernels_do_not_depend_on_the_number_of_sms(shape, num_sms):
    """They are built where there is no GPU."""
    other = H200._replace(num_sms=num_sms)
    for module, problem in ((gate_up, gate_up_of(*shape)), (down, down_of(*shape))):
        one, two = module.plan(problem, H200), module.plan(problem, other)
        assert (one and one.kernel) == (two and two.kernel)


def test_a_kernel_has_one_size_of_shared_memory():
    """The launcher allows a kernel so much when it loads it, once."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for topk, k, n in product((1, 6, 8), (1, 10, 48), (1, 2, 3, 4, 8)):
        for tokens in range(1, MAX_SLOTS // topk + 1):
            shape = (tokens, topk, 128 * k, 128 * n)
            steps = gate_up.plan(gate_up_of(*shape), H200), down.plan(down_of(*shape), H200)
            for step in filter(None, steps):
                sizes[step.kernel.text].add(step.launch.smem_bytes)
    assert len(sizes) > 100
    assert {k: s for k, s in sizes.items() if len(s) > 1} == {}


@pytest.mark.parametrize("device", [H200, B200], ids=lambda d: d.arch)
@pytest.mark.parametrize(
    "shape",
    [
        (4, 8, 6144, 256),
        (4, 8, 7168, 1536),
        (16, 2, 8192, 512),
        (2, 16, 8192, 2048),
        (8, 8, 6144, 256),
        (8, 8, 7168, 768),
        (6, 10, 4096, 512),
        (4, 16, 8192, 768),
    ],
)
def test_common_shapes_have_a_plan(shape, device):
    assert gate_up.plan(gate_up_of(*shape), device)
    assert down.plan(down_of(*shape), device)


def test_what_does_not_fit_has_no_plan():
    assert gate_up.plan(gate_up_of(9, 8, 512, 128), H200) is None  # 72 slots
    assert down.plan(down_of(9, 8, 512, 128), H200) is None
    assert gate_up.plan(gate_up_of(32, 1, 6144, 256), H200) is None
    assert gate_up.plan(gate_up_of(4, 8, 6144, 256), RTX) is None
    assert down.plan(down_of(32, 1, 512, 8192), H200) is None


def problem_of(M: int, topk: int, K: int, N: int) -> fused.Problem:
    return fused.Problem(
        M, K, N, 256, 256, topk, "int32", "fp32", False, "fp32", 0, False, False, True, True
    )


SIZES = {
    (8, 256): (4, 8),
    (8, 768): (4, 8),  # 64 slots of 768 codes
    (8, 896): (4,),
    (8, 1536): (4,),
    (8, 1664): (),
    (1, 256): (8,),
    (4, 1536): (8,),
    (5, 256): (6, 8),
    (10, 512): (3, 6),
    (16, 256): (2, 4),
    (16, 1024): (2,),
    (32, 256): (1, 2),
    (33, 256): (1,),
    (64, 256): (1,),
    (65, 256): (),
}
"""By topk and N."""


@pytest.mark.parametrize(("topk", "N"), SIZES)
def test_which_calls_are_of_the_fewest_tokens(topk, N):
    """And whether 32 slots or 64 have room in their kernels."""
    sizes = SIZES[topk, N]
    assert tiny.sizes(topk, 2048, N) == sizes
    assert tiny.max_tokens(topk, 2048, N) == max(sizes, default=0)
    for M in range(1, 11):
        plan = tiny.plan(problem_of(M, topk, 2048, N), H200)
        assert (plan is not None) == tiny.takes(M, topk, 2048, N)
        room = {constants(s)["MAX_TOKENS"] for s in plan.steps} if plan else set()
        assert room == {min((n for n in sizes if n >= M), default=None)} - {None}


@pytest.mark.parametrize(("K", "N", "sizes"), [(6144, 256, (4, 8)), (6144, 512, (4,))])
def test_more_than_32_slots_have_few_weights(K, N, sizes):
    """The chain for few tokens reads faster."""
    assert tiny.sizes(8, K, N) == sizes
    assert [tiny.takes(M, 8, K, N) for M in (4, 5)] == [True, sizes[-1] > 4]


@given(shapes(), st.integers(0, 9), st.integers(0, 9))
def test_a_part_runs_where_the_whole_runs(shape, M, more):
    _, topk, K, N = shape
    whole = problem_of(M + more, topk, K, N)
    one, other = (tiny.plan(p, H200) for p in (whole, whole._replace(M=M, whole_M=M + more)))
    assert other is None or [s.kernel for s in other.steps] == [s.kernel for s in one.steps]
    assert (other is None) == (one is None or M == 0)


@pytest.mark.parametrize(("topk", "N"), SIZES)
def test_prebuilding_knows_the_kernels_of_every_call(topk, N):
    one = problem_of(1, topk, 2048, N)
    counts = fused.representative_token_counts(one)
    plans = [tiny.plan(one._replace(M=M), H200) for M in (*range(1, 11), *counts)]
    kernels = [{s.kernel for s in p.steps} if p else set() for p in plans]
    assert set().union(*kernels[:10]) <= set().union(*kernels[10:])
    assert bool(kernels[0]) == bool(SIZES[topk, N])


def test_tables_have_one_or_two_slots_for_each_lane():
    assert [table_slots(n) for n in (1, 32, 33, 64)] == [32, 32, 64, 64]
    assert (table_bytes(32), table_bytes(64)) == (304, 592)
