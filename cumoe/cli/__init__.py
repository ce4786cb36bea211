"""The command ``cumoe``: parses, and prints what others compute.

Exit status: 0 done, 1 failed, 2 a command line or a setting that cannot be used.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from cumoe._version import __version__
from cumoe.cli import cache, demo, doctor, prebuild, run
from cumoe.errors import ArgumentError, CumoeError

# Each has add_to(subparsers), which sets `execute` of the parsed line.
_COMMANDS = (demo, run, prebuild, cache, doctor)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of argparse's usage and error."""
        self.exit(2, f"cumoe: error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (by default the process's own); returns its exit status."""
    args = parser().parse_args(argv)
    try:
        status: int = args.execute(args)
    except ArgumentError as error:
        return _fail(str(error), 2)
    except BrokenPipeError:  # whoever reads, `head` for instance, has enough
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # or the flush at the exit fails as well
        return 1
    except (CumoeError, OSError) as error:
        return _fail(str(error))
    except MemoryError:
        return _fail("out of memory; free some, or use a smaller layer or fewer tokens")
    except KeyboardInterrupt:
        return _fail("interrupted")
    return status


def parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    top = _Parser(prog="cumoe", description="FP8 Mixture-of-Experts kernels compiled at run time.")
    top.add_argument("--version", action="version", version=f"cumoe {__version__}")
    subparsers = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_to(subparsers)
    return top


def _fail(message: str, status: int = 1) -> int:
    print(f"cumoe: error: {message}", file=sys.stderr)
    return status
