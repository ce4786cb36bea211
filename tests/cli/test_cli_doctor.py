"""``cumoe doctor``: every finding, its remedy, and the exit status."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from cumoe import _installed, _settings, doctor
from cumoe.cli import main
from cumoe.errors import UnsupportedDeviceError
from cumoe.launch import device, nvml
from cumoe.plan.device import H200
from cumoe.plan.spec import kernel_spec
from cumoe.store import nvrtc, store

H200_GPU = nvml.Gpu("NVIDIA H200", (9, 0))


@pytest.fixture(autouse=True)
def healthy(monkeypatch, tmp_path) -> Iterator[None]:
    """A machine without a GPU, one CuPy wheel, and a cache that can be written."""
    monkeypatch.setenv("CUMOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nvml, "machine", lambda: None)
    install(monkeypatch, {"cupy-cuda12x": "14.2.0"})
    renew()
    yield
    renew()


def renew() -> None:
    _settings.settings.cache_clear()
    store.forget()


def install(monkeypatch, wheels: dict[str, str]) -> None:
    def version(wheel: str) -> str:
        if wheel not in wheels:
            raise metadata.PackageNotFoundError(wheel)
        return wheels[wheel]

    monkeypatch.setattr(_installed.metadata, "version", version)


def give_gpu(monkeypatch, *gpus: nvml.Gpu, cuda: int = 13000, visible: int | None = None) -> None:
    found = nvml.Machine("580.159.04", cuda, gpus)
    monkeypatch.setattr(nvml, "machine", lambda: found)
    count = len(gpus) if visible is None else visible
    monkeypatch.setattr(device, "device_count", lambda: count)

    def info(ordinal: int):
        if gpus[ordinal].capability != (9, 0):
            raise UnsupportedDeviceError("GPU: want compute capability 9.0")
        return H200

    monkeypatch.setattr(device, "info", info)


def refuse(monkeypatch, module, name: str, cause: Exception) -> None:
    """Replaces a function by one that fails as the library does."""

    def refused():
        raise UnsupportedDeviceError("unusable") from cause

    monkeypatch.setattr(module, name, refused)


def only_finding() -> doctor.Finding:
    (finding,) = doctor.diagnose().findings
    return finding


def test_nothing_is_wrong_without_a_gpu():
    found = doctor.diagnose()
    assert (found.findings, found.ok) == ((), True)
    facts = dict(found.facts)
    assert facts["GPU"] == facts["driver"] == "none"
    assert facts["CuPy"] == "cupy-cuda12x 14.2.0"
    assert facts["NVRTC"].startswith("V")
    assert "libnvrtc." in facts["NVRTC"]
    assert facts["cache"].endswith("cache, 0 kernels, 0 bytes, writable")
    assert {backend for _, backend in found.ops} == {"NumPy reference, on CPU arrays"}
    assert [op for op, _ in found.ops] == [
        "per_token_group_quant_fp8", "silu_and_mul_quant_fp8", "moe_align_block_size",
        "fused_experts_fp8",
    ]  # fmt: skip


def test_on_an_h200_kernels_run(monkeypatch):
    give_gpu(monkeypatch, H200_GPU, H200_GPU)
    found = doctor.diagnose()
    assert found.findings == ()
    assert found.facts[0] == ("GPU", "NVIDIA H200, compute capability 9.0")
    assert ("driver", "580.159.04, up to CUDA 13.0") in found.facts
    ops = dict(found.ops)
    assert ops["silu_and_mul_quant_fp8"].startswith("kernel on sm_90a; NumPy reference")
    assert "moe_align_block_size" in ops["fused_experts_fp8"]


def test_two_cupy_wheels(monkeypatch):
    install(monkeypatch, {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"})
    finding = only_finding()
    assert finding.problem.startswith("cupy-cuda12x and cupy-cuda13x are installed together")
    assert finding.remedy == (
        "pip uninstall -y cupy-cuda12x cupy-cuda13x; pip install 'cumoe[cuda12]'"
    )
    give_gpu(monkeypatch, H200_GPU)
    assert only_finding().remedy.endswith("pip install 'cumoe[cuda13]'")


def test_no_cupy(monkeypatch):
    install(monkeypatch, {})
    refuse(monkeypatch, device, "cupy", ModuleNotFoundError("No module named 'cupy'"))
    finding = only_finding()
    assert finding.problem.startswith("CuPy is not installed")
    assert finding.remedy == "pip install 'cumoe[cuda12]'"
    assert not finding.is_fatal
    give_gpu(monkeypatch, H200_GPU, visible=0)
    assert not doctor.diagnose().ok


@pytest.mark.parametrize(("arch", "ok"), [("bla", False), ("sm_90", False), ("sm_100a", True)])
def test_an_unknown_architecture(monkeypatch, arch, ok):
    monkeypatch.setenv("CUMOE_ARCH", arch)
    renew()
    found = doctor.diagnose()
    assert found.ok is ok
    if not ok:
        assert only_finding().problem.startswith("CUMOE_ARCH: wanted one of sm_89, ")
        assert only_finding().problem.endswith(f"got {arch!r}.")


def test_a_read_only_folder_that_is_not_there(monkeypatch, tmp_path):
    (tmp_path / "there").mkdir()
    monkeypatch.setenv("CUMOE_CACHE_PATH", f"{tmp_path}/there:{tmp_path}/gone")
    renew()
    assert only_finding().problem == f"CUMOE_CACHE_PATH names what is no folder: {tmp_path}/gone."
    assert doctor.diagnose().ok


def test_a_cupy_that_does_not_import(monkeypatch):
    refuse(monkeypatch, device, "cupy", ImportError("undefined symbol: x"))
    finding = only_finding()
    assert finding.problem == "CuPy is installed but cannot be imported (undefined symbol: x)."
    assert finding.remedy == "pip uninstall -y cupy-cuda12x; pip install 'cumoe[cuda12]'"


def test_no_nvrtc(monkeypatch):
    cause = RuntimeError("CuPy failed to load libnvrtc.so.12")
    refuse(monkeypatch, nvrtc, "nvrtc_build", cause)
    finding = only_finding()
    assert finding.problem == f"NVRTC cannot be used: {cause}."
    assert "pip install 'cumoe[cuda12]'" in finding.remedy
    assert dict(doctor.diagnose().facts)["NVRTC"] == "none"


def test_an_nvrtc_that_is_newer_than_the_driver(monkeypatch):
    give_gpu(monkeypatch, H200_GPU, cuda=12040)
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: (13, 0))
    finding = only_finding()
    assert finding.problem.startswith(
        "NVRTC 13.0 compiles for drivers of CUDA 13 or newer, and this driver supports CUDA 12.4"
    )
    assert "libnvrtc.so" in finding.problem
    assert "Update the driver; or pip install 'cumoe[cuda12]'" in finding.remedy


def test_an_nvrtc_that_is_older_than_the_driver_is_fine(monkeypatch):
    give_gpu(monkeypatch, H200_GPU, cuda=13000)
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: (12, 9))
    assert doctor.diagnose().ok


def test_a_gpu_without_kernels(monkeypatch):
    give_gpu(monkeypatch, nvml.Gpu("Tesla V100", (7, 0)))
    finding = only_finding()
    assert finding.problem.startswith("Tesla V100 has compute capability 7.0; kernels are written")
    assert "9.0" in finding.problem
    assert "NumPy reference" in finding.remedy
    assert dict(doctor.diagnose().ops)["fused_experts_fp8"] == "NumPy reference, on CPU arrays"


def test_gpus_that_this_process_does_not_see(monkeypatch):
    give_gpu(monkeypatch, H200_GPU, visible=0)
    finding = only_finding()
    assert finding.problem.startswith("CUDA offers this process none of the GPUs")
    assert "(NVIDIA H200)" in finding.problem
    assert "CUDA_VISIBLE_DEVICES" in finding.remedy
    assert doctor.diagnose().ok


def test_a_variable_with_a_wrong_value(monkeypatch):
    monkeypatch.setenv("CUMOE_DISABLE_JIT", "perhaps")
    renew()
    finding = only_finding()
    assert finding.problem.startswith("CUMOE_DISABLE_JIT: wanted 1 or 0, got 'perhaps'")
    assert finding.is_fatal


def test_a_cache_below_a_file(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUMOE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    renew()
    found = doctor.diagnose()
    (finding,) = found.findings
    assert "cannot be written ([Errno 20] Not a directory" in finding.problem
    assert "CUMOE_CACHE_DIR" in finding.remedy
    assert not found.ok
    assert dict(found.facts)["cache"].endswith("0 bytes, not writable")


def test_a_full_disk(monkeypatch, tmp_path):
    def full(self, data):
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert "No space left on device" in only_finding().problem


def test_a_cache_in_an_image_need_not_be_written(monkeypatch, tmp_path):
    store.build(kernel_spec("moe_align_block_size", "sm_90a", NUM_LOCAL_EXPERTS=8, IDS=1, MAP=0))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUMOE_CACHE_PATH", str(tmp_path / "cache"))
    monkeypatch.setenv("CUMOE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    renew()
    found = doctor.diagnose()
    assert [f.is_fatal for f in found.findings] == [False]
    assert found.ok
    assert ", 1 kernels, " in dict(found.facts)["read-only cache"]


def test_looking_leaves_nothing_behind(tmp_path):
    doctor.diagnose()
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_facts_findings_and_status(monkeypatch, capsys):
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].split() == ["result", "ok"]
    assert err == ""
    install(monkeypatch, {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"})
    assert main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].split() == ["result", "FAILED"]
    assert err.startswith("cumoe: error: cupy-cuda12x and cupy-cuda13x are installed together")
    assert err.splitlines()[1] == (
        "  pip uninstall -y cupy-cuda12x cupy-cuda13x; pip install 'cumoe[cuda12]'"
    )


def test_a_warning_is_no_failure(monkeypatch, capsys):
    give_gpu(monkeypatch, H200_GPU, visible=0)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().err.startswith("cumoe: warning: CUDA offers this process none")


def test_json(monkeypatch, capsys):
    give_gpu(monkeypatch, H200_GPU, nvml.Gpu("Tesla V100", (7, 0)))
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert len(report["facts"]["GPU"]) == 2
    assert list(report["findings"][0]) == ["problem", "remedy", "is_fatal"]
    assert "kernel on sm_90a" in report["ops"]["moe_align_block_size"]


def as_ordinary_user() -> None:
    """In a child of root: file permissions count, as they do for everybody else."""
    if os.geteuid() == 0:
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            if ctypes.CDLL(None).prctl(24, capability, 0, 0, 0):  # PR_CAPBSET_DROP
                os._exit(99)


def run_doctor(**env: object) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUMOE_", "CUPY_", "XDG_"))}
    return subprocess.run(
        [sys.executable, "-m", "cumoe", "doctor"],
        env=kept | {name: str(value) for name, value in env.items()},
        preexec_fn=as_ordinary_user, cwd=Path(__file__).parents[2],
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.fixture
def locked(tmp_path) -> Iterator[Path]:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    yield folder
    folder.chmod(0o755)


def test_a_read_only_home_in_a_real_process(locked, tmp_path):
    done = run_doctor(HOME=locked, CUMOE_CACHE_DIR=tmp_path / "kernels")
    assert done.returncode == 0  # kernels run: CuPy got a temporary folder
    assert f"Permission denied: '{locked}/.cupy'" in done.stderr
    assert "Name a writable folder in CUPY_CACHE_DIR" in done.stderr


def test_the_remedy_for_a_read_only_home_works(locked, tmp_path):
    done = run_doctor(
        HOME=locked, CUMOE_CACHE_DIR=tmp_path / "kernels", CUPY_CACHE_DIR=tmp_path / "cupy"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unwritable_cache_in_a_real_process(locked, tmp_path):
    done = run_doctor(HOME=tmp_path, CUMOE_CACHE_DIR=locked / "kernels")
    assert done.returncode == 1
    assert f"The cache folder {locked}/kernels cannot be written" in done.stderr
    assert "Permission denied" in done.stderr
