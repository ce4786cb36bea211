"""``cumoe run``: one layer of a checkpoint, measured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cumoe.cli import values
from cumoe.cli.output import Row, print_json, print_rows, seconds

if TYPE_CHECKING:
    from cumoe.checkpoint.accuracy import Errors
    from cumoe.checkpoint.config import MoeConfig
    from cumoe.checkpoint.run import LayerReport

_DESCRIPTION = """\
Loads the experts of one layer of a block-FP8 checkpoint, sends random tokens through them, and
compares up to 16 of these with the NumPy reference and with a float64 evaluation. Runs on the GPU
where there is one, else on the CPU. Options left out are taken from the checkpoint's config.json.
"""


def add_to(subparsers: Any) -> None:
    """Adds the command's parser."""
    p = subparsers.add_parser(
        "run", help="run and verify one layer of a checkpoint", description=_DESCRIPTION
    )
    p.add_argument("file", help=".safetensors file, .safetensors.index.json, or folder with either")
    p.add_argument("--layer", type=values.index, metavar="N", help="default: first with experts")
    p.add_argument("--tokens", type=values.count, default=64, metavar="M", help="default: 64")
    p.add_argument("--seed", type=values.index, default=0, metavar="S", help="default: 0")
    p.add_argument(
        "--swiglu-limit", type=values.limit, metavar="L", help="clamp of gate and up; inf for none"
    )
    p.add_argument("--top-k", type=values.count, metavar="K", help="experts per token")
    p.add_argument("--router", choices=("softmax", "sigmoid"), help="scores of the router")
    p.add_argument(
        "--routed-scaling-factor", type=values.factor, metavar="F", help="multiplies the result"
    )
    p.add_argument("--scale-format", choices=("fp32", "ue8m0"), help="scales of the activations")
    p.add_argument(
        "--device", type=values.device, default="auto", help="auto (default), cpu, cuda or cuda:N"
    )
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    from cumoe.checkpoint.run import RunOptions, run_layer

    options = RunOptions(
        layer=args.layer,
        tokens=args.tokens,
        seed=args.seed,
        device=args.device,
        top_k=args.top_k,
        scoring=args.router,
        routed_scaling_factor=args.routed_scaling_factor,
        scale_format=args.scale_format,
        swiglu_limit=args.swiglu_limit,
    )
    report = run_layer(args.file, options)
    failures = report.errors.failures
    if args.json:
        print_json(asdict(report) | {"passed": not failures, "failures": failures})
    else:
        result = "FAILED" if failures else "ok"
        print_rows([*rows(report), ("result", result)])
    return conclude(report.file, failures)


def conclude(file: str, failures: Sequence[str]) -> int:
    """Names each failure on stderr; returns the exit status."""
    for failure in failures:
        print(f"cumoe: error: {file}: {failure}", file=sys.stderr)
    return 1 if failures else 0


def rows(report: LayerReport) -> list[Row]:
    """The report as names and values."""
    on_cpu = report.backend == "cpu"
    used = f"{report.distinct_experts} of {report.config.num_experts}"
    cold = "" if on_cpu else ", compiling or loading kernels included"
    return [
        ("file", report.file),
        ("layer", str(report.layer)),
        *_config_rows(report.config, report.tokens, report.router),
        ("backend", "cpu (NumPy)" if on_cpu else report.backend),
        ("distinct experts", used),
        *_error_rows(report.errors, itself=on_cpu),
        ("first call", f"{seconds(report.first_call_s)}{cold}"),
        ("later calls", f"{seconds(report.call_s)} median"),
    ]


def _config_rows(c: MoeConfig, tokens: int, router: str) -> list[Row]:
    experts, k, n = c.num_experts, c.hidden_size, c.intermediate_size
    factor = f"factor {c.routed_scaling_factor:g}"
    limit = "no limit" if c.swiglu_limit is None else f"limit {c.swiglu_limit:g}"
    if (c.swiglu_alpha, c.swiglu_beta) != (1.0, 0.0):
        limit += f", alpha {c.swiglu_alpha:g}, beta {c.swiglu_beta:g}"
    return [
        ("shapes", f"x [{tokens}, {k}], w1 [{experts}, {2 * n}, {k}], w2 [{experts}, {k}, {n}]"),
        ("routing", f"top {c.top_k} by {c.scoring}, {router} router, {factor}"),
        ("activation", f"SwiGLU, {limit}"),
        ("scale format", str(c.scale_format)),
    ]


def _error_rows(e: Errors, *, itself: bool) -> list[Row]:
    from cumoe.checkpoint.accuracy import FLOAT64_ALL, FLOAT64_ROW

    same = "; the backend is the reference" if itself else ""
    worst = f"{e.max_row_error_float64:.3g} worst (bound {FLOAT64_ROW:g})"
    together = f"{e.error_float64:.3g} all together (bound {FLOAT64_ALL:g})"
    return [
        ("sampled tokens", str(e.sampled_tokens)),
        ("error to reference", f"{e.max_row_error:.3g} worst (bound {e.reference_bound:g}){same}"),
        ("error to float64", f"{worst}, {together}"),
    ]
