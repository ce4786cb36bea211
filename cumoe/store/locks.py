"""Who compiles a kernel, and who uses an entry: locks that the kernel of the system releases.

    <key>.lock     held exclusively by the process that compiles `key`, or removes its entry
    <key>.cubin    held in common by every process that has loaded it, to the end of its life

Both save work and nothing else. A lock that cannot be had is done without. A child made by fork
shares the marks of its parent; a program started by exec does not inherit them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger("cumoe")

LOCK_TIMEOUT_S = 30.0
"""A kernel compiles in seconds: whoever holds its lock for longer is stuck."""
_POLL_S = 0.02

_held: dict[Path, int] = {}
"""The entries in use, and the descriptors that mark them."""


@contextmanager
def compiling(path: Path, name: str) -> Iterator[bool]:
    """Keeps other processes from compiling the cubin at `path`; yields whether the lock is held.

    After LOCK_TIMEOUT_S, or where the file system has no locks, the caller goes on without.
    """
    fd = _acquire(path.with_suffix(".lock"), name, time.monotonic() + LOCK_TIMEOUT_S)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            _release(fd)


def hold(path: Path) -> bool:
    """Marks the cubin at `path` as in use by this process; False where there is none to use."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    there, marked = _mark(fd)
    superfluous: int | None = fd
    if marked:
        superfluous = _held.get(path)  # of an entry that was replaced since
        _held[path] = fd
    if superfluous is not None:
        _close(superfluous)
    return there


def let_go() -> None:
    """Takes back every mark of this process."""
    while _held:
        _close(_held.popitem()[1])


@contextmanager
def removing(path: Path) -> Iterator[bool]:
    """Yields whether the cubin at `path` may be removed: nobody uses or compiles it.

    Where that cannot be known, it may not.
    """
    lock = _try_exclusive(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
    cubin = None if lock is None else _try_exclusive(path, os.O_RDWR)
    try:
        yield cubin is not None
    finally:
        for fd in (cubin, lock):
            if fd is not None:
                _release(fd)


def remove_unused_lock(path: Path) -> None:
    """Removes a lock file that nobody holds; whoever waits for it makes a new one."""
    fd = _try_exclusive(path, os.O_RDWR)
    if fd is not None:
        with suppress(OSError):
            os.unlink(path)
        _release(fd)


def _mark(fd: int) -> tuple[bool, bool]:
    """Whether the open file still is an entry, and whether it is marked now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        there = _is_linked(fd)
    except BlockingIOError:  # being removed
        return False, False
    except (OSError, NotImplementedError):
        logger.debug("descriptor %d: this file system has no locks", fd)
        return True, False
    return there, there and _may_keep(fd)


def _may_keep(fd: int) -> bool:
    """Descriptors are the caller's: beyond half of them an entry is used without a mark."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit == resource.RLIM_INFINITY or fd < limit // 2


def _try_exclusive(path: Path, flags: int) -> int | None:
    """A descriptor that holds `path` alone, or None."""
    try:
        fd = os.open(path, flags, 0o644)
    except OSError:
        return None
    with suppress(OSError, NotImplementedError):
        if _try_lock(fd):
            return fd
    _close(fd)
    return None


def _acquire(path: Path, name: str, deadline: float) -> int | None:
    """A descriptor that holds the lock, or None."""
    while True:
        try:
            os.makedirs(path.parent, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError:
            return None
        try:
            held = _wait(fd, path, name, deadline)
            if held and _is_linked(fd):
                return fd
        except (OSError, NotImplementedError):
            logger.debug("no lock on %s: this file system has none", path)
            held = False
        _close(fd)
        if not held:
            return None


def _wait(fd: int, path: Path, name: str, deadline: float) -> bool:
    start = time.monotonic()
    told = False
    while not _try_lock(fd):
        now = time.monotonic()
        if not told:
            logger.info("another process compiles %s: waiting up to %.3g s", name, deadline - now)
            told = True
        if now >= deadline:
            waited = now - start
            logger.warning("%s: held for %.3g s; compiling %s all the same", path, waited, name)
            return False
        time.sleep(_POLL_S)
    return True


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_linked(fd: int) -> bool:
    """Whether the file still has a name: a removed one keeps nobody out."""
    return os.fstat(fd).st_nlink > 0


def _release(fd: int) -> None:
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing alone would leave it to a child forked meanwhile
    _close(fd)


def _close(fd: int) -> None:
    with suppress(OSError):
        os.close(fd)
