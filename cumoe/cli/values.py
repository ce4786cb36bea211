"""Values of options: text to number, or a refusal that says what was wanted."""

from __future__ import annotations

import argparse
import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cumoe.plan.spec import KernelSpec

_MOST = 10**18 - 1


def count(text: str) -> int:
    """1, 2, 3, ..."""
    return _integer(text, 1)


def index(text: str) -> int:
    """0, 1, 2, ..."""
    return _integer(text, 0)


def limit(text: str) -> float:
    """A positive number, or inf."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"wanted a positive number or inf, got {text!r}")
    return value


def factor(text: str) -> float:
    """A finite number."""
    value = _number(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"wanted a finite number, got {text!r}")
    return value


def device(text: str) -> str:
    """auto, cpu, cuda or cuda:N."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"wanted auto, cpu, cuda or cuda:N, got {text!r}")
    return text


def size(text: str) -> int:
    """Bytes: 1000, 500K, 200M or 2G, of 1024 each."""
    match = re.fullmatch(r"(\d{1,15})([KMGT]?)", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"wanted a size as 500M or 2G, got {text!r}")
    return int(match[1]) << 10 * " KMGT".index(match[2] or " ")


def age(text: str) -> float:
    """Seconds: 90s, 30m, 12h or 30d."""
    match = re.fullmatch(r"(\d{1,9})([smhd])", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"wanted an age as 30d or 12h, got {text!r}")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def kernel(text: str) -> KernelSpec:
    """A kernel by its name."""
    from cumoe.errors import ArgumentError
    from cumoe.plan.spec import parse_spec

    try:
        return parse_spec(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _integer(text: str, least: int) -> int:
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or int(text) < least:
        bounds = (
            f"from {least} to {_MOST}"
            if text.isdecimal() and len(text) > 18
            else f"of at least {least}"
        )
        raise argparse.ArgumentTypeError(f"wanted an integer {bounds}, got {text!r}")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted a number, got {text!r}") from None
