"""Plans for many tokens: they fit, agree with the sources, and leave what they cannot to others."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumoe.plan import experts_decode as decode
from cumoe.plan import experts_prefill as prefill
from cumoe.plan import experts_tiny as tiny
from cumoe.plan import fused_experts_fp8 as fused
from cumoe.plan import moe_align_block_size as align
from cumoe.plan import moe_down_prefill_fp8 as down
from cumoe.plan import moe_gate_up_prefill_fp8 as gate_up
from cumoe.plan import wgmma_tile
from cumoe.plan.device import H200
from cumoe.plan.enumerate import device_of
from cumoe.plan.tensor_map import is_mappable
from tests.helpers.regions import assert_regions

SOURCES = Path(__file__).parents[2] / "kernels_src"
GLM_TP8 = fused.Problem(
    4096, 6144, 256, 256, 256, 8, "int32", "fp32", False, "fp32", 0, False, False, True, True
)


@st.composite
def problems(d: st.DrawFn) -> fused.Problem:
    """Calls of a part of any number of tokens of a whole of many."""
    experts = d(st.integers(1, 512))
    return GLM_TP8._replace(
        M=d(st.integers(0, 65_536)),
        K=128 * d(st.integers(1, 64)),
        N=128 * d(st.integers(1, 32)),
        num_experts=experts,
        num_local_experts=d(st.integers(1, experts)),
        topk=d(st.integers(1, 16)),
        has_map=True,
        scale_format=d(st.sampled_from(["fp32", "ue8m0"])),
        clamp=d(st.integers(0, 2)),
        whole_M=1 << 20,
    )


def constants(source: str) -> dict[str, str]:
    """What a source file defines."""
    text = (SOURCES / source).read_text()
    lines = re.findall(r"^constexpr int (.*);", text, re.MULTILINE)
    return dict(re.findall(r"(\w+) = ([^,]+)(?:, |$)", ", ".join(lines)))


def test_the_tile_is_that_of_the_sources():
    found = constants("common/wgmma_tile.cuh")
    for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"):
        assert int(found[name]) == getattr(wgmma_tile, name)
    assert (found["CONSUMERS"], found["THREADS"]) == ("256", "CONSUMERS + 128")
    assert wgmma_tile.THREADS == 256 + 128
    assert (found["STAGING_ROW"], found["STAGING_BYTES"]) == ("128 * 2 + 16", "16 * STAGING_ROW")
    assert wgmma_tile.STAGING_BYTES == 8 * 16 * (128 * 2 + 16)
    assert constants("moe_gate_up_prefill_fp8.cu")["MAXIMA"] == "2 * CONSUMER_WARPS * 16"
    assert gate_up.MAXIMA_BYTES == 2 * 8 * 16 * 4


@given(problems())
def test_plans_fit_the_gpu_and_their_tiles(problem):
    plan = fused.plan(problem, H200)
    assert isinstance(plan, prefill.Plan)
    for step in (plan.gate_up, plan.down):
        assert step.launch.smem_bytes <= H200.smem_optin_bytes
        assert step.launch.grid <= H200.num_sms
        assert bool(step.launch.grid) == bool(problem.M)
        assert step.launch.block == wgmma_tile.THREADS
    found = dict(plan.down.kernel.constants)
    assert -(-problem.K // wgmma_tile.BLOCK_N) % found["ITEM_TILES"] == 0
    assert plan.align_problem.block_size == wgmma_tile.BLOCK_M
    assert plan.align.capacity == plan.align.max_blocks * wgmma_tile.BLOCK_M


@given(problems())
def test_regions_of_the_workspace_are_disjoint_aligned_and_large_enough(problem):
    p, plan = problem, fused.plan(problem, H200)
    slots, capacity = p.M * p.topk, plan.align.capacity
    sizes = {
        "a": p.M * p.K, "a_scale": p.M * p.K // 32,
        "counts": plan.align.chunks * p.num_local_experts * 4,
        "bases": p.num_local_experts * 4 * bool(plan.align.chunks),
        "sorted_token_ids": capacity * 4, "expert_ids": plan.align.max_blocks * 4,
        "num_tokens_post_padded": 4, "q": capacity * p.N, "q_scale": capacity * p.N // 32,
        "d": 2 * slots * p.K,
    }  # fmt: skip
    assert_regions(plan.workspace, sizes)


@given(problems(), st.sampled_from([1, 78, 114, 148]))
def test_kernels_do_not_depend_on_the_number_of_sms(problem, num_sms):
    plan, other = (fused.plan(problem, H200._replace(num_sms=n)) for n in (132, num_sms))
    assert [s.kernel for s in plan.steps] == [s.kernel for s in other.steps]
    assert plan.workspace == other.workspace


def test_shared_memory_is_a_function_of_the_kernel():
    found = defaultdict(set)
    for k, n, M in product((1, 3, 48), range(1, 17), (2, 512)):
        plan = fused.plan(GLM_TP8._replace(M=M, K=128 * k, N=128 * n, whole_M=1 << 20), H200)
        for step in (plan.gate_up, plan.down):
            found[step.kernel].add(step.launch.smem_bytes)
    assert len(found) > 30
    assert all(len(sizes) == 1 for sizes in found.values())


def test_every_number_of_tokens_has_the_same_kernels():
    """But for the quantizer, which has one for the smallest calls."""
    plans = [fused.plan(GLM_TP8._replace(M=M, whole_M=1 << 20), H200) for M in (1, 300, 1 << 16)]
    assert len({(p.gate_up.kernel, p.down.kernel, p.combine.kernel) for p in plans}) == 1


def test_maps_of_the_weights():
    assert gate_up.weights((4, 512, 640), (512 * 768, 768, 1))[:4] == (
        "w1", (640, 512, 4), (768, 512 * 768), (128, 64, 1),
    )  # fmt: skip
    assert down.weights((1, 640, 256), (0, 256, 1))[1:4] == (
        (256, 640, 1), (256, 640 * 256), (128, 128, 1),
    )  # fmt: skip
    codes = down.codes("workspace", 4096, 7, 256)
    assert codes[:5] == ("workspace", (256, 448), (256,), (128, 64), 4096)
    assert is_mappable(codes.dims, codes.strides)
    assert codes.promotion == 128  # with 256 reading is 5 % slower (docs/decisions/0003)


@given(problems())
def test_what_it_cannot_take_goes_to_the_chain_for_any(problem):
    odd = problem._replace(weights_mappable=False, down_contiguous=False)
    assert prefill.plan(odd, H200) is None
    assert isinstance(fused.plan(odd, H200), fused.Plan)


@pytest.mark.parametrize("arch", ["sm_89", "sm_100a", "sm_103a", "sm_120a", "sm_121a"])
def test_other_gpus_have_no_wgmma(arch):
    assert prefill.plan(GLM_TP8, device_of(arch)) is None
    assert isinstance(fused.plan(GLM_TP8, device_of(arch)), fused.Plan)


@given(st.integers(1, 512), st.integers(1, 16), st.integers(1, 300))
def test_few_tokens_keep_their_chain(experts, topk, M):
    problem = GLM_TP8._replace(M=M, num_experts=experts, num_local_experts=experts, topk=topk)
    few = tiny.plan(problem, H200) or decode.plan(problem, H200)
    assert isinstance(fused.plan(problem, H200), prefill.Plan if few is None else type(few))


def test_parts_run_in_the_chain_of_the_whole():
    for tokens in (1, 8, 100):
        part = fused.part(GLM_TP8, tokens)
        assert isinstance(fused.plan(part, H200), prefill.Plan)
        alone = fused.plan(part._replace(whole_M=None), H200)
        assert isinstance(alone, tiny.Plan | decode.Plan)


@given(problems())
def test_which_launches_overlap(problem):
    """x is quantized beside the sort, and all that follows waits for both."""
    steps = fused.plan(problem, H200).steps
    few = problem.M * problem.topk <= align.MAX_SLOTS_AT_ONCE
    assert [s.entry.removeprefix("moe_align_block_size_") for s in steps] == [
        *(("at_once",) if few else ("count", "scan", "scatter")),
        "per_token_group_quant_fp8", "moe_gate_up_prefill_fp8", "moe_down_prefill_fp8", "moe_sum",
    ]  # fmt: skip
    overlap = [s.launch.overlap for s in steps]
    assert overlap == [False, *[True] * (len(steps) - 4), False, True, True]
