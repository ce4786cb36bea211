"""The values that leave this room: what to compile (KernelSpec) and how to run it (LaunchSpec)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from cumoe.errors import ArgumentError

_TEXT = re.compile(
    r"(?P<stem>\w+)-(?P<arch>sm_\w+)(?P<pairs>(?:-[A-Za-z_]\w*=-?\d{1,19})*)", re.ASCII
)
_PAIR = re.compile(r"-(\w+)=(-?\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One cubin: a source file, an architecture and its compile-time constants.

    Nothing that varies from call to call (a token count, a pointer, the value of a limit) is in
    here, so the kernels that a model can reach are a finite, known set.
    """

    stem: str
    """File under ``kernels_src`` without its suffix, and the name of the op."""
    arch: str
    """``sm_90a`` and the like."""
    constants: tuple[tuple[str, int], ...]
    """``constexpr int``s put before the source, sorted by name."""

    text: str = field(init=False, compare=False, repr=False)
    """Canonical name: ``stem-arch-A=1-B=2``."""

    def __post_init__(self) -> None:
        pairs = [f"{name}={value}" for name, value in self.constants]
        object.__setattr__(self, "text", "-".join([self.stem, self.arch, *pairs]))

    def __hash__(self) -> int:
        return hash(self.text)  # a string remembers its hash: looked up on every launch


def kernel_spec(stem: str, arch: str, **constants: int) -> KernelSpec:
    """A KernelSpec with its constants in canonical order and as plain integers."""
    return KernelSpec(stem, arch, tuple(sorted((k, int(v)) for k, v in constants.items())))


def parse_spec(text: str) -> KernelSpec:
    """The KernelSpec whose `text` this is; raises ArgumentError for any other text."""
    match = _TEXT.fullmatch(text)
    pairs = _PAIR.findall(match["pairs"]) if match else []
    if match is None or len({name for name, _ in pairs}) < len(pairs):
        raise ArgumentError(
            f"kernel: wanted its name as stem-arch-A=1-B=2, each constant once, got {text!r}; "
            "take it from `cumoe cache list` or from the message that asked for it"
        )
    constants = sorted((name, int(value)) for name, value in pairs)
    return KernelSpec(match["stem"], match["arch"], tuple(constants))


class LaunchSpec(NamedTuple):
    """How one launch of a kernel is laid out."""

    grid: int
    """Number of CTAs (grids are one-dimensional: x reaches 2^31 - 1, y and z only 65,535)."""
    block: int
    """Threads per CTA."""
    smem_bytes: int = 0
    """Dynamic shared memory per CTA."""
    overlap: bool = False
    """Programmatic dependent launch: the kernel may be scheduled while its predecessor still runs;
    it waits for that one itself before it touches memory."""


class Step(NamedTuple):
    """One launch of a plan: which function of which cubin, and how."""

    kernel: KernelSpec
    entry: str
    """Name of the ``extern "C"`` function in the cubin."""
    launch: LaunchSpec
    abi: str
    """The entry's parameters in order: P pointer, q 64-bit integer, f float (as in `struct`), T
    `TensorMap`."""
