"""Entries that are not what they were: each is a miss, compiled anew, counted and mended."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cumoe.plan.spec import kernel_spec
from cumoe.store import disk, key, store

SPEC = kernel_spec("tiny", "sm_90a", A=5)
OTHER = kernel_spec("tiny", "sm_90a", A=6)
Damage = Callable[[Path, Path], object]


@pytest.fixture
def entry(kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> store.Cubin:
    """SPEC's entry, as a process left it that has ended."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # slow, and no power fails here
    cubin = store.get(SPEC)
    store.get(OTHER)
    store.forget()
    return cubin


def _path(cubin: store.Cubin) -> Path:
    assert cubin.path is not None
    return cubin.path


def _check_miss(entry: store.Cubin) -> None:
    """The next process compiles once, counts once and mends; the one after it finds a hit."""
    assert store.get(SPEC) == entry
    now = store.stats()
    assert (now.compiled, now.damaged, now.disk_hits) == (1, 1, 0)
    store.forget()
    assert store.get(SPEC) == entry
    now = store.stats()
    assert (now.compiled, now.damaged, now.disk_hits) == (0, 0, 1)
    store.forget()


def test_a_bit_flipped_at_each_of_200_random_offsets(entry: store.Cubin) -> None:
    path, data = _path(entry), entry.data
    rng = random.Random(200)  # noqa: S311
    for offset in rng.sample(range(len(data)), 200):
        flipped = bytearray(data)
        flipped[offset] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        _check_miss(entry)


def test_cut_at_any_length(entry: store.Cubin) -> None:
    for length in (0, 1, 63, 64, len(entry.data) // 2, len(entry.data) - 1):
        os.truncate(_path(entry), length)
        _check_miss(entry)


def _swap(path: Path, other: Path) -> None:
    """Both files of both entries change places."""
    for suffix in (".cubin", ".json"):
        ours, theirs = path.with_suffix(suffix), other.with_suffix(suffix)
        mine, yours = ours.read_bytes(), theirs.read_bytes()
        ours.write_bytes(yours)
        theirs.write_bytes(mine)


def _of_an_older_schema(path: Path, other: Path) -> None:
    """Sound in itself, but its fields mean something else by now."""
    manifest = json.loads(path.with_suffix(".json").read_text())
    manifest["fields"]["schema"] = str(key.SCHEMA - 1)
    path.with_suffix(".json").write_text(json.dumps(manifest))


def _of_an_older_format(path: Path, other: Path) -> None:
    """As a version might have written that kept no fields."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_suffix(".json").write_text(json.dumps({"version": 0, "sha256": digest}))


@pytest.mark.parametrize(
    "damage",
    [
        _swap,
        _of_an_older_schema,
        _of_an_older_format,
        pytest.param(lambda path, other: path.write_bytes(other.read_bytes()), id="other cubin"),
        pytest.param(lambda path, other: path.with_suffix(".json").unlink(), id="no manifest"),
        pytest.param(lambda path, other: path.with_suffix(".json").write_text(""), id="empty one"),
        pytest.param(
            lambda path, other: path.with_suffix(".json").write_text("[" * 100000), id="deep one"
        ),
    ],
)
def test_another_content(entry: store.Cubin, cache: Path, damage: Damage) -> None:
    other = next(path for path in cache.rglob("*.cubin") if path != _path(entry))
    damage(_path(entry), other)
    _check_miss(entry)


def test_an_entry_of_an_older_schema_stays_for_older_versions(
    kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(key, "SCHEMA", key.SCHEMA - 1)
        before = store.get(SPEC)
    store.forget()
    after = store.get(SPEC)
    assert (store.stats().compiled, store.stats().damaged) == (1, 0)
    assert after.key != before.key
    assert disk.read(cache, before.key).data == before.data
