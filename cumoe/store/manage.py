"""What lies in the cache folders: listing, verifying and removing entries."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cumoe.store import disk, locks
from cumoe.store.key import Fields

_CUBIN = re.compile(r"[0-9a-f]{64}\.cubin")


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel on disk, whole or not."""

    path: Path
    """Its cubin; the file's name is the key."""
    size: int
    """Bytes of cubin and manifest."""
    used: float
    """When a process last loaded it: seconds since 1970."""
    created: float
    """When it was compiled, likewise; the last use where the manifest is not readable."""
    fields: Fields
    """What was hashed; empty where the manifest is not readable."""

    @property
    def key(self) -> str:
        """64 hex digits."""
        return self.path.stem

    @property
    def kernel(self) -> str:
        """`KernelSpec.text`, or an empty string."""
        named = dict(self.fields)
        parts = (named.get("stem", ""), self.arch, *named.get("constants", "").split())
        return "-".join(filter(None, parts))

    @property
    def arch(self) -> str:
        """As ``sm_90a``, or an empty string."""
        return dict(self.fields).get("arch", "")


@dataclass(frozen=True, slots=True)
class Removal:
    """What `prune` did."""

    removed: tuple[Entry, ...]
    in_use: tuple[Entry, ...]
    """Entries that should have gone, but are or may be used, or may not be removed by this user."""
    size: int
    """Bytes of the entries that are left."""


def entries(root: Path) -> Iterator[Entry]:
    """Every entry in a folder."""
    for path in disk.files(root):
        if _CUBIN.fullmatch(path.name) and path.name.startswith(path.parent.name):
            with suppress(OSError):  # removed meanwhile
                yield _entry(path)


def verify(roots: Iterable[Path]) -> Iterator[tuple[Entry, str]]:
    """Every entry, hashed anew, and what is wrong with it or an empty string."""
    for root in roots:
        for entry in entries(root):
            data, damage = disk.read(root, entry.key)
            yield entry, damage or ("" if data is not None else "it cannot be read")


def prune(root: Path, *, max_size: int | None = None, max_age_s: float | None = None) -> Removal:
    """Removes entries, the least recently used first; never one that a running process uses.

    Args:
        max_size: bytes that may stay.
        max_age_s: seconds since the last use after which an entry goes.
    """
    now = time.time()
    found = sorted(entries(root), key=lambda entry: entry.used)
    size = sum(entry.size for entry in found)
    removed, in_use = [], []
    for entry in found:
        is_old = max_age_s is not None and now - entry.used > max_age_s
        if not is_old and (max_size is None or size <= max_size):
            continue
        if _remove(entry.path):
            removed.append(entry)
            size -= entry.size
        else:
            in_use.append(entry)
    _tidy(root)
    return Removal(tuple(removed), tuple(in_use), size)


def clean(root: Path) -> Removal:
    """Removes every entry that no running process uses."""
    return prune(root, max_age_s=-math.inf)


def _entry(path: Path) -> Entry:
    cubin = os.stat(path)
    try:
        manifest = os.stat(path.with_suffix(".json"))
        text = disk.read_file(path.with_suffix(".json"))
    except FileNotFoundError:
        return Entry(path, cubin.st_size, cubin.st_mtime, cubin.st_mtime, ())
    created, fields = _manifest(text)
    size, used = cubin.st_size + manifest.st_size, manifest.st_mtime
    return Entry(path, size, used, used if created is None else created, fields)


def _manifest(text: bytes) -> tuple[float | None, Fields]:
    """Date and fields, where both are readable."""
    try:
        claims = json.loads(text)
        fields = tuple((str(label), str(value)) for label, value in claims["fields"].items())
        return datetime.fromisoformat(claims["created"]).timestamp(), fields
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None, ()


def _remove(path: Path) -> bool:
    """Removes an entry, the cubin first, unless somebody uses or compiles it."""
    with locks.removing(path) as free:
        if not free:
            return False
        try:
            os.unlink(path)
        except OSError:
            return False
        for suffix in (".json", ".lock"):
            with suppress(OSError):
                os.unlink(path.with_suffix(suffix))
    return True


def _tidy(root: Path) -> None:
    """Removes what belongs to no entry: old strays, free locks, empty folders."""
    disk.sweep(root)
    present = set(disk.files(root))
    for path in present:
        if path.with_suffix(".cubin") not in present:
            if path.suffix == ".json":
                disk.remove_stray(path)
            elif path.suffix == ".lock":
                locks.remove_unused_lock(path)
    for folder in disk.folders(root):
        with suppress(OSError):
            os.rmdir(folder)
