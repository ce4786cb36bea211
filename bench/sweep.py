"""Every candidate strategy of the activation at every size: ``python -m bench.sweep --out FILE``.

The tables in ``cumoe/plan/silu_and_mul_quant_fp8.py`` are chosen from what this records.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from bench.harness import compile_kernels, measure
from cumoe.ops import _op
from cumoe.plan import silu_and_mul_quant_fp8 as planning
from cumoe.plan.device import DeviceInfo
from cumoe.plan.silu_and_mul_quant_fp8 import AT_ONCE, EAGER, WALK, Plan, Problem, Strategy

LIMIT = 10.0
INPUTS = 4
TOPK = 6
E = 256
ANY = 2**63
MAX_GRID = 70_000
"""CTAs of a call that is dealt out at once: with more it loses everywhere."""


class Size(NamedTuple):
    """One call; with a filter 1/8 of the rows are computed."""

    rows: int
    H: int
    filter: str | None = None
    """``ids``: -1 in the others; ``map``: a map that has 1/8 of the experts."""


def _strategies(deal: int, *shapes: tuple[int, ...]) -> list[Strategy]:
    """From (lanes, threads[, CTAs per SM[, listers[, scan]]])."""
    fields = ("lanes", "threads", "ctas_per_sm", "listers", "scan")
    return [Strategy(ANY, deal=deal, **dict(zip(fields, s, strict=False))) for s in shapes]


UNFILTERED = [
    *_strategies(AT_ONCE, (32, 128), (32, 256), (16, 128), (16, 256), (16, 512)),
    *_strategies(AT_ONCE, (8, 64), (8, 128), (8, 128, 12), (8, 256), (8, 512), (4, 64), (4, 128)),
    *_strategies(WALK, (8, 128, 8), (8, 256, 4), (8, 512, 2), (8, 512, 1), (16, 512, 2)),
]
FILTERED = [
    *_strategies(AT_ONCE, (32, 128), (16, 128)),
    *_strategies(EAGER, (32, 128), (16, 64), (16, 128), (16, 256), (8, 64), (8, 128)),
    *_strategies(WALK, (32, 256, 1, 32, 1), (32, 256, 2, 32, 1), (16, 128, 2, 32, 2)),
    *_strategies(WALK, (16, 256, 1, 32, 1), (16, 256, 1, 32, 2), (16, 256, 1, 32, 4)),
    *_strategies(WALK, (16, 256, 2, 32, 1), (16, 256, 2, 32, 2), (16, 256, 2, 32, 4)),
    *_strategies(WALK, (8, 256, 1, 32, 4), (8, 256, 2, 32, 4), (8, 512, 1, 32, 8)),
    *_strategies(WALK, (8, 512, 2, 32, 1), (16, 256, 1, 128, 2), (16, 256, 1, 128, 6)),
    *_strategies(WALK, (16, 256, 1, 256, 1), (16, 256, 1, 256, 3), (16, 512, 1, 128, 6)),
    *_strategies(WALK, (16, 512, 1, 512, 2), (8, 256, 1, 256, 6), (8, 256, 2, 128, 4)),
    *_strategies(WALK, (8, 256, 4, 128, 8), (8, 256, 4, 256, 1), (8, 512, 1, 128, 8)),
    *_strategies(WALK, (8, 512, 1, 512, 2), (8, 512, 2, 128, 8), (8, 512, 2, 512, 1)),
    *_strategies(WALK, (8, 512, 2, 512, 4), (8, 1024, 1, 1024, 6)),
]
H512 = (8, 128, 512, 1024, 2048, 4096, 8192, 65_536)
H2048 = (6, 24, 96, 192, 384, 768, 1536, 3072, 6144, 16_384, 65_536)
TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 10_922)


def sizes(quick: bool) -> Iterator[Size]:
    """Unfiltered ones, then filtered by a map, then by ids alone and in short rows."""
    for H, rows in ((512, H512), (2048, H2048)):
        yield from (Size(r, H) for r in rows)
    yield from (Size(TOPK * t, 2048, "map") for t in TOKENS)
    if not quick:
        yield from (Size(TOPK * t, 2048, "ids") for t in TOKENS)
        yield from (Size(TOPK * t, 512, "map") for t in TOKENS)


def problem(size: Size) -> Problem:
    """What the plan knows of the call that `run` makes."""
    filtered, mapped = size.filter is not None, size.filter == "map"
    return Problem(
        size.rows, size.H, "ue8m0" if filtered else "fp32", packed=False,
        clamp=planning.clamp_kind(LIMIT), scaled=False, ids="int32" if filtered else None,
        has_map=mapped, aligned=True, num_experts=E if mapped else 0,
    )  # fmt: skip


def candidates(size: Size, device: DeviceInfo) -> list[tuple[Strategy, Plan]]:
    """Those worth timing, the one that the plan would choose among them."""
    all_ = FILTERED if size.filter else UNFILTERED
    some = [chosen(size), *(s for s in all_ if s != chosen(size))]
    plans = [(s, planning.plan_with(s, problem(size), device)) for s in some]
    return [(s, p) for s, p in plans if s.deal == WALK or p.step.launch.grid <= MAX_GRID]


def chosen(size: Size) -> Strategy:
    """What the plan does with this size."""
    return planning.strategy(problem(size))._replace(max_groups=ANY)


def name(s: Strategy) -> str:
    """``8x512 walk 2, 128 list 4``: lanes, threads, deal, CTAs per SM, listers, ids of each."""
    if s.deal == WALK:
        return f"{s.lanes}x{s.threads} walk {s.ctas_per_sm}, {s.listers} list {s.scan}"
    bound = f" {s.ctas_per_sm}" if s.ctas_per_sm > 1 else ""
    return f"{s.lanes}x{s.threads} {'eager' if s.deal == EAGER else 'at once'}{bound}"


@contextmanager
def forced(strategy: Strategy) -> Iterator[None]:
    """The activation planned with one strategy, whatever its size."""
    tables = (strategy._replace(max_groups=ANY),)
    try:
        with patch.multiple(planning, UNFILTERED=tables, FILTERED=tables):
            _forget_calls()
            yield
    finally:
        _forget_calls()


def _forget_calls() -> None:
    planning.plan.cache_clear()
    importlib.import_module("cumoe.ops.silu_and_mul_quant_fp8")._checked.cache_clear()
    _op._thread.forget()


def calls(size: Size) -> tuple[Callable[[int], Any], tuple[Any, Any], int]:
    """The i-th call on rotated inputs, its outputs, and the number of rows that it computes."""
    import torch

    import cumoe

    generator = torch.Generator("cuda").manual_seed(1)
    xs = [
        torch.randn(size.rows, 2 * size.H, device="cuda", generator=generator).bfloat16() * 3
        for _ in range(INPUTS)
    ]
    ids, expert_map, local = _filter(size, generator)
    named = {
        "limit": LIMIT, "scale_format": problem(size).scale_format,
        "topk_ids": ids, "expert_map": expert_map,
    }  # fmt: skip
    out, scale = cumoe.silu_and_mul_quant_fp8(xs[0], **named)

    def call(i: int) -> Any:
        return cumoe.silu_and_mul_quant_fp8(xs[i % INPUTS], out=out, out_scale=scale, **named)

    return call, (out, scale), local


def _filter(size: Size, generator: Any) -> tuple[Any, Any, int]:
    """topk_ids, expert_map, and the number of rows that these keep."""
    import torch

    if size.filter is None:
        return None, None, size.rows
    weights = torch.ones(size.rows // TOPK, E, device="cuda")
    ids = torch.multinomial(weights, TOPK, generator=generator).int()
    local = ids < E // 8
    if size.filter == "ids":
        return torch.where(local, ids, -1), None, int(local.sum())
    expert_map = torch.full((E,), -1, dtype=torch.int32, device="cuda")
    expert_map[: E // 8] = torch.arange(E // 8, dtype=torch.int32, device="cuda")
    return ids, expert_map, int(local.sum())


def run(size: Size, device: DeviceInfo) -> Iterator[dict[str, Any]]:
    """A row for each candidate: its bytes compared with the first one's, then timed."""
    import torch

    call, outputs, local = calls(size)
    want = None
    for strategy, _ in candidates(size, device):
        with forced(strategy):
            for array in outputs:
                array.view(torch.uint8).fill_(0xAA)
            got = [array.clone() for array in call(0)]
            want = want or got
            if not all(_same(a, b) for a, b in zip(got, want, strict=True)):
                raise SystemExit(f"{size}: {name(strategy)} gives other bytes: not timed")
            timing = measure(call)
        yield {
            **size._asdict(), "local_rows": local, "strategy": name(strategy),
            "chosen": strategy == chosen(size), "us": timing.us, "p20": timing.p20,
            "p80": timing.p80,
        }  # fmt: skip


def _same(a: Any, b: Any) -> bool:
    import torch

    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


def build(wanted: list[Size], device: DeviceInfo) -> None:
    """Compiles all kernels of these sizes on all cores."""
    compile_kernels(p.step.kernel for size in wanted for _, p in candidates(size, device))


def summary(rows: list[dict[str, Any]], count: int = 4) -> str:
    """One line: the size, what was chosen, and the fastest."""
    r, best = rows[0], sorted(rows, key=lambda row: row["us"])[:count]
    now = next(row for row in rows if row["chosen"])
    fastest = ", ".join(f"{row['us']:.2f} {row['strategy']}" for row in best)
    size = f"{r['rows']}x{r['H']} {r['filter'] or '-'} ({r['local_rows']})"
    return f"{size:24} chosen {now['us']:.2f} {now['strategy']}; {fastest}"


def main() -> None:
    """Writes the record after each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    arguments = parser.parse_args()
    from bench.environment import environment
    from cumoe.launch import device

    here, wanted = device.info(0), list(sizes(arguments.quick))
    build(wanted, here)
    rows: list[dict[str, Any]] = []
    for size in wanted:
        of_size = list(run(size, here))
        print(summary(of_size), flush=True)
        rows += of_size
        if arguments.out:
            record = {"environment": environment(), "rows": rows}
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
