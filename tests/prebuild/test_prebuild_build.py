"""Kernels compiled ahead: what is built, what was there, what fails, and how long it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cumoe
from cumoe import _settings
from cumoe.errors import ArgumentError
from cumoe.launch import nvml
from cumoe.plan.device import H200
from cumoe.plan.enumerate import all_steps, device_of, serving_steps, specs_of
from cumoe.plan.spec import kernel_spec
from cumoe.prebuild import default_archs, selected_specs
from cumoe.store import store

TINY = [kernel_spec("tiny", "sm_90a", A=a).text for a in range(3)]
BROKEN = kernel_spec("broken", "sm_90a", A=2).text
SIZES = {"hidden": 256, "intermediate": 128, "experts": 4, "top_k": 2}


def counts(report) -> tuple[int, int, int]:
    return tuple(report.count(state) for state in ("built", "cached", "failed"))


def as_new_process() -> None:
    store.forget()


def test_first_all_are_built_then_all_are_cached(kernels, cache):
    first = cumoe.prebuild(kernel=TINY)
    assert counts(first) == (3, 0, 0)
    as_new_process()
    second = cumoe.prebuild(kernel=TINY)
    assert counts(second) == (0, 3, 0)
    assert store.stats().compiled == 0
    assert first.num_bytes == second.num_bytes == sum(f.stat().st_size for f in cubins(cache))
    assert (first.cache_dir, first.archs) == (cache, ("sm_90a",))


def cubins(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.cubin"))


def test_only_what_is_missing_is_built(kernels, cache):
    cumoe.prebuild(kernel=TINY[0])
    as_new_process()
    report = cumoe.prebuild(kernel=TINY)
    assert [k.state for k in report.kernels] == ["cached", "built", "built"]
    assert [k.name for k in report.kernels] == TINY


def test_a_failure_stops_no_other_and_carries_the_log(kernels, cache):
    (kernels / "broken.cu").write_text('static_assert(A == 1, "A is one");\n')
    report = cumoe.prebuild(kernel=[TINY[0], BROKEN, TINY[1]], jobs=1)
    assert counts(report) == (2, 0, 1)
    assert not report.ok
    (failed,) = (k for k in report.kernels if k.state == "failed")
    assert failed.name == BROKEN
    assert 'broken.cu(1): error: static assertion failed with "A is one"' in failed.log
    assert len(cubins(cache)) == 2
    assert not report.is_compiled
    assert report.causes == (f"{BROKEN}: {failed.log}",)


def test_a_name_without_its_constants_is_one_line(cache):
    """Of a kernel of the library, which NVRTC would answer with a page of errors."""
    report = cumoe.prebuild(kernel="moe_sum-sm_90a")
    (cause,) = report.causes
    assert cause.startswith("moe_sum-sm_90a: NVRTC misses ")
    missed = cause.partition("misses ")[2].partition(": want the constants")[0]
    assert {"K", "TOPK"} <= set(missed.split(", "))
    assert "\n" not in cause


def test_a_kernel_that_does_not_exist_is_a_failure_too(kernels, cache):
    report = cumoe.prebuild(kernel=["nonsense-sm_90a-A=1", TINY[0]])
    assert counts(report) == (1, 0, 1)
    (failed,) = (k for k in report.kernels if k.state == "failed")
    assert "cannot read nonsense.cu" in failed.log


def test_a_kernel_that_cannot_be_saved_is_a_failure(kernels, cache):
    cache.write_text("a file where the folder should be")
    report = cumoe.prebuild(kernel=TINY)
    assert counts(report) == (0, 0, 3)
    assert all(f"{cache} cannot be written" in k.log for k in report.kernels)
    assert report.is_compiled
    (cause,) = report.causes
    assert cause.startswith(f"{TINY[0]} and 2 more kernels: compiled, but {cache} cannot be ")


def test_prebuild_compiles_although_workers_may_not(kernels, cache, monkeypatch):
    monkeypatch.setenv("CUMOE_DISABLE_JIT", "1")
    _settings.settings.cache_clear()
    assert counts(cumoe.prebuild(kernel=TINY)) == (3, 0, 0)
    as_new_process()
    assert store.get(kernel_spec("tiny", "sm_90a", A=1)).path is not None


def test_a_read_only_folder_below_counts_as_cached(kernels, cache, tmp_path, monkeypatch):
    cumoe.prebuild(kernel=TINY)
    monkeypatch.setenv("CUMOE_CACHE_DIR", str(tmp_path / "another"))
    monkeypatch.setenv("CUMOE_CACHE_PATH", str(cache))
    _settings.settings.cache_clear()
    as_new_process()
    assert counts(cumoe.prebuild(kernel=TINY)) == (0, 3, 0)


def test_progress_is_told_kernel_by_kernel(kernels, cache):
    seen = []
    cumoe.prebuild(kernel=TINY, progress=lambda kernel, total: seen.append((kernel.name, total)))
    assert sorted(seen) == [(name, 3) for name in TINY]


def test_kernels_named_twice_are_built_once(kernels, cache):
    assert counts(cumoe.prebuild(kernel=[TINY[0], TINY[0]])) == (1, 0, 0)


def test_nothing_to_build_is_an_error():
    with pytest.raises(ArgumentError, match="prebuild: want a model, a config, sizes or a kernel"):
        cumoe.prebuild()


@pytest.mark.parametrize("arch", ["", "sm_90", "sm_90a,", ["sm_90a", "bla"]])
def test_an_unknown_architecture_is_refused_before_any_compile(kernels, cache, arch):
    with pytest.raises(
        ArgumentError, match=r"arch \(--arch\): want one of sm_89, sm_90a, .*, got '"
    ):
        cumoe.prebuild(kernel=TINY, arch=arch)
    assert not cache.exists()


def test_an_unknown_architecture_of_the_environment_is_named(cache, monkeypatch):
    monkeypatch.setenv("CUMOE_ARCH", "bla")
    _settings.settings.cache_clear()
    monkeypatch.setattr(nvml, "machine", lambda: None)
    with pytest.raises(ArgumentError, match=r"CUMOE_ARCH: want one of sm_89, .*, got 'bla'"):
        cumoe.prebuild(**SIZES)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"top_k": 5}, "top_k: want 1 to 4 in the layer, got 5"),
        ({"experts": 128, "top_k": 65}, "top_k: want 1 to 64 in the layer, got 65"),
        ({"experts": 4097}, "experts: want 1 to 4096 in the layer, got 4097"),
    ],
)
def test_sizes_that_no_op_takes_are_refused_before_any_compile(cache, sizes, message):
    with pytest.raises(ArgumentError) as error:
        cumoe.prebuild(**SIZES | sizes)
    assert str(error.value).startswith(message)
    assert not cache.exists()


def test_a_selection_is_what_serving_engines_reach_on_each_architecture():
    specs = selected_specs({**SIZES, "scale_format": "fp32"}, ["sm_90a", "sm_89"])
    (layer,) = cumoe.models.selected_layers({**SIZES, "scale_format": "fp32"})
    want = specs_of(serving_steps(H200, layer)) + specs_of(serving_steps(device_of("sm_89"), layer))
    assert tuple(specs) == want
    everything = selected_specs(SIZES, ["sm_90a"], everything=True)
    assert set(everything) == set(specs_of(all_steps(H200, layer)))


def test_a_layer_is_built_for_two_architectures(cache):
    report = cumoe.prebuild(**SIZES, scale_format="fp32", arch="sm_90a,sm_89")
    assert report.ok
    assert report.archs == ("sm_90a", "sm_89")
    assert {k.name.split("-")[1] for k in report.kernels} == {"sm_90a", "sm_89"}


@pytest.mark.parametrize(
    ("gpus", "variable", "archs"),
    [
        ([], None, ("sm_90a",)),
        ([], "sm_100a", ("sm_100a",)),
        ([(9, 0)] * 8, "sm_100a", ("sm_90a",)),
        ([(8, 9), (9, 0)], None, ("sm_89", "sm_90a")),
        ([(7, 0)], None, ("sm_90a",)),
    ],
)
def test_default_architectures(monkeypatch, gpus, variable, archs):
    machine = nvml.Machine("580.1", 13000, tuple(nvml.Gpu("a GPU", c) for c in gpus))
    monkeypatch.setattr(nvml, "machine", lambda: machine)
    monkeypatch.setenv("CUMOE_ARCH", variable or "")
    _settings.settings.cache_clear()
    assert default_archs() == archs
    _settings.settings.cache_clear()


def test_a_process_that_prebuilt_may_fork(cache):
    """No thread is left behind, and CUDA was not touched."""
    code = (
        "import os, threading, cumoe\n"
        "from cumoe.launch import device\n"
        "cumoe.prebuild(hidden=256, intermediate=128, experts=4, top_k=2)\n"
        "print(threading.active_count(), device._cuda_is_up)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1 False\n", "")


def command(cache: Path, *arguments: str) -> tuple[dict, float]:
    """The report of `cumoe prebuild --json` in a new process, and its seconds on the clock."""
    env = {**os.environ, "CUMOE_CACHE_DIR": str(cache), "CUMOE_ARCH": "sm_90a"}
    line = [sys.executable, "-m", "cumoe", "prebuild", "--json", "--arch", "sm_90a", *arguments]
    start = time.perf_counter()
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout), seconds


def test_glm_is_prebuilt_in_seconds_and_found_again_at_once(tmp_path):
    glm = ("--model", "glm-5.3", "--tp", "8", "--scale-format", "both")
    first, cold_s = command(tmp_path, *glm, "--jobs", "2")
    assert first["failed"] == first["cached"] == 0
    assert first["built"] >= 12
    assert cold_s < 15
    again = [command(tmp_path, *glm) for _ in range(2)]
    assert all(report["cached"] == first["built"] for report, _ in again)
    assert min(warm_s for _, warm_s in again) < 1


def test_cache_info_counts_kernels_and_this_process(kernels, cache, tmp_path, monkeypatch):
    report = cumoe.prebuild(kernel=TINY)
    monkeypatch.setenv("CUMOE_CACHE_PATH", str(tmp_path / "below"))
    _settings.settings.cache_clear()
    info = cumoe.cache_info()
    own, below = info.folders
    assert (own.path, own.kernels, below.path, below.kernels) == (cache, 3, tmp_path / "below", 0)
    assert own.num_bytes > report.num_bytes  # the manifests count too
    assert (info.counters.compiled, info.counters.disk_hits) == (3, 0)
