"""What identifies a compiled kernel: labelled fields, and their digest.

Contents only. A path, a time, the host, the GPU and the version of this library are no part of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from cumoe.plan.spec import KernelSpec
from cumoe.store.flags import nvrtc_flags
from cumoe.store.nvrtc import nvrtc_build
from cumoe.store.source import read_source

Fields = tuple[tuple[str, str], ...]
"""Label and value, in a fixed order."""

SCHEMA = 1
"""Raised when the meaning of a field changes, or what lies on disk under a key."""


def fields(spec: KernelSpec, source: str | None = None) -> Fields:
    """Label and value of everything that the bytes of a cubin depend on.

    Args:
        source: `read_source(spec)`, where the caller has it already.
    """
    text = read_source(spec) if source is None else source
    return (
        ("schema", str(SCHEMA)),
        ("stem", spec.stem),
        ("arch", spec.arch),
        ("constants", " ".join(f"{name}={value}" for name, value in spec.constants)),
        ("flags", " ".join(nvrtc_flags(spec.arch))),
        ("nvrtc", nvrtc_build()),
        ("source", hashlib.sha256(text.encode()).hexdigest()),
    )


def digest(fields: Iterable[tuple[str, str]]) -> str:
    """SHA-256 over labels and values, each preceded by its length; 64 hex digits."""
    sha = hashlib.sha256()
    for pair in fields:
        for part in pair:
            raw = part.encode()
            sha.update(b"%d:%b" % (len(raw), raw))
    return sha.hexdigest()
