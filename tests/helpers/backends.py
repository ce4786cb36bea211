"""The four ways in which a caller holds arrays, behind one small interface.

A test written against a Backend runs on the NumPy reference (``numpy``, ``torch-cpu``) and on the
kernels (``cupy``, ``torch-cuda``). NumPy arrays with ml_dtypes element types are the common tongue.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)


class NumpyBackend:
    name = "numpy"
    is_gpu = False

    def put(self, a: np.ndarray) -> Any:
        """The caller's array with the values, the dtype and the strides of ``a``."""
        return a

    def raw(self, a: Any) -> np.ndarray:
        """The array as NumPy; fp8 and bf16 come as bytes where the framework has no such type."""
        return np.asarray(a)

    def codes(self, a: Any) -> np.ndarray:
        """E4M3 codes as uint8."""
        return np.ascontiguousarray(self.raw(a)).view(np.uint8)

    def bf16(self, a: Any) -> np.ndarray:
        """A bf16 result as ml_dtypes.bfloat16."""
        return np.ascontiguousarray(self.raw(a)).view(BF16)


class TorchBackend(NumpyBackend):
    def __init__(self, device: str) -> None:
        self.name = f"torch-{device}"
        self.device = device
        self.is_gpu = device != "cpu"

    def put(self, a: np.ndarray) -> Any:
        import torch

        names = {E4M3: torch.float8_e4m3fn, BF16: torch.bfloat16}
        plain = a.view({1: np.uint8, 2: np.int16}[a.itemsize]) if a.dtype in names else a
        order = np.argsort([-abs(s) for s in plain.strides], kind="stable")
        base = torch.from_numpy(np.ascontiguousarray(plain.transpose(order))).to(self.device)
        back = np.argsort(order)
        out = base.permute(*back.tolist()) if a.ndim else base
        return out.view(names[a.dtype]) if a.dtype in names else out

    def raw(self, a: Any) -> np.ndarray:
        import torch

        bits = {torch.float8_e4m3fn: torch.uint8, torch.bfloat16: torch.int16}
        return a.view(bits.get(a.dtype, a.dtype)).cpu().numpy()


class CupyBackend(NumpyBackend):
    name = "cupy"
    is_gpu = True

    def put(self, a: np.ndarray) -> Any:
        import cupy

        bits = {E4M3: np.uint8, BF16: np.uint16}
        plain = a.view(bits[a.dtype]) if a.dtype in bits else a
        order = np.argsort([-abs(s) for s in plain.strides], kind="stable")
        base = cupy.asarray(np.ascontiguousarray(plain.transpose(order)))
        return base.transpose(np.argsort(order).tolist()) if a.ndim else base

    def raw(self, a: Any) -> np.ndarray:
        import cupy

        if a.flags.c_contiguous:
            return cupy.asnumpy(a)
        # A strided copy on the device would compile a kernel of CuPy's: strides are taken here.
        steps = zip(a.shape, a.strides, strict=True)
        extent = np.empty(a.size and sum((n - 1) * s for n, s in steps) + a.itemsize, np.uint8)
        cupy.cuda.runtime.deviceSynchronize()
        a.data.copy_to_host(extent.ctypes.data, extent.nbytes)
        return np.ndarray(a.shape, a.dtype, extent, 0, a.strides)


BACKENDS = [
    pytest.param(NumpyBackend(), id="numpy"),
    pytest.param(TorchBackend("cpu"), id="torch-cpu"),
    pytest.param(CupyBackend(), id="cupy", marks=pytest.mark.gpu),
    pytest.param(TorchBackend("cuda"), id="torch-cuda", marks=pytest.mark.gpu),
]
