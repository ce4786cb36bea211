"""New arrays to a caller who came by DLPack, in his framework where it can be found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from cumoe.arrays.dlpack import REFUSALS, retype
from cumoe.errors import ArgumentError

_TYPE_CODES = {"e4m3": bytes((10, 8)), "bf16": bytes((4, 16))}
"""DLPack's code and bits of the types that NumPy's and CuPy's own exports lack."""
_BITS = {
    np.dtype(ml_dtypes.float8_e4m3fn): np.uint8,
    np.dtype(ml_dtypes.bfloat16): np.uint16,
}


class Export:
    """A NumPy or CuPy array that other frameworks take with its true element type.

    Its framework makes the capsule, whose consumer's stream then waits for the current one.
    """

    __slots__ = ("_typed", "array", "dtype", "like")

    def __init__(self, array: Any, dtype: str, like: Any) -> None:
        """``like``: the caller's array, in whose framework this one is to be."""
        self.array, self.dtype, self.like = array, dtype, like
        self._typed = True

    def __getitem__(self, index: Any) -> Export:
        return Export(self.array[index], self.dtype, self.like)

    @property
    def T(self) -> Export:
        """The transpose, of the same memory."""
        return Export(self.array.T, self.dtype, self.like)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, ordinal = self.array.__dlpack_device__()
        return int(kind), int(ordinal)

    def __dlpack__(self, **options: Any) -> Any:
        bits = _BITS.get(self.array.dtype)
        plain = self.array if bits is None else self.array.view(bits)
        capsule = plain.__dlpack__(**options)
        if self._typed and self.dtype in _TYPE_CODES:
            retype(capsule, _TYPE_CODES[self.dtype])
        return capsule

    def delivered(self) -> Any:
        """The array in the caller's framework, as it is where that framework takes none.

        To be called after the launches that fill it: the framework waits for those and no others.
        Bytes where it has no such element type.
        """
        take = _taker(self.like)
        if take is None:
            return self.array
        try:
            return take(self)
        except REFUSALS as error:
            self._typed = False
            if self.dtype not in _TYPE_CODES:
                raise self._not_taken(error) from error
        try:
            return take(self)
        except REFUSALS as error:
            raise self._not_taken(error) from error

    def _not_taken(self, error: Exception) -> ArgumentError:
        a = self.array
        return ArgumentError(
            f"result: want a framework that takes {self.dtype} of shape {list(a.shape)} with "
            f"strides of {list(a.strides)} bytes, got {type(self.like).__module__}, which says: "
            f"{error}; choose scale_layout 'row', or pass outputs of another framework"
        )


_takers: dict[type, Callable[[Any], Any]] = {}


def _taker(like: Any) -> Callable[[Any], Any] | None:
    """The from_dlpack of an array's framework."""
    take = _takers.get(type(like)) or _find_taker(like)
    if take is not None:
        _takers[type(like)] = take
    return take


def _find_taker(like: Any) -> Callable[[Any], Any] | None:
    namespace = getattr(like, "__array_namespace__", None)
    top = sys.modules.get(type(like).__module__.partition(".")[0])
    places = (
        None if namespace is None else namespace(),
        top,
        getattr(top, "dlpack", None),
        getattr(getattr(top, "utils", None), "dlpack", None),
    )
    found = (getattr(place, "from_dlpack", None) for place in places)
    return next((take for take in found if callable(take)), None)
