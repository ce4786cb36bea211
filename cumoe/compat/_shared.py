"""What functions in the place of another library's ask of their arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cumoe.arrays.exchange import torch_dtype_name
from cumoe.errors import ArgumentError, CumoeError, DTypeError
from cumoe.ops import _inputs


def require_eps(eps: Any) -> None:
    """The floor that the kernels hold."""
    if _inputs.number(eps, "eps") != 1e-10:
        raise ArgumentError(f"eps: want 1e-10, which the kernels hold, got {eps!r}; leave it out")


def require_e4m3(dtype: Any, name: str) -> None:
    """torch's own."""
    if torch_dtype_name(dtype) != "e4m3":
        raise DTypeError(f"{name}: want torch.float8_e4m3fn, got {dtype}; pass that one")


def require_value(value: Any, wanted: Any, name: str, remedy: str) -> None:
    """Refuses what would ask for something that the ops do not have."""
    if type(value) is not type(wanted) or value != wanted:
        got = value if isinstance(value, bool | int | float | str) else type(value).__name__
        raise ArgumentError(f"{name}: want {wanted}, got {got!r}; {remedy}")


@contextmanager
def named(**theirs: str) -> Iterator[None]:
    """Messages of our errors name arguments as the other library does."""
    try:
        yield
    except CumoeError as error:
        ours = rf"(?<![\w.])({'|'.join(theirs)})(?=[:.]| is\b|$)"
        error.args = (re.sub(ours, lambda m: theirs[m[1]], str(error)),)
        raise
