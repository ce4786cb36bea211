"""A kernel that only reads: the time that no kernel with the same input can beat by much."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ctypes import c_int64, c_uint64
from pathlib import Path
from typing import Any

CHUNK_BYTES = 32_768
CTAS_PER_SM = 4


def reader(inputs: Iterable[Iterable[Any]]) -> Callable[[int], None]:
    """``call(i)`` reads all tensors of the i-th input, up to a remainder below CHUNK_BYTES each."""
    import torch

    from cumoe.launch import driver
    from cumoe.plan.spec import LaunchSpec

    function, grid = _load()
    chunks, target, count = c_uint64(), c_uint64(), c_int64()
    launcher = driver.Launcher(function, LaunchSpec(grid, 256), (chunks, target, count))
    lists = [torch.tensor(_chunks(tensors), device="cuda") for tensors in inputs]
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")

    def call(i: int) -> None:
        chunks.value, target.value = lists[i].data_ptr(), sink.data_ptr()
        count.value = lists[i].numel()
        launcher.config.stream = torch.cuda.current_stream().cuda_stream
        driver.check(launcher.fire(), "read_only")

    return call


def _chunks(tensors: Iterable[Any]) -> list[int]:
    return [
        t.data_ptr() + at
        for t in tensors
        for at in range(0, t.numel() * t.element_size() - CHUNK_BYTES + 1, CHUNK_BYTES)
    ]


def _load() -> tuple[int, int]:
    from cumoe.launch.device import cupy, info
    from cumoe.store import nvrtc
    from cumoe.store.flags import nvrtc_flags

    source = Path(__file__).with_suffix(".cu").read_text()
    source = f"constexpr int CHUNK_BYTES = {CHUNK_BYTES};\n{source}"
    module = cupy().cuda.function.Module()
    module.load(nvrtc.compile(source, "read_only.cu", nvrtc_flags(info(0).arch)))
    _modules.append(module)
    return int(module.get_function("read_only").ptr), info(0).num_sms * CTAS_PER_SM


_modules: list[Any] = []
"""Loaded for the life of the process."""
