"""Plans are values: pure, total over the legal range, and blind to the number of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumoe.errors import ArgumentError, UnsupportedDeviceError
from cumoe.plan import fused_experts_fp8 as fused
from cumoe.plan import moe_align_block_size as align
from cumoe.plan import moe_gemm_fp8 as gemm
from cumoe.plan.device import H200, architecture
from cumoe.plan.enumerate import layer_specs
from cumoe.plan.scales import scale_layout
from cumoe.plan.spec import kernel_spec
from tests.helpers.regions import assert_regions

GLM_TP8 = fused.Problem(
    1, 6144, 256, 256, 256, 8, "int32", "fp32", False, "fp32", False, False, False, True, True
)

ANY_STRIDES = {"down_contiguous": False, "weights_mappable": False}
"""Of weights that only the chain for all GPUs takes."""


def problems() -> st.SearchStrategy[fused.Problem]:
    """Any legal problem on aligned arrays."""

    @st.composite
    def draw(d: st.DrawFn) -> fused.Problem:
        experts = d(st.integers(1, 512))
        mapped = d(st.booleans())
        return GLM_TP8._replace(
            M=d(st.integers(0, 65536)),
            K=128 * d(st.integers(1, 64)),
            N=128 * d(st.integers(1, 32)),
            num_experts=experts,
            num_local_experts=d(st.integers(1, experts)) if mapped else experts,
            topk=d(st.integers(1, 16)),
            ids=d(st.sampled_from(["int32", "int64"])),
            weight=d(st.sampled_from(["fp32", "bf16", "fp16"])),
            has_map=mapped,
            scale_format=d(st.sampled_from(["fp32", "ue8m0"])),
            clamp=d(st.booleans()),
            scaled=d(st.booleans()),
        )

    return draw()


@given(problems())
def test_no_call_leaves_the_enumerated_kernels(problem):
    p = problem
    local = p.num_local_experts if p.has_map else None
    if p.has_map and local == p.num_experts:
        p = p._replace(has_map=False)  # a map over all experts is named by `has_map` alone
    reachable = layer_specs(
        H200, K=p.K, N=p.N, num_experts=p.num_experts, num_local_experts=local, topk=p.topk,
        scale_format=p.scale_format, clamp=p.clamp, scaled=p.scaled, ids=p.ids, weight=p.weight,
    )  # fmt: skip
    launched = [step for step in fused.plan(p, H200).steps if step.launch.grid]
    assert {step.kernel for step in launched} <= set(reachable)


@given(problems())
def test_regions_of_the_workspace_are_disjoint_aligned_and_large_enough(problem):
    p, plan = problem, fused.plan(problem._replace(**ANY_STRIDES), H200)
    slots = p.M * p.topk
    sizes = {
        "a": p.M * p.K, "a_scale": p.M * p.K // 32,
        "counts": plan.align.chunks * p.num_local_experts * 4,
        "bases": p.num_local_experts * 4 * bool(plan.align.chunks),
        "sorted_token_ids": plan.align.capacity * 4, "expert_ids": plan.align.max_blocks * 4,
        "num_tokens_post_padded": 4, "slots": 2 * slots * max(2 * p.N, p.K), "q": slots * p.N,
        "q_scale": slots * p.N // 32,
    }  # fmt: skip
    assert_regions(plan.workspace, sizes)


@given(problems())
def test_grids_cover_the_bound_and_stay_launchable(problem):
    assert all(0 <= step.launch.grid < 2**31 for step in fused.plan(problem, H200).steps)
    plan = fused.plan(problem._replace(**ANY_STRIDES), H200)
    assert all(0 <= step.launch.grid < 2**31 for step in plan.steps)
    assert all(step.launch.smem_bytes <= H200.smem_optin_bytes for step in plan.steps)
    assert plan.gemm1.launch.grid == plan.align.max_blocks * (2 * problem.N // 128)


@given(st.integers(0, 5000), st.integers(1, 300), st.integers(1, 128))
def test_padded_bound_holds_for_the_worst_routing(slots, experts, block):
    bound = align.padded_bound(slots, experts, block)
    opened = min(slots, experts)
    worst = sum(-(-n // block) * block for n in [slots - opened + 1] + [1] * (opened - 1) if slots)
    assert bound % block == 0
    assert worst <= bound


def test_bound_of_a_small_decode_call():
    assert align.padded_bound(32, 256, 16) == 512


def test_a_kernel_name_is_canonical():
    a = kernel_spec("op", "sm_90a", B=2, A=True)
    assert a == kernel_spec("op", "sm_90a", A=1, B=2)
    assert a.text == "op-sm_90a-A=1-B=2"


def test_tokens_are_split_to_fit_a_workspace():
    problem = GLM_TP8._replace(M=512)
    whole = fused.plan(problem, H200).workspace.total
    assert fused.tokens_per_call(problem, H200, None) == 512
    assert fused.tokens_per_call(problem, H200, whole) == 512
    with pytest.raises(ArgumentError, match=r"max_workspace_bytes: one token .* got 1000"):
        fused.tokens_per_call(problem, H200, 1000)


@pytest.mark.parametrize("M", [2, 3, 512])
def test_the_split_takes_every_token_that_fits(M):
    whole = GLM_TP8._replace(M=M)

    def needed(tokens: int) -> int:
        return fused.plan(fused.part(whole, tokens), H200).workspace.total

    for bytes_ in (needed(M) - 1, needed(M - 1), needed(M) // 2, needed(1)):
        if bytes_ >= needed(1):
            count = fused.tokens_per_call(whole, H200, bytes_)
            assert needed(count) <= bytes_ < needed(count + 1)
    assert fused.tokens_per_call(whole, H200, needed(M) - 1) == M - 1
    assert fused.tokens_per_call(whole, H200, needed(M)) == M


def test_a_small_gpu_gets_fewer_stages_or_a_clear_error():
    assert gemm.stages_that_fit(64, H200.smem_optin_bytes) == 4
    assert gemm.stages_that_fit(64, 101_376) == 4  # L40S, RTX 4090, sm_120
    assert gemm.stages_that_fit(64, 80_000) == 3
    with pytest.raises(UnsupportedDeviceError, match="wants 50176 bytes of shared memory"):
        gemm.stages_that_fit(64, 49_152)


@pytest.mark.parametrize(
    ("capability", "arch"), [((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")]
)
def test_architecture_of_a_gpu(capability, arch):
    assert architecture(*capability) == arch


def test_an_old_gpu_is_refused_by_name():
    with pytest.raises(UnsupportedDeviceError, match=r"want compute capability .*, got 8\.0"):
        architecture(8, 0)


@pytest.mark.parametrize(
    ("layout", "shape", "strides", "rows"),
    [
        ("row", (5, 6), (6, 1), 5),
        ("column", (5, 6), (1, 5), 5),
        ("tma", (5, 6), (1, 8), 8),
        ("packed", (5, 2), (1, 8), 8),
    ],
)
def test_scale_layouts(layout, shape, strides, rows):
    found = scale_layout(5, 768, layout, "ue8m0")
    assert (found.shape, found.strides, found.rows) == (shape, strides, rows)


def test_packed_scales_are_exponents():
    with pytest.raises(ArgumentError, match=r"scale_layout: 'packed' .* got 'fp32'"):
        scale_layout(5, 768, "packed", "fp32")
