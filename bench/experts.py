"""The experts of a layer: ``python -m bench experts --shape glm-5.3-tp8 --m 1,2,4``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice, product
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from bench import peers, roofline, shapes, truth
from bench.harness import CALLS, FULL, QUICK, Effort, compile_kernels, host_us, measure
from bench.peers import Layer, Moe
from bench.read_only import reader
from bench.record import name_of
from bench.shapes import Shape
from cumoe.checkpoint.accuracy import REFERENCE_ROW, reference_row, row_errors
from cumoe.launch import device as gpu
from cumoe.plan.enumerate import layer_specs

CHECKED_TOKENS = 8
INPUTS = 2
"""Different x, used in turn."""
SIGMA = 112.0
"""Of the weights' codes: the largest of a block of 128 x 128 normal values is near 448."""


class NotTimed(Exception):
    """A row whose result is wrong."""


class Case(NamedTuple):
    """One row of the table."""

    shape: str
    m: int
    routing: str = "uniform"
    scale_format: str = "fp32"


class Inputs(NamedTuple):
    """What a call reads besides the weights: INPUTS of x, CALLS of the others."""

    xs: list[Any]
    weights: list[Any]
    ids: list[Any]

    def of(self, i: int) -> tuple[Any, Any, Any]:
        """x, topk_weights and topk_ids of the i-th call."""
        return self.xs[i % len(self.xs)], self.weights[i], self.ids[i]


class Sample(NamedTuple):
    """Tokens that are checked: the number of the call, the row in it, and what it must be."""

    picks: list[tuple[int, int]]
    want: Any


def run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row per shape, routing, scale format and number of tokens, each checked before timing."""
    compile_layers(arguments.shape, arguments.scale_format)
    with peers.vllm_context() if arguments.peers else nullcontext():
        for name in arguments.shape:
            calls = product(arguments.routing, arguments.scale_format, arguments.m)
            cases = [Case(name, m, *how) for *how, m in calls]
            yield from layer_rows(cases, arguments.peers, QUICK if arguments.quick else FULL)


def compile_layers(names: Iterable[str], scale_formats: Iterable[str]) -> None:
    """All kernels of these calls."""
    layers = product(map(shapes.shape, names), scale_formats)
    device = gpu.info(0)
    compile_kernels(
        kernel
        for s, fmt in layers
        for kernel in layer_specs(
            device, K=s.K, N=s.N, num_experts=s.E, num_local_experts=s.num_local_experts,
            topk=s.topk, scale_format=fmt, clamp=s.limit is not None,
        )
    )  # fmt: skip


def layer_rows(
    cases: Iterable[Case], names: Iterable[str], effort: Effort = FULL
) -> Iterator[dict[str, Any]]:
    """Rows of one shape, beside these peers; where a result is wrong what was wrong about it."""
    import torch

    cases = list(cases)
    s = shapes.shape(cases[0].shape)
    layer = make_layer(s)
    others = peers.experts_peers(names, s, layer)
    for case in cases:
        try:
            yield row(case, layer, others if case.scale_format == "fp32" else {}, effort)
        except NotTimed as error:
            yield {**case._asdict(), "op": "fused_experts_fp8", "error": str(error)}
    del layer, others
    torch.cuda.empty_cache()


def make_layer(s: Shape, device: str = "cuda") -> Layer:
    """Weights as a checkpoint has them. Gate and up are normal; every 20th is beyond a limit."""
    import torch

    generator = torch.Generator(device).manual_seed(7)

    def codes(rows: int, depth: int) -> Any:
        count = s.num_local_experts or s.E
        out = torch.empty(count, rows, depth, dtype=torch.float8_e4m3fn, device=device)
        for expert in range(count):
            out[expert] = random_codes(generator, rows, depth)
        return out

    w1, w2 = codes(2 * s.N, s.K), codes(s.K, s.N)
    gate = 1.0 if s.limit is None else s.limit / 2
    scales = random_scales(generator, w1.shape, gate), random_scales(generator, w2.shape, 1.0)
    return Layer(w1, w2, *scales, shapes.expert_map(s, device))


def random_codes(generator: Any, rows: int, depth: int) -> Any:
    """Normal values that use the whole range of e4m3."""
    import torch

    normal = torch.randn(rows, depth, device=generator.device, generator=generator)
    return (normal * SIGMA).clamp(-448, 448).to(torch.float8_e4m3fn)


def random_scales(generator: Any, shape: Sequence[int], deviation: float) -> Any:
    """For codes [..., rows, depth], whose products with inputs of deviation 1 have this one."""
    import torch

    *experts, rows, depth = shape
    blocks = (*experts, rows // 128, depth // 128)
    spread = 0.75 + torch.rand(blocks, device=generator.device, generator=generator) / 2
    return spread * deviation / (SIGMA * depth**0.5)


def make_inputs(s: Shape, m: int, routing: str, device: str = "cuda") -> Inputs:
    """Normal x, random router weights that sum to one, and a routing for each call of a graph."""
    import torch

    generator = torch.Generator(device).manual_seed(m)
    named: dict[str, Any] = {"device": device, "generator": generator}
    xs = [torch.randn(m, s.K, **named).bfloat16() for _ in range(INPUTS)]
    weights = [torch.rand(m, s.topk, **named).softmax(-1) for _ in range(CALLS)]
    ids = [shapes.routing(routing, m, s.E, s.topk, i, device) for i in range(CALLS)]
    return Inputs(xs, weights, ids)


def row(case: Case, layer: Layer, others: dict[str, Moe], effort: Effort = FULL) -> dict[str, Any]:
    """Checks ours, then times ours, a kernel that only reads, and the peers. NotTimed if wrong."""
    import torch

    s, m = shapes.shape(case.shape), case.m
    inputs = make_inputs(s, m, case.routing)
    ours = caller(s, layer, inputs, case.scale_format)
    buffers = {"out": torch.full_like(inputs.xs[0], torch.nan), "workspace": None}
    buffers["workspace"] = new_workspace(s, layer, inputs, case.scale_format, buffers["out"])
    given = lambda i: ours(i, **buffers)  # noqa: E731
    sample = make_sample(s, layer, inputs, case.scale_format)
    error = checked_error(given, sample, reference_row(m, s.topk, s.K, s.N))
    timing = measure(given, effort)
    local = [local_slots(ids, layer.expert_map) for ids in inputs.ids]
    used = [np.unique(experts) for experts in local]
    return {
        "op": "fused_experts_fp8", **case._asdict(),
        **figures(s, m, timing.us, [len(u) for u in used], [len(x) for x in local]),
        "p20": timing.p20, "p80": timing.p80, "host_us": timing.host_us,
        "host_us_allocating": round(host_us(ours, effort), 2),
        "read_only_us": measure(reader(read_only_inputs(layer, inputs, used)), effort).us,
        "max_row_error": error,
        **peer_figures(others, inputs, sample, name_of(case._asdict()), effort),
    }  # fmt: skip


def caller(s: Shape, layer: Layer, inputs: Inputs, scale_format: str) -> Callable[..., Any]:
    """``call(i, **buffers)``: our op on the i-th input."""
    import cumoe

    def call(i: int, **buffers: Any) -> Any:
        x, weights, ids = inputs.of(i)
        return cumoe.fused_experts_fp8(
            x, layer.w1, layer.w2, weights, ids, w1_scale=layer.w1_scale, w2_scale=layer.w2_scale,
            scale_format=scale_format, swiglu_limit=s.limit, expert_map=layer.expert_map, **buffers,
        )  # fmt: skip

    return call


def new_workspace(s: Shape, layer: Layer, inputs: Inputs, scale_format: str, out: Any) -> Any:
    """As many bytes as the plan of these calls wants."""
    import torch

    from cumoe.arrays.exchange import optional_view
    from cumoe.launch import device
    from cumoe.ops._experts_inputs import checked, scalars
    from cumoe.plan import fused_experts_fp8 as planning

    x, weights, ids = inputs.of(0)
    views = [
        optional_view(a, "an array")
        for a in (
            x, layer.w1, layer.w2, weights, ids, layer.w1_scale, layer.w2_scale, layer.expert_map,
            out, None,
        )
    ]  # fmt: skip
    plain = scalars((128, 128), scale_format, s.limit, 1.0, 0.0, None, False, 1.0, None)
    facts = [None if v is None else v.facts for v in views]
    problem = checked(*facts, tuple(0 if v is None else v.start for v in views), plain).problem
    plan = planning.plan(problem, device.info(x.device.index))
    return torch.empty(plan.workspace.total, dtype=torch.uint8, device=x.device)


def make_sample(s: Shape, layer: Layer, inputs: Inputs, scale_format: str) -> Sample:
    """Up to CHECKED_TOKENS tokens spread over a call, or over several, and what they must be."""
    import torch

    m = len(inputs.ids[0])
    rows = np.unique(np.linspace(0, m - 1, CHECKED_TOKENS).astype(int)).tolist()
    picks = list(islice(product(range(CALLS), rows), CHECKED_TOKENS))
    x, weights, ids = (
        torch.stack(parts)
        for parts in zip(*([a[t] for a in inputs.of(i)] for i, t in picks), strict=True)
    )
    local = ids if layer.expert_map is None else layer.expert_map[ids.long()]
    want = truth.fused_experts(x, layer, weights, local, scale_format=scale_format, limit=s.limit)
    return Sample(picks, want.float().cpu().numpy())


def checked_error(
    call: Callable[[int], Any], sample: Sample, bound: float = REFERENCE_ROW
) -> float:
    """Largest row error. Raises NotTimed where that is more than a right result has."""
    error = worst_error(call, sample)
    if not error < bound:  # NaN fails too
        raise NotTimed(f"row error {error:.2e}, want below {bound:g}: not timed")
    return error


def worst_error(call: Callable[[int], Any], sample: Sample) -> float:
    """norm(out - reference) / norm(reference) of the worst of the sampled tokens."""
    got = np.stack([call(i)[t].float().cpu().numpy() for i, t in sample.picks])
    return float(row_errors(got, sample.want).max())


def local_slots(ids: Any, expert_map: Any) -> Any:
    """The local experts that a routing names, one for each slot that is on this rank."""
    local = (ids if expert_map is None else expert_map[ids.long()]).flatten()
    return local[local >= 0].cpu().numpy()


def read_only_inputs(layer: Layer, inputs: Inputs, used: list[Any]) -> Iterator[list[Any]]:
    """For each call its x and the weights of the experts that it uses."""
    for i, experts in enumerate(used):
        weights = [w[e] for e in experts.tolist() for w in (layer.w1, layer.w2)]
        yield [*weights, inputs.of(i)[0]]


def figures(s: Shape, m: int, us: float, active: list[int], slots: list[int]) -> dict[str, Any]:
    """Sizes, floor and rates; experts and slots are means over the routings of a graph."""
    import torch

    named: dict[str, Any] = {"K": s.K, "N": s.N}
    a, k = mean(active), mean(slots)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    floor = roofline.experts_floor_us(device, M=m, active=a, slots=k, **named)
    return {
        "E": s.E, **named, "topk": s.topk, "limit": s.limit,
        "num_local_experts": s.num_local_experts or s.E, "active": round(a, 2),
        "slots": round(k, 2), "us": us, "floor_us": floor and round(floor, 2),
        "tflops": round(roofline.experts_flops(slots=k, **named) / us / 1e6, 2),
        "tbytes_s": round(roofline.experts_bytes(M=m, active=a, **named) / us / 1e6, 3),
    }  # fmt: skip


def peer_figures(
    others: dict[str, Moe], inputs: Inputs, sample: Sample, where: str, effort: Effort = FULL
) -> dict[str, Any]:
    """Each peer's time, host time and error; the last is recorded, not judged."""
    found: dict[str, dict[str, float]] = {"peers": {}, "peers_host_us": {}, "peers_row_error": {}}
    for name, peer in others.items():
        call = lambda i, peer=peer: peer(*inputs.of(i))  # noqa: E731
        try:
            error, timing = worst_error(call, sample), measure(call, effort)
        except Exception as failure:  # noqa: BLE001 - whatever foreign code raises
            print(f"{name}: left out of {where} ({type(failure).__name__}: {failure})")
            continue
        found["peers"][name] = timing.us
        found["peers_host_us"][name] = timing.host_us
        found["peers_row_error"][name] = round(error, 5) if np.isfinite(error) else 1.0
    return found
