"""Cubins on disk: immutable, content-addressed, verified at every read.

    <root>/<key[:2]>/<key>.cubin    the ELF file, as cuobjdump and the driver take it
    <root>/<key[:2]>/<key>.json     the key's fields, size, SHA-256 and date; touched at each load
    <root>/<key[:2]>/<key>.lock     empty; see `locks`

Nothing here is needed for a right answer: an OSError while reading is a miss, and a damaged entry
is overwritten by the next compile. Files are touched by functions of `os` alone, so that tests can
let each call fail.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from cumoe.store.key import Fields, digest

STRAY_AGE_S = 3600.0
"""A temporary file this old was left by a process that died."""
_CHUNK = 1 << 20  # bytes per read


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
        data = read_file(path)
    except OSError:
        return Reading(None)
    try:
        damage = damage_of(key, data, read_file(path.with_suffix(".json")))
    except FileNotFoundError:
        damage = "no manifest"
    except OSError:
        return Reading(None)
    return Reading(None, damage) if damage else Reading(data)


def damage_of(key: str, data: bytes, manifest: bytes) -> str:
    """What is wrong with the cubin and the manifest of `key`, or an empty string."""
    try:
        claims = json.loads(manifest)
        if claims["size"] != len(data):
            return f"{len(data)} bytes, not {claims['size']}"
        if claims["sha256"] != hashlib.sha256(data).hexdigest():
            return "its SHA-256 differs from the manifest's"
        if digest(claims["fields"].items()) != key:
            return "its manifest is that of another key"
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return "the manifest is not readable"
    return ""


def publish(root: Path, key: str, data: bytes, fields: Fields) -> Path:
    """Writes a new entry; returns the cubin's path. Raises OSError where that is impossible."""
    path = entry_path(root, key)
    manifest = {
        "fields": dict(fields),
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    put(path, data, json.dumps(manifest, indent=1).encode())
    return path


def put(path: Path, data: bytes, manifest: bytes) -> None:
    """Writes an entry so that no reader ever sees a part of it; raises OSError.

    The cubin comes last: its presence says that the entry is complete.
    """
    try:
        _put(path, data, manifest)
    except FileNotFoundError:  # somebody removed the folder just after it was made
        _put(path, data, manifest)


def touch(path: Path) -> None:
    """Notes that the entry of this cubin was used now, where that can be noted."""
    with suppress(OSError):
        os.utime(path.with_suffix(".json"))


def files(root: Path) -> Iterator[Path]:
    """Every file in the folders of the entries; what cannot be listed is left out."""
    for folder in folders(root):
        for name in _names(folder):
            yield folder / name


def folders(root: Path) -> list[Path]:
    """The folders of the entries."""
    return [root / name for name in _names(root) if len(name) == 2]


def sweep(root: Path) -> None:
    """Removes the temporary files that dead processes left."""
    for path in files(root):
        if path.name.startswith(".") and path.suffix == ".tmp":
            remove_stray(path)


def remove_stray(path: Path) -> None:
    """Removes a file that no whole entry needs, unless it is so young that it may become one."""
    with suppress(OSError):
        if os.stat(path).st_mtime < time.time() - STRAY_AGE_S:
            os.unlink(path)


def read_file(path: Path) -> bytes:
    """The whole file; raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(fd, _CHUNK), b""))
    finally:
        with suppress(OSError):
            os.close(fd)


@contextmanager
def written(path: Path, data: bytes) -> Iterator[Path]:
    """`data` in a private file beside `path`, which is removed if it is still there at the end."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        # Exclusive like mkstemp, but readable by others as far as the umask allows.
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            _write(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)  # a network file system may tell of a full disk only here
        yield temporary
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def _put(path: Path, data: bytes, manifest: bytes) -> None:
    os.makedirs(path.parent, exist_ok=True)
    manifest_path = path.with_suffix(".json")
    with written(manifest_path, manifest) as text, written(path, data) as cubin:
        os.replace(text, manifest_path)
        os.replace(cubin, path)


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
