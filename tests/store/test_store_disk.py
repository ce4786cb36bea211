"""Entries on disk: whole or absent, readable by others, verified at every read."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from cumoe.store import disk, key

FIELDS: key.Fields = (("schema", "1"), ("stem", "a"))
OTHER: key.Fields = (("schema", "1"), ("stem", "b"))
KEY = key.digest(FIELDS)
DATA = bytes(range(256)) * 8


def _publish(root: Path, fields: key.Fields = FIELDS, data: bytes = DATA) -> Path:
    return disk.publish(root, key.digest(fields), data, fields)


def _files(root: Path) -> set[str]:
    return {path.name for path in root.rglob("*") if path.is_file()}


def test_an_entry_is_the_raw_file_and_its_manifest(tmp_path: Path) -> None:
    path = _publish(tmp_path / "deep/root")
    assert path == tmp_path / "deep/root" / KEY[:2] / f"{KEY}.cubin"
    assert path.read_bytes() == DATA
    manifest = json.loads(path.with_suffix(".json").read_text())
    assert manifest.pop("created").endswith("+00:00")
    assert manifest == {
        "fields": dict(FIELDS),
        "sha256": hashlib.sha256(DATA).hexdigest(),
        "size": len(DATA),
    }
    assert _files(tmp_path) == {f"{KEY}.cubin", f"{KEY}.json"}
    assert disk.read(tmp_path / "deep/root", KEY) == (DATA, "")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o000, 0o644)])
def test_modes_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        path = _publish(tmp_path)
    finally:
        os.umask(before)
    for file in (path, path.with_suffix(".json")):
        assert stat.S_IMODE(file.stat().st_mode) == mode


def test_what_is_not_there_is_a_plain_miss(tmp_path: Path) -> None:
    assert disk.read(tmp_path, KEY) == (None, "")
    path = _publish(tmp_path)
    path.unlink()  # as between the two steps of a publish
    assert disk.read(tmp_path, KEY) == (None, "")


@pytest.mark.parametrize("suffix", [".cubin", ".json"])
def test_what_cannot_be_read_is_a_plain_miss(tmp_path: Path, suffix: str) -> None:
    path = _publish(tmp_path).with_suffix(suffix)
    path.unlink()
    path.mkdir()  # EISDIR, also for root
    assert disk.read(tmp_path, KEY) == (None, "")


def test_a_bit_flipped_anywhere_in_the_cubin_is_damage(tmp_path: Path) -> None:
    path = _publish(tmp_path)
    for offset in range(0, len(DATA), 37):
        path.write_bytes(DATA[:offset] + bytes([DATA[offset] ^ 4]) + DATA[offset + 1 :])
        assert disk.read(tmp_path, KEY) == (None, "its SHA-256 differs from the manifest's")


def test_a_cut_cubin_is_named_by_its_size(tmp_path: Path) -> None:
    path = _publish(tmp_path)
    os.truncate(path, 100)
    assert disk.read(tmp_path, KEY) == (None, f"100 bytes, not {len(DATA)}")


def test_a_bit_flipped_in_the_manifest_never_gives_other_bytes(tmp_path: Path) -> None:
    path = _publish(tmp_path).with_suffix(".json")
    good = path.read_bytes()
    damaged = 0
    for offset in range(len(good)):
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 4]) + good[offset + 1 :])
        data, damage = disk.read(tmp_path, KEY)
        assert (data == DATA) != bool(damage)
        damaged += bool(damage)
    assert damaged > len(good) * 2 // 3  # all but the date and the blanks


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{}", b'{"size": 2048}', b"\xff\xfe", b"1"])
def test_a_manifest_of_another_form_is_damage(tmp_path: Path, text: bytes) -> None:
    _publish(tmp_path).with_suffix(".json").write_bytes(text)
    data, damage = disk.read(tmp_path, KEY)
    assert data is None
    assert damage


def test_a_whole_entry_of_another_kernel_is_damage(tmp_path: Path) -> None:
    ours, theirs = _publish(tmp_path), _publish(tmp_path, OTHER, DATA[::-1])
    for suffix in (".cubin", ".json"):
        os.replace(theirs.with_suffix(suffix), ours.with_suffix(suffix))
    assert disk.read(tmp_path, KEY) == (None, "its manifest is that of another key")


def test_a_failed_publish_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        _publish(tmp_path)
    assert _files(tmp_path) == set()


def test_a_folder_removed_just_after_it_was_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = []
    makedirs = os.makedirs

    def make_and_lose(path: Path, exist_ok: bool) -> None:
        makedirs(path, exist_ok=exist_ok)
        if not removed:
            removed.append(path)
            path.rmdir()

    monkeypatch.setattr(os, "makedirs", make_and_lose)
    _publish(tmp_path)
    assert removed
    assert disk.read(tmp_path, KEY).data == DATA


def test_a_short_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:100]))
    _publish(tmp_path)
    assert disk.read(tmp_path, KEY).data == DATA


def test_readers_see_a_whole_entry_or_none_while_it_is_written(tmp_path: Path) -> None:
    stop = threading.Event()
    seen: set[disk.Reading] = set()

    def read() -> None:
        while not stop.is_set():
            seen.add(disk.read(tmp_path, KEY))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(50):
        _publish(tmp_path)
    stop.set()
    reader.join()
    assert seen <= {disk.Reading(None), disk.Reading(DATA)}
    assert disk.Reading(DATA) in seen


def test_sweep_takes_old_temporaries_only(tmp_path: Path) -> None:
    path = _publish(tmp_path)
    old, young = (path.with_name(f".{path.name}.{name}.tmp") for name in ("old", "young"))
    for file in (old, young):
        file.touch()
    past = time.time() - 2 * disk.STRAY_AGE_S
    for file in (old, path, path.with_suffix(".json")):
        os.utime(file, (past, past))
    disk.sweep(tmp_path)
    assert _files(tmp_path) == {path.name, path.with_suffix(".json").name, young.name}


def test_sweep_never_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stray = _publish(tmp_path).with_name(".x.tmp")
    stray.touch()
    os.utime(stray, (0, 0))

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "unlink", refuse)
    disk.sweep(tmp_path)
    disk.sweep(tmp_path / "none")
    assert stray.exists()
