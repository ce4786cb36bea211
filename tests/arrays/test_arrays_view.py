"""Views tell the truth about arrays of each framework, and move nothing."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
import torch

from cumoe.arrays import check
from cumoe.arrays.exchange import from_numpy, to_numpy, view
from cumoe.arrays.view import CPU, ArrayView, Device, facts
from cumoe.errors import ArgumentError, DeviceMismatchError, DTypeError, UnsupportedDeviceError


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float32, "fp32"),
        (np.float16, "fp16"),
        (ml_dtypes.bfloat16, "bf16"),
        (ml_dtypes.float8_e4m3fn, "e4m3"),
        (np.uint8, "uint8"),
        (np.int64, "int64"),
        (np.float64, "float64"),
    ],
)
def test_numpy_facts(dtype, name):
    a = np.zeros((4, 6), dtype)[:, 1:4]
    v = view(a, "a")
    f = v.facts
    assert (f.shape, f.strides, f.dtype, f.device, f.framework) == (
        (4, 3), (6, 1), name, CPU, "numpy",
    )  # fmt: skip
    assert v.ptr == a.__array_interface__["data"][0]
    assert not f.is_contiguous


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "fp32"),
        (torch.bfloat16, "bf16"),
        (torch.float8_e4m3fn, "e4m3"),
        (torch.int32, "int32"),
        (torch.float8_e5m2, "float8_e5m2"),
    ],
)
def test_torch_facts(dtype, name):
    t = torch.zeros(4, 6, dtype=torch.uint8).to(dtype).T
    v = view(torch.nn.Parameter(t, requires_grad=False), "t")
    f = v.facts
    assert (f.shape, f.strides, f.dtype, f.framework) == ((6, 4), (1, 6), name, "torch")
    assert view(t.clone().T.clone().T, "t").facts is f
    assert v.ptr == t.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
def test_torch_to_numpy_and_back_shares_memory(dtype):
    t = torch.arange(12.0).reshape(3, 4).to(dtype)
    a = to_numpy(view(t, "t"))
    assert a.astype(np.float32).tolist() == t.float().tolist()
    back = from_numpy(a, "torch")
    assert (back.dtype, back.data_ptr()) == (dtype, t.data_ptr())


def test_an_array_of_numpy_is_handed_through():
    a = np.ones(3, np.float32)
    assert to_numpy(view(a, "a")) is a
    assert from_numpy(a, "numpy") is a


def test_every_byte_of_a_narrow_type_reaches_torch():
    codes = np.arange(256, dtype=np.uint8)
    back = from_numpy(codes.view(ml_dtypes.float8_e4m3fn), "torch")
    assert back.view(torch.uint8).tolist() == codes.tolist()
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    back = from_numpy(bits.view(ml_dtypes.bfloat16), "torch")
    assert back.view(torch.int16).numpy().view(np.uint16).tolist() == bits.tolist()


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int32", "int64"])
def test_other_types_keep_their_name_in_torch(dtype):
    a = np.arange(6, dtype=dtype).reshape(2, 3)
    back = from_numpy(a, "torch")
    assert (str(back.dtype), back.data_ptr()) == (f"torch.{dtype}", a.ctypes.data)
    assert back.tolist() == a.tolist()


def test_a_gradient_does_not_hinder():
    assert to_numpy(view(torch.ones(2, requires_grad=True), "t")).tolist() == [1, 1]


@pytest.mark.parametrize("thing", [[1.0], 3, None, "x"])
def test_no_array_is_a_type_error(thing):
    with pytest.raises(DTypeError, match=r"x: want .*, or one with __dlpack__, got builtins"):
        view(thing, "x")


def test_a_meta_tensor_is_refused():
    with pytest.raises(UnsupportedDeviceError, match=r"^x: want .* got one on meta; move it"):
        view(torch.empty(2, device="meta"), "x")


def fake(ptr=0, shape=(4,), strides=(1,), dtype="fp32", device=CPU) -> ArrayView:
    return ArrayView(ptr, facts(shape, strides, dtype, device, "numpy"), None)


@pytest.mark.parametrize(
    ("shape", "strides", "contiguous"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (4, 1), False),
        ((1, 3), (99, 1), True),
        ((2, 1), (1, 7), True),
        ((0, 3), (7, 7), True),
        ((3, 0), (7, 7), True),
        ((3, 2, 0), (1, 7, 7), True),
        ((3, 2), (1, 3), False),
        ((), (), True),
    ],
)
def test_contiguity(shape, strides, contiguous):
    assert fake(shape=shape, strides=strides).facts.is_contiguous is contiguous


def test_extent_covers_negative_strides():
    assert fake(shape=(3, 2), strides=(-2, 1)).facts.extent == (-16, 8)
    assert fake(shape=(0,)).facts.extent == (0, 0)


def test_same_device():
    gpu = fake(device=Device("cuda", 1)).facts
    assert check.require_same_device([("a", gpu), ("b", None)]) == Device("cuda", 1)
    with pytest.raises(DeviceMismatchError, match="b: want it on cuda:1, where a is, got cpu"):
        check.require_same_device([("a", gpu), ("b", fake().facts)])


@pytest.mark.parametrize(
    ("start", "overlaps"),
    [(84, False), (85, True), (100, True), (115, True), (116, False), (300, False)],
)
def test_overlap_of_one_byte_at_each_end(start, overlaps):
    """Against x in bytes 100 to 115: an out of 16 bytes, forward and backward."""
    x = fake(ptr=100)
    for out in (fake(ptr=start), fake(ptr=start + 12, strides=(-1,))):
        if overlaps:
            with pytest.raises(ArgumentError, match="out: must not overlap x"):
                require_apart(x, out)
        else:
            require_apart(x, out)


def require_apart(*views: ArrayView, num_inputs: int = 1, in_place: bool = False) -> None:
    pairs = check.apart(tuple(v.facts for v in views), num_inputs, in_place=in_place)
    check.require_apart(pairs, [v.ptr for v in views], ("x", "out", "more")[: len(views)])


def test_inputs_may_overlap_and_empty_arrays_overlap_nothing():
    require_apart(fake(100), fake(108), fake(300), num_inputs=2)
    require_apart(fake(100), fake(104, shape=(0,)))
    require_apart(fake(104, shape=(0,)), fake(100))


def test_outputs_are_apart_from_each_other():
    with pytest.raises(ArgumentError, match="more: must not overlap out"):
        require_apart(fake(100), fake(200), fake(215))


@pytest.mark.parametrize("start", [88, 96, 100, 104, 112])
@pytest.mark.parametrize("strides", [(1,), (2,)])
def test_in_place_is_the_same_address_and_strides_or_apart(start, strides):
    if (start, strides) == (100, (1,)):
        require_apart(fake(100), fake(start, strides=strides), in_place=True)
        return
    with pytest.raises(ArgumentError, match="out: must not overlap x"):
        require_apart(fake(100), fake(start, strides=strides), in_place=True)


def test_bytes_stand_for_the_narrow_types():
    assert check.require_dtype(fake(dtype="uint8").facts, "w", "e4m3") == "e4m3"
    assert check.require_dtype(fake(dtype="uint16").facts, "x", "fp16", "bf16") == "bf16"
    with pytest.raises(DTypeError, match="x: want bf16, got fp16"):
        check.require_dtype(fake(dtype="fp16").facts, "x", "bf16")


def test_a_contiguous_copy_is_named_in_the_callers_framework():
    of = {f: facts((2, 2), (1, 2), "fp32", CPU, f) for f in ("numpy", "cupy", "torch")}
    for framework, remedy in [
        ("numpy", "np.ascontiguousarray(x)"),
        ("cupy", "cupy.ascontiguousarray(x)"),
        ("torch", "x.contiguous()"),
    ]:
        assert check.contiguous_copy_of(of[framework], "x") == remedy
        with pytest.raises(ArgumentError, match=rf"x: want .*; pass {re.escape(remedy)}$"):
            check.require_contiguous(of[framework], "x")


def test_a_read_only_array_is_not_for_results():
    a = np.zeros(4, np.float32)
    check.require_writeable(view(a, "out").facts, "out")
    check.require_writeable(view(torch.zeros(4), "out").facts, "out")
    a.flags.writeable = False
    with pytest.raises(ArgumentError, match="out: want a writeable array, got a read-only one"):
        check.require_writeable(view(a, "out").facts, "out")


def test_importing_the_library_touches_nothing():
    import subprocess
    import sys

    code = "import sys, cumoe; print([m for m in ('cupy', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
