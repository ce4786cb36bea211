"""Every kernel of a layer compiles for every architecture, without a GPU, in seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from cumoe.plan.device import ARCHITECTURES, H200
from cumoe.plan.enumerate import device_of, layer_specs
from cumoe.plan.spec import KernelSpec
from cumoe.store import store

GLM_TP8 = {"K": 6144, "N": 256, "num_experts": 256, "topk": 8}


def build(specs: Iterable[KernelSpec]) -> list[store.Cubin]:
    """Every kernel; the first that NVRTC refuses raises."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(store.build, specs))


@pytest.mark.parametrize("arch", ARCHITECTURES.values())
def test_a_layer_compiles_for(arch):
    cubins = build(layer_specs(device_of(arch), K=512, N=256, num_experts=8, topk=2, clamp=True))
    assert len(cubins) > 10


LAYERS = {
    "glm_tp8": GLM_TP8,
    "glm_tp4": GLM_TP8 | {"N": 512},
    "flash_tp8": {"K": 4096, "N": 256, "num_experts": 288, "topk": 8, "clamp": True},
    "qwen_tp1": {"K": 2048, "N": 512, "num_experts": 256, "topk": 8, "ids": "int64"},
    "deepseek_ep8": {
        "K": 4096, "N": 2048, "num_experts": 256, "num_local_experts": 32, "topk": 6,
        "scale_format": "ue8m0",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_the_compiler_has_nothing_to_say(name, monkeypatch, tmp_path, caplog):
    """A spill, or a comparison that is always true, is a warning in its log."""
    from cumoe import _settings

    monkeypatch.setenv("CUMOE_CACHE_DIR", str(tmp_path))
    _settings.settings.cache_clear()
    store.forget()
    with caplog.at_level("WARNING", logger="cumoe"):
        build(layer_specs(H200, **LAYERS[name]))
    _settings.settings.cache_clear()
    assert [record.getMessage() for record in caplog.records] == []


def test_cold_compile_of_a_layer_takes_seconds(monkeypatch, tmp_path):
    """Of a CPU: what else the machine does meanwhile is not the compiler's."""
    from cumoe import _settings

    monkeypatch.setenv("CUMOE_CACHE_DIR", str(tmp_path))
    _settings.settings.cache_clear()
    store.forget()
    start = time.process_time()
    cubins = build(layer_specs(H200, **GLM_TP8))
    seconds = time.process_time() - start
    _settings.settings.cache_clear()
    assert store.stats().compiled == len(cubins)
    assert seconds < 5
