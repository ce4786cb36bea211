"""Cubins on disk: immutable, content-addressed, verified at every read.

    <root>/<key[:2]>/<key>.cubin    the ELF file, as cuobjdump and the driver take it
    <root>/<key[:2]>/<key>.json     the key's fields, size, SHA-256 and date; written first
    <root>/<key[:2]>/<key>.lock     empty; kept, since deleting it would split its waiters

Nothing here is needed for a right answer: an OSError while reading is a miss, a lock that cannot
be had is done without, and a damaged entry is overwritten by the next compile.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from cumoe.store.key import Fields, digest

logger = logging.getLogger("cumoe")

LOCK_TIMEOUT_S = 30.0
"""A kernel compiles in seconds: whoever holds its lock for longer is stuck."""
STRAY_AGE_S = 3600.0
"""A temporary file this old was left by a process that died."""
_POLL_S = 0.02


class Reading(NamedTuple):
    """Verified bytes, or None and, for a damaged entry, what is wrong with it."""

    data: bytes | None
    damage: str = ""


def entry_path(root: Path, key: str) -> Path:
    """Where the cubin of `key` lies; its manifest and lock differ in the suffix."""
    return root / key[:2] / f"{key}.cubin"


def read(root: Path, key: str) -> Reading:
    """The cubin of `key` if its size, SHA-256 and key are what the manifest says."""
    path = entry_path(root, key)
    try:
        data = path.read_bytes()
    except OSError:
        return Reading(None)
    try:
        damage = _damage(key, data, json.loads(path.with_suffix(".json").read_bytes()))
    except FileNotFoundError:
        damage = "no manifest"
    except OSError:
        return Reading(None)
    except (ValueError, TypeError, AttributeError):
        damage = "the manifest is not readable"
    return Reading(None, damage) if damage else Reading(data)


def publish(root: Path, key: str, data: bytes, fields: Fields) -> Path:
    """Writes an entry so that no reader ever sees a part of it; returns the cubin's path.

    The cubin comes last: its presence says that the entry is complete.

    Raises:
        OSError: the folder cannot be written.
    """
    path = entry_path(root, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    manifest = {
        "fields": dict(fields),
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    _replace(path.with_suffix(".json"), json.dumps(manifest, indent=1).encode())
    _replace(path, data)
    return path


@contextmanager
def lock(root: Path, key: str, name: str, timeout_s: float | None = None) -> Iterator[bool]:
    """Keeps other processes from compiling `key`; yields whether the lock is held.

    After `timeout_s` (LOCK_TIMEOUT_S), or where the file system has no locks, the caller goes on
    without. The kernel releases the lock of a process that dies.
    """
    fd = _acquire(
        entry_path(root, key).with_suffix(".lock"),
        name,
        LOCK_TIMEOUT_S if timeout_s is None else timeout_s,
    )
    try:
        yield fd is not None
    finally:
        if fd is not None:
            _release(fd)


def sweep(root: Path) -> None:
    """Removes the temporary files that dead processes left."""
    oldest = time.time() - STRAY_AGE_S
    with suppress(OSError):
        for path in root.glob("??/.*.tmp"):
            with suppress(OSError):
                if path.stat().st_mtime < oldest:
                    path.unlink()


def _damage(key: str, data: bytes, manifest: Any) -> str:
    """What is wrong with an entry, or an empty string."""
    if manifest.get("size") != len(data):
        return f"{len(data)} bytes, not {manifest.get('size')}"
    if manifest.get("sha256") != hashlib.sha256(data).hexdigest():
        return "its SHA-256 differs from the manifest's"
    if digest(manifest.get("fields").items()) != key:
        return "its manifest is that of another key"
    return ""


def _replace(path: Path, data: bytes) -> None:
    """Puts `data` at `path` in one step, through a private file in the same folder."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        # Exclusive like mkstemp, but readable by others as far as the umask allows.
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def _acquire(path: Path, name: str, timeout_s: float) -> int | None:
    """A descriptor that holds the lock, or None."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        return None
    try:
        if _wait(fd, path, name, timeout_s):
            return fd
    except (OSError, NotImplementedError):
        logger.debug("no lock on %s: this file system has none", path)
    os.close(fd)
    return None


def _wait(fd: int, path: Path, name: str, timeout_s: float) -> bool:
    start = time.monotonic()
    told = False
    while not _try_lock(fd):
        if not told:
            logger.info("another process compiles %s: waiting up to %g s", name, timeout_s)
            told = True
        if time.monotonic() - start >= timeout_s:
            logger.warning("%s was held for %g s: compiling %s all the same", path, timeout_s, name)
            return False
        time.sleep(_POLL_S)
    return True


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(fd: int) -> None:
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing alone would leave it to a child forked meanwhile
    os.close(fd)
