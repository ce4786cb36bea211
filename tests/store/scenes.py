"""What happens in the child processes of the tests of races and kills.

A scene runs in a child of its own, forks the processes that it needs, and reports facts.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cumoe import _settings
from cumoe.plan.spec import kernel_spec
from cumoe.store import disk, locks, nvrtc, source, store
from tests.helpers.child import report
from tests.helpers.faults import FileCalls
from tests.helpers.forks import Barrier, Facts, Fork, fork, join, kill

SPECS = tuple(kernel_spec("tiny", "sm_90a", A=a) for a in (5, 6, 7))
SPEC = SPECS[0]
MODULES = (disk, locks)


def race() -> None:
    """argv: kernels, number of processes, whether locks work; each wants all kernels, cold."""
    count, with_locks = int(sys.argv[2]), sys.argv[3] == "True"
    _prepare()
    start, compiling = Barrier(), Barrier()
    if with_locks:
        nvrtc.compile = _after(lambda: time.sleep(0.2), nvrtc.compile)  # all arrive meanwhile
    else:
        fcntl.flock = _no_locks  # type: ignore[assignment]
        nvrtc.compile = _after(compiling.wait, nvrtc.compile)  # all come, since nobody publishes
    processes = [fork(lambda number=number: _racer(start, number)) for number in range(count)]
    start.release(count)
    if not with_locks:
        compiling.release(count)
    report(racers=[join(process) for process in processes])


def _after(wait: Callable[[], None], compiler: Callable[..., bytes]) -> Callable[..., bytes]:
    """The compiler, which waits before it does its first work."""
    waited = False

    def compile_(*args: Any) -> bytes:
        nonlocal waited
        if not waited:
            waited = True
            wait()
        return compiler(*args)

    return compile_


def _racer(barrier: Barrier, number: int) -> Facts:
    os.chdir(tempfile.mkdtemp(dir=Path(sys.argv[1]).parent))
    order = SPECS[number % 3 :] + SPECS[: number % 3]
    barrier.wait()
    cubins = {spec.text: _sha256(store.get(spec).data) for spec in order}
    return {"cubins": cubins, **asdict(store.stats())}


def killed_at_random() -> None:
    """argv: kernels, folder, number of moments; a build is killed, and another process follows."""
    folder, moments = Path(sys.argv[2]), int(sys.argv[3])
    _prepare()
    normal_s = max(_start_after(folder / f"normal{i}")["seconds"] for i in range(3))
    begin = time.monotonic()
    join(fork(lambda: _slow_build(folder / "duration")))
    duration_s = time.monotonic() - begin
    moment = random.Random(0)  # noqa: S311
    rounds = []
    for i in range(moments):
        victim = fork(lambda i=i: _slow_build(folder / str(i)))
        time.sleep(moment.uniform(0, duration_s))
        rounds.append(_follow(victim, folder / str(i)))
    report(normal_s=normal_s, rounds=rounds)


def killed_at_each_call() -> None:
    """argv: kernels, folder; a build is killed before, within and after each of its file calls."""
    folder = Path(sys.argv[2])
    _prepare()
    names = join(fork(lambda: _counted_build(folder / "count")))["names"]
    rounds = []
    for number, name in enumerate(names):
        for when in ("before", "after", *(["within"] if name == "write" else [])):
            root = folder / f"{number}{when}"
            victim = fork(lambda n=number, w=when, r=root: _build_and_die(r, n, w))
            os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
            rounds.append(_follow(victim, root) | {"call": name, "when": when})
    report(rounds=rounds, names=names)


def _prepare() -> None:
    """Imports and NVRTC's loading are over before anything is timed or forked."""
    root = Path(sys.argv[1])
    source.kernels_root = lambda: root
    nvrtc.nvrtc_build()


def _enter(root: Path) -> None:
    os.environ["CUMOE_CACHE_DIR"] = str(root)
    _settings.settings.cache_clear()


def _follow(victim: Fork, root: Path) -> Facts:
    """Kills the victim where it has not died by itself; what it left, and the next process."""
    killed = kill(victim)
    left = sorted({_kind(path) for path in root.rglob("*") if path.is_file()})
    return {"killed": killed, "left": left, **_start_after(root)}


def _start_after(root: Path) -> Facts:
    """A process that needs SPEC in this folder."""
    return join(fork(lambda: _start(root)))


def _start(root: Path) -> Facts:
    _enter(root)
    begin = time.monotonic()
    cubin = store.get(SPEC)
    seconds = time.monotonic() - begin
    whole = disk.read(root, cubin.key).data == cubin.data
    return {
        "seconds": seconds,
        "sha256": _sha256(cubin.data),
        "whole": whole,
        **asdict(store.stats()),
    }


def _slow_build(root: Path) -> Facts:
    """A build that takes as long over its files as over its compile, and writes in halves."""

    def dawdle(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        time.sleep(0.002)
        return function(*(_half(name, args)), **kwargs)

    _enter(root)
    FileCalls(dawdle, lambda number: True).install(MODULES, setattr)
    store.get(SPEC)
    return {}


def _counted_build(root: Path) -> Facts:
    _enter(root)
    calls = FileCalls()
    calls.install(MODULES, setattr)
    store.get(SPEC)
    return {"names": calls.names}


def _build_and_die(root: Path, number: int, when: str) -> Facts:
    def die(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            if when != "before":
                function(*(_half(name, args) if when == "within" else args), **kwargs)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    _enter(root)
    FileCalls(die, lambda n: n == number).install(MODULES, setattr)
    store.get(SPEC)
    return {}


def _half(name: str, args: Any) -> Any:
    if name != "write":
        return args
    fd, data = args
    return fd, data[: (len(data) + 1) // 2]


def _no_locks(fd: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def _kind(path: Path) -> str:
    """``.cubin`` and the like; ``.cubin.tmp`` and ``.json.tmp`` for temporary files."""
    return "".join(s for s in path.suffixes if s in {".cubin", ".json", ".lock", ".tmp"})


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
