"""Tensor maps among the arguments of a launch: encoded for the addresses of each call."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from cumoe.errors import CumoeError, UnsupportedDeviceError
from cumoe.launch import driver, run
from cumoe.launch.run import At, Launch, Prepared
from cumoe.plan.spec import LaunchSpec, Step, kernel_spec
from cumoe.plan.tensor_map import MAX_STRIDE, TensorMap, is_mappable

WEIGHTS = TensorMap("w", (640, 96, 5), (768, 81920), (128, 64, 1))
CODES = TensorMap("scratch", (512, 40), (512,), (64, 40), offset=1024, swizzle=64, promotion=0)
RANK_5 = TensorMap("w", (128, 8, 2, 4, 3), (128, 4096, 1024, 8192), (128, 8, 2, 4, 1), promotion=64)


class Driver:
    """Takes notes; a map that it encodes is the number of those before it, in every byte."""

    def __init__(self) -> None:
        self.encoded: list[tuple[Any, ...]] = []
        self.launched: list[list[bytes]] = []
        self.answer = 0

    def cuTensorMapEncodeTiled(
        self, storage, dtype, rank, address, dims, strides, box, steps, *how
    ):
        assert ctypes.addressof(storage) % 64 == 0
        assert len(storage) == 128
        assert (dtype.value, list(steps)) == (0, [1] * rank.value)
        assert [type(a)._type_ for a in (dims, strides, box)] == [
            ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32,
        ]  # fmt: skip
        shape = tuple(dims), tuple(strides), tuple(box)
        self.encoded.append((address.value, *shape, tuple(h.value for h in how)))
        ctypes.memset(storage, len(self.encoded), 128)
        return self.answer

    def cuLaunchKernelEx(self, config, function, places, extra):
        self.launched.append([ctypes.string_at(place, 128)[:8] for place in places])
        return 0

    def cuGetErrorName(self, code, name):
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE"


@pytest.fixture
def gpu(monkeypatch):
    gpu = Driver()
    monkeypatch.setattr(driver, "library", lambda: gpu)
    monkeypatch.setattr(run, "function", lambda step, device, stream: 1)
    return gpu


def launch(*arguments: Any) -> Launch:
    letters = {At: "P", TensorMap: "T", int: "q", float: "f"}
    abi = "".join(letters[type(a)] for a in arguments)
    return Launch(Step(kernel_spec("k", "sm_90a"), "k", LaunchSpec(2, 32), abi), arguments)


def prepared(*launches: Launch) -> Prepared:
    return Prepared(launches, ["w", "scratch"], 0, 0)


def word(value: int) -> bytes:
    return value.to_bytes(8, "little")


def test_all_of_a_map_reaches_the_driver(gpu):
    prepared(launch(WEIGHTS, CODES, RANK_5))(0, [4096, 65536])
    assert gpu.encoded == [
        (4096, (640, 96, 5), (768, 81920), (128, 64, 1), (0, 3, 2, 0)),
        (65536 + 1024, (512, 40), (512,), (64, 40), (0, 2, 0, 0)),
        (4096, (128, 8, 2, 4, 3), (128, 4096, 1024, 8192), (128, 8, 2, 4, 1), (0, 3, 1, 0)),
    ]


def test_the_kernel_gets_the_map_in_its_place(gpu):
    call = prepared(launch(7, WEIGHTS, At("w"), CODES), launch(CODES, At("scratch", 8)))
    call(0, [4096, 65536])
    assert gpu.launched == [
        [word(7), b"\1" * 8, word(4096), b"\2" * 8],
        [b"\3" * 8, word(65536 + 8)],
    ]


def test_an_address_that_stays_is_not_encoded_again(gpu):
    call = prepared(launch(WEIGHTS, CODES))
    for addresses in ([4096, 65536], [4096, 65536], [4096, 131072], [8192, 131072]):
        call(0, addresses)
    assert [e[0] for e in gpu.encoded] == [4096, 66560, 132096, 8192]
    assert [[p[0] for p in places] for places in gpu.launched] == [[1, 2], [1, 2], [1, 3], [4, 3]]


def test_an_address_that_returns_is_encoded_again(gpu):
    call = prepared(launch(WEIGHTS))
    for address in (4096, 8192, 4096):
        call(0, [address, 0])
    assert [e[0] for e in gpu.encoded] == [4096, 8192, 4096]


def test_what_the_driver_refuses_is_told_and_not_launched(gpu):
    call = prepared(launch(WEIGHTS))
    gpu.answer = 1
    for _ in range(2):
        with pytest.raises(CumoeError, match=r"^tensor map of w, dims \(640, 96, 5\).*INVALID"):
            call(0, [4096, 0])
    assert gpu.launched == []
    gpu.answer = 0
    call(0, [4096, 0])
    assert len(gpu.launched) == 1
    assert len(gpu.encoded) == 3


def test_a_driver_that_knows_no_tensor_maps(gpu, monkeypatch):
    monkeypatch.delattr(Driver, "cuTensorMapEncodeTiled")
    with pytest.raises(UnsupportedDeviceError, match=r"want a driver of CUDA 12 or newer, .*got"):
        prepared(launch(WEIGHTS))


@pytest.mark.parametrize(
    ("dims", "strides", "expected"),
    [
        ((640, 96, 5), (768, 81920), True),
        ((640, 96, 5), (768, 640), True),  # in any order
        ((640, 96, 1), (768, 0), True),
        ((640, 1, 1), (-640, 7), True),
        ((640, 96, 5), (768, 0), False),
        ((640, 96, 5), (-768, 81920), False),
        ((640, 96, 5), (776, 81920), False),
        ((640, 96, 5), (768, MAX_STRIDE), False),
        ((640, 96, 5), (768, MAX_STRIDE - 16), True),
        ((640, 0, 5), (768, 81920), False),
    ],
)
def test_which_strides_a_map_holds(dims, strides, expected):
    assert is_mappable(dims, strides) is expected
