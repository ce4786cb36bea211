"""Folders that are full, closed, foreign or gone: right kernels, and at most one warning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cumoe.plan.spec import kernel_spec
from cumoe.store import store
from tests.helpers import child
from tests.helpers.tiny_kernels import write_kernels

Facts = dict[str, Any]
IS_ROOT = os.geteuid() == 0
"""Then a child becomes another user; else what it may not do is taken from this user."""


@pytest.fixture
def wanted(kernels: Path, cache: Path) -> list[str]:
    """The cubins of the three kernels."""
    return [store.get(kernel_spec("tiny", "sm_90a", A=a)).data.hex() for a in (5, 6, 7)]


@pytest.fixture
def folder(public: Path, wanted: list[str]) -> Path:
    """Where the child has its kernels and its cache; other users may enter."""
    write_kernels(public / "kernels")
    (public / "work").mkdir()
    return public / "work"


def _scene(name: str, folder: Path, **env: str) -> Facts:
    scene = child.start(
        f"from tests.store.hostile import {name}; {name}()",
        *(folder.parent / "kernels", folder),
        **({"CUMOE_CACHE_DIR": str(folder / "cache")} | env),
    )
    try:
        return child.result(scene)
    finally:
        child.end(scene)


def _check(facts: Facts, wanted: list[str], on_disk: list[bool]) -> None:
    """The right bytes, and one warning if anything could not be kept."""
    assert facts["data"] == wanted
    assert facts["on_disk"] == on_disk
    assert len(facts["warned"]) == (not all(on_disk))
    for message in facts["warned"]:
        assert message.startswith("CacheWarning: the kernel cache ")
        assert "name a writable folder in CUMOE_CACHE_DIR" in message
    assert not [name for name in facts.get("files", []) if name.endswith(".tmp")]


def test_full_disk(folder: Path, wanted: list[str]) -> None:
    rounds = _scene("full_disk", folder)["rounds"]
    kept = [sum(facts["on_disk"]) for facts in rounds]
    assert kept[0] == 0
    assert set(kept) >= {0, 1}  # room for an entry, but not for three
    for facts in rounds:
        _check(facts, wanted, facts["on_disk"])
        assert facts["after"] == [True]  # once there is room, kernels are kept
        cubins = [name for name in facts["files"] if name.endswith(".cubin")]
        assert len(cubins) == sum(facts["on_disk"])


def test_no_inodes(folder: Path, wanted: list[str]) -> None:
    _check(_scene("no_inodes", folder), wanted, [False] * 3)


def test_a_limit_on_the_size_of_files(folder: Path, wanted: list[str]) -> None:
    facts = _scene("file_size_limit", folder)
    _check(facts, wanted, [False] * 3)
    assert "File too large" in facts["warned"][0]


def test_a_read_only_mount_serves_what_it_has(folder: Path, wanted: list[str]) -> None:
    facts = _scene("read_only_mount", folder)
    _check(facts, wanted, [True, False, False])
    assert (facts["compiled"], facts["hits"]) == (2, 1)
    assert "Read-only file system" in facts["warned"][0]


def test_a_read_only_home(folder: Path, wanted: list[str]) -> None:
    env = {"HOME": str(folder), "XDG_CACHE_HOME": ""}
    facts = _scene("read_only_home", folder, CUMOE_CACHE_DIR="", **env)
    _check(facts, wanted, [False] * 3)
    assert f"{folder}/.cache/cumoe" in facts["warned"][0]


@pytest.mark.parametrize("mode", [0o755, 0o700, 0o711])
def test_a_folder_of_another_user(folder: Path, wanted: list[str], mode: int) -> None:
    (folder / "cache").mkdir()
    (folder / "cache").chmod(mode if IS_ROOT else mode & 0o555)
    _check(_scene("as_nobody", folder), wanted, [False] * 3)


def test_a_folder_of_another_user_with_kernels(folder: Path, wanted: list[str]) -> None:
    _check(_scene("plain", folder), wanted, [True] * 3)
    for path in (folder / "cache").rglob("*") if not IS_ROOT else ():
        path.chmod(0o555 if path.is_dir() else 0o444)
    facts = _scene("as_nobody", folder)
    _check(facts, wanted, [True] * 3)
    assert (facts["compiled"], facts["hits"]) == (0, 3)
    for path in (folder / "cache").rglob("*.cubin"):
        path.chmod(0o600 if IS_ROOT else 0)
    facts = _scene("as_nobody", folder)
    _check(facts, wanted, [False] * 3)
    assert facts["compiled"] == 3


def test_a_folder_removed_while_running(folder: Path, wanted: list[str]) -> None:
    facts = _scene("removed_while_running", folder)
    _check(facts, wanted, [True] * 3)
    assert len([name for name in facts["files"] if name.endswith(".cubin")]) == 1


def test_a_symlinked_folder(folder: Path, wanted: list[str]) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "cache").symlink_to(folder / "elsewhere")
    _check(_scene("plain", folder), wanted, [True] * 3)
    assert len(list((folder / "elsewhere").rglob("*.cubin"))) == 3
    facts = _scene("plain", folder)
    assert (facts["compiled"], facts["hits"]) == (0, 3)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda path: path.symlink_to(path.with_name("none")), id="dangling link"),
        pytest.param(lambda path: path.symlink_to(path), id="loop of links"),
        pytest.param(lambda path: path.write_text("a file"), id="a file"),
        pytest.param(lambda path: os.mkfifo(path), id="a pipe"),
    ],
)
def test_what_is_no_folder(folder: Path, wanted: list[str], make: Any) -> None:
    make(folder / "cache")
    _check(_scene("plain", folder), wanted, [False] * 3)


def test_a_name_that_no_file_can_have(folder: Path, wanted: list[str]) -> None:
    facts = _scene("plain", folder, CUMOE_CACHE_DIR=str(folder / ("a" * 300)))
    _check(facts, wanted, [False] * 3)
