"""What the cache holds, and what this process took from it."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cumoe.store import manage, store


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """One of the folders of compiled kernels."""

    path: Path
    kernels: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The folders in the order of search, and counts of this process."""

    folders: tuple[CacheFolder, ...]
    """Only the first is ever written."""
    counters: store.Counters


def cache_info() -> CacheInfo:
    """The cache folders with the number and size of their kernels; reads every manifest.

    ``counters`` says how many kernels this process compiled, and how many it found in memory or on
    disk.
    """
    return CacheInfo(tuple(map(_folder, store.roots())), store.stats())


def read_error(root: Path) -> OSError | None:
    """Why a folder of kernels cannot be listed; None too where there is none yet."""
    try:
        os.listdir(root)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None


def write_error(root: Path) -> OSError | None:
    """Why no file can be made in a folder, found by making one; leaves nothing behind."""
    there = os.path.isdir(root)
    probe = root / f".{secrets.token_hex(8)}.tmp"
    try:
        os.makedirs(root, exist_ok=True)
        probe.write_bytes(bytes(4096))
    except OSError as error:
        return error
    finally:
        with suppress(OSError):
            probe.unlink()
        if not there:
            with suppress(OSError):
                os.rmdir(root)
    return None


def _folder(root: Path) -> CacheFolder:
    sizes = [entry.size for entry in manage.entries(root)]
    return CacheFolder(root, len(sizes), sum(sizes))
