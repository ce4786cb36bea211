"""Tensor maps as kernel arguments: the driver encodes them, for the address of their array."""

from __future__ import annotations

from ctypes import addressof, c_int, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p
from functools import partial
from typing import Any

from cumoe.errors import UnsupportedDeviceError
from cumoe.launch import driver
from cumoe.plan.tensor_map import TensorMap

BYTES, ALIGNMENT = 128, 64
"""Of a CUtensorMap."""
UINT8 = 0
"""CU_TENSOR_MAP_DATA_TYPE_UINT8"""
INTERLEAVE_NONE = FILL_WITH_ZEROS = 0
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""CU_TENSOR_MAP_SWIZZLE_* by bytes."""
PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
"""CU_TENSOR_MAP_L2_PROMOTION_* by bytes."""


class Encoded:
    """A tensor map in the memory of an argument. One thread at a time."""

    __slots__ = ("_address", "_encode", "_rest", "_what", "storage")

    def __init__(self, wanted: TensorMap) -> None:
        w, rank = wanted, len(wanted.dims)
        raw = (c_ubyte * (BYTES + ALIGNMENT))()
        self.storage = (c_ubyte * BYTES).from_buffer(raw, -addressof(raw) % ALIGNMENT)
        self._what = f"tensor map of {w.array}, dims {w.dims}, strides {w.strides}, box {w.box}"
        self._address: int | None = None
        self._encode = partial(_encoder(), self.storage, c_int(UINT8), c_uint(rank))
        self._rest = (
            (c_uint64 * rank)(*w.dims),
            (c_uint64 * (rank - 1))(*w.strides),
            (c_uint32 * rank)(*w.box),
            (c_uint32 * rank)(*[1] * rank),
            c_int(INTERLEAVE_NONE),
            c_int(SWIZZLES[w.swizzle]),
            c_int(PROMOTIONS[w.promotion]),
            c_int(FILL_WITH_ZEROS),
        )

    def point_at(self, address: int) -> None:
        """Encodes it for the array at this address; nothing to do where it is the last one's.

        Raises: CumoeError if the driver refuses it.
        """
        if address != self._address:
            self._address = None
            driver.check(self._encode(c_void_p(address), *self._rest), self._what)
            self._address = address


def _encoder() -> Any:
    try:
        return driver.library().cuTensorMapEncodeTiled
    except AttributeError as error:
        raise UnsupportedDeviceError(
            f"GPU: want a driver of CUDA 12 or newer, which knows tensor maps, got one without "
            f"({error}); update the driver"
        ) from error
