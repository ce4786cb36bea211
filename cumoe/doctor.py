"""Whether kernels can be compiled, cached and run here; if not, why, and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from cumoe._installed import (
    CUPY_WHEELS,
    cuda_devices,
    dotted,
    gpus,
    install,
    installed,
    libraries,
    machine,
    reinstall,
)
from cumoe._settings import make_room_for_cupy, settings
from cumoe.errors import CumoeError, UnsupportedDeviceError
from cumoe.launch import device
from cumoe.plan.device import ARCHITECTURES, DeviceInfo
from cumoe.plan.enumerate import Layer, serving_steps
from cumoe.store import nvrtc
from cumoe.store.info import cache_info, write_error

_ONE_KERNEL_OPS = ("per_token_group_quant_fp8", "silu_and_mul_quant_fp8", "moe_align_block_size")
_REFERENCE = "NumPy reference, on CPU arrays"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong here."""

    problem: str
    remedy: str
    is_fatal: bool = True
    """Whether something would not work; else it works, but not as well as it could."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that `cumoe doctor` prints."""

    facts: tuple[tuple[str, str], ...]
    """Name and value, in the order in which they are best read."""
    ops: tuple[tuple[str, str], ...]
    """What would run for each public op."""
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether everything would work."""
        return not any(finding.is_fatal for finding in self.findings)


def diagnose() -> Diagnosis:
    """Looks at GPU, driver, CuPy, NVRTC and cache; compiles nothing and launches nothing."""
    machine.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's own of two wheels: found here too
        findings = tuple(_findings())
        return Diagnosis(tuple(_facts()), tuple(_ops()), findings)


def _findings() -> Iterator[Finding]:
    try:
        settings()
    except CumoeError as error:
        yield Finding(str(error), "Correct the environment variable.")
        return
    for check in (two_cupy_wheels, cupy_does_not_import, nvrtc_is_missing, nvrtc_is_too_new):
        finding = check()
        if finding is not None:
            yield finding
            break  # what follows would only tell of the same fault again
    for check in _SEPARATE_CHECKS:
        finding = check()
        if finding is not None:
            yield finding


def two_cupy_wheels() -> Finding | None:
    """Several CuPy wheels, which overwrite each other's files."""
    wheels = list(installed(CUPY_WHEELS))
    if len(wheels) < 2:
        return None
    return Finding(
        f"{' and '.join(wheels)} are installed together and overwrite each other's files.",
        f"pip uninstall -y {' '.join(wheels)}; {install()}",
    )


def cupy_does_not_import() -> Finding | None:
    """No CuPy, a broken one, or no folder that it may write."""
    try:
        device.cupy()
    except UnsupportedDeviceError as error:
        return _why_no_cupy(error)
    return None


def _why_no_cupy(error: UnsupportedDeviceError) -> Finding:
    cause = error.__cause__
    if isinstance(cause, OSError) and not isinstance(cause, ImportError):
        return Finding(
            f"CuPy cannot be imported: it wants to make its cache folder ({cause}).",
            "Name a writable folder in CUPY_CACHE_DIR before Python starts.",
        )
    if not list(installed(CUPY_WHEELS)):
        return Finding(
            "CuPy is not installed: kernels can be neither compiled nor run.",
            install(),
            is_fatal=bool(gpus()),  # without a GPU the reference computes everything
        )
    return Finding(f"CuPy is installed but cannot be imported ({cause}).", reinstall())


def cupy_has_no_folder() -> Finding | None:
    """A home in which CuPy cannot make its cache folder; cumoe gives it a temporary one."""
    error = make_room_for_cupy()
    if error is None:
        return None
    return Finding(
        f"CuPy cannot make its cache folder ({error}): where other code imports it first, that "
        "import fails.",
        "Name a writable folder in CUPY_CACHE_DIR before Python starts.",
        is_fatal=False,
    )


def nvrtc_is_missing() -> Finding | None:
    """No NVRTC library that CuPy finds and can use."""
    try:
        nvrtc.nvrtc_build()
    except CumoeError as error:
        return Finding(f"NVRTC cannot be used: {error.__cause__ or error}.", reinstall())
    return None


def nvrtc_is_too_new() -> Finding | None:
    """An NVRTC whose cubins the driver does not take."""
    driver = machine()
    if driver is None:
        return None
    try:
        nvrtc.require_driver_supports(driver.cuda)
    except UnsupportedDeviceError as error:
        where = ", ".join(libraries("libnvrtc.")) or "a place that /proc/self/maps does not show"
        return Finding(
            f"{str(error).partition(':')[0]} (CuPy found it in {where}).",
            f"Update the driver; or {install()}, and see that no newer libnvrtc comes before it "
            f"in LD_LIBRARY_PATH or from another wheel.",
        )
    return None


def gpu_is_unknown() -> Finding | None:
    """A GPU that no kernel is written for."""
    for gpu in gpus():
        if gpu.capability not in ARCHITECTURES:
            known = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
            return Finding(
                f"{gpu.name} has compute capability {dotted(gpu.capability)}; kernels are written "
                f"for {known}.",
                "Move arrays to the CPU to have them computed by the NumPy reference.",
            )
    return None


def gpu_is_hidden() -> Finding | None:
    """GPUs that the driver shows and CUDA does not."""
    if not gpus() or cuda_devices():
        return None
    return Finding(
        f"CUDA offers this process none of the GPUs that the driver shows "
        f"({', '.join(gpu.name for gpu in gpus())}).",
        "See whether CUDA_VISIBLE_DEVICES hides them, or a finding above explains it.",
        is_fatal=False,
    )


def cache_cannot_be_written() -> Finding | None:
    """A cache folder in which nothing can be kept."""
    root = settings().cache_dir
    error = write_error(root)
    if error is None:
        return None
    return Finding(
        f"The cache folder {root} cannot be written ({error}): kernels that are in no other folder "
        f"are compiled anew in every process.",
        "Name a writable folder in CUMOE_CACHE_DIR, or make this one writable.",
        # An image may bring its kernels in a read-only folder: then nothing has to be written.
        is_fatal=not any(folder.kernels for folder in cache_info().folders[1:]),
    )


def arch_is_unknown() -> Finding | None:
    """A CUMOE_ARCH that no kernel can be compiled for."""
    arch = settings().arch
    if arch is None or arch in ARCHITECTURES.values():
        return None
    known = ", ".join(ARCHITECTURES.values())
    return Finding(
        f"CUMOE_ARCH: wanted one of {known}, got {arch!r}.", "Set one of them, or unset it."
    )


def cache_path_is_missing() -> Finding | None:
    """Read-only folders that are not there: their kernels are compiled or missed."""
    missing = [str(folder) for folder in settings().cache_path if not folder.is_dir()]
    if not missing:
        return None
    return Finding(
        f"CUMOE_CACHE_PATH names what is no folder: {', '.join(missing)}.",
        "Correct the path, or leave it out.",
        is_fatal=False,
    )


_SEPARATE_CHECKS = (
    cupy_has_no_folder,
    gpu_is_unknown,
    gpu_is_hidden,
    arch_is_unknown,
    cache_cannot_be_written,
    cache_path_is_missing,
)


def _facts() -> Iterator[tuple[str, str]]:
    driver = machine()
    for gpu in gpus():
        yield "GPU", f"{gpu.name}, compute capability {dotted(gpu.capability)}"
    if not gpus():
        yield "GPU", "none"
    cuda = "" if driver is None else f"{driver.cuda // 1000}.{driver.cuda % 1000 // 10}"
    yield "driver", "none" if driver is None else f"{driver.driver}, up to CUDA {cuda}"
    yield "CuPy", ", ".join(installed(CUPY_WHEELS, versions=True)) or "not installed"
    yield "NVRTC", _nvrtc()
    yield from _cache_facts()


def _nvrtc() -> str:
    try:
        build = nvrtc.nvrtc_build().rpartition(", ")[2]
    except CumoeError:
        return "none"
    return ", ".join([build, *libraries("libnvrtc.")])


def _cache_facts() -> Iterator[tuple[str, str]]:
    try:
        info = cache_info()
    except CumoeError:  # an environment variable that is a finding
        return
    for index, folder in enumerate(info.folders):
        writable = index == 0 and write_error(folder.path) is None
        yield (
            "cache" if index == 0 else "read-only cache",
            f"{folder.path}, {folder.kernels} kernels, {folder.num_bytes:,} bytes"
            + (", writable" if writable else ", not writable" if index == 0 else ""),
        )


def _ops() -> Iterator[tuple[str, str]]:
    stems = _fused_stems()
    for op in _ONE_KERNEL_OPS:
        yield op, f"kernel on {_archs()}; {_REFERENCE}" if stems else _REFERENCE
    kernels = f"kernels {', '.join(stems)} on {_archs()}; " if stems else ""
    yield "fused_experts_fp8", f"{kernels}{_REFERENCE}"


def _fused_stems() -> list[str]:
    """The kernels of the whole layer on the first GPU that runs any; empty where none does."""
    layer = Layer(K=512, N=256, num_experts=8, num_local_experts=8, topk=2)
    for info in _devices():
        return sorted({step.kernel.stem for step in serving_steps(info, layer)})
    return []


def _archs() -> str:
    return ", ".join(dict.fromkeys(info.arch for info in _devices()))


def _devices() -> Iterator[DeviceInfo]:
    """The GPUs of this process that kernels run on."""
    for ordinal in range(cuda_devices()):
        with suppress(UnsupportedDeviceError):
            yield device.info(ordinal)
