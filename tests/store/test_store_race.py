"""Real processes on one cold cache: released together, without locks, killed."""

from __future__ import annotations

import hashlib
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cumoe.plan.spec import kernel_spec
from cumoe.store import disk, key, store
from tests.helpers import child

SPECS = [kernel_spec("tiny", "sm_90a", A=a) for a in (5, 6, 7)]
SPEC = SPECS[0]

PRELUDE = """
import dataclasses, fcntl, hashlib, os, sys, threading, time
from pathlib import Path
from cumoe.plan.spec import kernel_spec
from cumoe.store import disk, key, locks, nvrtc, source, store
from tests.helpers.child import at_barrier, report
source.kernels_root = lambda: Path(sys.argv[1])
SPEC = kernel_spec("tiny", "sm_90a", A=5)
CACHE = Path(os.environ["CUMOE_CACHE_DIR"])
"""


def _start(code: str, kernels: Path, cache: Path, cwd: Path | None = None) -> child.Child[str]:
    return child.start(PRELUDE + code, kernels, cwd=cwd, CUMOE_CACHE_DIR=str(cache))


def _race(kernels: Path, cache: Path, *, with_locks: bool) -> list[dict[str, Any]]:
    """What 64 processes report that wanted three kernels at once, each in a folder of its own."""
    scene = child.start(
        "from tests.store.scenes import race; race()",
        *(kernels, 64, with_locks),
        CUMOE_CACHE_DIR=str(cache),
        OPENBLAS_NUM_THREADS="1",
    )
    try:
        racers: list[dict[str, Any]] = child.result(scene)["racers"]
    finally:
        child.end(scene)
    assert len(racers) == 64
    return racers


def _check_cache(cache: Path, racers: list[dict[str, Any]]) -> None:
    """A whole entry of each kernel with the bytes that all processes had, nothing temporary."""
    files = set()
    for spec in SPECS:
        name = key.digest(key.fields(spec))
        data = disk.read(cache, name).data
        assert data is not None
        assert {r["cubins"][spec.text] for r in racers} == {hashlib.sha256(data).hexdigest()}
        files |= {f"{name}.cubin", f"{name}.json", f"{name}.lock"}
    assert {path.name for path in cache.rglob("*") if path.is_file()} == files


def test_64_processes_compile_each_kernel_once(kernels: Path, cache: Path) -> None:
    racers = _race(kernels, cache, with_locks=True)
    assert sum(r["compiled"] for r in racers) == 3
    assert sum(r["disk_hits"] for r in racers) == 64 * 3 - 3
    assert sum(r["damaged"] for r in racers) == 0
    _check_cache(cache, racers)


def test_64_processes_without_locks_agree(kernels: Path, cache: Path) -> None:
    racers = _race(kernels, cache, with_locks=False)
    assert all(r["compiled"] + r["disk_hits"] == 3 for r in racers)
    assert sum(r["compiled"] for r in racers) >= 64  # else the race did not happen
    assert sum(r["damaged"] for r in racers) == 0
    _check_cache(cache, racers)


def test_a_killed_lock_holder_holds_nobody_up(kernels: Path, cache: Path) -> None:
    holder = _start(
        "with locks.compiling(disk.entry_path(CACHE, key.digest(key.fields(SPEC))), 'k') as held:\n"
        "    assert held\n"
        "    at_barrier()\n",
        kernels,
        cache,
    )
    waiter = _start(
        "nvrtc.nvrtc_build()\n"
        "wait = locks._wait\n"
        "def tell(*args):\n"
        "    print('waiting', flush=True)\n"
        "    return wait(*args)\n"
        "locks._wait = tell\n"
        "at_barrier()\n"
        "store.get(SPEC)\n"
        "report(at=time.time(), compiled=store.stats().compiled)\n",
        kernels,
        cache,
    )
    try:
        child.wait_ready(holder)
        child.wait_ready(waiter)
        child.release([waiter])
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "waiting\n"
        time.sleep(0.2)
        assert waiter.poll() is None
        killed_at = time.time()
        holder.send_signal(signal.SIGKILL)
        facts = child.result(waiter)
    finally:
        child.end(holder)
        child.end(waiter)
    assert facts["compiled"] == 1
    assert 0 <= facts["at"] - killed_at < 3


def test_a_process_killed_while_it_writes_leaves_a_stray_only(
    kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = _start(
        "replace = os.replace\n"
        "def stop_before_the_cubin(a, b):\n"
        "    if str(b).endswith('.cubin'):\n"
        "        at_barrier()\n"
        "    replace(a, b)\n"
        "os.replace = stop_before_the_cubin\n"
        "store.get(SPEC)\n",
        kernels,
        cache,
    )
    try:
        child.wait_ready(writer)
    finally:
        child.end(writer)
    assert len(list(cache.rglob("*.tmp"))) == 1
    assert store.lookup(SPEC) is None
    monkeypatch.setattr(disk, "STRAY_AGE_S", -1.0)  # every stray is old
    assert store.get(SPEC).data.startswith(b"\x7fELF")
    assert store.stats().compiled == 1
    assert store.stats().damaged == 0
    assert list(cache.rglob("*.tmp")) == []


def test_a_child_forked_during_a_compile_is_not_locked_out(kernels: Path, cache: Path) -> None:
    parent = _start(
        "compiling, go_on = threading.Event(), threading.Event()\n"
        "compiler = nvrtc.compile\n"
        "def stuck(*args):\n"
        "    compiling.set()\n"
        "    go_on.wait()\n"
        "    return compiler(*args)\n"
        "nvrtc.compile = stuck\n"
        "locks.LOCK_TIMEOUT_S = 0.2\n"
        "thread = threading.Thread(target=store.get, args=(SPEC,))\n"
        "thread.start()\n"
        "compiling.wait()\n"
        "import warnings\n"
        "warnings.simplefilter('ignore')  # a fork beside threads is what this is about\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    nvrtc.compile = compiler\n"
        "    store.get(SPEC)\n"
        "    os._exit(7)\n"
        "deadline = time.monotonic() + 20\n"
        "ended, status = 0, 0\n"
        "while not ended and time.monotonic() < deadline:\n"
        "    ended, status = os.waitpid(pid, os.WNOHANG)\n"
        "    time.sleep(0.02)\n"
        "if not ended:\n"
        "    os.kill(pid, 9)\n"
        "go_on.set()\n"
        "thread.join()\n"
        "report(ended=bool(ended), code=os.waitstatus_to_exitcode(status))\n",
        kernels,
        cache,
    )
    try:
        assert child.result(parent) == {"ended": True, "code": 7}
    finally:
        child.end(parent)
