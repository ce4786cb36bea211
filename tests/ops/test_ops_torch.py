"""torch.ops.cumoe: schemas, bytes, errors, and what fake tensors tell."""

from __future__ import annotations

import inspect
import logging
import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import cumoe
from cumoe import ArgumentError, CumoeError, DeviceMismatchError, DTypeError
from cumoe.ops import _experts_inputs
from tests.helpers import child
from tests.helpers.backends import TorchBackend
from tests.helpers.calls import RIGHT_ARGUMENTS, placed
from tests.helpers.cases import E4M3
from tests.helpers.torch_ops import (
    FORMS,
    LAYOUTS,
    OPS,
    arguments,
    cloned,
    form,
    outcome,
    require_same,
)
from tests.ops.test_ops_errors import REFUSALS

QUANTIZER = 'int group_size=128, *, str scale_format="fp32", str scale_layout="row"'
ACTIVATION = (
    "float? limit=None, *, float alpha=1., float beta=0., int group_size=128, "
    'str scale_format="fp32", str scale_layout="row", Tensor? topk_ids=None, '
    "Tensor? expert_map=None, int? num_experts=None"
)
LAYER = (
    "Tensor x, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor w1_scale, "
    "Tensor w2_scale"
)
EXPERTS = (
    'int[] block_shape=128, str scale_format="fp32", float? swiglu_limit=None, '
    "float swiglu_alpha=1., float swiglu_beta=0., int? num_experts=None, Tensor? expert_map=None, "
    "bool apply_router_weight_on_input=False, float routed_scaling_factor=1., "
    "int? max_workspace_bytes=None"
)
OUTPUTS = "Tensor(a!) out, Tensor(b!) out_scale"
SCHEMAS = {
    "quantizer": f"(Tensor x, {QUANTIZER}) -> (Tensor, Tensor)",
    "quantizer_out": f"(Tensor x, {OUTPUTS}, {QUANTIZER}) -> ()",
    "activation": f"(Tensor gate_up, {ACTIVATION}) -> (Tensor, Tensor)",
    "activation_out": f"(Tensor gate_up, {OUTPUTS}, {ACTIVATION}) -> ()",
    "sort": "(Tensor topk_ids, int block_size, int num_experts, Tensor? expert_map=None)"
    " -> (Tensor, Tensor, Tensor)",
    "experts": f"({LAYER}, *, {EXPERTS}) -> Tensor",
    "experts_out": f"({LAYER}, Tensor(a!) out, Tensor(b!)? workspace=None, *, {EXPERTS}) -> ()",
    "experts_workspace": f"({LAYER}, Tensor(a!) workspace, *, {EXPERTS}) -> Tensor",
}
POSITIONAL = ("w1_scale", "w2_scale", "out", "out_scale", "workspace", "limit")
"""By name only in the function; here by position too, which takes less time."""


@pytest.mark.parametrize("name", FORMS)
def test_the_schema_is(name):
    overload, _ = form(name)
    assert str(overload._schema).partition("(")[2] == SCHEMAS[name].removeprefix("(")
    assert set(overload.tags) == {torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag}


ARRAYS = {
    "quantizer_out": ("x", "out", "out_scale"),
    "activation_out": ("gate_up", "out", "out_scale"),
    "experts": (*_experts_inputs.ARRAYS[:7],),
    "experts_out": (*_experts_inputs.ARRAYS[:7], "out"),
    "experts_workspace": (*_experts_inputs.ARRAYS[:7], "workspace"),
}
"""What may come by position, in this order."""


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_a_call_must_have_come_by_position_or_by_name(name):
    (overload, by_name), (_, given) = form(name), form(name)
    want = outcome(by_name, overload(**by_name))
    arrays = [given.pop(n) for n in ARRAYS[name]]
    result = overload(*arrays, **given)
    require_same(outcome(dict(zip(ARRAYS[name], arrays, strict=True)), result), want)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(a) for a in arrays]
    given = {k: mode.from_tensor(v) if torch.is_tensor(v) else v for k, v in given.items()}
    assert (overload(*fakes, **given) is None) == (overload._overloadname == "out")
    last = ARRAYS[name][-1]
    with pytest.raises(CumoeError, match=rf"^{last}: "):
        overload(*fakes[:-1], fakes[-1].double(), **given)


def test_all_overloads_are_among_the_forms():
    ops = {op for op, _ in FORMS.values()}
    assert {(op, o) for op in ops for o in getattr(OPS, op).overloads()} == set(FORMS.values())


@pytest.mark.parametrize("op", [op for op, overload in FORMS.values() if overload == "default"])
def test_the_overloads_have_the_arguments_of_the_function_and_its_defaults(op):
    parameters = inspect.signature(getattr(cumoe, op)).parameters
    named = {}
    for overload in getattr(OPS, op).overloads():
        named |= {a.name: a for a in getattr(getattr(OPS, op), overload)._schema.arguments}
    assert set(named) == set(parameters)
    for name, argument in named.items():
        wanted = parameters[name]
        is_by_name = wanted.kind is inspect.Parameter.KEYWORD_ONLY
        assert argument.kwarg_only == (is_by_name and name not in POSITIONAL), name
        if wanted.default is inspect.Parameter.empty or "out" in name or name == "workspace":
            continue  # an overload wants its outputs
        value = argument.default_value
        assert (tuple(value) if isinstance(value, list) else value) == wanted.default, name


def test_importing_cumoe_registers_nothing_and_leaves_torch_alone():
    code = (
        "import sys, cumoe\nassert 'torch' not in sys.modules\n"
        "import torch\nassert not hasattr(torch.ops.cumoe, 'fused_experts_fp8')\n"
        "import cumoe.torch_ops\nprint(torch.ops.cumoe.fused_experts_fp8.overloads())"
    )
    out, errors = (running := child.start(code)).communicate()
    assert (running.returncode, errors) == (0, "")
    assert out == "['default', 'workspace', 'out']\n"


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("num_tokens", [0, 1, 8])
def test_the_bytes_are_those_of_the_function(name, num_tokens):
    overload, given = form(name, num_tokens=num_tokens)
    plain = {k: v for k, v in given.items() if k not in ("out", "out_scale", "workspace")}
    want = getattr(cumoe, FORMS[name][0])(**plain)
    want = want if isinstance(want, tuple) else (want,)
    if name == "activation_out":  # rows that the filter skips keep their bytes
        want = getattr(cumoe, FORMS[name][0])(**cloned(given))
    got = outcome(given, overload(**given))
    require_same(tuple(got), want, name)


def test_a_wrong_byte_would_be_seen():
    overload, given = form("experts")
    result = overload(**given)
    given["topk_weights"][2, 0] *= -1
    with pytest.raises(AssertionError, match="bytes of result 0 differ"):
        require_same((overload(**given),), (result,))


@pytest.mark.parametrize("name", FORMS)
def test_opcheck(name):
    overload, given = form(name)
    opcheck(overload, (), given)


@pytest.mark.parametrize(("fmt", "layout"), LAYOUTS)
@pytest.mark.parametrize("name", ["quantizer", "activation"])
def test_opcheck_of_the_layout(name, fmt, layout):
    overload, given = form(name, num_tokens=5)
    opcheck(overload, (), given | {"scale_format": fmt, "scale_layout": layout})


@pytest.mark.parametrize("name", FORMS)
def test_a_tensor_that_requires_grad_is_read_as_it_is(name):
    overload, given = form(name)
    floats = [k for k in ("x", "gate_up", "topk_weights", "w1_scale") if k in given]
    tracked = {k: v.clone().requires_grad_() if k in floats else v for k, v in given.items()}
    tracked |= {k: given[k].clone() for k in ("out", "out_scale") if k in given}
    want, got = outcome(given, overload(**given)), outcome(tracked, overload(**tracked))
    assert not any(t.requires_grad for t in got)
    require_same(got, want)
    if floats:
        opcheck(overload, (), tracked)


def test_out_may_be_x():
    _, given = form("experts")
    want = cumoe.fused_experts_fp8(**given)
    OPS.fused_experts_fp8.out(**given, out=given["x"])
    require_same((given["x"],), (want,))


ALL = [(op, name) for op in RIGHT_ARGUMENTS if op != "pad_experts" for name in REFUSALS[op]]
OF_TORCH = {"no_array", "out_list"}
"""Lists for tensors: torch finds no overload."""
NEEDS_MEMORY = {"w1_at_8"}
"""What a fake tensor cannot show."""


def refused(op: str, name: str) -> dict:
    """Arguments of a test of errors, on torch; with both outputs where one is given."""
    given = {**RIGHT_ARGUMENTS[op](), **REFUSALS[op][name].change}
    if {"out", "out_scale"} & given.keys() and op != "fused_experts_fp8":
        outputs = {"out": np.zeros((4, 256), E4M3), "out_scale": np.zeros((4, 2), np.float32)}
        given = outputs | given
    return placed(TorchBackend("cpu"), given)


def check_refusal(op: str, name: str, given: dict) -> None:
    refusal = REFUSALS[op][name]
    error = RuntimeError if name in OF_TORCH else refusal.error
    with pytest.raises(error) as caught:
        getattr(OPS, op)(**given)
    if name not in OF_TORCH:
        assert type(caught.value) is error
        argument, *parts = refusal.says
        assert str(caught.value).startswith(f"{argument}: ")
        assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(("op", "name"), ALL, ids=[f"{op}-{name}" for op, name in ALL])
def test_refuses(op, name):
    check_refusal(op, name, refused(op, name))


@pytest.fixture
def fake():
    """Its log shows every error of ours as one of its own."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.disabled = True
    yield FakeTensorMode()
    logger.disabled = False


def as_fake(mode: FakeTensorMode, given: dict) -> dict:
    return {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}


@pytest.mark.parametrize(("op", "name"), ALL, ids=[f"{op}-{name}" for op, name in ALL])
def test_a_fake_call_refuses(fake, op, name):
    given = as_fake(fake, refused(op, name))
    if name in NEEDS_MEMORY:
        getattr(OPS, op)(**given)
        return
    check_refusal(op, name, given)


def test_tensors_of_two_devices_are_refused(fake):
    _, given = form("experts")
    moved = as_fake(fake, given)
    moved["w2"] = moved["w2"].to("meta")
    with pytest.raises(DeviceMismatchError, match="w2: want it on cpu, where x is, got meta"):
        OPS.fused_experts_fp8(**moved)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_sparse_tensor_gets_our_error():
    with pytest.raises(DTypeError, match="x: want a dense torch tensor"):
        OPS.per_token_group_quant_fp8(torch.zeros(4, 256).to_sparse())
    with pytest.raises(CumoeError, match="gate_up: want a dense torch tensor"):
        OPS.silu_and_mul_quant_fp8(torch.zeros(4, 256).to_sparse_csr())


def test_an_output_that_overlaps_is_refused():
    memory = torch.zeros(4 * 256, dtype=torch.bfloat16)
    out = memory.view(torch.uint8)[: 4 * 256].view(4, 256)
    with pytest.raises(ArgumentError, match="out: must not overlap x"):
        OPS.per_token_group_quant_fp8.out(memory.view(4, 256), out=out, out_scale=torch.zeros(4, 2))


def described(tensor: torch.Tensor) -> tuple:
    """What a fake tensor has to tell of a real one. Where nothing is, strides mean nothing."""
    strides = tensor.stride() if tensor.numel() else None
    return tensor.shape, strides, tensor.dtype, tensor.device, tensor.storage_offset()


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 8])
@pytest.mark.parametrize(("fmt", "layout"), LAYOUTS)
@pytest.mark.parametrize("op", ["per_token_group_quant_fp8", "silu_and_mul_quant_fp8"])
def test_fake_results_look_like_real_ones(fake, op, fmt, layout, num_tokens):
    given = arguments(op, num_tokens=num_tokens) | {"scale_format": fmt, "scale_layout": layout}
    real, faked = (getattr(OPS, op)(**g) for g in (given, as_fake(fake, given)))
    assert list(map(described, faked)) == list(map(described, real))


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_fake_results_of_any_number_of_dimensions(fake, leading):
    x = torch.ones(*leading, 256)
    faked = OPS.per_token_group_quant_fp8(fake.from_tensor(x))
    assert list(map(described, faked)) == list(map(described, OPS.per_token_group_quant_fp8(x)))


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 2), (64, 8)])
@pytest.mark.parametrize("block_size", [1, 16, 100])
@pytest.mark.parametrize("num_experts", [1, 60, 4096])
def test_fake_results_of_the_sort(fake, shape, block_size, num_experts):
    ids = torch.zeros(shape, dtype=torch.int64)
    real = OPS.moe_align_block_size(ids, block_size, num_experts)
    faked = OPS.moe_align_block_size(fake.from_tensor(ids), block_size, num_experts)
    assert list(map(described, faked)) == list(map(described, real))


def test_fake_results_of_the_experts(fake):
    overload, given = form("experts")
    given["x"] = torch.zeros(8, 1024, dtype=torch.bfloat16)[:, :512]
    assert described(overload(**as_fake(fake, given))) == described(overload(**given))


def test_fake_results_are_where_x_is(fake):
    with fake:
        x = torch.empty(5, 640, dtype=torch.bfloat16, device="cuda:1")
    for result in OPS.per_token_group_quant_fp8(x):
        assert result.device == torch.device("cuda:1")


def test_meta_tensors_need_no_memory():
    x = torch.empty(1 << 40, 7168, dtype=torch.bfloat16, device="meta")
    q, scale = OPS.per_token_group_quant_fp8(x, scale_layout="tma")
    assert (q.shape, q.dtype, q.device.type) == (x.shape, torch.float8_e4m3fn, "meta")
    assert scale.stride() == (1, 1 << 40)
    assert math.prod(scale.shape) == 56 << 40
