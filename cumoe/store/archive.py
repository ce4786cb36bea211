"""A cache as one file: exported on one machine, imported on another or into an image.

An uncompressed tar: <key>.cubin and <key>.json of each entry as they lie on disk, and at the end
index.json with the schema and the keys.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import secrets
import stat
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cumoe.errors import CacheFileError
from cumoe.store import disk, locks, manage
from cumoe.store.key import SCHEMA

_INDEX = "index.json"
_MEMBER = re.compile(r"([0-9a-f]{64})\.(cubin|json)")
_REMEDY = "export it anew with `cumoe cache export`, from a cache that `cumoe cache verify` passes"


@dataclass(frozen=True, slots=True)
class Exported:
    """What `export_to` wrote."""

    kernels: int
    size: int
    """Bytes of the file."""
    left_out: tuple[Path, ...]
    """Entries that are damaged, or of another schema."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What `import_from` did."""

    added: int
    kept: int
    """Entries that were there already."""
    size: int
    """Bytes that were added."""


class _Member(NamedTuple):
    key: str
    cubin: bytes
    manifest: bytes


def export_to(file: Path, roots: Iterable[Path]) -> Exported:
    """Writes every whole entry of these folders to a new file, or over an old one in one step.

    Raises:
        CacheFileError: the file cannot be written.
    """
    try:
        return _export(file, roots)
    except OSError as error:
        raise CacheFileError(
            f"{file}: wanted a file that can be written, got: {error.strerror}; name one in a "
            "folder that exists and can be written"
        ) from error


def _export(file: Path, roots: Iterable[Path]) -> Exported:
    left_out: list[Path] = []
    keys: dict[str, None] = {}
    with (
        _replacing(file) as temporary,
        tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for entry in (entry for root in roots for entry in manage.entries(root)):
            if entry.key in keys:
                continue
            member = _read_entry(entry)
            if member is None:
                left_out.append(entry.path)
                continue
            keys[entry.key] = None
            _add(tar, f"{entry.key}.cubin", member.cubin)
            _add(tar, f"{entry.key}.json", member.manifest)
        _add(tar, _INDEX, json.dumps({"schema": SCHEMA, "keys": list(keys)}, indent=1).encode())
    return Exported(len(keys), os.stat(file).st_size, tuple(left_out))


def import_from(file: Path, root: Path) -> Imported:
    """Adds the entries of an exported file to a folder; those that are there already are kept.

    The whole file is verified before the first entry is written, and each entry appears in one
    step.

    Raises:
        CacheFileError: the file is damaged, of another schema, or no exported cache; says what is
            wrong with which part, and nothing was written. Or the file cannot be read, or the
            folder not be written.
    """
    added = kept = size = 0
    with _opened(file) as (tar, keys):
        for key in keys:
            _verified(tar, key, file)
        for key in keys:
            member = _verified(tar, key, file)
            path = disk.entry_path(root, key)
            with locks.compiling(path, key):
                if disk.read(root, key).data is not None:
                    kept += 1
                    continue
                _put(path, member, root)
            added += 1
            size += len(member.cubin) + len(member.manifest)
    return Imported(added, kept, size)


def _put(path: Path, member: _Member, root: Path) -> None:
    try:
        disk.put(path, member.cubin, member.manifest)
    except OSError as error:
        raise CacheFileError(
            f"{root}: wanted a cache folder that can be written, got: {error.strerror}; name one "
            "in CUMOE_CACHE_DIR"
        ) from error


def _read_entry(entry: manage.Entry) -> _Member | None:
    """The bytes of an entry, if they are whole and this version would look for them."""
    try:
        cubin = disk.read_file(entry.path)
        manifest = disk.read_file(entry.path.with_suffix(".json"))
    except OSError:
        return None
    is_ours = dict(entry.fields).get("schema") == str(SCHEMA)
    if not is_ours or disk.damage_of(entry.key, cubin, manifest):
        return None
    return _Member(entry.key, cubin, manifest)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o644
    tar.addfile(member, io.BytesIO(data))


@contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    """A private name beside `file`, moved onto it if all went well."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        os.replace(temporary, file)
    finally:
        with suppress(OSError):
            os.unlink(temporary)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[tarfile.TarFile, list[str]]]:
    """The archive and its keys, once its members are the ones that the index names."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # a pipe would be waited for
            raise OSError(errno.EINVAL, "it is no regular file")
        with tarfile.open(file, "r:") as tar:
            yield tar, _keys(tar, file)
    except OSError as error:
        raise CacheFileError(
            f"{file}: wanted an exported cache that can be read, got: {error.strerror}; check the "
            "path"
        ) from error
    except (tarfile.TarError, EOFError) as error:
        raise _refusal(
            file, f"wanted an exported cache, got no whole tar file ({error})"
        ) from error


def _keys(tar: tarfile.TarFile, file: Path) -> list[str]:
    members = tar.getmembers()
    for member in members:
        is_ours = member.name == _INDEX or _MEMBER.fullmatch(member.name)
        if not is_ours or not member.isreg() or member.issparse():
            raise _refusal(
                file,
                f"{member.name!r}: wanted plain files named <key>.cubin, <key>.json and {_INDEX}",
            )
    names = [member.name for member in members]
    if _INDEX not in names:
        raise _refusal(file, f"wanted {_INDEX} in it, which comes last: the file was cut off")
    keys = _index(_bytes(tar, _INDEX), file)
    wanted = [_INDEX, *(f"{key}.{suffix}" for key in keys for suffix in ("cubin", "json"))]
    if sorted(names) != sorted(wanted):
        odd = sorted(set(names) ^ set(wanted)) or ["a name that comes twice"]
        raise _refusal(file, f"wanted the members that {_INDEX} names, it differs in {odd[0]}")
    return keys


def _index(text: bytes, file: Path) -> list[str]:
    try:
        claims: Any = json.loads(text)
        schema, keys = claims["schema"], [str(key) for key in claims["keys"]]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise _refusal(file, f"{_INDEX} is not readable ({error})") from error
    if schema != SCHEMA:
        raise _refusal(
            file,
            f"wanted schema {SCHEMA}, it is of schema {schema}: another version of cumoe wrote it",
        )
    return keys


def _verified(tar: tarfile.TarFile, key: str, file: Path) -> _Member:
    """The entry of `key`, whose bytes are those that it was exported with."""
    member = _Member(key, _bytes(tar, f"{key}.cubin"), _bytes(tar, f"{key}.json"))
    damage = disk.damage_of(key, member.cubin, member.manifest)
    if damage:
        raise _refusal(file, f"{key}.cubin: {damage}")
    return member


def _bytes(tar: tarfile.TarFile, name: str) -> bytes:
    opened = tar.extractfile(name)
    return b"" if opened is None else opened.read()


def _refusal(file: Path, what: str) -> CacheFileError:
    return CacheFileError(f"{file}: {what}; {_REMEDY}")
