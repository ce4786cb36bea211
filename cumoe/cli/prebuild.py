"""``cumoe prebuild``: every kernel of a model into the cache."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cumoe.cli import values
from cumoe.cli.output import print_json, print_rows, seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from cumoe.prebuild import BuiltKernel, PrebuildReport

_DESCRIPTION = """\
Compiles every kernel that a layer of experts reaches, whatever the number of tokens, into the
cache: for models by name, for a config.json, or for given sizes. Needs no GPU. Several models,
ranks and architectures may be given; each is combined with each.
"""
_SELECTION = (
    "model", "config", "hidden", "intermediate", "experts", "top_k", "swiglu_limit",
    "swiglu_alpha", "swiglu_beta", "scale_format", "tp", "ep", "pad",
)  # fmt: skip


def add_to(subparsers: Any) -> None:
    """Adds the command's parser."""
    p = subparsers.add_parser(
        "prebuild", help="compile the kernels of a model into the cache", description=_DESCRIPTION
    )
    many = {"action": "append", "default": []}
    p.add_argument("--model", **many, metavar="NAME", help="a known model; --list names them")
    p.add_argument(
        "--list",
        action="store_true",
        help="print the known models, or those of --model; build nothing",
    )
    p.add_argument("--config", **many, metavar="PATH", help="config.json, or a folder with one")
    p.add_argument("--kernel", **many, metavar="TEXT", help="one kernel, as messages name it")
    p.add_argument("--hidden", type=values.count, metavar="K", help="hidden size of a layer")
    p.add_argument("--intermediate", type=values.count, metavar="N", help="size of an expert")
    p.add_argument("--experts", type=values.count, metavar="E", help="number of experts")
    p.add_argument("--top-k", type=values.count, metavar="K", help="experts per token")
    p.add_argument(
        "--swiglu-limit", type=values.limit, metavar="L", help="clamp of gate and up; inf for none"
    )
    p.add_argument("--swiglu-alpha", type=values.factor, metavar="A", help="default: 1")
    p.add_argument("--swiglu-beta", type=values.factor, metavar="B", help="default: 0")
    p.add_argument(
        "--scale-format",
        choices=("fp32", "ue8m0", "both"),
        help="scales of the activations; default: what the model declares, else both",
    )
    p.add_argument("--tp", **many, type=values.count, metavar="N", help="ranks sharing an expert")
    p.add_argument("--ep", **many, type=values.count, metavar="N", help="ranks sharing the experts")
    p.add_argument("--pad", action="store_true", help="for weights padded with cumoe.pad_experts")
    p.add_argument("--all", action="store_true", help="also for calls that engines do not make")
    p.add_argument(
        "--arch", metavar="LIST", help="as sm_90a,sm_100a; default: the GPU's, CUMOE_ARCH or sm_90a"
    )
    p.add_argument("--jobs", type=values.count, metavar="N", help="default: one per CPU")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    if args.list:
        return _list(args.model, as_json=args.json)
    from cumoe.prebuild import prebuild

    chosen = {name: getattr(args, name) for name in _SELECTION}
    with _progress(quiet=args.json) as progress:
        report = prebuild(
            kernel=args.kernel,
            everything=args.all,
            arch=args.arch,
            jobs=args.jobs,
            progress=progress,
            **{name: value for name, value in chosen.items() if value not in (None, [])},
        )
    if args.json:
        print_json(as_json(report))
    else:
        print_rows(_rows(report))
    for cause in report.causes:
        print(f"cumoe: error: {cause}", file=sys.stderr)
    return 0 if report.ok else 1


def as_json(report: PrebuildReport) -> dict[str, Any]:
    """The report as one JSON object."""
    return {
        "cache": str(report.cache_dir),
        "archs": report.archs,
        **{state: report.count(state) for state in ("built", "cached", "failed")},
        "bytes": report.num_bytes,
        "seconds": report.seconds,
        "kernels": [asdict(kernel) for kernel in report.kernels],
    }


def _rows(report: PrebuildReport) -> list[tuple[str, str]]:
    counts = (f"{report.count(state)} {state}" for state in ("built", "cached", "failed"))
    return [
        ("cache", str(report.cache_dir)),
        ("arch", ", ".join(report.archs)),
        ("kernels", ", ".join(counts)),
        ("size", f"{report.num_bytes:,} bytes"),
        ("time", seconds(report.seconds)),
        ("result", "ok" if report.ok else "FAILED"),
    ]


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[BuiltKernel, int], None] | None]:
    """What is told of each kernel: a bar on a terminal, a line elsewhere, nothing if quiet."""
    if quiet:
        yield None
    elif sys.stdout.isatty():
        with _bar() as advance:
            yield advance
    else:
        yield _print_line


def _print_line(kernel: BuiltKernel, total: int) -> None:
    print(f"{kernel.state:6}  {seconds(kernel.seconds):>8}  {kernel.name}", flush=True)


@contextmanager
def _bar() -> Iterator[Callable[[BuiltKernel, int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    name = TextColumn("{task.description}", markup=False)
    with Progress(BarColumn(), MofNCompleteColumn(), name, transient=True) as progress:
        task = progress.add_task("kernels", total=None)

        def advance(kernel: BuiltKernel, total: int) -> None:
            stem = kernel.name.split("-", 1)[0]
            progress.update(task, total=total, advance=1, description=stem)

        yield advance


def _list(names: list[str], *, as_json: bool) -> int:
    from cumoe.models import known_models, model

    models = [model(name) for name in names] or list(known_models().values())
    if as_json:
        print_json({"models": [asdict(one) for one in models]})
    else:
        print_rows([(one.name, _describe(one)) for one in models])
    return 0


def _describe(model: Any) -> str:
    limit = "" if model.swiglu_limit is None else f", limit {model.swiglu_limit:g}"
    return (
        f"E={model.num_experts} topk={model.top_k} K={model.hidden_size} "
        f"N={model.intermediate_size}{limit}, {model.scale_format or 'fp32 or ue8m0'} scales  "
        f"{model.source}"
    )
