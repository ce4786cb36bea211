"""What the rest of the library knows of a caller's array."""

from __future__ import annotations

from typing import Any, NamedTuple


class Device(NamedTuple):
    """Where an array lies: ``Device("cpu", 0)`` or ``Device("cuda", 1)``."""

    kind: str
    ordinal: int

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.ordinal}"


CPU = Device("cpu", 0)

ITEM_BYTES = {
    "e4m3": 1, "uint8": 1, "bf16": 2, "fp16": 2, "uint16": 2, "fp32": 4, "int32": 4, "int64": 8,
}  # fmt: skip


class ArrayView(NamedTuple):
    """Facts about one array. ``owner`` keeps the memory alive."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    dtype: str
    """A key of ITEM_BYTES, or the framework's own name for a type that no op takes."""
    device: Device
    framework: str
    """``numpy``, ``torch`` or ``cupy``."""
    owner: Any

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie without gaps in row-major order."""
        if 0 in self.shape:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def extent(self) -> tuple[int, int]:
        """First byte and one past the last byte that the array covers."""
        if 0 in self.shape:
            return self.ptr, self.ptr
        item = ITEM_BYTES.get(self.dtype, 1)
        steps = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
        return self.ptr + low * item, self.ptr + (high + 1) * item
