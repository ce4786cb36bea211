"""Ops called with NumPy arrays, run on a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cumoe
from tests.helpers.backends import NumpyBackend
from tests.helpers.cases import BF16


def fused_experts_on(backend: NumpyBackend) -> Callable[..., np.ndarray]:
    """``fused_experts_fp8`` that takes NumPy arrays, or arrays that are on the backend already.

    The result goes to the given ``out``, or to one that held NaN.
    """

    def put(a: Any) -> Any:
        return backend.put(a) if isinstance(a, np.ndarray) else a

    def op(x: Any, *arrays: Any, **options: Any) -> np.ndarray:
        if "out" not in options:
            options["out"] = np.full(tuple(x.shape), np.nan, np.float32).astype(BF16)
        moved = {name: put(value) for name, value in options.items()}
        result = cumoe.fused_experts_fp8(put(x), *map(put, arrays), **moved)
        assert moved["out"] is None or result is moved["out"]
        return backend.bf16(result)

    return op
