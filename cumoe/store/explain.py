"""Why a kernel would be compiled: its key's fields beside those of the nearest entry."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from cumoe.plan.spec import KernelSpec
from cumoe.store import disk, manage, store
from cumoe.store import key as keys

_LISTS = ("constants", "flags")
"""Fields that are words with blanks between: only those that differ are worth showing."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which an entry is not what is wanted."""

    label: str
    wanted: str
    found: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the store would do for a kernel, and why."""

    spec: KernelSpec
    key: str
    path: Path | None
    """The entry that would be used; None for a miss."""
    damages: tuple[str, ...]
    """Entries of this key that cannot be used, and why."""
    nearest: manage.Entry | None
    """For a miss without damage: the entry of this source file that differs least."""
    differences: tuple[Difference, ...]


def explain(spec: KernelSpec) -> Explanation:
    """Looks `spec` up without compiling, waiting or marking anything.

    Raises:
        UnsupportedDeviceError: CuPy or NVRTC is not usable here, so the key is not known.
    """
    fields = keys.fields(spec)
    key = keys.digest(fields)
    damages: list[str] = []
    for root in store.roots():
        data, damage = disk.read(root, key)
        if data is not None:
            path = disk.entry_path(root, key)
            return Explanation(spec, key, path, tuple(damages), None, ())
        if damage:
            damages.append(f"{disk.entry_path(root, key)}: {damage}")
    nearest = None if damages else _nearest(fields)
    differences = () if nearest is None else _differences(fields, nearest.fields)
    return Explanation(spec, key, None, tuple(damages), nearest, differences)


def _nearest(wanted: keys.Fields) -> manage.Entry | None:
    found = chain.from_iterable(map(manage.entries, store.roots()))
    same = [e for e in found if dict(e.fields).get("stem") == dict(wanted)["stem"]]
    return min(same, key=lambda e: _distance(wanted, e.fields), default=None)


def _distance(wanted: keys.Fields, found: keys.Fields) -> tuple[int, int, int]:
    """Another architecture is farthest, then other constants: the same kernel comes first."""
    theirs = dict(found)
    differing = [label for label, value in wanted if theirs.get(label) != value]
    constants = set(dict(wanted)["constants"].split()) ^ set(theirs.get("constants", "").split())
    return "arch" in differing, len(constants), len(differing)


def _differences(wanted: keys.Fields, found: keys.Fields) -> tuple[Difference, ...]:
    ours, theirs = dict(wanted), dict(found)
    pairs = ((label, ours.get(label, ""), theirs.get(label, "")) for label in {**ours, **theirs})
    return tuple(Difference(label, *_trimmed(label, a, b)) for label, a, b in pairs if a != b)


def _trimmed(label: str, a: str, b: str) -> tuple[str, str]:
    """Of two lists of words, those that the other one lacks."""
    if label not in _LISTS:
        return a, b
    ours, theirs = a.split(), b.split()
    return (
        " ".join(word for word in ours if word not in theirs),
        " ".join(word for word in theirs if word not in ours),
    )
