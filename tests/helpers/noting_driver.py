"""A GPU whose driver takes notes, and tensors of the CPU that pass for its own."""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace
from typing import Any

import torch

from cumoe.arrays import exchange
from cumoe.launch import memory
from cumoe.ops import _op

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


class Gpu:
    """Answers every call with success, or with `answer` at a launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, int, list[int]]] = []
        """Entry, stream, and every argument that is no float."""
        self.entries: list[str] = []
        self.answer = self.current = self.stream = self.cupy_stream = 0
        self.capturing: set[int] = set()
        """Streams."""
        self.modes = [0]
        """Of capture, as the thread has exchanged them: 0 is global, 2 relaxed."""

    def load(self, kernel: Any) -> Any:
        def get_function(entry: str) -> Any:
            self.entries.append(entry)
            return SimpleNamespace(ptr=len(self.entries))

        return SimpleNamespace(get_function=get_function)

    def cuLaunchKernelEx(self, config, function, places, extra) -> int:
        entry = self.entries[function.value - 1]
        count = len(places) - 3 * entry.startswith("silu")
        words = [ctypes.c_int64.from_address(place).value for place in places[:count]]
        self.launches.append((entry, config._obj.stream or 0, words))
        return self.answer

    def cuStreamIsCapturing(self, stream, status) -> int:
        status._obj.value = stream.value in self.capturing
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode) -> int:
        self.modes.append(mode._obj.value)
        mode._obj.value = self.modes[-2]
        return 0

    def cuGetErrorName(self, code, name) -> None:
        name._obj.value = b"CUDA_ERROR_LAUNCH_FAILED"

    def __getattr__(self, name):
        return lambda *arguments: 0


def forget() -> None:
    """What was remembered of CPU tensors is of another device now."""
    exchange._torch_facts.cache_clear()
    _op._thread.forget()


def made(output: memory.Output) -> torch.Tensor:
    return tensor(*output.shape, dtype=memory._torch_dtype(output.dtype))


def tensor(*shape: int, dtype: torch.dtype = BF16, start: int = 0) -> torch.Tensor:
    """At ``start`` bytes past a multiple of 256."""
    size = math.prod(shape) * dtype.itemsize
    raw = torch.zeros(size + 512, dtype=torch.uint8)
    first = -raw.data_ptr() % 256 + start
    return raw[first : first + size].view(dtype).view(shape)


def quantized(*shape: int) -> dict[str, torch.Tensor]:
    return {
        "out": tensor(*shape, dtype=E4M3),
        "out_scale": tensor(shape[0], shape[1] // 128, dtype=torch.float32),
    }


def experts(x: Any, topk: int = 2) -> dict[str, Any]:
    """A call on [M, 256] tokens and eight experts."""
    slots = x.shape[0], topk
    return {
        "x": x, "w1": tensor(8, 256, 256, dtype=E4M3),
        "w2": tensor(8, 256, 128, dtype=E4M3), "topk_weights": tensor(*slots, dtype=torch.float32),
        "topk_ids": tensor(*slots, dtype=torch.int32),
        "w1_scale": tensor(8, 2, 2, dtype=torch.float32),
        "w2_scale": tensor(8, 2, 1, dtype=torch.float32),
    }  # fmt: skip
