"""The only file that touches NVRTC: source and flags to a cubin. Needs no GPU and no driver."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from typing import Any

from cumoe._settings import make_room_for_cupy
from cumoe.errors import CompileError, UnsupportedDeviceError

logger = logging.getLogger("cumoe")

_CUPY_WHEELS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
_INSTALL = "pip install 'cumoe[cuda12]' (or 'cumoe[cuda13]' with a driver for CUDA 13)"
_SHT_NOBITS = 8  # a section that takes no room in the file


def compile(source: str, name: str, flags: Sequence[str]) -> bytes:
    """Compiles one translation unit to a whole ELF cubin; warnings go to the log "cumoe".

    Args:
        source: the complete text; no include path is passed.
        name: what errors call it, as ``moe_sum.cu``.
        flags: `nvrtc_flags(arch)`.

    Raises:
        CompileError: NVRTC refused the source, or returned a cut cubin.
        UnsupportedDeviceError: CuPy or NVRTC is not usable here.
    """
    cubin, log = _run(source, name, flags, "getCUBIN")
    if log:
        logger.warning("NVRTC on %s: %s", name, log)
    return whole_elf(cubin, name)


def whole_elf(data: bytes, name: str) -> bytes:
    """`data` with the last byte that CuPy's getCUBIN loses; unchanged where nothing is missing.

    Raises:
        CompileError: more than that byte is missing, or it is not an ELF file.
    """
    mended = data + b"\0"
    try:
        size = max(_ends(mended))
    except struct.error as error:
        raise CompileError(_incomplete(data, name, "an unreadable header")) from error
    if size > len(mended) or not data.startswith(b"\x7fELF"):
        raise CompileError(_incomplete(data, name, f"{size} bytes in its header"))
    return mended if size == len(mended) else data


@cache
def nvrtc_build() -> str:
    """The exact compiler: its line ``Cuda compilation tools, release 12.9, V12.9.86``."""
    ptx = _run("", "version.cu", ("--no-cache",), "getPTX")[0].decode()  # as flags.py says
    lines = [line.strip("/ ") for line in ptx.splitlines()]
    return next((line for line in lines if line.startswith("Cuda compilation tools")), ptx)


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the NVRTC in use."""
    major, minor = _nvrtc().getVersion()
    return major, minor


def require_driver_supports(driver_version: int) -> None:
    """Refuses cubins that the driver is too old for.

    Args:
        driver_version: what ``cudaDriverGetVersion`` gives, as 12090.

    Raises:
        UnsupportedDeviceError: NVRTC is of a newer CUDA major version than the driver.
    """
    major, minor = nvrtc_version()
    if major > driver_version // 1000:
        has = f"{driver_version // 1000}.{driver_version % 1000 // 10}"
        raise UnsupportedDeviceError(
            f"NVRTC {major}.{minor} compiles for drivers of CUDA {major} or newer, and this driver "
            f"supports CUDA {has}: update the driver, or install the NVRTC of its own version "
            f"(pip install 'cumoe[cuda{driver_version // 1000}]') and see that no newer libnvrtc "
            "is found before it"
        )


def _run(source: str, name: str, flags: Sequence[str], getter: str) -> tuple[bytes, str]:
    """What `getter` returns after compiling, and the log."""
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(source, name, (), ())
    try:
        nvrtc.compileProgram(program, tuple(flags))
        result: bytes = getattr(nvrtc, getter)(program)
        return result, _log(program)
    except nvrtc.NVRTCError as error:
        version = ".".join(map(str, nvrtc.getVersion()))
        raise CompileError(
            f"NVRTC {version} cannot compile {name} with {' '.join(flags)} ({error}). The "
            f"library's kernels compile with the NVRTC of {_INSTALL}; if not, report this log:",
            _log(program),
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def _log(program: int) -> str:
    log: str = _nvrtc().getProgramLog(program)
    return log.strip("\0\n ")


@cache
def _nvrtc() -> Any:
    """CuPy's NVRTC module, with the library loaded."""
    make_room_for_cupy()
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()  # CuPy loads the library at its first call
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedDeviceError(
            f"NVRTC cannot be used: {type(error).__name__}: {error}. {_remedy(error)}"
        ) from error
    return nvrtc


def _remedy(error: Exception) -> str:
    installed = [name for name in _CUPY_WHEELS if _is_installed(name)]
    if len(installed) > 1:
        both = " and ".join(installed)
        return f"{both} overwrite each other's files: uninstall them all, then {_INSTALL}"
    if isinstance(error, OSError) and error.filename is not None:
        return "CuPy wants a writable folder when it is imported: name one in CUPY_CACHE_DIR"
    return f"Compiling needs CuPy and NVRTC, but no GPU: {_INSTALL}"


def _is_installed(wheel: str) -> bool:
    try:
        metadata.distribution(wheel)
    except metadata.PackageNotFoundError:
        return False
    return True


def _ends(elf: bytes) -> Iterator[int]:
    """Where each part of an ELF64 file ends, in bytes."""
    segments, sections = struct.unpack_from("<QQ", elf, 32)
    segment_size, num_segments, section_size, num_sections = struct.unpack_from("<4H", elf, 54)
    yield segments + num_segments * segment_size
    yield sections + num_sections * section_size
    for i in range(num_segments):
        offset, _, _, size = struct.unpack_from("<4Q", elf, segments + i * segment_size + 8)
        yield offset + size
    for i in range(num_sections):
        kind, _, _, offset, size = struct.unpack_from("<I4Q", elf, sections + i * section_size + 4)
        yield offset + (size if kind != _SHT_NOBITS else 0)


def _incomplete(data: bytes, name: str, wanted: str) -> str:
    return (
        f"NVRTC returned no complete cubin for {name}: {len(data)} bytes, but {wanted}; "
        f"reinstall CuPy and NVRTC: {_INSTALL}"
    )
