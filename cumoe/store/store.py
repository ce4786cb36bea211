"""KernelSpec to verified cubin: memory, then disk, then NVRTC."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from cumoe._settings import settings
from cumoe.errors import CacheWarning, CompileError
from cumoe.plan.spec import KernelSpec
from cumoe.store import disk, nvrtc
from cumoe.store import key as keys
from cumoe.store.flags import nvrtc_flags
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


@dataclass(frozen=True, slots=True)
class Report:
    """What `build` did."""

    cubins: tuple[Cubin, ...]
    failures: tuple[tuple[KernelSpec, CompileError], ...]
    seconds: float


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
        CompileError: NVRTC refused the kernel; carries its log.
        UnsupportedDeviceError: CuPy or NVRTC is not usable here.

    Warns:
        CacheWarning: once per process, if the cache folder cannot be written.
    """
    cubin = _memory.get(spec)
    if cubin is None:
        return _get_cold(spec)
    _counters.memory_hits += 1
    return cubin


def lookup(spec: KernelSpec) -> Cubin | None:
    """The cubin of `spec` if it is in memory or on disk; compiles nothing, waits for nobody."""
    cubin = _memory.get(spec)
    if cubin is not None:
        _counters.memory_hits += 1
        return cubin
    key = keys.digest(keys.fields(spec))
    data = disk.read(settings().cache_dir, key).data
    return None if data is None else _memory.setdefault(spec, _from_disk(spec, key, data))


def build(specs: Iterable[KernelSpec], jobs: int | None = None) -> Report:
    """Gets many kernels, `jobs` at a time (by default one per CPU); a failure stops no other.

    Raises:
        UnsupportedDeviceError: CuPy or NVRTC is not usable here.
    """
    start = time.perf_counter()
    unique = list(dict.fromkeys(specs))
    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        results = list(pool.map(_try_get, unique))
    return Report(
        cubins=tuple(r for r in results if isinstance(r, Cubin)),
        failures=tuple(
            (spec, r)
            for spec, r in zip(unique, results, strict=True)
            if isinstance(r, CompileError)
        ),
        seconds=time.perf_counter() - start,
    )


def stats() -> Counters:
    """A copy of the counters of this process."""
    return replace(_counters)


def forget() -> None:
    """Drops what this process holds, counters included; the disk keeps its entries."""
    global _counters
    _memory.clear()
    _done_once.clear()
    _counters = Counters()


def _try_get(spec: KernelSpec) -> Cubin | CompileError:
    try:
        return get(spec)
    except CompileError as error:
        return error


def _get_cold(spec: KernelSpec) -> Cubin:
    with _locks.setdefault(spec, threading.Lock()):
        cubin = _memory.get(spec)
        if cubin is None:
            cubin = _memory[spec] = _find_or_compile(spec)
        else:
            _count(memory_hits=1)
        return cubin


def _find_or_compile(spec: KernelSpec) -> Cubin:
    source = read_source(spec)  # read once: what is hashed is what is compiled
    fields = keys.fields(spec, source)
    key = keys.digest(fields)
    root = settings().cache_dir
    data = disk.read(root, key).data
    if data is not None:
        return _from_disk(spec, key, data)
    with disk.lock(root, key, spec.text):
        again = disk.read(root, key)
        if again.data is not None:
            return _from_disk(spec, key, again.data)
        if again.damage:
            _count(damaged=1)
            logger.warning("%s: %s; compiling", disk.entry_path(root, key), again.damage)
        data = _compile(spec, source)
        return Cubin(spec, key, data, _publish(root, key, data, fields))


def _from_disk(spec: KernelSpec, key: str, data: bytes) -> Cubin:
    _count(disk_hits=1)
    return Cubin(spec, key, data, disk.entry_path(settings().cache_dir, key))


def _compile(spec: KernelSpec, source: str) -> bytes:
    start = time.perf_counter()
    data = nvrtc.compile(source, f"{spec.stem}.cu", nvrtc_flags(spec.arch))
    seconds = time.perf_counter() - start
    _count(compiled=1, compile_s=seconds)
    logger.info("compiled %s in %.0f ms, %d bytes", spec.text, seconds * 1e3, len(data))
    return data


def _publish(root: Path, key: str, data: bytes, fields: keys.Fields) -> Path | None:
    try:
        path = disk.publish(root, key, data, fields)
    except OSError as error:
        if _first("unwritable"):
            warnings.warn(
                f"the kernel cache {root} cannot be written ({error}): kernels are compiled anew "
                "in every process; name a writable folder in CUMOE_CACHE_DIR",
                CacheWarning,
                stacklevel=2,
            )
        return None
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
