"""What the rest of the library knows of a caller's array."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple


class Device(NamedTuple):
    """Where an array lies: ``Device("cpu", 0)`` or ``Device("cuda", 1)``."""

    kind: str
    ordinal: int

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.ordinal}"


CPU = Device("cpu", 0)

LINE = 256
"""Bytes, as cudaMalloc aligns: where an array starts in such a line decides which kernel fits."""

ITEM_BYTES = {
    "e4m3": 1, "uint8": 1, "bf16": 2, "fp16": 2, "uint16": 2, "fp32": 4, "int32": 4, "int64": 8,
}  # fmt: skip


class Facts:
    """What an array is, without where it lies. Made by `facts`, so equal facts are one object."""

    __slots__ = (
        "device",
        "dtype",
        "extent",
        "framework",
        "is_contiguous",
        "is_row_major",
        "shape",
        "strides",
        "writeable",
    )

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    dtype: str
    """A key of ITEM_BYTES, or the framework's own name for a type that no op takes."""
    device: Device
    framework: str
    """``numpy``, ``torch``, ``cupy``; ``dlpack`` for every other."""
    extent: tuple[int, int]
    """First byte and one past the last byte that the array covers, from its pointer."""
    is_contiguous: bool
    """Whether the elements lie without gaps in row-major order."""
    is_row_major: bool
    """Whether the strides are just those of that order, also where a size of 1 makes one idle."""
    writeable: bool
    """False for a read-only array of NumPy or DLPack, and JAX's; torch and CuPy have none."""


@lru_cache(1 << 16)
def facts(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
    device: Device,
    framework: str,
    writeable: bool = True,
) -> Facts:
    """The Facts object of an array: always the same one, so that it is a key that costs nothing."""
    made = Facts()
    made.shape, made.strides, made.dtype = shape, strides, dtype
    made.device, made.framework, made.writeable = device, framework, writeable
    made.extent = _extent(shape, strides, ITEM_BYTES.get(dtype, 1))
    made.is_contiguous = _is_contiguous(shape, strides)
    made.is_row_major = strides == row_major(shape)
    return made


def _extent(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> tuple[int, int]:
    if 0 in shape:
        return 0, 0
    steps = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
    return low * item_bytes, (high + 1) * item_bytes


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without gaps, the last dimension fastest."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class ArrayView(NamedTuple):
    """One array: where it lies and what it is. ``owner`` keeps the memory alive."""

    ptr: int
    facts: Facts
    owner: Any

    @property
    def device(self) -> Device:
        """Where it lies."""
        return self.facts.device

    @property
    def framework(self) -> str:
        """Whose array it is."""
        return self.facts.framework

    @property
    def start(self) -> int:
        """Where it starts in a line of LINE bytes."""
        return self.ptr % LINE
