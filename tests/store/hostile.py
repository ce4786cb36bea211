"""Folders that refuse: what happens in the child processes of test_store_hostile."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from cumoe.plan.spec import kernel_spec
from cumoe.store import nvrtc, source, store
from tests.helpers import mounts
from tests.helpers.child import report

KERNELS, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
CACHE = FOLDER / "cache"


def prepare() -> None:
    """Imports what is imported at all while everything can still be read."""
    source.kernels_root = lambda: KERNELS
    nvrtc.nvrtc_build()


def observed(*constants: int) -> dict[str, Any]:
    """What three kernels, or those with these constants, come to in this process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cubins = [store.get(kernel_spec("tiny", "sm_90a", A=a)) for a in constants or (5, 6, 7)]
    now = store.stats()
    return {
        "data": [cubin.data.hex() for cubin in cubins],
        "on_disk": [cubin.path is not None for cubin in cubins],
        "warned": [f"{w.category.__name__}: {w.message}" for w in caught],
        "compiled": now.compiled,
        "hits": now.disk_hits,
    }


def become_nobody() -> None:
    """Root may write anywhere: go on as a user who may not."""
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)


def files() -> list[str]:
    return sorted(path.name for path in FOLDER.rglob("*") if path.is_file())


def full_disk() -> None:
    """No room, then room for 1, 2, ... more pages, then enough: each with kernels of its own."""
    prepare()
    mounts.enter_private_namespace()
    mounts.mount_tmpfs(FOLDER, "size=128k")
    filler = FOLDER / "filler"
    rounds = []
    for pages in range(8):
        shutil.rmtree(CACHE, ignore_errors=True)
        _fill(filler, pages)
        facts = observed() | {"pages": pages, "files": files()}
        filler.unlink()
        report_after = observed(8)["on_disk"]
        rounds.append(facts | {"after": report_after})
        store.forget()
    report(rounds=rounds)


def _fill(filler: Path, free_pages: int) -> None:
    """Writes until the disk is full, then gives some pages back."""
    page = 4096
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(page))
    os.truncate(filler, max(0, filler.stat().st_size // page - free_pages) * page)


def no_inodes() -> None:
    """Files can be written, but not made."""
    prepare()
    mounts.enter_private_namespace()
    mounts.mount_tmpfs(FOLDER, "size=1m,nr_inodes=4")  # its root, the cache, one folder, one file
    report(**observed(), files=files())


def file_size_limit() -> None:
    """As a quota: a file may not grow as large as a cubin."""
    prepare()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))
    report(**observed(), files=files())


def read_only_mount() -> None:
    """One kernel is there, and nothing can be written, not even by root."""
    prepare()
    mounts.enter_private_namespace()
    mounts.mount_tmpfs(FOLDER, "size=1m")
    before = observed(5)
    mounts.make_read_only(FOLDER)
    store.forget()
    report(**observed(), before=before, files=files())


def read_only_home() -> None:
    """As in a container: HOME cannot be written, CuPy has a folder elsewhere."""
    source.kernels_root = lambda: KERNELS
    mounts.enter_private_namespace()
    mounts.mount_tmpfs(FOLDER, "size=1m")
    mounts.make_read_only(FOLDER)
    report(**observed(), files=files())


def as_nobody() -> None:
    """The folder is what the parent made of it."""
    prepare()
    become_nobody()
    report(**observed())


def removed_while_running() -> None:
    """The folder goes, between calls and while a kernel is compiled."""
    prepare()
    first = observed(5)
    shutil.rmtree(CACHE)
    second = observed(6)
    compiler = nvrtc.compile

    def remove_and_compile(*args: Any) -> bytes:
        shutil.rmtree(CACHE)
        return compiler(*args)

    nvrtc.compile = remove_and_compile
    third = observed(7)
    report(
        data=[*first["data"], *second["data"], *third["data"]],
        on_disk=[*first["on_disk"], *second["on_disk"], *third["on_disk"]],
        warned=first["warned"] + second["warned"] + third["warned"],
        files=files(),
    )


def plain() -> None:
    """The folder is what the parent made of it."""
    prepare()
    report(**observed())
