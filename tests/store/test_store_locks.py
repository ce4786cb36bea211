"""Locks of a compile and marks of use: who is kept out, what they survive, how they end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cumoe.store import disk, key, locks
from tests.helpers import child

FIELDS: key.Fields = (("schema", "1"), ("stem", "a"))
KEY = key.digest(FIELDS)


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    yield
    locks.let_go()


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LOCK_TIMEOUT_S", 0.05)


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    return disk.publish(tmp_path, KEY, b"cubin", FIELDS)


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.usefixtures("no_wait")
def test_one_compiles_and_the_lock_file_stays(tmp_path: Path) -> None:
    path = disk.entry_path(tmp_path, KEY)
    with locks.compiling(path, "k") as first, locks.compiling(path, "k") as second:
        assert (first, second) == (True, False)
    with locks.compiling(path, "k") as third:
        assert third
    assert [p.name for p in path.parent.iterdir()] == [f"{KEY}.lock"]


@pytest.mark.usefixtures("no_wait")
def test_locks_of_two_kernels_are_apart(tmp_path: Path) -> None:
    one, two = disk.entry_path(tmp_path, KEY), disk.entry_path(tmp_path, "f" * 64)
    with locks.compiling(one, "k"), locks.compiling(two, "k") as held:
        assert held


@pytest.mark.usefixtures("no_wait")
def test_an_error_under_the_lock_passes_and_releases_it(tmp_path: Path) -> None:
    path = disk.entry_path(tmp_path, KEY)
    with pytest.raises(FileNotFoundError, match="mine"), locks.compiling(path, "k"):
        raise FileNotFoundError("mine")
    with locks.compiling(path, "k") as held:
        assert held


@pytest.mark.parametrize("error", [OSError(37, "No locks available"), NotImplementedError()])
def test_a_file_system_without_locks_is_done_without(
    entry: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise error

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    before = _open_descriptors()
    with locks.compiling(entry, "k") as held:
        assert not held
    assert locks.hold(entry)  # there, though it cannot be marked
    with locks.removing(entry) as free:
        assert not free  # nobody knows, so it stays
    assert _open_descriptors() == before


def test_a_folder_that_cannot_hold_a_lock_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with locks.compiling(tmp_path / "file/below/k.cubin", "k") as held:
        assert not held


def test_whoever_waits_for_a_lock_that_is_removed_takes_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = disk.entry_path(tmp_path, KEY)
    lock = path.with_suffix(".lock")
    lock.parent.mkdir()
    lock.touch()
    removed: list[Path] = []
    wait = locks._wait

    def remove_then_wait(*args: object) -> bool:
        if not removed:
            removed.append(lock)
            locks.remove_unused_lock(lock)
        return wait(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(locks, "_wait", remove_then_wait)
    monkeypatch.setattr(locks, "LOCK_TIMEOUT_S", 0.05)
    with locks.compiling(path, "k") as one, locks.compiling(path, "k") as two:
        assert (one, two) == (True, False)


def test_a_lock_in_use_is_not_removed(tmp_path: Path) -> None:
    path = disk.entry_path(tmp_path, KEY)
    with locks.compiling(path, "k"):
        locks.remove_unused_lock(path.with_suffix(".lock"))
        assert path.with_suffix(".lock").exists()
    locks.remove_unused_lock(path.with_suffix(".lock"))
    assert not path.with_suffix(".lock").exists()


def test_what_is_not_there_cannot_be_held_nor_removed(tmp_path: Path) -> None:
    path = disk.entry_path(tmp_path, KEY)
    assert not locks.hold(path)
    with locks.removing(path) as free:
        assert not free


def test_many_may_hold_and_then_none_may_remove(entry: Path) -> None:
    with locks.removing(entry) as free:
        assert free
        assert not locks.hold(entry)  # it is going
    before = _open_descriptors()
    assert locks.hold(entry)
    assert locks.hold(entry)
    assert _open_descriptors() == before + 1
    with locks.removing(entry) as free:
        assert not free
    locks.let_go()
    assert _open_descriptors() == before
    with locks.removing(entry) as free:
        assert free


def test_an_entry_removed_at_the_last_moment_is_not_held(
    entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = locks.fcntl.flock

    def remove_first(fd: int, operation: int) -> None:
        entry.unlink()
        flock(fd, operation)

    monkeypatch.setattr(locks.fcntl, "flock", remove_first)
    before = _open_descriptors()
    assert not locks.hold(entry)
    assert _open_descriptors() == before


def test_a_replaced_entry_is_held_instead_of_the_old_one(tmp_path: Path, entry: Path) -> None:
    assert locks.hold(entry)
    old = os.open(entry, os.O_RDWR)
    disk.publish(tmp_path, KEY, b"cubin", FIELDS)
    with locks.removing(entry) as free:
        assert free  # the new file is not what this process has
    assert locks.hold(entry)
    with locks.removing(entry) as free:
        assert not free
    assert locks._try_lock(old)
    os.close(old)


def test_who_compiles_is_not_removed(entry: Path) -> None:
    with locks.compiling(entry, "k"), locks.removing(entry) as free:
        assert not free


def test_descriptors_are_left_to_the_caller(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = _open_descriptors()
    for limit, held in ((used, 0), (10 * used + 20, 1), (locks.resource.RLIM_INFINITY, 1)):
        monkeypatch.setattr(locks.resource, "getrlimit", lambda what, limit=limit: (limit, limit))
        before = _open_descriptors()
        assert locks.hold(entry)
        assert _open_descriptors() == before + held
        locks.let_go()


RELEASED = """
import os, sys, warnings
from pathlib import Path
from cumoe.store import locks
from tests.helpers.child import report
warnings.simplefilter("ignore", DeprecationWarning)  # libraries may have idle threads
with locks.compiling(Path(sys.argv[1]), "k") as held:
    pid = os.fork()
    if pid == 0:
        sys.stdin.readline()
        os._exit(0)
other = locks._try_exclusive(Path(sys.argv[1]).with_suffix(".lock"), os.O_RDWR)
alive = os.waitpid(pid, os.WNOHANG) == (0, 0)
os.kill(pid, 9)
report(held=held, free=other is not None, alive=alive)
"""


def test_a_released_lock_is_free_though_a_child_forked_under_it_lives(tmp_path: Path) -> None:
    path = disk.entry_path(tmp_path, KEY)
    facts = child.result(child.start(RELEASED, path))
    assert facts == {"held": True, "free": True, "alive": True}


HOLDER = """
import os, subprocess, sys
from pathlib import Path
from cumoe.store import locks
from tests.helpers.child import at_barrier, report
assert locks.hold(Path(sys.argv[1]))
"""
FORKED = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # libraries may have idle threads
pid = os.fork()
if pid:
    report(child=pid)
    os._exit(0)  # the parent is gone; its child goes on
sys.stdin.readline()
"""
EXECED = """
other = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL, close_fds=False)
print(other.pid, flush=True)
at_barrier()
"""


def _free_within(entry: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with locks.removing(entry) as free:
            if free:
                return True
        time.sleep(0.01)
    return False


def test_a_mark_ends_with_a_killed_process(entry: Path) -> None:
    holder = child.start(HOLDER + "at_barrier()", entry)
    try:
        child.wait_ready(holder)
        assert not _free_within(entry, 0.1)
    finally:
        child.end(holder)
    assert _free_within(entry, 5)


def test_a_mark_lasts_as_long_as_a_forked_child(entry: Path) -> None:
    parent = child.start(HOLDER + FORKED, entry)
    try:
        assert parent.wait(timeout=30) == 0
        assert not _free_within(entry, 0.1)
        assert parent.stdin is not None
        parent.stdin.close()  # lets the child end
        assert _free_within(entry, 5)
    finally:
        parent.stdin = None
        child.end(parent)


def test_another_program_started_by_the_holder_inherits_no_mark(entry: Path) -> None:
    holder = child.start(HOLDER + EXECED, entry)
    try:
        assert holder.stdout is not None
        other = int(holder.stdout.readline())
        child.wait_ready(holder)
        child.end(holder)
        assert _free_within(entry, 5)
    finally:
        child.end(holder)
        os.kill(other, 9)
