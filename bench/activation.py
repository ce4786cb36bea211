"""Activation and quantization: ``python -m bench activation``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from bench import peers, roofline, shapes
from bench.harness import CALLS, measure
from bench.read_only import reader

LIMIT = 10.0
INPUTS = 4
"""Rotated over a graph's calls, as when the peers' figures were taken: small ones stay in L2."""
GRID = [(512, 8), (512, 128), (512, 2048), (2048, 6), (2048, 768), (2048, 6144), (512, 65536),
        (2048, 65536)]  # fmt: skip
GLM_TOKENS = (1, 4, 16, 64, 128, 256)
EP8_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024)
QUANTIZER = [(1, 7168), (8192, 4096), (4096, 6144)]


class Case(NamedTuple):
    """One row of the table."""

    H: int
    rows: int
    filter: str | None = None
    topk: int = 8
    E: int = 256
    scale_format: str = "fp32"


def cases(quick: bool) -> Iterator[Case]:
    """The sizes of the goals, a GLM decode layer, and DeepSeek-V4 with 1/8 of the experts local."""
    yield from (Case(H, rows) for H, rows in GRID)
    if quick:
        return
    yield from (Case(512, 8 * t, None, 8, 288, "ue8m0") for t in GLM_TOKENS)
    for tokens in EP8_TOKENS:
        yield Case(2048, 6 * tokens, "map", 6, 256, "ue8m0")


def layer_cases(names: list[str], tokens: list[int]) -> Iterator[Case]:
    """The activation of layers by their shapes' names; with part of the experts: 1/8 local."""
    for s, m in product([shapes.shape(name) for name in names], tokens):
        yield Case(s.N, s.topk * m, "map" if s.num_local_experts else None, s.topk, s.E)


def run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows, each checked before it is timed."""
    import torch

    device, named = torch.cuda.get_device_name(), arguments.peers
    with peers.vllm_context() if named else nullcontext():
        if arguments.shape:
            for case in layer_cases(arguments.shape, arguments.m):
                yield _activation_row(case, device, named)
            return
        for case in cases(arguments.quick):
            yield _activation_row(case, device, named)
        for M, K in QUANTIZER:
            yield _quantizer_row(M, K, device, named)


def _activation_row(case: Case, device: str, named: list[str]) -> dict[str, Any]:
    import torch

    import cumoe

    c = case
    generator = torch.Generator("cuda").manual_seed(1)
    xs = [
        torch.randn(c.rows, 2 * c.H, device="cuda", generator=generator).bfloat16() * 3
        for _ in range(INPUTS)
    ]
    ids, expert_map = _filter(c, generator)
    out, scale = cumoe.silu_and_mul_quant_fp8(xs[0], limit=LIMIT, scale_format=c.scale_format)

    def ours(x: Any) -> Any:
        return cumoe.silu_and_mul_quant_fp8(
            x, limit=LIMIT, scale_format=c.scale_format, topk_ids=ids, expert_map=expert_map,
            out=out, out_scale=scale,
        )  # fmt: skip

    def allocating(x: Any) -> Any:
        return cumoe.silu_and_mul_quant_fp8(
            x, limit=LIMIT, scale_format=c.scale_format, topk_ids=ids, expert_map=expert_map
        )

    local = _local_rows(c, ids, expert_map)
    wrong = _wrong_bytes(xs[0], ours(xs[0]), local, c)
    others = peers.activation_peers(c.H, c.rows, LIMIT, c.scale_format == "ue8m0", ids, expert_map)
    timing = measure(_rotating(ours, xs))
    read = [x[local] for x in xs] if c.filter else xs  # kept alive: the reader has addresses only
    row = {
        "op": "silu_and_mul_quant_fp8", "hidden": c.H, "rows": c.rows, "filter": c.filter,
        "scale_format": c.scale_format, "limit": LIMIT, "local_rows": len(local),
        "us": timing.us, "p20": timing.p20, "p80": timing.p80, "host_us": timing.host_us,
        "host_us_allocating": measure(_rotating(allocating, xs)).host_us,
        "floor_us": _rounded(roofline.activation_floor_us(device, len(local), c.H)),
        "read_only_us": measure(reader([[x] for x in read * CALLS][:CALLS])).us,
        "max_row_error": wrong,
        "peers": {n: measure(_rotating(f, xs)).us for n, f in others.items() if n in named},
    }  # fmt: skip
    if c.filter:
        row["unfiltered_local_rows_us"] = _unfiltered_us(c, [x[: len(local)] for x in xs])
    return row


def _unfiltered_us(c: Case, xs: list[Any]) -> float:
    """Of as many rows as are local, without ids."""
    import cumoe

    out, scale = cumoe.silu_and_mul_quant_fp8(xs[0], limit=LIMIT)

    def call(x: Any) -> Any:
        return cumoe.silu_and_mul_quant_fp8(
            x, limit=LIMIT, scale_format=c.scale_format, out=out, out_scale=scale
        )

    return measure(_rotating(call, xs)).us


def _filter(c: Case, generator: Any) -> tuple[Any, Any]:
    import torch

    if c.filter is None:
        return None, None
    weights = torch.ones(c.rows // c.topk, c.E, device="cuda")
    ids = torch.multinomial(weights, c.topk, generator=generator).int()
    expert_map = torch.full((c.E,), -1, dtype=torch.int32, device="cuda")
    expert_map[: c.E // 8] = torch.arange(c.E // 8, dtype=torch.int32, device="cuda")
    return ids, expert_map


def _local_rows(c: Case, ids: Any, expert_map: Any) -> list[int]:
    if ids is None:
        return list(range(c.rows))
    return [int(r) for r in (expert_map[ids.flatten().long()] >= 0).nonzero().flatten()]


def _wrong_bytes(x: Any, result: Any, local: list[int], c: Case) -> float:
    """Share of bytes unlike the reference, on up to 64 rows; more than 1e-4 is an error."""
    import torch

    from cumoe import reference

    picked = local[:: max(1, len(local) // 64)][:64]
    if not picked:
        return 0.0
    bits = x[picked].cpu().view(torch.int16).numpy().view(np.uint16)
    q, scale = reference.silu_and_mul_quant_fp8(bits, limit=LIMIT, scale_format=c.scale_format)
    codes = result[0][picked].view(torch.uint8).cpu().numpy()
    wrong = float((codes != q.view(np.uint8)).mean())
    if wrong > 1e-4 or not np.allclose(result[1][picked].cpu().numpy(), scale, rtol=1e-2):
        raise SystemExit(f"{c}: {wrong:.2%} of bytes differ from the reference: not timed")
    return wrong


def _quantizer_row(M: int, K: int, device: str, named: list[str]) -> dict[str, Any]:
    import torch

    import cumoe

    xs = [torch.randn(M, K, device="cuda").bfloat16() for _ in range(INPUTS)]
    out, scale = cumoe.per_token_group_quant_fp8(xs[0])

    def ours(x: Any) -> Any:
        return cumoe.per_token_group_quant_fp8(x, out=out, out_scale=scale)

    timing = measure(_rotating(ours, xs))
    return {
        "op": "per_token_group_quant_fp8", "hidden": K, "rows": M, "filter": None,
        "scale_format": "fp32", "us": timing.us, "p20": timing.p20, "p80": timing.p80,
        "host_us": timing.host_us,
        "floor_us": _rounded(roofline.quantize_floor_us(device, M, K)),
        "read_only_us": measure(reader([[x] for x in xs * CALLS][:CALLS])).us,
        "peers": {
            n: measure(_rotating(f, xs)).us
            for n, f in peers.quantizer_peers(False).items()
            if n in named
        },
    }  # fmt: skip


def _rotating(call: Callable[[Any], Any], xs: list[Any]) -> Callable[[int], Any]:
    return lambda i: call(xs[i % len(xs)])


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
