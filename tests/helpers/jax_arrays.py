"""JAX on the CPU or a GPU: imported here only, so that its settings come before it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too

import jax


def put(a: np.ndarray, platform: str = "cpu") -> jax.Array:
    """A JAX array with the values and the dtype of ``a``."""
    return jax.device_put(a, jax.devices(platform)[0])


def has_gpu() -> bool:
    """Whether this JAX has a CUDA backend and a device for it."""
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def host_bytes(a: Any) -> np.ndarray:
    """A JAX array's bytes as NumPy has them."""
    return np.ascontiguousarray(np.asarray(a)).view(np.uint8)
