"""What the launcher says where there is no CuPy, no driver, no such GPU, or a launch fails."""

from __future__ import annotations

import builtins
import ctypes

import numpy as np
import pytest

from cumoe.errors import ArgumentError, CumoeError, UnsupportedDeviceError
from cumoe.launch import device, driver, memory
from cumoe.ops._experts_inputs import _require_slots


@pytest.fixture
def cupy_fails(monkeypatch):
    """`import cupy` fails with an error of the test's choice."""
    real = builtins.__import__

    def fail_with(error: Exception) -> None:
        def imported(name, *args, **kwargs):
            if name == "cupy":
                raise error
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", imported)

    device.cupy.cache_clear()
    yield fail_with
    device.cupy.cache_clear()


def test_without_cupy(cupy_fails):
    cupy_fails(ModuleNotFoundError("No module named 'cupy'"))
    wanted = r"CuPy: want cupy-cuda12x or .*No module named 'cupy'.*pip install 'cumoe\[cuda12\]'"
    with pytest.raises(UnsupportedDeviceError, match=wanted):
        device.cupy()
    assert device.device_count() == 0


def test_on_a_read_only_home(cupy_fails):
    cupy_fails(PermissionError(13, "Permission denied", "/home/x/.cupy"))
    wanted = r"CuPy: want a writable folder .*/home/x/\.cupy.*; name one in CUPY_CACHE_DIR"
    with pytest.raises(UnsupportedDeviceError, match=wanted):
        device.cupy()


def test_without_a_driver(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    driver.library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(
        UnsupportedDeviceError, match=r"want the NVIDIA driver's libcuda\.so\.1, .*"
    ):
        driver.library()
    driver.library.cache_clear()


class FailingDriver:
    """Answers every call with CUDA_ERROR_ILLEGAL_ADDRESS."""

    def cuGetErrorName(self, code, name):
        name._obj.value = b"CUDA_ERROR_ILLEGAL_ADDRESS"

    def __getattr__(self, name):
        return lambda *args: 700


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: driver.check(700, "launch of moe_sum"), "launch of moe_sum"),
        (lambda: driver.is_capturing(5), "stream capture query"),
        (lambda: driver.set_shared_memory(1, 2, "moe_sum"), "shared memory of moe_sum"),
        (lambda: driver.relaxed_capture().__enter__(), "capture mode"),
    ],
)
def test_a_call_that_the_driver_refuses(monkeypatch, call, what):
    monkeypatch.setattr(driver, "library", FailingDriver)
    with pytest.raises(CumoeError) as error:
        call()
    assert str(error.value).startswith(
        f"{what}: want success, the CUDA driver answered CUDA_ERROR_ILLEGAL_ADDRESS (700)"
    )
    assert "CUDA_LAUNCH_BLOCKING=1" in str(error.value)


def test_a_call_that_succeeds_is_no_error():
    driver.check(0, "launch")


def test_the_capture_mode_is_exchanged_and_given_back(monkeypatch):
    """Relaxed inside, and afterwards what the thread had before, whatever happened."""
    mode = [0]

    class Driver:
        def cuThreadExchangeStreamCaptureMode(self, pointer):
            mode[0], pointer._obj.value = pointer._obj.value, mode[0]
            return 0

    def fail_inside():
        with driver.relaxed_capture():
            assert mode == [driver.CAPTURE_MODE_RELAXED]
            raise KeyError

    monkeypatch.setattr(driver, "library", Driver)
    with pytest.raises(KeyError):
        fail_inside()
    assert mode == [0]


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(memory, "device_count", lambda: 2)
    with pytest.raises(UnsupportedDeviceError, match="cuda:2: want one of the 2 CUDA devices"):
        memory.to_device(np.zeros(3), 2)


def test_more_slots_than_32_bits_count():
    _require_slots(2**31 - 2**20, 16)
    with pytest.raises(ArgumentError, match=r"topk_ids: want fewer than 2\^31 padded slots, got"):
        _require_slots(2**31 - 2, 16)
