"""New arrays to frameworks that take DLPack: the true element type, the same memory."""

from __future__ import annotations

import sys
import types

import ml_dtypes
import numpy as np
import pytest
import torch

from cumoe.arrays.exchange import from_numpy, host_result, view
from cumoe.arrays.export import Export
from cumoe.errors import ArgumentError
from tests.helpers.lenders import OfTorch, Wrapped

E4M3, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
TYPES = {
    "e4m3": (E4M3, torch.float8_e4m3fn),
    "bf16": (BF16, torch.bfloat16),
    "fp32": (np.dtype(np.float32), torch.float32),
    "int32": (np.dtype(np.int32), torch.int32),
    "uint8": (np.dtype(np.uint8), torch.uint8),
}
every_type = pytest.mark.parametrize("dtype", TYPES)


def every_code(dtype: str) -> np.ndarray:
    """[16, n] of a type, each byte value among its bytes."""
    return np.arange(256, dtype=np.uint8).reshape(16, 16).view(TYPES[dtype][0])


@every_type
@pytest.mark.parametrize("options", [{}, {"max_version": (1, 0)}, {"stream": None}])
def test_capsules_hold_the_true_type(dtype, options):
    class Relay(Wrapped):
        def __dlpack__(self, **_):
            return self.array.__dlpack__(**options)

    a = every_code(dtype)
    v = view(Relay(Export(a, dtype, None)), "x")
    assert (v.facts.dtype, v.ptr, v.facts.shape) == (dtype, a.ctypes.data, a.shape)


@every_type
@pytest.mark.parametrize("held", ["typed", "bytes"])
def test_torch_takes_them_without_a_copy(dtype, held):
    """Held with its type, as NumPy arrays are, or as bytes, as CuPy arrays are."""
    a = every_code(dtype)
    if held == "bytes":
        a = a.view({1: np.uint8, 2: np.uint16, 4: a.dtype}[a.itemsize])
    t = torch.from_dlpack(Export(a, dtype, None))
    assert (t.dtype, t.data_ptr()) == (TYPES[dtype][1], a.ctypes.data)
    assert t.view(torch.uint8).numpy().tobytes() == a.tobytes()


def test_slices_and_transposes_keep_the_type():
    a = np.arange(64, dtype=np.uint8).reshape(8, 8)
    t = torch.from_dlpack(Export(a, "e4m3", None)[:, :3].T)
    assert (t.shape, t.stride(), t.dtype) == ((3, 8), (1, 8), torch.float8_e4m3fn)
    assert (t.view(torch.uint8).numpy() == a[:, :3].T).all()


@every_type
def test_the_callers_framework_is_found_by_its_namespace(dtype):
    a = every_code(dtype)
    like = view(OfTorch(torch.ones(1)), "x")
    result = host_result(a, like)
    assert (type(result), result.dtype) == (torch.Tensor, TYPES[dtype][1])
    assert (result.data_ptr(), result.shape) == (a.ctypes.data, a.shape)


@pytest.mark.parametrize("place", ["", "dlpack", "utils.dlpack"])
def test_the_callers_framework_is_found_by_its_top_module(place, monkeypatch):
    module = types.ModuleType("framework_of_a_test")
    parts = place.split(".") if place else []
    inner = module
    for part in parts:
        setattr(inner, part, types.ModuleType(part))
        inner = getattr(inner, part)
    inner.from_dlpack = lambda a: ("taken", torch.from_dlpack(a))
    monkeypatch.setitem(sys.modules, "framework_of_a_test", module)
    cls = type("Array", (Wrapped,), {"__module__": "framework_of_a_test.arrays"})
    word, result = host_result(every_code("e4m3"), view(cls(torch.ones(1)), "x"))
    assert (word, result.dtype) == ("taken", torch.float8_e4m3fn)


@every_type
def test_without_from_dlpack_it_is_numpys(dtype):
    a = every_code(dtype)
    assert host_result(a, view(Wrapped(torch.ones(1)), "x")) is a


class Picky(Wrapped):
    """Of a framework that takes what NumPy takes."""

    def __array_namespace__(self):
        return types.SimpleNamespace(from_dlpack=self.take)

    @staticmethod
    def take(a):
        return np.from_dlpack(a)


@pytest.mark.parametrize(("dtype", "bits"), [("e4m3", np.uint8), ("bf16", np.uint16)])
def test_a_framework_without_the_type_gets_bytes(dtype, bits):
    a = every_code(dtype)
    result = host_result(a, view(Picky(torch.ones(1)), "x"))
    assert (result.dtype, result.ctypes.data) == (bits, a.ctypes.data)


def test_what_no_framework_takes_is_an_error_with_its_cause():
    class Refuses(Picky):
        @staticmethod
        def take(a):
            raise BufferError("never")

    like = view(Refuses(torch.ones(1)), "x")
    for dtype in ("e4m3", "fp32"):
        with pytest.raises(ArgumentError, match=rf"framework that takes {dtype} .*never") as e:
            host_result(every_code(dtype), like)
        assert isinstance(e.value.__cause__, BufferError)


def test_known_frameworks_go_their_own_way():
    a = every_code("e4m3")
    assert host_result(a, view(np.ones(1), "x")) is a
    assert host_result(a, view(torch.ones(1), "x")).data_ptr() == a.ctypes.data
    assert from_numpy(a, "torch").dtype == torch.float8_e4m3fn
