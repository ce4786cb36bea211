"""Arrays of any other framework, by DLPack: `__dlpack__` lends the memory in a capsule.

The capsule is read and kept, unused, until the loan ends: its own destructor calls the deleter
then, as the protocol has it for a capsule that no consumer has renamed. What is needed of CUDA
comes from the launch room, which sets `gpu`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from ctypes import pythonapi
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple, Protocol

from cumoe.arrays.view import CPU, ArrayView, Device, Facts, facts, row_major
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

_MEMORY: Any = (ctypes.c_char * sys.maxsize).from_address(0)
"""All of the process: each byte at its address."""
_TENSOR = "PqiIPPQ"
"""DLTensor: data, device, ndim, dtype, shape, strides, byte_offset."""
_unpack = Struct(f"@{_TENSOR}").unpack_from
"""A DLManagedTensor up to its end, which are manager_ctx and deleter."""
_unpack_1 = Struct(f"@I4x16xQ{_TENSOR}").unpack_from
"""DLManagedTensorVersioned: major, (minor, manager_ctx, deleter), flags, the tensor."""
_DELETER, _DELETER_1 = 56, 16
"""Bytes before the deleter of each."""
_TENSOR_OFFSET = 32
"""Bytes before the tensor of a DLManagedTensorVersioned."""
_TYPE_OFFSET = 20
"""Bytes in a DLTensor before its dtype: code, bits, lanes."""
_READ_ONLY = 1

# Functions of their own: the types of ctypes.pythonapi's are set by all who share it.
_CAPSULE, _TEXT, _ADDRESS = ctypes.py_object, ctypes.c_char_p, ctypes.c_void_p
_pointer = ctypes.PYFUNCTYPE(_ADDRESS, _CAPSULE, _TEXT)(("PyCapsule_GetPointer", pythonapi))
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, _CAPSULE, _TEXT)(("PyCapsule_SetName", pythonapi))
_destructor = ctypes.PYFUNCTYPE(_ADDRESS, _CAPSULE)(("PyCapsule_GetDestructor", pythonapi))
# A capsule keeps the address of its name: these live as long as the module.
_NAME, _USED = ctypes.c_char_p(b"dltensor"), ctypes.c_char_p(b"used_dltensor")
_NAME_1 = ctypes.c_char_p(b"dltensor_versioned")
_USED_1 = ctypes.c_char_p(b"used_dltensor_versioned")
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""Releases the GIL: a deleter may wait for a thread that wants it."""


class Visit(Protocol):
    """Arrays of one call on a GPU, in the order of one stream."""

    lent: list[Any]
    """What is let go when the device has done what was on the stream at the end of the visit."""
    handle: int
    """The stream, as DLPack numbers it."""
    is_current: bool
    """Whether its device is the current one. If not, an export is made by way of `ask`."""

    def ask(self, export: Callable[[Any, int], Any], array: Any) -> Any:
        """``export(array, handle)`` with the device current."""


class Gpu(Protocol):
    """The CUDA side of loans."""

    def begin(self, ordinal: int) -> Visit:
        """A visit on the stream of now. It ends with the last reference to it."""


Visits = dict[int, Visit]
"""Those of one call, by device: the first array begins one, the others join it."""

gpu: Gpu | None = None


class Loan(NamedTuple):
    """A caller's array, and what keeps its export: on the host the capsule, on a GPU the visit.

    On a GPU the memory is not the producer's again before the stream has passed the launches of the
    call. The order of streams does not see to it: the export makes our stream wait for the
    producer's, but nothing makes the producer, who may reuse the memory at once, wait for ours.
    """

    array: Any
    memory: Any


_new: Callable[..., Any] = tuple.__new__
"""Faster than calling a NamedTuple."""


def find_viewer(array: Any) -> Callable[[Any, Visits], ArrayView] | None:
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
    return _Lender(jax is not None and isinstance(array, jax.Array)).view


class _Lender:
    """How arrays of one type lend their memory, as far as their exports have shown."""

    __slots__ = ("_ask", "_flags", "_has_destructor", "_name")

    def __init__(self, immutable: bool) -> None:
        """``immutable``: JAX's, whose capsules do not say so."""
        self._flags = _READ_ONLY if immutable else 0
        self._ask = _ask_in_full
        self._name = _NAME_1
        self._has_destructor = False

    def view(self, array: Any, visits: Visits) -> ArrayView:
        """The facts of an array, with a loan as the owner."""
        visit = None
        try:
            kind, ordinal = array.__dlpack_device__()
            if kind in _CUDA and gpu is not None:
                visit = visits.get(ordinal)
                if visit is None:
                    visit = visits[ordinal] = gpu.begin(ordinal)
                if visit.is_current:
                    capsule = self._export(array, visit.handle)
                else:
                    capsule = visit.ask(self._export, array)
            elif kind in _HOST:
                capsule = self._export(array, None)
            else:
                raise _elsewhere(array, kind)
        except REFUSALS as error:
            raise DTypeError(
                f"want an array that lends its memory by DLPack, got {_name(array)}, whose export "
                f"failed ({error}); convert it first"
            ) from error
        address, made, memory = self._read(capsule)
        if (visit is None) is not (made.device is CPU):
            raise DTypeError(
                f"want an export on the device of __dlpack_device__, {int(kind)}, got one on "
                f"{made.device}; convert the array first"
            )
        if visit is not None:
            visit.lent.append(memory)
            memory = visit
        view: ArrayView = _new(ArrayView, (address, made, _new(Loan, (array, memory))))
        return view

    def _export(self, array: Any, stream: int | None) -> Any:
        """A capsule of the newest kind that the producer makes."""
        try:
            return self._ask(array, stream)
        except TypeError:
            pass  # an argument that this producer does not know
        for ask in (_ask_in_full, _ask_before_1):
            with suppress(TypeError):
                capsule, self._ask = ask(array, stream), ask
                return capsule
        capsule, self._ask = _ask_before_streams(array, stream), _ask_before_streams
        return capsule

    def _read(self, capsule: Any) -> tuple[int, Facts, Any]:
        """Address and facts, and what gives the memory back when it goes."""
        try:
            name = self._name
            managed = _pointer(capsule, name)
        except ValueError:
            managed, name = _open(capsule)
            self._name = name
        memory = capsule if self._has_destructor else self._keep(capsule, managed, name)
        if name is _NAME_1:
            version, flags, data, device, ndim, dtype, shape, strides, offset = _unpack_1(
                _MEMORY, managed
            )
            if version != MAX_VERSION[0]:  # the rest may be other things
                raise DTypeError(
                    f"want a DLPack capsule of version 1, got {version}; convert the array"
                )
        else:
            data, device, ndim, dtype, shape, strides, offset = _unpack(_MEMORY, managed)
            flags = 0
        size = 8 * ndim
        numbers = _MEMORY[shape : shape + size]
        if strides:
            numbers += _MEMORY[strides : strides + size]
        return data + offset, _facts(device, dtype, ndim, numbers, flags | self._flags), memory

    def _keep(self, capsule: Any, managed: int, name: ctypes.c_char_p) -> Any:
        """The capsule, or where it has no destructor, which it should have, what stands for it."""
        if _destructor(capsule):
            self._has_destructor = True
            return capsule
        return _Used(capsule, managed, name is _NAME_1)


def _elsewhere(array: Any, kind: int) -> UnsupportedDeviceError:
    return UnsupportedDeviceError(
        f"want an array on the CPU or on a CUDA device, got {_name(array)} on DLPack device type "
        f"{int(kind)}; move it first"
    )


def _ask_in_full(array: Any, stream: int | None) -> Any:
    return array.__dlpack__(stream=stream, max_version=MAX_VERSION)


def _ask_before_1(array: Any, stream: int | None) -> Any:
    return array.__dlpack__(stream=stream)


def _ask_before_streams(array: Any, stream: int | None) -> Any:
    if stream in (None, 1):  # without the argument it means the default stream
        return array.__dlpack__()
    return array.__dlpack__(stream=stream)


def _open(capsule: Any) -> tuple[int, ctypes.c_char_p]:
    """The managed tensor of a capsule that nobody has used, and the capsule's name."""
    for name in (_NAME_1, _NAME):
        with suppress(ValueError):  # of another name, or no capsule
            return _pointer(capsule, name), name
    raise DTypeError(
        f"want a DLPack capsule that nobody has used, got {capsule!r}; have __dlpack__ make a new "
        f"one for each call"
    )


class _Used:
    """A capsule without a destructor, used as others use them all: its deleter is called here."""

    __slots__ = ("_deleter", "_managed")

    def __init__(self, capsule: Any, managed: int, versioned: bool) -> None:
        _rename(capsule, _USED_1 if versioned else _USED)
        place = managed + (_DELETER_1 if versioned else _DELETER)
        self._managed, self._deleter = managed, _Deleter.from_address(place)

    def __del__(self) -> None:
        if self._deleter:
            self._deleter(self._managed)


def retype(capsule: Any, dtype: bytes) -> None:
    """Writes another element type of the same size, code and bits, into an unused capsule."""
    managed, name = _open(capsule)
    tensor = managed + _TENSOR_OFFSET if name is _NAME_1 else managed
    ctypes.memmove(tensor + _TYPE_OFFSET, dtype, 2)


@lru_cache(1 << 16)
def _facts(device: int, dtype: int, ndim: int, numbers: bytes, flags: int) -> Facts:
    """``device``, ``dtype``: as the structs have them; ``numbers``: shape, and strides if any."""
    kind, ordinal = Struct("@ii").unpack(device.to_bytes(8, sys.byteorder))
    where = Device("cuda", ordinal) if kind in _CUDA else CPU
    name = _type_name(*Struct("@BBH").unpack(dtype.to_bytes(4, sys.byteorder)))
    lengths = Struct(f"@{len(numbers) // 8}q").unpack(numbers)
    shape, strides = lengths[:ndim], lengths[ndim:] or row_major(lengths[:ndim])
    return facts(shape, strides, name, where, "dlpack", not flags & _READ_ONLY)


def _type_name(code: int, bits: int, lanes: int) -> str:
    if lanes != 1:
        raise DTypeError(f"want elements of one value, got {lanes} lanes; view it as its scalars")
    if code >= len(_KINDS):
        index = code - len(_KINDS)
        kind = f"float8_{_FLOAT8[index]}" if index < len(_FLOAT8) else f"DLPack type {code}"
        return _NAMES.get(kind, kind)
    name = "bool" if _KINDS[code] == "bool" else f"{_KINDS[code]}{bits}"
    return _NAMES.get(name, name)


def _name(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"
