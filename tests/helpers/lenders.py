"""Arrays of no known framework: they have `__dlpack__` and `__dlpack_device__` and nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

CPU, CUDA, CUDA_HOST, OPENCL, VULKAN, ROCM, CUDA_MANAGED = 1, 2, 3, 4, 7, 10, 13


class Wrapped:
    """An array of torch, CuPy or NumPy behind the protocol as DLPack 1.0 has it."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.streams: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__(stream=stream, max_version=max_version)


class Old(Wrapped):
    """The same before DLPack 1.0."""

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__(stream=stream)


class Oldest(Wrapped):
    """The same without a stream, which stands for the default one."""

    def __dlpack__(self) -> Any:
        return self.array.__dlpack__(stream=None)


class OfTorch(Wrapped):
    """The same in a framework that has a from_dlpack: torch's."""

    def __array_namespace__(self) -> Any:
        import torch

        return torch


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Legacy(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
# Capsules keep the address of their name.
_LEGACY_NAME, _VERSIONED_NAME = (ctypes.c_char_p(n) for n in (b"dltensor", b"dltensor_versioned"))


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_is_valid.argtypes = _pointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_pointer.restype = ctypes.c_void_p


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule: int) -> None:
    for name, cls in ((_LEGACY_NAME, _Legacy), (_VERSIONED_NAME, _Versioned)):
        if _is_valid(capsule, name):
            managed = cls.from_address(_pointer(capsule, name))
            if managed.deleter:
                _Deleter(managed.deleter)(ctypes.addressof(managed))


_kept: list[Any] = []
"""What capsules point at: one may outlive the array that lent it."""


class Handmade:
    """Capsules written field by field. They count what they lent and what they got back.

    The destructor calls the deleter of a capsule that has not been renamed.
    """

    destructor: Any = _destroy

    def __init__(
        self,
        data: int,
        shape: tuple[int, ...],
        *,
        strides: tuple[int, ...] | None = None,
        code: int = 2,
        bits: int = 32,
        lanes: int = 1,
        device: tuple[int, int] = (CPU, 0),
        says: tuple[int, int] | None = None,
        byte_offset: int = 0,
        major: int | None = 1,
        flags: int = 0,
        deleter: bool = True,
    ) -> None:
        """``says``: what __dlpack_device__ answers; ``major``: None for an unversioned capsule."""
        self.device, self.says, self.major, self.flags = device, says or device, major, flags
        self.type, self.data, self.byte_offset = (code, bits, lanes), data, byte_offset
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        self.lent: dict[int, Any] = {}
        self.returned: list[int] = []
        self.streams: list[int | None] = []
        self.deleter: Callable[[int], None] | None = _Deleter(self.returned.append)
        if not deleter:
            self.deleter = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.says

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None) -> Any:
        self.streams.append(stream)
        assert max_version == (1, 0)
        managed = _Legacy() if self.major is None else _Versioned()
        managed.tensor = _Tensor(
            self.data, *self.device, len(self.shape), *self.type,
            ctypes.addressof(self.shape),
            None if self.strides is None else ctypes.addressof(self.strides), self.byte_offset,
        )  # fmt: skip
        managed.deleter = ctypes.cast(self.deleter, ctypes.c_void_p) if self.deleter else None
        if self.major is not None:
            managed.major, managed.flags = self.major, self.flags
        self.lent[ctypes.addressof(managed)] = managed
        _kept.append((managed, self.deleter, self.shape, self.strides))
        name = _LEGACY_NAME if self.major is None else _VERSIONED_NAME
        return _new_capsule(ctypes.addressof(managed), name, self.destructor)

    @property
    def all_returned(self) -> bool:
        """Whether each capsule's deleter was called once."""
        return sorted(self.lent) == sorted(self.returned)


class Careless(Handmade):
    """Capsules without a destructor: who does not call their deleter is found out."""

    destructor = None


class FakeVisit:
    def __init__(self, stream: int, is_current: bool, asked: list[Any]) -> None:
        self.handle, self.is_current, self.asked = stream, is_current, asked
        self.lent: list[Any] = []

    def ask(self, export: Callable[[Any, int], Any], array: Any) -> Any:
        self.asked.append(array)
        return export(array, self.handle)


class FakeGpu:
    """The CUDA side of loans where there is no GPU: a stream by number, visits that stay."""

    def __init__(self, stream: int = 77, current: int | None = None) -> None:
        """``current``: the device; None for whichever is asked about."""
        self.stream, self.current = stream, current
        self.made: list[FakeVisit] = []
        self.asked: list[Any] = []
        """Arrays exported with another device than the current one."""

    def begin(self, ordinal: int) -> FakeVisit:
        self.made.append(FakeVisit(self.stream, self.current in (None, ordinal), self.asked))
        return self.made[-1]
