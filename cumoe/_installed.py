"""What is installed here: GPUs, driver, CuPy wheels, and the command that installs what fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

from cumoe.launch import device, nvml

CUPY_WHEELS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")


@cache
def machine() -> nvml.Machine | None:
    """`nvml.machine`, asked once per diagnosis."""
    return nvml.machine()


def cuda_devices() -> int:
    """GPUs that CUDA offers this process."""
    return device.device_count() if gpus() else 0


def gpus() -> tuple[nvml.Gpu, ...]:
    """GPUs that the driver shows."""
    found = machine()
    return () if found is None else found.gpus


def installed(wheels: tuple[str, ...], *, versions: bool = False) -> Iterator[str]:
    """Those of these wheels that are here."""
    for wheel in wheels:
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(wheel)
            yield f"{wheel} {version}" if versions else wheel


def install() -> str:
    """The command that installs what fits the driver."""
    driver = machine()
    major = 12 if driver is None or driver.cuda < 13000 else 13
    return f"pip install 'cumoe[cuda{major}]'"


def reinstall() -> str:
    """The command that replaces what is here by what fits."""
    wheels = " ".join(installed(CUPY_WHEELS))
    return f"pip uninstall -y {wheels}; {install()}" if wheels else install()


def libraries(name: str) -> list[str]:
    """Files of this process whose name begins so."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = {line.partition("/")[2] for line in maps.splitlines() if "/" in line}
    return sorted(f"/{path}" for path in paths if path.rpartition("/")[2].startswith(name))


def dotted(capability: tuple[int, int]) -> str:
    """``9.0`` for (9, 0)."""
    return ".".join(map(str, capability))
