"""Read-only folders below the writable one, and a process that may not compile."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cumoe import _settings
from cumoe.errors import KernelNotBuiltError
from cumoe.plan.spec import kernel_spec, parse_spec
from cumoe.store import disk, missing, store

SPEC = kernel_spec("tiny", "sm_90a", A=5)
OTHER = kernel_spec("tiny", "sm_90a", A=6)


@pytest.fixture
def image(kernels: Path, cache: Path, tmp_path: Path) -> Path:
    """A read-only folder that holds SPEC; the writable one is empty."""
    store.get(SPEC)
    root = tmp_path / "image"
    cache.rename(root)
    return root


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.undo()
    _settings.settings.cache_clear()


def _restart(monkeypatch: pytest.MonkeyPatch, **env: object) -> None:
    """As a process that starts with these variables."""
    for name, value in env.items():
        monkeypatch.setenv(f"CUMOE_{name}", str(value))
    _settings.settings.cache_clear()
    store.forget()


def _state(root: Path) -> dict[str, tuple[bytes, int]]:
    """Content and times of every file."""
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file()
    }


def _tallies() -> tuple[int, int, int]:
    now = store.stats()
    return now.compiled, now.disk_hits, now.damaged


def test_a_hit_in_a_lower_folder_is_used_in_place(
    image: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = _state(image)
    _restart(monkeypatch, CACHE_PATH=f"{tmp_path / 'none'}{os.pathsep}{image}")
    cubin = store.get(SPEC)
    assert _tallies() == (0, 1, 0)
    assert cubin.path == disk.entry_path(image, cubin.key)
    assert not cache.exists()
    assert _state(image) == before


def test_a_miss_in_all_folders_goes_to_the_writable_one(
    image: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _state(image)
    _restart(monkeypatch, CACHE_PATH=image)
    cubin = store.get(OTHER)
    assert _tallies() == (1, 0, 0)
    assert cubin.path == disk.entry_path(cache, cubin.key)
    assert _state(image) == before


def test_folders_are_looked_at_in_order(
    image: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    second = tmp_path / "second"
    shutil.copytree(image, second)
    key = store.get(SPEC).key
    _restart(monkeypatch, CACHE_PATH=f"{second}{os.pathsep}{image}{os.pathsep}{second}")
    assert store.roots() == (cache, second, image)
    assert store.get(SPEC).path == disk.entry_path(second, key)
    disk.entry_path(second, key).unlink()
    store.forget()
    assert store.get(SPEC).path == disk.entry_path(image, key)


def test_damage_in_a_lower_folder_is_passed_over_and_counted(
    image: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (damaged,) = image.rglob("*.cubin")
    os.truncate(damaged, 100)
    before = _state(image)
    _restart(monkeypatch, CACHE_PATH=image)
    cubin = store.get(SPEC)
    assert _tallies() == (1, 0, 1)
    assert cubin.path == disk.entry_path(cache, cubin.key)
    assert f"{damaged}: 100 bytes, not " in caplog.text
    assert _state(image) == before
    store.forget()
    assert store.get(SPEC) == cubin
    assert _tallies() == (0, 1, 0)


def test_without_compiling_a_hit_is_a_hit(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _restart(monkeypatch, CACHE_PATH=image, DISABLE_JIT=1)
    assert store.get(SPEC).data.startswith(b"\x7fELF")


def test_without_compiling_a_miss_names_the_command(
    image: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _restart(monkeypatch, CACHE_PATH=image, DISABLE_JIT=1)
    with pytest.raises(KernelNotBuiltError) as caught:
        store.get(OTHER)
    message = str(caught.value)
    assert message.startswith(f"{OTHER.text}: not in {cache} or {image}, and CUMOE_DISABLE_JIT=1")
    assert f"\n    {missing.prebuild_command([OTHER])}\n" in message
    assert _tallies() == (0, 0, 0)
    assert not cache.exists()


def test_without_compiling_damage_is_named(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (damaged,) = image.rglob("*.cubin")
    os.truncate(damaged, 0)
    _restart(monkeypatch, CACHE_PATH=image, DISABLE_JIT=1)
    with pytest.raises(KernelNotBuiltError, match=re.escape(f"{damaged}: 0 bytes, not")):
        store.get(SPEC)


def test_build_compiles_all_the_same(
    kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _restart(monkeypatch, DISABLE_JIT=1)
    assert store.build(SPEC).spec == SPEC
    assert store.get(SPEC).path is not None
    assert _tallies() == (1, 0, 0)


def test_the_command_builds_exactly_these_kernels() -> None:
    specs = [SPEC, kernel_spec("tiny", "sm_100a", B=-1, A=2)]
    words = shlex.split(missing.prebuild_command(specs))
    assert words[:2] == ["cumoe", "prebuild"]
    assert words[2::2] == ["--kernel", "--kernel"]
    assert [parse_spec(text) for text in words[3::2]] == specs


def test_many_missing_kernels_are_one_error() -> None:
    error = missing.not_built([SPEC, OTHER], "the stream is being captured")
    assert str(error).startswith(f"{SPEC.text} and 1 more kernels: the stream is being captured. ")
    assert missing.prebuild_command([SPEC, OTHER]) in str(error)


def test_the_last_use_is_noted_once_per_process(kernels: Path, cache: Path) -> None:
    path = store.get(SPEC).path
    assert path is not None
    manifest = path.with_suffix(".json")
    os.utime(manifest, (1, 1))
    store.get(SPEC)
    assert manifest.stat().st_mtime == 1
    store.forget()
    store.get(SPEC)
    first = manifest.stat().st_mtime
    assert first > 1
    os.utime(manifest, (1, 1))
    store.get(SPEC)
    assert manifest.stat().st_mtime == 1


def test_a_time_that_cannot_be_noted_does_not_matter(
    kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = store.get(SPEC)
    store.forget()

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert store.get(SPEC) == wanted
    assert _tallies() == (0, 1, 0)
