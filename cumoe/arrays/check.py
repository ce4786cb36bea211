"""Requirements on views. Each raises with the argument's name, what was wanted and what came."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from cumoe.arrays.view import Device, Facts
from cumoe.errors import ArgumentError, DeviceMismatchError, DTypeError

# Bytes stand for the narrow types in frameworks that lack them.
_ALIASES = {"e4m3": "uint8", "bf16": "uint16"}


def require_dtype(v: Facts, name: str, *wanted: str) -> str:
    """The one of ``wanted`` that the array holds; raw bytes count as the narrow type."""
    for dtype in wanted:
        if v.dtype == dtype or v.dtype == _ALIASES.get(dtype):
            return dtype
    raise DTypeError(
        f"{name}: want {' or '.join(wanted)}, got {v.dtype}; "
        f"convert it first, for instance with .to() or .astype()"
    )


def require_shape(v: Facts, name: str, *shape: int | None, means: str = "") -> None:
    """The array has this shape; None matches any length."""
    fits = len(v.shape) == len(shape) and all(
        w is None or w == n for w, n in zip(shape, v.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if w is None else str(w) for w in shape)
        note = f" = {means}" if means else ""
        raise ArgumentError(f"{name}: want shape [{wanted}]{note}, got {list(v.shape)}")


def require_ndim(v: Facts, name: str, ndim: int, means: str) -> None:
    """The array has ``ndim`` dimensions."""
    if len(v.shape) != ndim:
        raise ArgumentError(
            f"{name}: want {ndim} dimensions {means}, got shape {list(v.shape)}; reshape it"
        )


def require_multiple(size: int, name: str, what: str, of: int, remedy: str) -> None:
    """A dimension is a multiple of ``of``, and not zero."""
    if size % of or size == 0:
        raise ArgumentError(f"{name}: {what} must be a multiple of {of}, got {size}; {remedy}")


def require_contiguous(v: Facts, name: str) -> None:
    """The array lies in row-major order without gaps."""
    if not v.is_contiguous:
        raise ArgumentError(
            f"{name}: want a contiguous array, got shape {list(v.shape)} with strides "
            f"{list(v.strides)}; pass {contiguous_copy_of(v, name)}"
        )


def contiguous_copy_of(v: Facts, name: str) -> str:
    """How the caller writes a contiguous copy, in the framework of the array: for remedies."""
    if v.framework == "torch":
        return f"{name}.contiguous()"
    if v.framework == "dlpack":
        return f"a contiguous copy of {name}"
    module = {"numpy": "np"}.get(v.framework, v.framework)
    return f"{module}.ascontiguousarray({name})"


def require_writeable(v: Facts, name: str) -> None:
    """The array may be written to."""
    if not v.writeable:
        got, remedy = "a read-only one", "pass a copy"
        if v.framework == "dlpack":
            got, remedy = "a read-only one, as JAX's are", "leave it out and a new one is returned"
        raise ArgumentError(f"{name}: want a writeable array, got {got}; {remedy}")


def require_choice(value: object, name: str, choices: Iterable[object]) -> None:
    """A keyword has one of the values that the op knows."""
    choices = list(choices)
    if value not in choices:
        raise ArgumentError(f"{name}: want one of {choices}, got {value!r}")


def require_same_device(arrays: Iterable[tuple[str, Facts | None]]) -> Device:
    """All arrays lie on one device, which is returned."""
    present = [(name, v) for name, v in arrays if v is not None]
    first_name, first = present[0]
    for name, v in present[1:]:
        if v.device != first.device:
            raise DeviceMismatchError(
                f"{name}: want it on {first.device}, where {first_name} is, got {v.device}; "
                f"move one of them"
            )
    return first.device


class Apart(NamedTuple):
    """Two arrays of a call that overlap where their addresses are too near."""

    one: int
    other: int
    low: int
    high: int
    """They share a byte if ``low < address of other - address of one < high``."""


@lru_cache(4096)
def apart(
    arrays: tuple[Facts, ...], num_inputs: int, *, in_place: bool = False
) -> tuple[Apart, ...]:
    """What `require_apart` has to test: each output with all arrays before it.

    ``in_place``: the first output may be the first input, with its address and its strides.
    """
    found = []
    for i, out in enumerate(arrays[num_inputs:], num_inputs):
        for j, other in enumerate(arrays[:i]):
            pair = Apart(i, j, out.extent[0] - other.extent[1], out.extent[1] - other.extent[0])
            if in_place and (i, j) == (num_inputs, 0) and out.strides == other.strides:
                found += [pair._replace(high=0), pair._replace(low=0)]
            elif out.extent != (0, 0) != other.extent:
                found.append(pair)
    return tuple(found)


def require_apart(pairs: tuple[Apart, ...], addresses: Sequence[int], names: Sequence[str]) -> None:
    """An output shares no byte with an array that came before it."""
    for one, other, low, high in pairs:
        if low < addresses[other] - addresses[one] < high:
            raise ArgumentError(
                f"{names[one]}: must not overlap {names[other]}; pass a buffer of its own"
            )
