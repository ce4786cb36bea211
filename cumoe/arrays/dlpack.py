"""Arrays of any other framework, by DLPack: `__dlpack__` lends the memory in a capsule.

The capsule's structures are read in place, and its deleter is called once, when the loan ends. What
is needed of CUDA comes from the launch room, which sets `gpu`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import pythonapi, string_at
from functools import lru_cache, partial
from struct import Struct
from typing import Any, Protocol

from cumoe.arrays.view import CPU, ArrayView, Device, Facts, facts
from cumoe.errors import DTypeError, UnsupportedDeviceError

MAX_VERSION = (1, 0)
REFUSALS = (BufferError, TypeError, ValueError, RuntimeError, AttributeError)
"""What producers and consumers of capsules raise when they cannot."""

_HOST = (1, 3)
"""kDLCPU, and kDLCUDAHost: pinned memory of the host."""
_CUDA = (2, 13)
"""kDLCUDA, and kDLCUDAManaged, which kernels read and write like any other."""
_KINDS = ("int", "uint", "float", "handle", "bfloat", "complex", "bool")
_FLOAT8 = (
    "e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu",
)  # fmt: skip
"""Names of the type codes from 0, and from 7."""
_NAMES = {"float16": "fp16", "float32": "fp32", "bfloat16": "bf16", "float8_e4m3fn": "e4m3"}

_TENSOR = "P8si4sPPQ"
"""DLTensor: data, device, ndim, dtype, shape, strides, byte_offset."""
_LEGACY = Struct(f"@{_TENSOR}PP")
"""DLManagedTensor: the tensor, manager_ctx, deleter."""
_VERSIONED = Struct(f"@IIPPQ{_TENSOR}")
"""DLManagedTensorVersioned: major, minor, manager_ctx, deleter, flags, the tensor."""
_TENSOR_OFFSET = 32
"""Bytes before the tensor of a DLManagedTensorVersioned."""
_TYPE_OFFSET = 20
"""Bytes in a DLTensor before its dtype: code, bits, lanes."""
_READ_ONLY = 1

_is_valid, _pointer, _rename = (
    pythonapi.PyCapsule_IsValid, pythonapi.PyCapsule_GetPointer, pythonapi.PyCapsule_SetName,
)  # fmt: skip
_is_valid.argtypes = _pointer.argtypes = _rename.argtypes = (ctypes.py_object, ctypes.c_char_p)
_pointer.restype = ctypes.c_void_p
# A capsule keeps the address of its name: these live as long as the module.
_NAME, _USED = ctypes.c_char_p(b"dltensor"), ctypes.c_char_p(b"used_dltensor")
_NAME_1 = ctypes.c_char_p(b"dltensor_versioned")
_USED_1 = ctypes.c_char_p(b"used_dltensor_versioned")


class Visit(Protocol):
    """Arrays of one call on a GPU, in the order of one stream."""

    releases: list[Callable[[], object]]
    """Called when the device has done what was on the stream at the end of the visit."""


class Gpu(Protocol):
    """The CUDA side of a loan."""

    def ask(self, ordinal: int, export: Callable[[int], Any]) -> tuple[Any, Visit]:
        """The result of ``export(stream)`` with that device current, and the visit."""


gpu: Gpu | None = None

_new_view: Callable[..., ArrayView] = tuple.__new__
"""Faster than calling the NamedTuple."""


class Loan:
    """A caller's array, and what its export lent. The memory is the producer's again at the end.

    On a GPU not before the stream has passed the launches of the call. The order of streams does
    not see to it: the export makes our stream wait for the producer's, but nothing makes the
    producer, who may reuse the memory at once, wait for ours.
    """

    __slots__ = ("_release", "_visit", "array")

    def __init__(self, array: Any, release: Callable[[], object], visit: Visit | None) -> None:
        self.array = array
        self._release: Callable[[], object] | None = release
        self._visit = visit

    def delivered(self) -> Any:
        """The array, which is the caller's own."""
        return self.array

    def end(self) -> None:
        """Gives the memory back now, of which no launch knows."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __del__(self) -> None:
        if self._visit is None:
            self.end()
        elif self._release is not None:
            self._visit.releases.append(self._release)


def find_viewer(array: Any) -> Callable[[Any], ArrayView] | None:
    """The function that views arrays of this type, or None where they have no DLPack."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(array, jax.core.Tracer):
        raise DTypeError(
            f"want an array with values, got {type(array).__name__}, a traced value of JAX; "
            f"call outside of jax.jit and other transforms, or by way of jax.pure_callback, which "
            f"gives the values on the host"
        )
    cls = type(array)
    if not (hasattr(cls, "__dlpack__") and hasattr(cls, "__dlpack_device__")):
        return None
    is_jax = jax is not None and isinstance(array, jax.Array)
    return partial(_view, immutable=is_jax)  # which JAX's capsules do not say


def _view(array: Any, *, immutable: bool) -> ArrayView:
    try:
        kind, ordinal = array.__dlpack_device__()
        capsule, visit = _borrow(array, int(kind), int(ordinal))
    except REFUSALS as error:
        raise DTypeError(
            f"want an array that lends its memory by DLPack, got {_name(array)}, whose export "
            f"failed ({error}); convert it first"
        ) from error
    tensor, flags, release = _consume(capsule)
    loan = Loan(array, release, visit)
    try:
        data, device, ndim, dtype, shape, strides, offset = tensor
        made = _facts(
            device,
            dtype,
            string_at(shape, 8 * ndim) if ndim else b"",
            string_at(strides, 8 * ndim) if ndim and strides else None,
            not (immutable or flags & _READ_ONLY),
        )
        if (made.device.kind == "cuda") != (visit is not None):
            raise DTypeError(
                f"want an export on the device of __dlpack_device__, {kind}, got one on "
                f"{made.device}; convert the array first"
            )
    except BaseException:
        loan.end()
        raise
    return _new_view(ArrayView, ((data or 0) + offset, made, loan))


def _borrow(array: Any, kind: int, ordinal: int) -> tuple[Any, Visit | None]:
    """The capsule, and on a GPU the visit, before whose launches the producer's work is ordered."""
    if kind in _HOST:
        return _export(array, None), None
    if kind not in _CUDA or gpu is None:
        raise UnsupportedDeviceError(
            f"want an array on the CPU or on a CUDA device, got {_name(array)} on DLPack device "
            f"type {kind}; move it first"
        )
    return gpu.ask(ordinal, partial(_export, array))


def _export(array: Any, stream: int | None) -> Any:
    """A capsule of the newest kind that the producer makes."""
    try:
        return array.__dlpack__(stream=stream, max_version=MAX_VERSION)
    except TypeError:
        pass  # older than DLPack 1.0
    try:
        return array.__dlpack__(stream=stream)
    except TypeError:
        if stream not in (None, 1):  # without the argument it means the default stream
            raise
    return array.__dlpack__()


def _consume(capsule: Any) -> tuple[list[Any], int, Callable[[], object]]:
    """The DLTensor, its flags and its deleter, which is ours to call from here on."""
    if _is_valid(capsule, _NAME_1):
        managed = _pointer(capsule, _NAME_1)
        raw = string_at(managed, _VERSIONED.size)
        major, _, _, deleter, flags, *tensor = _VERSIONED.unpack(raw)
        _rename(capsule, _USED_1)
        release = partial(_deleter(deleter), managed)
        if major != MAX_VERSION[0]:  # of which only what was read up to the deleter is known
            release()
            raise DTypeError(f"want a DLPack capsule of version 1, got {major}; convert the array")
        return tensor, flags, release
    if _is_valid(capsule, _NAME):
        managed = _pointer(capsule, _NAME)
        *tensor, _, deleter = _LEGACY.unpack(string_at(managed, _LEGACY.size))
        _rename(capsule, _USED)
        return tensor, 0, partial(_deleter(deleter), managed)
    raise DTypeError(
        f"want a DLPack capsule that nobody has used, got {capsule!r}; have __dlpack__ make a new "
        f"one for each call"
    )


def retype(capsule: Any, code: int, bits: int) -> None:
    """Writes another element type of the same size into a capsule that nobody has used."""
    if _is_valid(capsule, _NAME_1):
        tensor = _pointer(capsule, _NAME_1) + _TENSOR_OFFSET
    else:
        tensor = _pointer(capsule, _NAME)
    ctypes.memmove(tensor + _TYPE_OFFSET, bytes((code, bits)), 2)


@lru_cache
def _deleter(address: int) -> Callable[[int], None]:
    # A function type that releases the GIL: a deleter may wait for a thread that wants it.
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address) if address else lambda _: None


@lru_cache(1 << 16)
def _facts(
    device: bytes, dtype: bytes, shape: bytes, strides: bytes | None, writeable: bool
) -> Facts:
    kind, ordinal = Struct("@ii").unpack(device)
    where = Device("cuda", ordinal) if kind in _CUDA else CPU
    sizes = _int64s(shape)
    steps = _row_major(sizes) if strides is None else _int64s(strides)
    return facts(
        sizes, steps, _type_name(*Struct("@BBH").unpack(dtype)), where, "dlpack", writeable
    )


def _type_name(code: int, bits: int, lanes: int) -> str:
    if lanes != 1:
        raise DTypeError(f"want elements of one value, got {lanes} lanes; view it as its scalars")
    if code >= len(_KINDS):
        index = code - len(_KINDS)
        kind = f"float8_{_FLOAT8[index]}" if index < len(_FLOAT8) else f"DLPack type {code}"
        return _NAMES.get(kind, kind)
    name = "bool" if _KINDS[code] == "bool" else f"{_KINDS[code]}{bits}"
    return _NAMES.get(name, name)


def _int64s(raw: bytes) -> tuple[int, ...]:
    return Struct(f"@{len(raw) // 8}q").unpack(raw)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _name(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"
