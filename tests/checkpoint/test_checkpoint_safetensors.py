"""The reader against files that the official library wrote, and against damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from cumoe.checkpoint.safetensors import DTYPES, SafetensorsFile
from cumoe.checkpoint.shards import open_checkpoint
from cumoe.errors import CheckpointError

KINDS = [
    np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64,
    np.float16, np.float32, np.float64, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz,
    ml_dtypes.float8_e8m0fnu,
]  # fmt: skip


def random_array(kind, shape, seed=0) -> np.ndarray:
    dtype = np.dtype(kind)
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    limit = 2 if dtype == np.bool_ else 256
    raw = np.random.default_rng(seed).integers(0, limit, count).astype(np.uint8)
    return raw.view(dtype).reshape(shape)


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def write(path: Path, header: object, data: bytes = b"") -> Path:
    """A file with any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[int], first: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


def test_every_dtype_is_read_as_the_library_wrote_it(tmp_path):
    wrote = {f"t{i}": random_array(kind, (3, 5), i) for i, kind in enumerate(KINDS)}
    save_file(wrote, tmp_path / "all.safetensors", metadata={"format": "np"})
    read = SafetensorsFile(tmp_path / "all.safetensors")
    assert set(read.tensors) == set(wrote)
    assert {info.dtype for info in read.tensors.values()} == set(DTYPES)
    assert all(same_bytes(read[name], wrote[name]) for name in wrote)


def test_same_bytes_notices_one_bit():
    a = random_array(np.float32, (4, 4))
    b = a.copy()
    b.view(np.uint8)[2, 3] ^= 1
    assert same_bytes(a, a.copy())
    assert not same_bytes(a, b)
    assert not same_bytes(a, a.reshape(2, 8))


shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
tensors = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    st.tuples(st.sampled_from(KINDS), shapes, st.integers(0, 2**31)),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(specs=tensors)
def test_any_names_shapes_and_dtypes_come_back(tmp_path_factory, specs):
    specs.pop("__metadata__", None)
    wrote = {name: random_array(*spec) for name, spec in specs.items()}
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    path.write_bytes(save(wrote))
    read = open_checkpoint(path)
    assert set(read) == set(wrote)
    assert len(read) == len(wrote)
    assert all(same_bytes(read[name], wrote[name]) for name in wrote)


def test_tensors_are_views_of_the_file_and_cannot_be_written(tmp_path):
    save_file({"a": np.arange(1000, dtype=np.float32)}, tmp_path / "x.safetensors")
    read = SafetensorsFile(tmp_path / "x.safetensors")
    assert not read["a"].flags.owndata
    assert not read["a"].flags.writeable
    assert np.shares_memory(read["a"], read["a"])


@given(keep=st.floats(0, 1, exclude_max=True))
@settings(max_examples=60, deadline=None)
def test_a_file_truncated_anywhere_is_refused(tmp_path_factory, keep):
    whole = save({"a": np.ones((4, 8), np.float32), "b": np.ones(3, np.float16)})
    path = tmp_path_factory.mktemp("cut") / "cut.safetensors"
    path.write_bytes(whole[: int(keep * len(whole))])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors: .*wanted.*found.*download"):
        SafetensorsFile(path)


DAMAGED = {
    "empty": (b"", r"wanted a header length of 8 bytes, found a file of 0 bytes"),
    "length beyond the file": (
        (10_000).to_bytes(8, "little") + b"{}",
        r"header: wanted at most 2 bytes \(file of 10\), found a length of 10000",
    ),
    "not JSON": ((4).to_bytes(8, "little") + b"{oh}", r"header: wanted JSON, found b'\{oh\}'"),
    "not UTF-8": ((2).to_bytes(8, "little") + b"\xff\xfe", r"header: wanted JSON, found"),
    "a list": ((2).to_bytes(8, "little") + b"[]", r"header: wanted a JSON object, found list"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_header(tmp_path, case):
    content, message = DAMAGED[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors: " + message):
        SafetensorsFile(path)


ENTRIES = {
    "no object": (7, r"wanted a dtype, a shape and data_offsets, found 7"),
    "no dtype": ({"shape": [1], "data_offsets": [0, 4]}, r"wanted a dtype, a shape"),
    "negative shape": (entry("F32", [-1], 0, 4), r"wanted a dtype, a shape"),
    "boolean shape": (entry("F32", [True], 0, 4), r"wanted a dtype, a shape"),
    "fractional shape": (entry("F32", [1.0], 0, 4), r"wanted a dtype, a shape"),
    "three offsets": (
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]},
        r"wanted data_offsets \[first, end\], found \[0, 4, 8\]",
    ),
    "reversed offsets": (entry("F32", [1], 4, 0), r"wanted data_offsets \[first, end\], found"),
    "size too small": (entry("F32", [2], 0, 4), r"wanted 8 bytes for F32 \[2\], found .* hold 4"),
    "size too large": (entry("U8", [2], 0, 4), r"wanted 2 bytes for U8 \[2\], found .* hold 4"),
    "beyond the file": (entry("F32", [2], 0, 8), r"wanted a file of \d+ bytes, .* found"),
    "bytes left over": (entry("U8", [3], 0, 3), r"wanted a file of \d+ bytes, .* found"),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_damaged_entry(tmp_path, case):
    found, message = ENTRIES[case]
    path = write(tmp_path / "bad.safetensors", {"w": found}, b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors: w: " + message):
        SafetensorsFile(path)


def test_an_unknown_type_stops_only_its_own_tensor(tmp_path):
    header = {"narrow": entry("F4", [8], 0, 4), "plain": entry("U8", [2], 4, 6)}
    read = SafetensorsFile(write(tmp_path / "f4.safetensors", header, bytes(range(6))))
    assert read["plain"].tolist() == [4, 5]
    with pytest.raises(
        CheckpointError, match=r"f4\.safetensors: narrow: wanted an element type .* found F4"
    ):
        read["narrow"]


def test_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: .* got: No such file"):
        open_checkpoint(tmp_path / "gone.safetensors")


def test_missing_tensor(tmp_path):
    save_file({"a": np.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"x\.safetensors: b: wanted this tensor, found 1"):
        open_checkpoint(tmp_path / "x.safetensors")["b"]


def test_a_misaligned_tensor_is_read(tmp_path):
    header = {"a": entry("U8", [1], 0, 1), "b": entry("F32", [2], 1, 9)}
    data = b"\7" + np.array([1.5, -2], "<f4").tobytes()
    path = write(tmp_path / "x.safetensors", header, data)
    assert SafetensorsFile(path)["b"].tolist() == [1.5, -2]
