"""Values of options: text to number, or a refusal that says what was wanted."""

from __future__ import annotations

import argparse
import math
import re


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


def _integer(text: str, least: int) -> int:
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or int(text) < least:
        raise argparse.ArgumentTypeError(f"wanted an integer of at least {least}, got {text!r}")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted a number, got {text!r}") from None
