"""Kernel files keep their promises: stems, constants, and the ABI that Python packs."""

from __future__ import annotations

import importlib
import re

import pytest

from bench.digest import COMPOSED, PACKAGE, kernel_stems
from cumoe.plan import enumerate as enumeration
from cumoe.plan.device import H200
from cumoe.store.source import kernels_root

STEMS = kernel_stems()


def signature(source: str, entry: str) -> str:
    """The ABI string of an entry, read from its parameter list."""
    body = re.search(rf"\b{entry}\(\n(.*?)\)\s*\{{", source, re.DOTALL)
    assert body, entry
    parameters = re.sub(r"//[^\n]*", "", body[1]).split(",")
    return "".join(_code(p.strip()) for p in parameters)


def _code(parameter: str) -> str:
    if "*" in parameter:
        return "P"
    kind = parameter.removeprefix("const __grid_constant__ ").split()[0]
    return {"i64": "q", "float": "f", "TensorMap": "T"}[kind]


def steps():
    """One plan's steps of each kernel entry: one token, few, many, the most, and odd strides."""
    from cumoe.plan import fused_experts_fp8 as fused

    problem = fused.Problem(
        9, 512, 256, 8, 8, 2, "int32", "fp32", False, "fp32", True, False, False, True, True
    )
    many = problem._replace(M=4096)
    most = many._replace(M=20_000)
    calls = (
        problem._replace(M=1),
        problem._replace(M=10),
        many,
        most,
        most._replace(weights_mappable=False),
    )
    return list({s.entry: s for call in calls for s in fused.plan(call, H200).steps}.values())


@pytest.mark.parametrize("step", steps(), ids=lambda s: s.entry)
def test_abi_is_the_kernels_signature(step):
    source = (kernels_root() / f"{step.kernel.stem}.cu").read_text()
    assert step.abi == signature(source, step.entry)


@pytest.mark.parametrize("stem", STEMS)
def test_every_kernel_has_a_plan(stem):
    module = importlib.import_module(f"cumoe.plan.{stem}")
    assert callable(module.plan)
    assert stem in {s.kernel.stem for s in steps()}


def test_the_composed_op_has_none():
    assert not (kernels_root() / f"{COMPOSED}.cu").exists()
    assert (PACKAGE / "ops" / f"{COMPOSED}.py").exists()


@pytest.mark.parametrize("stem", STEMS)
def test_kernel_says_what_it_computes_and_asserts_its_constants(stem):
    source = (kernels_root() / f"{stem}.cu").read_text()
    assert source.startswith(f"// {stem}: ")
    assert "static_assert" in source
    pointers = [line for line in source.split("\n") if re.match(r"    \S.*\*.*,  ", line)]
    assert pointers
    assert all(re.search(r"// \[", line) for line in pointers), pointers


@pytest.mark.parametrize("path", sorted(kernels_root().rglob("*.cu*")), ids=lambda p: p.name)
def test_no_angle_includes(path):
    assert "#include <" not in path.read_text()


def test_constants_of_a_spec_are_used_by_its_kernel():
    specs = enumeration.layer_specs(H200, K=512, N=256, num_experts=8, topk=2)
    for spec in specs:
        source = (kernels_root() / f"{spec.stem}.cu").read_text()
        for name, _ in spec.constants:
            assert re.search(rf"\b{name}\b", source), (spec.stem, name)
