"""Compiling ahead: every kernel of a model into the cache, with or without a GPU."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from cumoe._settings import settings
from cumoe.errors import ArgumentError, CacheWarning, CompileError
from cumoe.models import Selection, selected_layers
from cumoe.plan.spec import KernelSpec, parse_spec

_UNDEFINED = re.compile(r'identifier "([A-Z][A-Z0-9_]*)" is undefined')


@dataclass(frozen=True, slots=True)
class BuiltKernel:
    """What became of one kernel."""

    name: str
    """`KernelSpec.text`."""
    state: str
    """``built``, ``cached`` or ``failed``."""
    num_bytes: int
    """0 where nothing was compiled: a kernel that only could not be saved has its size here."""
    seconds: float
    log: str = ""
    """Why it failed."""


@dataclass(frozen=True, slots=True)
class PrebuildReport:
    """What `prebuild` did; ``ok`` where every kernel lies in the cache now."""

    cache_dir: Path
    archs: tuple[str, ...]
    kernels: tuple[BuiltKernel, ...]
    """Sorted by name."""
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return self.count("failed") == 0

    @property
    def num_bytes(self) -> int:
        """Size of all cubins."""
        return sum(kernel.num_bytes for kernel in self.kernels)

    @property
    def is_compiled(self) -> bool:
        """Whether NVRTC took every kernel, saved or not."""
        return all(kernel.num_bytes for kernel in self.kernels)

    @property
    def causes(self) -> tuple[str, ...]:
        """Why kernels failed: each cause once, after the name of its first kernel."""
        names: dict[str, list[str]] = {}
        for kernel in self.kernels:
            if kernel.state == "failed":
                names.setdefault(kernel.log, []).append(kernel.name)
        return tuple(f"{_first_of(each)}: {log}" for log, each in names.items())

    def count(self, state: str) -> int:
        """Number of kernels that were ``built``, ``cached`` or ``failed``."""
        return sum(kernel.state == state for kernel in self.kernels)


def _first_of(names: Sequence[str]) -> str:
    more = len(names) - 1
    return names[0] + (f" and {more} more kernel{'s' if more > 1 else ''}" if more else "")


def prebuild(
    *,
    kernel: str | Sequence[str] = (),
    everything: bool = False,
    arch: str | Sequence[str] | None = None,
    jobs: int | None = None,
    progress: Callable[[BuiltKernel, int], None] | None = None,
    **selection: Unpack[Selection],
) -> PrebuildReport:
    """Compiles every kernel that a model's layers reach, whatever the number of tokens.

    Call it before worker processes are started: they then only read. It needs CuPy and NVRTC, but
    no GPU, and leaves CUDA uninitialised, so a process may fork after it.

    Args:
        model, config, hidden, intermediate, experts, top_k, swiglu_limit, swiglu_alpha,
            swiglu_beta, scale_format, tp, ep, pad: which layers, see `cumoe.models.Selection`.
        kernel: names of single kernels, as errors and `cumoe cache list` print them.
        everything: also what serving engines do not use: int64 ids, bf16 and fp16 router weights,
            unaligned rows, and the other ops called alone.
        arch: ``sm_90a`` and the like; by default those of the GPUs present, else CUMOE_ARCH, else
            sm_90a.
        jobs: kernels compiled at a time; by default one per CPU.
        progress: called with each kernel that is done, and the number of all.

    Returns: PrebuildReport. A kernel that fails stops no other: look at ``ok``.

    Raises:
        ArgumentError: an unknown name, sizes that no op takes, cannot be split or need padding,
            nothing to do.
        CheckpointError: a config.json without the sizes of experts.
        UnsupportedDeviceError: CuPy or NVRTC cannot be used here.

    Example:
        >>> import cumoe
        >>> report = cumoe.prebuild(hidden=256, intermediate=128, experts=4, top_k=2)
        >>> report.ok, report.count("failed")
        (True, 0)
    """
    start = time.perf_counter()
    archs = _archs(arch)
    specs = [*_named(kernel), *selected_specs(selection, archs, everything=everything)]
    if not specs:
        raise ArgumentError("prebuild: want a model, a config, sizes or a kernel, got none of them")
    done = []
    unique = tuple(dict.fromkeys(specs))
    for result in _build_all(unique, jobs or len(os.sched_getaffinity(0))):
        done.append(result)
        if progress is not None:
            progress(result, len(unique))
    return PrebuildReport(
        settings().cache_dir,
        tuple(dict.fromkeys(spec.arch for spec in specs)),
        tuple(sorted(done, key=lambda result: result.name)),
        time.perf_counter() - start,
    )


def selected_specs(
    selection: Selection, archs: Iterable[str], *, everything: bool = False
) -> list[KernelSpec]:
    """The kernels of a selection of layers, for each architecture."""
    from cumoe.plan import enumerate as plans

    steps = plans.all_steps if everything else plans.serving_steps
    layers = selected_layers(selection)
    return [
        spec
        for arch in archs
        for layer in layers
        for spec in plans.specs_of(steps(plans.device_of(arch), layer))
    ]


def _archs(arch: str | Sequence[str] | None) -> tuple[str, ...]:
    if arch is None or arch == ():
        return default_archs()
    return tuple(
        _known(one, "arch (--arch)") for one in (arch.split(",") if isinstance(arch, str) else arch)
    )


def _known(arch: str, named: str) -> str:
    from cumoe.plan.device import ARCHITECTURES

    if arch in ARCHITECTURES.values():
        return arch
    known = ", ".join(ARCHITECTURES.values())
    raise ArgumentError(f"{named}: want one of {known}, got {arch!r}")


def default_archs() -> tuple[str, ...]:
    """The architectures of the GPUs present that have one, else CUMOE_ARCH, else sm_90a."""
    from cumoe.launch.nvml import machine
    from cumoe.plan.device import ARCHITECTURES

    present = machine()
    gpus = () if present is None else present.gpus
    found = [ARCHITECTURES[gpu.capability] for gpu in gpus if gpu.capability in ARCHITECTURES]
    return tuple(dict.fromkeys(found)) or (_known(settings().arch or "sm_90a", "CUMOE_ARCH"),)


def _named(kernel: str | Sequence[str]) -> list[KernelSpec]:
    return [parse_spec(text) for text in ((kernel,) if isinstance(kernel, str) else kernel)]


def _build_all(specs: Sequence[KernelSpec], jobs: int) -> Iterator[BuiltKernel]:
    """Threads are enough: NVRTC works without the interpreter's lock."""
    with warnings.catch_warnings(), ThreadPoolExecutor(jobs) as pool:
        warnings.simplefilter("ignore", CacheWarning)  # each kernel that is not saved says so
        futures = [pool.submit(_build, spec) for spec in specs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _build(spec: KernelSpec) -> BuiltKernel:
    start = time.perf_counter()
    state, size, log = _find_or_compile(spec)
    return BuiltKernel(spec.text, state, size, time.perf_counter() - start, log)


def _find_or_compile(spec: KernelSpec) -> tuple[str, int, str]:
    """State, size and log."""
    from cumoe.store import store

    try:
        cubin, state = store.lookup(spec), "cached"
        if cubin is None:
            cubin, state = store.build(spec), "built"
    except CompileError as error:
        return "failed", 0, _why(error)
    if cubin.path is None:
        return "failed", len(cubin.data), _unsaved()
    return state, len(cubin.data), ""


def _unsaved() -> str:
    return (
        f"compiled, but {settings().cache_dir} cannot be written; name a writable folder in "
        "CUMOE_CACHE_DIR"
    )


def _why(error: CompileError) -> str:
    """NVRTC's log, or one line where the kernel's name lacks constants."""
    missing = dict.fromkeys(_UNDEFINED.findall(error.log))
    if not missing:
        return str(error)
    return (
        f"NVRTC misses {', '.join(missing)}: want the constants of this kernel in its name, as "
        "`cumoe cache list` or the message that asked for it has them"
    )
