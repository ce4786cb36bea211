"""Forks: before CUDA is initialised all is well, after it the child says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cumoe.launch import nvml

ROOT = Path(__file__).parents[2]

# A CuPy whose driver, like the real one, does not survive a fork.
WITH_FAKE_CUPY = """\
import json, os, sys, types
from cumoe.launch import device
from cumoe.store.nvrtc import nvrtc_version

nvrtc_version()  # loads the real NVRTC, which forks do not harm

class Runtime:
    class CUDARuntimeError(Exception): pass
    owner, current = None, 0
    def _use(self):
        self.owner = self.owner or os.getpid()
        if self.owner != os.getpid():
            raise self.CUDARuntimeError("cudaErrorInitializationError")
    def getDeviceCount(self): self._use(); return GPUS
    def getDevice(self): self._use(); return 0
    def setDevice(self, ordinal): self._use()
    def driverGetVersion(self): return 13000
    def getDeviceProperties(self, ordinal):
        self._use()
        return {"major": 9, "minor": 0, "multiProcessorCount": 132, "sharedMemPerBlockOptin": 1}

GPUS = int(sys.argv[2])
sys.modules["cupy"] = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=Runtime()))

def use():
    with device.on_device(0):
        return device.info(0).arch

def outcome(call):
    try: return str(call())
    except Exception as error: return f"{type(error).__name__}: {error}"

def in_child(*calls):
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps([outcome(c) for c in calls]).encode())
        os._exit(0)
    os.wait()
    return json.loads(os.read(read, 9999))

before = {"none": lambda: None, "count": device.device_count, "use": use}[sys.argv[1]]
before()
children = in_child(use, device.device_count, use), outcome(use)
print(json.dumps(children))
"""


def after(what: str, gpus: int = 1) -> tuple[list[str], str]:
    """What a child of a process that did `what` gets from use, count, use; and the parent."""
    line = [sys.executable, "-c", WITH_FAKE_CUPY, what, str(gpus)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    child, parent = json.loads(done.stdout)
    return child, parent


def test_a_fork_before_the_first_use_is_fine():
    assert after("none") == (["sm_90a", "1", "sm_90a"], "sm_90a")


@pytest.mark.parametrize("what", ["count", "use"])
def test_a_fork_after_it_is_a_clear_error_in_the_child_only(what):
    child, parent = after(what)
    assert parent == "sm_90a"
    for outcome in child:
        assert outcome.startswith(
            "UnsupportedDeviceError: CUDA: was initialised before this process"
        )
        assert "'spawn'" in outcome


def test_the_fake_driver_fails_as_the_real_one_does():
    """Without the check, the child's error would be CUDA's."""
    spoiled = WITH_FAKE_CUPY.replace(
        "before()\n", "before()\ndevice._cuda_is_up = False\ndevice._after_fork()\n"
    )
    line = [sys.executable, "-c", spoiled, "use", "1"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
    assert json.loads(done.stdout)[0][0].startswith("CUDARuntimeError: cudaErrorInit")


def test_a_machine_without_driver_has_none(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(nvml.ctypes, "CDLL", missing)
    assert nvml.machine() is None


def test_facts_of_the_driver(monkeypatch):
    """The calls and their arguments, as nvml.h declares them."""

    class Nvml:
        shut = 0

        def nvmlInit_v2(self):
            return 0

        def nvmlShutdown(self):
            self.shut += 1

        def nvmlSystemGetDriverVersion(self, text, size):
            text.value = b"580.1.2"
            assert size == 96

        def nvmlSystemGetCudaDriverVersion_v2(self, version):
            version._obj.value = 13000

        def nvmlDeviceGetCount_v2(self, count):
            count._obj.value = 2

        def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
            handle._obj.value = 1000 + index.value

        def nvmlDeviceGetName(self, handle, text, size):
            text.value = b"H200 %d" % handle.value

        def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
            major._obj.value, minor._obj.value = 9, handle.value - 1000

    fake = Nvml()
    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: fake)
    gpus = (nvml.Gpu("H200 1000", (9, 0)), nvml.Gpu("H200 1001", (9, 1)))
    assert nvml.machine() == nvml.Machine("580.1.2", 13000, gpus)
    assert fake.shut == 1
    fake.nvmlInit_v2 = lambda: 9  # NVML_ERROR_DRIVER_NOT_LOADED
    assert nvml.machine() is None
