"""torch.ops.cumoe on a GPU: the function's bytes, in graphs, on streams, compiled by inductor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import cumoe
from tests.helpers.torch_ops import (
    FORMS,
    LAYOUTS,
    NUM_EXPERTS,
    OPS,
    arguments,
    cloned,
    form,
    outcome,
    require_same,
)
from tests.helpers.workloads import churn

pytestmark = pytest.mark.gpu

Tensors = tuple[torch.Tensor, ...]
TOKENS = (8, 300)
"""Few and many: the experts have a chain of kernels for either."""


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def by_function(name: str, given: dict) -> list[torch.Tensor]:
    """What the function makes of copies of the arguments; activations go to zeros, as rows that the
    filter skips hold anything."""
    copies = cloned(given)
    if name == "activation":
        q, scale = OPS.silu_and_mul_quant_fp8(**{k: v for k, v in given.items() if "ids" not in k})
        copies |= {
            "out": torch.zeros_like(q.view(torch.uint8)),
            "out_scale": torch.zeros_like(scale),
        }
    result = getattr(cumoe, FORMS[name][0])(**copies)
    return list(result) if isinstance(result, tuple) else [result]


def kept(name: str, given: dict, results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results with zeros in rows that the filter skips."""
    if name != "activation":
        return results
    skipped = (given["topk_ids"].flatten() < 0)[:, None]
    q, scale = results
    return [q.view(torch.uint8).masked_fill(skipped, 0), scale.masked_fill(skipped, 0)]


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("name", FORMS)
def test_the_bytes_are_those_of_the_function(name, num_tokens):
    overload, given = form(name, "cuda", num_tokens=num_tokens)
    want = by_function(name, given)
    churn()
    require_same(kept(name, given, outcome(given, overload(**given))), want, name)


@pytest.mark.parametrize("name", [n for n in FORMS if n != "activation"])
def test_opcheck(name):
    """The activation leaves rows as they are: two runs of it are not equal."""
    overload, given = form(name, "cuda")
    opcheck(overload, (), given)


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 8])
@pytest.mark.parametrize(("fmt", "layout"), LAYOUTS)
@pytest.mark.parametrize("op", ["per_token_group_quant_fp8", "silu_and_mul_quant_fp8"])
def test_fake_results_look_like_those_of_the_kernels(op, fmt, layout, num_tokens):
    given = arguments(op, "cuda", num_tokens=num_tokens)
    given |= {"scale_format": fmt, "scale_layout": layout}
    mode = FakeTensorMode()
    fake = {k: mode.from_tensor(v) if torch.is_tensor(v) else v for k, v in given.items()}
    for real, faked in zip(getattr(OPS, op)(**given), getattr(OPS, op)(**fake), strict=True):
        assert (faked.shape, faked.dtype, faked.device) == (real.shape, real.dtype, real.device)
        steps = zip(real.shape, real.stride(), faked.stride(), strict=True)
        assert not real.numel() or all(a == b for size, a, b in steps if size > 1)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("name", FORMS)
def test_a_graph_replays_what_its_inputs_hold_then(name, num_tokens):
    overload, given = form(name, "cuda", num_tokens=num_tokens)
    overload(**given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = overload(**given)
    for seed in (1, 2):
        other = form(name, "cuda", num_tokens=num_tokens, seed=seed)[1]
        want = by_function(name, other)
        for key, value in other.items():
            if torch.is_tensor(value):
                given[key].copy_(value)
        churn()
        graph.replay()
        require_same(kept(name, given, outcome(given, result)), want, f"{name}, replay {seed}")


@pytest.mark.parametrize("name", FORMS)
def test_the_current_stream_is_used(name):
    """What the inputs hold comes late on a stream of its own."""
    overload, given = form(name, "cuda")
    overload(**given)
    want = by_function(name, given)
    late = {k: v.clone() for k, v in given.items() if k in ("x", "gate_up", "topk_ids")}
    for key in late:
        given[key].zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        for key, value in late.items():
            given[key].copy_(value)
        got = kept(name, given, outcome(given, overload(**given)))
        require_same(got, want, name)


def layer(given: dict, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Tensors:
    """Every op, between operations of torch that are exact."""
    given = given | {"topk_ids": ids, "topk_weights": weights * 0.5}
    q, scale = OPS.per_token_group_quant_fp8(x * 2, scale_format="ue8m0", scale_layout="packed")
    gate_up = torch.cat([x, x], -1)
    activated = OPS.silu_and_mul_quant_fp8(gate_up, limit=2.0, scale_layout="column")
    tiles = OPS.moe_align_block_size(ids, 16, NUM_EXPERTS)
    out = OPS.fused_experts_fp8(**given | {"x": x + 1})
    into = torch.full_like(x, torch.nan)
    OPS.fused_experts_fp8.out(**given | {"x": out + x}, out=into)
    return q, scale, *activated, *tiles, out * 0.5, into


def tokens(num_tokens: int, seed: int) -> Tensors:
    given = arguments("fused_experts_fp8", "cuda", num_tokens=num_tokens, seed=seed)
    return given["x"], given["topk_ids"], given["topk_weights"]


@pytest.mark.filterwarnings("ignore")  # advice of inductor's
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_gives_the_eager_bytes(compiler, mode):
    """In the second mode torch captures a graph of each size once it has run, and replays it."""
    given = arguments("fused_experts_fp8", "cuda")
    compiled = torch.compile(layer, mode=mode, fullgraph=True, dynamic=True)
    for num_tokens in (8, 300, 6):
        for seed in range(4):
            arrays = tokens(num_tokens, seed)
            want = layer(given, *arrays)
            torch.compiler.cudagraph_mark_step_begin()
            require_same(compiled(given, *arrays), want, f"{num_tokens} tokens, run {seed}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FORMS)
def test_inductor_with_each_overload_alone(compiler, name):
    overload, given = form(name, "cuda")
    want = by_function(name, given)
    compiled = torch.compile(overload, fullgraph=True)
    require_same(kept(name, given, outcome(given, compiled(**given))), want, name)
