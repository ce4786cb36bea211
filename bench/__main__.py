"""Measurements on a GPU, each beside its floor and its peers: a table, a JSON file, a PNG.

activation  activation and quantization, and the quantizer
experts     the experts of a layer
stress      the experts of eight layers that hold every pair of sizes, routings and clamps
host        the host's time of eager calls, in each framework
vllm        a layer and an engine of vLLM with the plugin and without it
coldstart   how long a worker's first call takes
plot        the PNG of a JSON file
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from bench import peers, shapes
from bench.record import Record, Row, name_of, read


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of them; 1 where a result was wrong and therefore not timed."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in _WITH_OPTIONS_OF_THEIR_OWN:
        main_of = import_module(f"bench.{words[0]}").main
        return int(main_of(words[1:]))
    arguments = parser().parse_args(words)
    if arguments.what == "plot":
        from bench.plot import draw

        draw(read(arguments.file), arguments.out)
        return 0
    return _measure(arguments)


def parser() -> argparse.ArgumentParser:
    """The options of all commands."""
    top = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = top.add_subparsers(dest="what", required=True, metavar="WHAT")
    activation = commands.add_parser("activation", help="activation and quantization")
    activation.add_argument("--quick", action="store_true", help="the main sizes only")
    activation.add_argument("--shape", type=_list(_shape), help="layers instead of the usual sizes")
    experts = commands.add_parser("experts", help="the experts of a layer")
    experts.add_argument("--shape", type=_list(_shape), default=["glm-5.3-tp8"], help=_SHAPES)
    experts.add_argument("--routing", type=_list(_choice(shapes.ROUTINGS)), default=["uniform"])
    experts.add_argument("--scale-format", type=_list(_choice(("fp32", "ue8m0"))), default=["fp32"])
    experts.add_argument("--quick", action="store_true", help="with less effort a row")
    stress = commands.add_parser("stress", help="sizes, routings and clamps in pairs")
    _add_common(activation, _TOKENS, peers.ACTIVATION, peers.ACTIVATION)
    _add_common(experts, _TOKENS, peers.EXPERTS, peers.EXPERTS)
    _add_common(stress, _TOKENS[:9], peers.EXPERTS, ["vllm-triton"])
    commands.add_parser("host", help="the host's time of eager calls", add_help=False)
    commands.add_parser("vllm", help="vLLM with the plugin and without it", add_help=False)
    commands.add_parser("coldstart", help="a worker's first call", add_help=False)
    plot = commands.add_parser("plot", help="the PNG of a JSON file")
    plot.add_argument("file", type=Path)
    plot.add_argument("--out", type=Path, required=True)
    return top


def _add_common(
    command: argparse.ArgumentParser,
    tokens: list[int],
    known: Iterable[str],
    default: Iterable[str],
) -> None:
    names, default = list(known), list(default)
    command.add_argument("--m", type=_list(_tokens), default=tokens, help="numbers of tokens")
    command.add_argument(
        "--peers", type=_peers(names), default=default, metavar="vllm|none|NAMES",
        help=f"all, none, or some of {','.join(names)}; by default {','.join(default)}",
    )  # fmt: skip
    command.add_argument("--out", type=Path, help="JSON file to write")
    command.add_argument("--plot", type=Path, help="PNG to write")
    command.add_argument(
        "--keep", action="store_true", help="keep the other rows of --out: same kernels only"
    )


_WITH_OPTIONS_OF_THEIR_OWN = (["host"], ["vllm"], ["coldstart"])
_TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
_SHAPES = f"{', '.join(shapes.SHAPES)}, or e256-top8-k6144-n256[-limit10][-local32]"


def _measure(arguments: argparse.Namespace) -> int:
    from bench import activation, experts, stress
    from bench.environment import environment
    from bench.table import show

    runs = {"activation": activation.run, "experts": experts.run, "stress": stress.run}
    where = environment() | ({"peers": peers.versions()} if arguments.peers else {})
    record = Record(arguments.out, where, keep=arguments.keep)
    measured = []
    for row in runs[arguments.what](arguments):
        record.add(row)
        measured.append(row)
        print(_progress(row), flush=True)
    show([row for row in measured if "error" not in row])
    if arguments.plot:
        from bench.plot import draw

        draw({"environment": where, "rows": record.rows}, arguments.plot)
    return int(any("error" in row for row in measured))


def _progress(row: Row) -> str:
    if "error" in row:
        return f"{name_of(row)}: {row['error']}"
    others = ", ".join(f"{name} {us:.2f}" for name, us in row["peers"].items())
    return f"{name_of(row)}: {row['us']:.2f} us, reads {row['read_only_us']:.2f}, {others or '-'}"


def _list(item: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A type of arguments: items with commas between them."""

    def values(text: str) -> list[Any]:
        return [item(part) for part in text.split(",")]

    return values


def _choice(known: Sequence[str]) -> Callable[[str], str]:
    def item(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"want one of {', '.join(known)}, got {text!r}")
        return text

    return item


def _shape(name: str) -> str:
    try:
        shapes.shape(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def _tokens(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"want a number of tokens above 0, got {text!r}")
    return int(text)


def _peers(known: Sequence[str]) -> Callable[[str], list[str]]:
    groups = {"vllm": list(known), "none": []}

    def names(text: str) -> list[str]:
        return groups[text] if text in groups else _list(_choice(known))(text)

    return names


if __name__ == "__main__":
    sys.exit(main())
