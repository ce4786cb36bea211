"""Arrays of any framework by DLPack: what a view says of them, and when their memory goes back."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest
import torch

from cumoe.arrays import dlpack
from cumoe.arrays.check import require_contiguous, require_dtype, require_writeable
from cumoe.arrays.exchange import to_numpy, view, view_all
from cumoe.arrays.view import CPU, Device
from cumoe.errors import ArgumentError, DTypeError, UnsupportedDeviceError
from tests.helpers import lenders
from tests.helpers.lenders import Careless, FakeGpu, Handmade, Old, Oldest, Wrapped

TORCH_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "float8_e5m2",
    torch.float64: "float64",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
    torch.complex64: "complex64",
}
producers = pytest.mark.parametrize("producer", [Wrapped, Old, Oldest])


@producers
@pytest.mark.parametrize(("dtype", "name"), TORCH_TYPES.items())
def test_facts_are_those_of_the_array(producer, dtype, name):
    t = torch.zeros(4, 6, dtype=torch.uint8).to(dtype)[1:, 1:4].T
    v = view(producer(t), "x")
    f = v.facts
    assert (f.shape, f.strides, f.dtype, f.device) == ((3, 3), (1, 6), name, CPU)
    assert (f.framework, f.writeable, f.is_contiguous) == ("dlpack", True, False)
    assert v.ptr == t.data_ptr()
    assert view(producer(t.clone().T.clone().T), "x").facts.is_contiguous is False
    assert view(producer(t), "y").facts is f


@producers
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.int64])
def test_to_numpy_shares_memory_and_keeps_the_type(producer, dtype):
    t = torch.arange(12.0).reshape(3, 4).to(dtype).T
    a = to_numpy(view(producer(t), "x"))
    assert (a.ctypes.data, a.shape) == (t.data_ptr(), (4, 3))
    assert a.dtype.name == str(dtype).removeprefix("torch.")
    assert a.astype(np.float32).tolist() == t.float().tolist()
    t.zero_()
    assert not a.astype(np.float32).any()


def test_a_wrong_value_would_be_seen():
    t = torch.arange(4.0)
    a = to_numpy(view(Wrapped(t), "x"))
    t[2] = 9
    assert a.tolist() == [0, 1, 9, 3]


MEMORY = np.arange(64, dtype=np.float32)
AT = MEMORY.ctypes.data
either = pytest.mark.parametrize("major", [None, 1], ids=["dltensor", "dltensor_versioned"])


@either
def test_the_fields_of_a_capsule(major):
    made = Handmade(AT, (2, 3), strides=(-8, 2), byte_offset=64, major=major)
    v = view(made, "x")
    assert (v.ptr, v.facts.shape, v.facts.strides, v.facts.dtype) == (
        AT + 64, (2, 3), (-8, 2), "fp32",
    )  # fmt: skip
    assert v.facts.extent == (-32, 20)
    assert to_numpy(v).tolist() == [[16, 18, 20], [8, 10, 12]]


@either
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (1, 1)])
def test_no_strides_are_row_major(major, shape):
    v = view(Handmade(AT, shape, major=major), "x")
    assert v.facts.is_contiguous
    assert (to_numpy(v) == MEMORY[: np.prod(shape, dtype=int)].reshape(shape)).all()


@either
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0, 2)])
def test_an_empty_array_needs_no_memory(major, shape):
    v = view(Handmade(0, shape, major=major), "x")
    assert (v.facts.shape, v.facts.extent, v.ptr) == (shape, (0, 0), 0)
    assert to_numpy(v).shape == shape


def test_an_array_without_a_deleter():
    view(Handmade(AT, (3,), deleter=False), "x")


@pytest.mark.parametrize(
    ("code", "bits", "name"),
    [
        (0, 8, "int8"), (1, 16, "uint16"), (2, 16, "fp16"), (4, 16, "bf16"), (5, 128, "complex128"),
        (6, 8, "bool"), (7, 8, "float8_e3m4"), (8, 8, "float8_e4m3"), (9, 8, "float8_e4m3b11fnuz"),
        (10, 8, "e4m3"), (11, 8, "float8_e4m3fnuz"), (12, 8, "float8_e5m2"),
        (13, 8, "float8_e5m2fnuz"), (14, 8, "float8_e8m0fnu"), (17, 4, "DLPack type 17"),
        (0, 4, "int4"),
    ],
)  # fmt: skip
def test_type_codes(code, bits, name):
    made = Handmade(AT, (4,), code=code, bits=bits)
    assert view(made, "x").facts.dtype == name
    assert made.all_returned
    if name not in ("e4m3", "bf16", "fp16"):
        with pytest.raises(DTypeError, match=f"^x: want fp32, got {name}; convert"):
            require_dtype(view(made, "x").facts, "x", "fp32")


either_way = pytest.mark.parametrize("kind", [Handmade, Careless])


@either
@either_way
def test_the_deleter_is_called_once_when_the_view_goes(major, kind):
    made = kind(AT, (4,), major=major)
    v = view(made, "x")
    kept = v.owner
    del v
    assert (len(made.lent), made.returned) == (1, [])
    a = to_numpy(dlpack_view := view(made, "x"))
    del dlpack_view
    assert (len(made.lent), made.returned) == (2, [])
    del a
    assert len(made.returned) == 1
    del kept
    assert len(made.lent) == 2
    assert made.all_returned


WRONG = {
    "lanes": ({"lanes": 4}, DTypeError, "want elements of one value, got 4 lanes"),
    "major": ({"major": 2}, DTypeError, "want a DLPack capsule of version 1, got 2"),
    "device": (
        {"device": (lenders.CUDA, 0), "says": (lenders.CPU, 0)},
        DTypeError,
        "want an export on the device of __dlpack_device__, 1, got one on cuda:0",
    ),
}


@either_way
@pytest.mark.parametrize("fault", WRONG)
def test_the_deleter_is_called_once_on_an_error(fault, kind):
    fields, error, message = WRONG[fault]
    made = kind(AT, (4,), **fields)
    with pytest.raises(error, match=f"^x: {message}"):
        view(made, "x")
    gc.collect()
    assert made.all_returned
    assert len(made.lent) == 1


def test_a_capsule_is_used_once():
    class Stale(Handmade):
        capsule = None

        def __dlpack__(self, **options):
            self.capsule = self.capsule or super().__dlpack__(**options)
            return self.capsule

    made = Stale(AT, (4,))
    torch.from_dlpack(made)
    with pytest.raises(DTypeError, match=r"^x: want a DLPack capsule that nobody has used, got"):
        view(made, "x")
    assert "used_dltensor_versioned" in repr(made.capsule)
    assert made.all_returned


def test_no_capsule_at_all():
    class Liar(Handmade):
        def __dlpack__(self, **_):
            return "dltensor"

    with pytest.raises(DTypeError, match=r"^x: want a DLPack capsule .*, got 'dltensor'"):
        view(Liar(AT, (4,)), "x")


def test_memory_that_only_the_capsule_owns_stays():
    class Copies(Wrapped):
        def __dlpack__(self, **options):
            return (self.array * 2).__dlpack__(**options)

    a = to_numpy(view(Copies(torch.arange(1e5)), "x"))
    others = [torch.zeros(100_000) for _ in range(4)]
    assert a.tolist() == (2 * torch.arange(1e5)).tolist()
    del others


def test_read_only_arrays_are_no_outputs():
    made = Handmade(AT, (4,), flags=1)
    assert not to_numpy(view(made, "x")).flags.writeable
    assert to_numpy(view(Handmade(AT, (4,)), "x")).flags.writeable
    with pytest.raises(ArgumentError, match=r"^out: want a writeable array, got a read-only one.*"):
        require_writeable(view(made, "out").facts, "out")


def test_the_remedy_for_gaps_names_no_framework():
    with pytest.raises(ArgumentError, match=r"pass a contiguous copy of x$"):
        require_contiguous(view(Wrapped(torch.zeros(3, 4).T), "x").facts, "x")


@pytest.mark.parametrize("device", [lenders.OPENCL, lenders.VULKAN, lenders.ROCM, 14])
def test_other_devices_are_refused(device):
    made = Handmade(AT, (4,), device=(device, 0))
    with pytest.raises(UnsupportedDeviceError, match=rf"^x: want .* device type {device}; move it"):
        view(made, "x")
    assert made.lent == {}


def test_pinned_memory_is_the_hosts():
    made = Handmade(AT, (4,), device=(lenders.CUDA_HOST, 0))
    assert view(made, "x").device == CPU
    assert made.streams == [None]


@pytest.mark.parametrize("device", [lenders.CUDA, lenders.CUDA_MANAGED])
def test_on_a_gpu_the_stream_is_named_and_the_memory_returns_after_it(device, monkeypatch):
    monkeypatch.setattr(dlpack, "gpu", gpu := FakeGpu(stream=77))
    made = Handmade(AT, (4,), device=(device, 3))
    v = view(made, "x")
    assert (v.device, made.streams) == (Device("cuda", 3), [77])
    del v
    assert made.returned == []
    gpu.made[0].lent.clear()
    assert made.all_returned


def test_the_arrays_of_a_call_are_one_visit_on_each_device(monkeypatch):
    monkeypatch.setattr(dlpack, "gpu", gpu := FakeGpu(stream=77))
    made = [Handmade(AT, (4,), device=(lenders.CUDA, ordinal)) for ordinal in (0, 1, 0, 0)]
    views = view_all([*made[:2], MEMORY, *made[2:]], "abcde")
    assert [v.device for v in views if v.framework == "dlpack"] == [
        Device("cuda", ordinal) for ordinal in (0, 1, 0, 0)
    ]
    assert [len(visit.lent) for visit in gpu.made] == [3, 1]
    assert [m.streams for m in made] == [[77]] * 4
    view(made[0], "x")
    assert len(gpu.made) == 3
    with pytest.raises(DTypeError, match=r"^c: want a NumPy, torch or CuPy array"):
        view_all([made[0], MEMORY, 3.0, made[1]], "abcd")


def test_a_visit_to_a_device_that_is_not_current_makes_it_so(monkeypatch):
    monkeypatch.setattr(dlpack, "gpu", gpu := FakeGpu(stream=77, current=1))
    here, there = (Handmade(AT, (4,), device=(lenders.CUDA, ordinal)) for ordinal in (1, 0))
    view_all([here, there, there], "abc")
    assert gpu.asked == [there, there]
    assert [m.streams for m in (here, there)] == [[77], [77, 77]]


def test_a_faulty_loan_on_a_gpu_returns_at_once(monkeypatch):
    monkeypatch.setattr(dlpack, "gpu", gpu := FakeGpu())
    made = Handmade(AT, (4,), device=(lenders.CUDA, 0), lanes=2)
    with pytest.raises(DTypeError, match="lanes"):
        view(made, "x")
    gc.collect()
    assert made.all_returned
    assert gpu.made[0].lent == []


def test_an_export_without_a_stream_is_for_the_default_stream_only(monkeypatch):
    monkeypatch.setattr(dlpack, "gpu", FakeGpu(stream=77))

    class NoStream(Handmade):
        def __dlpack__(self):
            return super().__dlpack__(max_version=(1, 0))

    with pytest.raises(DTypeError, match=r"^x: want an array that lends .*unexpected keyword"):
        view(NoStream(AT, (4,), device=(lenders.CUDA, 0)), "x")
    monkeypatch.setattr(dlpack, "gpu", FakeGpu(stream=1))
    assert view(NoStream(AT, (4,), device=(lenders.CUDA, 0)), "x").ptr == AT


@pytest.mark.parametrize("error", [BufferError, RuntimeError, ValueError, TypeError])
def test_a_failing_export_is_a_typed_error_with_its_cause(error):
    class Broken(Wrapped):
        def __dlpack__(self, *, stream=None, max_version=None):
            raise error("no can do")

    with pytest.raises(DTypeError, match=r"^x: want .*Broken, whose .* \(no can do\)") as e:
        view(Broken(torch.ones(3)), "x")
    assert isinstance(e.value.__cause__, error)


def test_a_gradient_is_named():
    with pytest.raises(DTypeError, match=r"^x: .*require gradient, use tensor.detach"):
        view(Wrapped(torch.ones(3, requires_grad=True)), "x")


@pytest.mark.parametrize("thing", [type("Half", (), {"__dlpack__": 1})(), np.ndarray, 3.0])
def test_half_a_protocol_is_no_array(thing):
    with pytest.raises(DTypeError, match=r"^x: want"):
        view(thing, "x")


def test_a_view_imports_no_framework():
    import subprocess

    code = (
        "import sys, numpy as np, cumoe\n"
        "class A:\n"
        "    a = np.ones((1, 128), np.float32)\n"
        "    def __dlpack_device__(self): return self.a.__dlpack_device__()\n"
        "    def __dlpack__(self, **o): return self.a.__dlpack__(**o)\n"
        "q, s = cumoe.per_token_group_quant_fp8(A())\n"
        "print(type(q).__name__, [m for m in ('cupy', 'torch', 'jax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "ndarray []"
