"""On a GPU: a warm layer is captured at once, loading harms no other's capture, forks, doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import cumoe
from cumoe import doctor
from cumoe.launch import device, nvml

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


def run(code: str, **env: str) -> dict:
    """What a new process reports in its last line."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


CAPTURED_AT_ONCE = """\
import json, torch, cumoe
from cumoe.store import store

LAYER = {"hidden": 384, "intermediate": 256, "experts": 6, "top_k": 2, "swiglu_limit": 7.0}
loaded = cumoe.warmup(**LAYER)
torch.manual_seed(0)
put = {"device": "cuda"}
w1 = torch.randn(6, 512, 384, **put).to(torch.float8_e4m3fn)
w2 = torch.randn(6, 384, 256, **put).to(torch.float8_e4m3fn)
s1, s2 = torch.rand(6, 4, 3, **put), torch.rand(6, 3, 2, **put)
equal = []
for M in (1, 5, 130, 3000):
    for expert_map in (None, torch.arange(6, dtype=torch.int32, **put)):
        for scale_format in ("fp32", "ue8m0"):
            x = torch.randn(M, 384, **put).bfloat16()
            weights, ids = torch.rand(M, 6, **put).topk(2)
            arguments = (x, w1, w2, weights.contiguous(), ids.int())
            options = {"w1_scale": s1, "w2_scale": s2, "swiglu_limit": 7.0,
                       "expert_map": expert_map, "scale_format": scale_format}
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = cumoe.fused_experts_fp8(*arguments, **options)
            graph.replay()
            eager = cumoe.fused_experts_fp8(*arguments, **options)
            equal.append(torch.equal(out.view(torch.int16), eager.view(torch.int16)))
print(json.dumps({"loaded": loaded, "again": cumoe.warmup(**LAYER), "equal": equal,
                  "compiled": store.stats().compiled}))
"""


def test_any_call_of_a_warm_layer_is_captured_without_a_first_run(tmp_path):
    env = {"CUMOE_CACHE_DIR": str(tmp_path)}
    sizes = ["--hidden=384", "--intermediate=256", "--experts=6", "--top-k=2", "--swiglu-limit=7"]
    command = [sys.executable, "-m", "cumoe", "prebuild", *sizes]
    subprocess.run(command, check=True, env=os.environ | env, cwd=ROOT, capture_output=True)
    facts = run(CAPTURED_AT_ONCE, CUMOE_DISABLE_JIT="1", **env)
    assert facts["loaded"] > 7
    assert (facts["again"], facts["compiled"]) == (0, 0)
    assert facts["equal"] == [True] * 16


def test_loading_in_one_thread_leaves_the_capture_of_another_whole():
    """torch captures in CUDA's global mode, in which loading is forbidden to all threads."""
    import torch

    counter = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    loaded = []

    def load() -> None:
        loaded.append(cumoe.warmup(hidden=640, intermediate=128, experts=5, top_k=3))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter += 1
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        counter *= 3
    for _ in range(2):
        graph.replay()
    assert counter.tolist() == [12.0] * 4
    assert loaded[0] > 0


FORKED = """\
import json, os, sys, cumoe
from cumoe.launch import device

def use():
    try:
        with device.on_device(0):
            return device.info(0).arch
    except Exception as error:
        return f"{type(error).__name__}: {error}"

cumoe.prebuild(hidden=256, intermediate=128, experts=4, top_k=2)
if sys.argv[1:] == ["use"]:
    use()
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, use().encode())
    os._exit(0)
os.wait()
print(json.dumps({"child": os.read(read, 9999).decode(), "parent": use()}))
"""


@pytest.mark.parametrize("used", [False, True])
def test_forks_before_and_after_the_first_use(used):
    facts = run(FORKED.replace("sys.argv[1:]", "['use']" if used else "[]"))
    assert facts["parent"].startswith("sm_")
    if used:
        assert facts["child"].startswith("UnsupportedDeviceError: CUDA: was initialised before")
    else:
        assert facts["child"] == facts["parent"]


def test_nvml_and_cuda_tell_the_same():
    machine = nvml.machine()
    assert machine is not None
    properties = device.cupy().cuda.runtime.getDeviceProperties(0)
    capability = (properties["major"], properties["minor"])
    assert (properties["name"].decode(), capability) in [tuple(gpu) for gpu in machine.gpus]
    assert machine.cuda == device.cupy().cuda.runtime.driverGetVersion()


def test_doctor_finds_kernels_and_nothing_wrong():
    found = doctor.diagnose()
    assert [f for f in found.findings if f.is_fatal] == []
    ops = dict(found.ops)
    assert all(backend.startswith("kernel") for backend in ops.values())


def test_warming_a_device_that_is_not_there_is_refused():
    with pytest.raises(cumoe.UnsupportedDeviceError, match="want device from 0 to"):
        cumoe.warmup(hidden=256, intermediate=128, experts=4, top_k=2, device=99)
