"""Where a measurement was made: stored with every record."""

from __future__ import annotations

import datetime
import platform
from typing import Any

from bench.digest import kernels_digest


def environment() -> dict[str, Any]:
    """Date, device, driver, compilers and libraries, and the digests of what ran."""
    import cupy
    import torch

    from cumoe import __version__
    from cumoe.store.nvrtc import nvrtc_build

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": properties["name"].decode(),
        "driver": _driver_version(),
        "cuda_driver_api": runtime.driverGetVersion(),
        "nvrtc": nvrtc_build(),
        "cupy": cupy.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cumoe": __version__,
        "kernels_digest": kernels_digest(),
    }


def _driver_version() -> str:
    import subprocess

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
