"""A kernel's name is its spec: written and read back without loss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumoe.errors import ArgumentError
from cumoe.plan.device import H200
from cumoe.plan.enumerate import layer_specs
from cumoe.plan.spec import KernelSpec, kernel_spec, parse_spec

NAMES = st.from_regex(r"[A-Za-z_]\w{0,8}", fullmatch=True).filter(str.isascii)
CONSTANTS = st.dictionaries(NAMES, st.integers(-(2**63), 2**63 - 1), max_size=6)


@given(st.sampled_from(["a", "moe_gemm_fp8"]), st.sampled_from(["sm_89", "sm_90a"]), CONSTANTS)
def test_text_and_spec_are_one(stem: str, arch: str, constants: dict[str, int]) -> None:
    spec = KernelSpec(stem, arch, tuple(sorted(constants.items())))
    assert parse_spec(spec.text) == spec


def test_every_kernel_of_a_layer_survives() -> None:
    specs = layer_specs(H200, K=512, N=256, num_experts=8, topk=2)
    assert tuple(parse_spec(spec.text) for spec in specs) == specs


def test_constants_in_another_order_are_the_same_kernel() -> None:
    assert parse_spec("a-sm_90a-C=3-B=-2") == kernel_spec("a", "sm_90a", B=-2, C=3)
    assert parse_spec("a-sm_90a") == kernel_spec("a", "sm_90a")


@pytest.mark.parametrize(
    "text",
    ["", "a", "a-90a", "a-sm_90a-", "a-sm_90a-A", "a-sm_90a-A=", "a-sm_90a-A=1-A=1", "../a-sm_90a",
     "a/b-sm_90a", "a-sm_90a-1A=1", "a-sm_90a-A=١", "a-sm_90a-A=1\n", "a-sm_90a-A=1.5",
     "a-sm_90a-A=1 ", "a-sm_90a-A=" + "9" * 20],
)  # fmt: skip
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"kernel: wanted its name as stem-arch-A=1-B=2"):
        parse_spec(text)
