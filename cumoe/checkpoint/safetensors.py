"""Safetensors files, read in place: a tensor is a view of the mapped file, no byte is copied.

A file is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes. The
header gives each tensor's dtype, shape and its first and one-past-last byte after the header.
"""

from __future__ import annotations

import errno
import json
import mmap
import stat
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import ml_dtypes
import numpy as np

from cumoe.errors import CheckpointError

Array = np.ndarray[Any, Any]

DTYPES = {
    name: np.dtype(kind)
    for name, kind in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": "<u2",
        "I16": "<i2",
        "U32": "<u4",
        "I32": "<i4",
        "U64": "<u8",
        "I64": "<i8",
        "F16": "<f2",
        "F32": "<f4",
        "F64": "<f8",
        "C64": "<c8",
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}
"""Element types by their name in the header. Types narrower than a byte are not among them."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_AGAIN = "the file is damaged or incomplete: download it again"


class TensorInfo(NamedTuple):
    """What the header says of one tensor; start and stop count from the first byte of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """One file. ``tensors`` maps each name to its TensorInfo; ``file[name]`` is a read-only array.

    Raises CheckpointError, at opening, for anything in the file that is not as the format has it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            require_regular(self.path)
            with self.path.open("rb") as stream:
                size = stream.seek(0, 2)
                stream.seek(0)
                header_bytes = _header_bytes(self.path, stream.read(_LENGTH_BYTES), size)
                self.tensors = _parse(self.path, stream.read(header_bytes), size)
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: wanted a .safetensors file that can be read, got: "
                f"{error.strerror}; check the path"
            ) from error

    def __getitem__(self, name: str) -> Array:
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"{self.path}: {name}: wanted this tensor, found {len(self.tensors)} others; "
                "check its name, and whether it lies in another shard"
            )
        dtype = DTYPES.get(info.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: {name}: wanted an element type among {', '.join(DTYPES)}, found "
                f"{info.dtype}; this tensor cannot be read"
            )
        raw: Array = np.frombuffer(self._map, np.uint8)[info.start : info.stop]
        tensor: Array = raw.view(dtype).reshape(info.shape)
        return tensor


def require_regular(path: Path) -> None:
    """Raises OSError for what is no file, or a pipe: opening one would wait for its writer."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")


def _header_bytes(path: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < _LENGTH_BYTES:
        raise CheckpointError(
            f"{path}: wanted a header length of {_LENGTH_BYTES} bytes, found a file of {size} "
            f"bytes; {_AGAIN}"
        )
    length = int.from_bytes(prefix, "little")
    room = min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES)
    if length > room:
        raise CheckpointError(
            f"{path}: header: wanted at most {room} bytes (file of {size}), found a length of "
            f"{length}; not a .safetensors file, or a truncated one: download it again"
        )
    return length


def _parse(path: Path, header: bytes, size: int) -> dict[str, TensorInfo]:
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: header: wanted JSON, found {bytes(header[:20])!r} ({error}); {_AGAIN}"
        ) from error
    if not isinstance(entries, dict):
        raise CheckpointError(
            f"{path}: header: wanted a JSON object, found {type(entries).__name__}; {_AGAIN}"
        )
    entries.pop("__metadata__", None)
    base = _LENGTH_BYTES + len(header)
    tensors = {name: _info(path, name, entry, base) for name, entry in entries.items()}
    _check_end(path, tensors, base, size)
    return tensors


def _info(path: Path, name: str, entry: Any, base: int) -> TensorInfo:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and _is_counts(shape) and _is_counts(offsets)):
        raise CheckpointError(
            f"{path}: {name}: wanted a dtype, a shape and data_offsets, found {entry!r:.200}; "
            f"{_AGAIN}"
        )
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{path}: {name}: wanted data_offsets [first, end], found {offsets}; {_AGAIN}"
        )
    info = TensorInfo(dtype, tuple(shape), base + offsets[0], base + offsets[1])
    _check_size(path, name, info)
    return info


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_size(path: Path, name: str, info: TensorInfo) -> None:
    dtype = DTYPES.get(info.dtype)
    found = info.stop - info.start
    if dtype is not None and found != (wanted := prod(info.shape) * dtype.itemsize):
        raise CheckpointError(
            f"{path}: {name}: wanted {wanted} bytes for {info.dtype} {list(info.shape)}, found "
            f"data_offsets that hold {found}; {_AGAIN}"
        )


def _check_end(path: Path, tensors: dict[str, TensorInfo], base: int, size: int) -> None:
    last = max(tensors, key=lambda name: tensors[name].stop, default=None)
    wanted = base if last is None else tensors[last].stop
    if wanted != size:
        raise CheckpointError(
            f"{path}: {last or 'header'}: wanted a file of {wanted} bytes, where this tensor ends, "
            f"found {size}; {_AGAIN}"
        )
