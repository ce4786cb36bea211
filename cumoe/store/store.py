"""KernelSpec to verified cubin: memory, then the folders on disk, then NVRTC."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from cumoe._settings import settings
from cumoe.errors import CacheWarning
from cumoe.plan.spec import KernelSpec
from cumoe.store import disk, locks, nvrtc
from cumoe.store import key as keys
from cumoe.store.flags import nvrtc_flags
from cumoe.store.missing import not_built
from cumoe.store.source import read_source

logger = logging.getLogger("cumoe")


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled kernel whose bytes were verified, or made, by this process."""

    spec: KernelSpec
    key: str
    """64 hex digits: everything that the bytes depend on."""
    data: bytes
    """The ELF file."""
    path: Path | None
    """The same bytes on disk; None where the cache cannot be written."""


class _Wanted(NamedTuple):
    """A kernel, and the text that NVRTC gets for it: read once, so what is hashed is compiled."""

    spec: KernelSpec
    source: str
    fields: keys.Fields
    key: str


@dataclass(slots=True)
class Counters:
    """What this process did so far."""

    compiled: int = 0
    disk_hits: int = 0
    memory_hits: int = 0
    damaged: int = 0
    """Entries on disk that failed verification and were compiled anew."""
    compile_s: float = 0.0
    """Seconds in NVRTC, added up over threads."""


_memory: dict[KernelSpec, Cubin] = {}
_locks: dict[KernelSpec, threading.Lock] = {}
_counters = Counters()
_counting = threading.Lock()
_done_once: set[str] = set()


def _renew_locks() -> None:
    """A fork while another thread compiles hands the child locks that nobody there releases."""
    global _counting
    _locks.clear()
    _counting = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def get(spec: KernelSpec) -> Cubin:
    """The cubin of `spec`, compiled if it is nowhere yet; from many threads too, once.

    Raises:
        KernelNotBuiltError: it is nowhere yet, and CUMOE_DISABLE_JIT=1.
        CompileError: NVRTC refused the kernel; carries its log.
        UnsupportedDeviceError: CuPy or NVRTC is not usable here.

    Warns:
        CacheWarning: once per process, if the cache folder cannot be written.
    """
    cubin = _memory.get(spec)
    if cubin is None:
        return _get_cold(spec, may_compile=not settings().disable_jit)
    _counters.memory_hits += 1
    return cubin


def lookup(spec: KernelSpec) -> Cubin | None:
    """The cubin of `spec` if it is in memory or on disk; compiles nothing, waits for nobody."""
    cubin = _memory.get(spec)
    if cubin is not None:
        _counters.memory_hits += 1
        return cubin
    found, _ = _search(_want(spec))
    return None if found is None else _memory.setdefault(spec, found)


def build(spec: KernelSpec) -> Cubin:
    """`get`, which compiles in spite of CUMOE_DISABLE_JIT: that is for what nobody asked to build.

    Raises:
        CompileError: NVRTC refused the kernel; carries its log.
        UnsupportedDeviceError: CuPy or NVRTC is not usable here.
    """
    return _get_cold(spec, may_compile=True)


def roots() -> tuple[Path, ...]:
    """The folders of compiled kernels in the order of search; only the first is ever written."""
    now = settings()
    return tuple(dict.fromkeys([now.cache_dir, *now.cache_path]))


def stats() -> Counters:
    """A copy of the counters of this process."""
    return replace(_counters)


def forget() -> None:
    """Drops what this process holds, counters included; the disk keeps its entries."""
    global _counters
    _memory.clear()
    locks.let_go()
    _done_once.clear()
    _counters = Counters()


def _get_cold(spec: KernelSpec, *, may_compile: bool) -> Cubin:
    with _locks.setdefault(spec, threading.Lock()):
        cubin = _memory.get(spec)
        if cubin is None:
            cubin = _memory[spec] = _find_or_compile(_want(spec), may_compile)
        else:
            _count(memory_hits=1)
        return cubin


def _want(spec: KernelSpec) -> _Wanted:
    source = read_source(spec)
    fields = keys.fields(spec, source)
    return _Wanted(spec, source, fields, keys.digest(fields))


def _find_or_compile(wanted: _Wanted, may_compile: bool) -> Cubin:
    found, damages = _search(wanted)
    if found is not None:
        return found
    if not may_compile:
        where = " or ".join(map(str, roots()))
        reason = f"not in {where}, and CUMOE_DISABLE_JIT=1 forbids compiling"
        raise not_built([wanted.spec], "; ".join([reason, *damages]))
    with _alone(wanted):
        found, damages = _search(wanted)
        return found or _compile_and_publish(wanted, damages)


def _alone(wanted: _Wanted) -> AbstractContextManager[object]:
    """The lock that lets one process compile; useless where the result cannot be handed over."""
    if "unwritable" in _done_once:
        return nullcontext()
    return locks.compiling(disk.entry_path(settings().cache_dir, wanted.key), wanted.spec.text)


def _search(wanted: _Wanted) -> tuple[Cubin | None, list[str]]:
    """The first whole entry in the folders, and what is wrong with entries before it."""
    damages: list[str] = []
    for root in roots():
        path = disk.entry_path(root, wanted.key)
        own = root == settings().cache_dir
        if own and not locks.hold(path):
            continue
        data, damage = disk.read(root, wanted.key)
        if data is not None:
            return _from_disk(wanted, data, path, own=own), damages
        if damage:
            damages.append(f"{path}: {damage}")
    return None, damages


def _from_disk(wanted: _Wanted, data: bytes, path: Path, *, own: bool) -> Cubin:
    _count(disk_hits=1)
    if own:
        disk.touch(path)
    return Cubin(wanted.spec, wanted.key, data, path)


def _compile_and_publish(wanted: _Wanted, damages: list[str]) -> Cubin:
    for damage in damages:
        _count(damaged=1)
        logger.warning("%s; compiling", damage)
    data = _compile(wanted)
    return Cubin(wanted.spec, wanted.key, data, _publish(wanted, data))


def _compile(wanted: _Wanted) -> bytes:
    spec = wanted.spec
    start = time.perf_counter()
    data = nvrtc.compile(wanted.source, f"{spec.stem}.cu", nvrtc_flags(spec.arch))
    seconds = time.perf_counter() - start
    _count(compiled=1, compile_s=seconds)
    logger.info("compiled %s in %.0f ms, %d bytes", spec.text, seconds * 1e3, len(data))
    return data


def _publish(wanted: _Wanted, data: bytes) -> Path | None:
    root = settings().cache_dir
    try:
        path = disk.publish(root, wanted.key, data, wanted.fields)
    except OSError as error:
        if _first("unwritable"):
            warnings.warn(
                f"the kernel cache {root} cannot be written ({error}): kernels are compiled anew "
                "in every process; name a writable folder in CUMOE_CACHE_DIR",
                CacheWarning,
                stacklevel=2,
            )
        return None
    locks.hold(path)
    if _first("sweep"):
        disk.sweep(root)
    return path


def _first(what: str) -> bool:
    """Whether this process has not asked for `what` before."""
    with _counting:
        first = what not in _done_once
        _done_once.add(what)
    return first


def _count(**amounts: float) -> None:
    with _counting:
        for name, amount in amounts.items():
            setattr(_counters, name, getattr(_counters, name) + amount)
