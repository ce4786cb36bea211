"""File systems of a process's own: full, read-only or small ones that nobody else sees."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 1, 32, 1 << 14, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def enter_private_namespace() -> None:
    """What this process mounts from now on is seen by it alone, and goes with it.

    Without root by way of a user namespace, which a process with one thread may enter.
    """
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc.unshare(_CLONE_NEWNS | (_CLONE_NEWUSER if uid else 0)), "unshare")
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "private mounts")


def mount_tmpfs(folder: Path, options: str) -> None:
    """An empty file system in memory; options as ``size=64k,nr_inodes=8``."""
    folder.mkdir(parents=True, exist_ok=True)
    done = _libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, options.encode())
    _check(done, f"tmpfs on {folder}")


def make_read_only(folder: Path) -> None:
    """From now on nobody writes to what is mounted there, root included."""
    flags = _MS_REMOUNT | _MS_RDONLY
    _check(_libc.mount(b"tmpfs", bytes(folder), b"tmpfs", flags, None), f"remount of {folder}")


def _check(result: int, what: str) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
