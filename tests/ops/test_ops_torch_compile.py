"""torch.ops.cumoe under torch.compile: the eager bytes, one graph, any number of tokens."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor

import cumoe
from tests.helpers.torch_ops import (
    FORMS,
    NUM_EXPERTS,
    OPS,
    TOPK,
    arguments,
    cloned,
    form,
    outcome,
    require_same,
)

INDUCTOR = ["inductor"] if shutil.which("g++") else []  # which compiles C++ on the CPU
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # inductor
BACKENDS = ["eager", "aot_eager", *INDUCTOR]
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    with inductor.patch(fx_graph_cache=False):  # whose keys know nothing of our fake results
        yield
    torch._dynamo.reset()


def layer(given: dict, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Tensors:
    """Every op, between operations of torch that are exact: inductor rounds others its own way."""
    given = given | {"topk_ids": ids, "topk_weights": weights * 0.5}
    q, scale = OPS.per_token_group_quant_fp8(x * 2, scale_format="ue8m0", scale_layout="packed")
    rows = torch.cat([x, x], -1).repeat_interleave(TOPK, 0)
    activated = OPS.silu_and_mul_quant_fp8(rows, limit=2.0, topk_ids=ids, scale_layout="tma")
    tiles = OPS.moe_align_block_size(ids, 16, NUM_EXPERTS)
    out = OPS.fused_experts_fp8(**given | {"x": x + 1})
    into = torch.full_like(x, torch.nan)
    OPS.fused_experts_fp8.out(**given | {"x": out + x}, out=into)
    OPS.per_token_group_quant_fp8.out(into, out=q, out_scale=(filled := x.new_empty(
        (x.shape[0], x.shape[1] // 128), dtype=torch.float32)))  # fmt: skip
    return q, scale, *activated, *tiles, out * 0.5, into, filled


def tokens(num_tokens: int) -> Tensors:
    given = arguments("fused_experts_fp8", num_tokens=num_tokens, seed=num_tokens)
    return given["x"], given["topk_ids"].abs(), given["topk_weights"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_gives_the_eager_bytes_for_any_number_of_tokens(backend):
    """The bound of the sort is another term below 4 tokens; only 301 tokens want padded scales.

    Inductor asks whether results are dense, and so makes a second graph for padded ones.
    """
    given = arguments("fused_experts_fp8")
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for num_tokens in (6, 2, 8, 301):
        arrays = tokens(num_tokens)
        for array in arrays:
            torch._dynamo.mark_dynamic(array, 0)
        got, want = compiled(given, *arrays), layer(given, *arrays)
        require_same(got, want, f"{num_tokens} tokens")
        assert [t.stride() for t in got] == [t.stride() for t in want]
    assert counter.frame_count == (2 if backend == "inductor" else 1)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_each_overload_alone(name, dynamic):
    overload, given = form(name)
    want_given = cloned(given)
    want = outcome(want_given, overload(**want_given))
    compiled = torch.compile(overload, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    got = outcome(given, compiled(**given))
    require_same(got, want, name)


def padded_rows(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    OPS.per_token_group_quant_fp8.out(x + 1, scale_layout="tma", out=q, out_scale=scale)
    return scale * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_with_padding_keeps_its_strides(backend):
    x = arguments("per_token_group_quant_fp8", num_tokens=5)["x"]
    calls = []
    for function in (padded_rows, torch.compile(padded_rows, backend=backend, fullgraph=True)):
        memory = torch.full((4, 8), 123.0)
        q = torch.full((5, 512), 0xAA, dtype=torch.uint8)
        calls.append((function(x, q, memory.T[:5]), q, memory))
    require_same(calls[1], calls[0])
    assert (memory[:, 5:] == 123).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_is_x(backend):
    def in_place(given: dict) -> torch.Tensor:
        x = given["x"] + 1
        OPS.fused_experts_fp8.out(**given | {"x": x}, out=x)
        return x

    given = arguments("fused_experts_fp8")
    got = torch.compile(in_place, backend=backend, fullgraph=True)(given)
    want = cumoe.fused_experts_fp8(**given | {"x": given["x"] + 1})
    require_same((got,), (want,))


def test_x_that_requires_grad():
    """Nothing flows back through the op, what goes around it does."""

    def around(x: torch.Tensor) -> torch.Tensor:
        _, scale = OPS.per_token_group_quant_fp8(x)
        return x.sum() + scale.sum()

    x = torch.ones(4, 256, requires_grad=True)
    torch.compile(around, backend="aot_eager", fullgraph=True)(x).backward()
    assert (x.grad == 1).all()


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_number_of_tokens_that_depends_on_data():
    def chosen(x: torch.Tensor, keep: torch.Tensor) -> Tensors:
        return OPS.per_token_group_quant_fp8(x[keep], scale_layout="tma")

    x = arguments("per_token_group_quant_fp8")["x"]
    compiled = torch.compile(chosen, backend="aot_eager", fullgraph=True)
    for count in (5, 3):
        keep = torch.arange(8) < count
        require_same(compiled(x, keep), chosen(x, keep))


def test_a_wrong_shape_is_told_when_it_is_traced_and_when_it_comes_later():
    compiled = torch.compile(OPS.silu_and_mul_quant_fp8, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=r"gate_up.*multiple of 128.*300"):
        compiled(torch.zeros(4, 300, dtype=torch.bfloat16))
    given = arguments("silu_and_mul_quant_fp8")
    torch._dynamo.mark_dynamic(given["gate_up"], 0)
    compiled(**given)
    with pytest.raises((cumoe.ArgumentError, torch._dynamo.exc.TorchRuntimeError), match="one id"):
        compiled(**given | {"gate_up": given["gate_up"][:7]})


def test_export_keeps_the_op():
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Tensors:
            return OPS.per_token_group_quant_fp8(x, scale_layout="column")

    x = arguments("per_token_group_quant_fp8", num_tokens=6)["x"]
    dynamic = {"x": {0: torch.export.Dim("tokens", min=2)}}
    exported = torch.export.export(Module(), (x,), dynamic_shapes=dynamic)
    assert "torch.ops.cumoe.per_token_group_quant_fp8.default" in exported.graph_module.code
    for rows in (x, x[:3]):
        require_same(exported.module()(rows), Module()(rows))
