"""NVRTC and the flags it gets."""

from __future__ import annotations

import logging
import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from cupy.cuda import nvrtc as cupy_nvrtc

from cumoe.errors import CompileError, UnsupportedDeviceError
from cumoe.store import nvrtc
from cumoe.store.flags import nvrtc_flags
from tests.helpers import child

FLAGS = nvrtc_flags("sm_90a")
MATHS = """
extern "C" __global__ void maths(float* x) {
    x[0] = x[1] * x[2] + x[3];
    x[4] = x[5] / x[6];
    x[7] = sqrtf(x[8]);
    x[9] = fmaf(x[10], x[11], x[12]);
}
"""
WGMMA = """
extern "C" __global__ void w() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
"""


def _ptx(source: str) -> str:
    return nvrtc._run(source, "k.cu", FLAGS, "getPTX")[0].decode()


def _raw_cubin(source: str) -> bytes:
    return nvrtc._run(source, "k.cu", FLAGS, "getCUBIN")[0]


def test_arithmetic_is_plain_ieee() -> None:
    ptx = _ptx(MATHS)
    assert set(re.findall(r"\b(?:mul|add|fma|div|sqrt|neg)[\w.]*f32", ptx)) == {
        "mul.rn.f32",  # with .rn the assembler may not contract it either
        "add.rn.f32",
        "div.rn.f32",
        "sqrt.rn.f32",
        "fma.rn.f32",
    }
    assert ptx.count("fma.rn.f32") == 1  # the one that is written as fmaf


def test_the_arch_suffix_reaches_the_compiler() -> None:
    assert nvrtc.compile(WGMMA, "w.cu", FLAGS).startswith(b"\x7fELF")
    with pytest.raises(CompileError, match="wgmma"):
        nvrtc.compile(WGMMA, "w.cu", nvrtc_flags("sm_90"))


def test_the_working_directory_is_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ambient.cuh").write_text("__device__ int a;\n")
    monkeypatch.chdir(tmp_path)
    for written in ('"ambient.cuh"', "<ambient.cuh>"):
        with pytest.raises(CompileError, match=r"could not open source file|cannot open"):
            nvrtc.compile(f"#include {written}\n", "k.cu", FLAGS)


def test_bytes_depend_on_nothing_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = nvrtc.compile(MATHS, "k.cu", FLAGS)
    monkeypatch.chdir(tmp_path)
    assert nvrtc.compile(MATHS, "k.cu", FLAGS) == here
    assert str(tmp_path).encode() not in here


def test_cupy_still_loses_the_last_byte() -> None:
    """When this fails CuPy has mended getCUBIN: `whole_elf` can then become a mere check."""
    raw = _raw_cubin(MATHS)
    assert nvrtc.whole_elf(raw, "k.cu") == raw + b"\0"
    assert max(nvrtc._ends(raw + b"\0")) == len(raw) + 1


def test_a_whole_elf_stays_as_it_is() -> None:
    whole = nvrtc.compile(MATHS, "k.cu", FLAGS)
    assert nvrtc.whole_elf(whole, "k.cu") == whole
    assert nvrtc.whole_elf(whole + b"more", "k.cu") == whole + b"more"


@pytest.mark.parametrize("kept", [0, 4, 40, 64, -500, -3, -2])
def test_a_cubin_that_misses_more_is_refused(kept: int) -> None:
    whole = nvrtc.compile(MATHS, "k.cu", FLAGS)
    with pytest.raises(CompileError, match=r"no complete cubin for k\.cu"):
        nvrtc.whole_elf(whole[:kept], "k.cu")


def test_what_is_no_elf_is_refused() -> None:
    with pytest.raises(CompileError, match="no complete cubin"):
        nvrtc.whole_elf(bytes(200), "k.cu")


def test_compile_error_carries_log_arch_version_and_remedy() -> None:
    with pytest.raises(CompileError) as caught:
        nvrtc.compile("int x = ;", "k.cu", FLAGS)
    assert "k.cu(1): error: expected an expression" in caught.value.log
    message = str(caught.value)
    version = ".".join(map(str, cupy_nvrtc.getVersion()))
    for wanted in (caught.value.log, "-arch=sm_90a", f"NVRTC {version}", "cumoe[cuda12]"):
        assert wanted in message


def test_unknown_arch_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match=r"sm_7777[\s\S]*gpu-architecture"):
        nvrtc.compile("", "k.cu", nvrtc_flags("sm_7777"))


def test_warnings_of_a_good_compile_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    spill = "--ptxas-options=--maxrregcount=24"
    values = ";".join(f"float v{i} = x[{i}]" for i in range(64))
    sums = ";".join(f"x[{i}] = v{i} * v{63 - i}" for i in range(64))
    source = f'extern "C" __global__ void k(float* x) {{ {values}; __syncthreads(); {sums}; }}'
    with caplog.at_level(logging.WARNING, "cumoe"):
        nvrtc.compile(source, "k.cu", FLAGS)
        assert caplog.text == ""
        nvrtc.compile(source, "k.cu", (*FLAGS, spill))
    assert "NVRTC on k.cu: ptxas warning" in caplog.text
    assert "spill" in caplog.text


def test_build_names_the_exact_compiler() -> None:
    version = ".".join(map(str, cupy_nvrtc.getVersion()))
    pattern = rf"Cuda compilation tools, release {re.escape(version)}, V{re.escape(version)}\.\d+"
    assert re.fullmatch(pattern, nvrtc.nvrtc_build())


def test_driver_of_an_older_major_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: (13, 0))
    nvrtc.require_driver_supports(13000)
    nvrtc.require_driver_supports(14010)
    with pytest.raises(UnsupportedDeviceError, match=r"NVRTC 13\.0 .* CUDA 12\.9.*cumoe\[cuda12\]"):
        nvrtc.require_driver_supports(12090)


def _use_cupy(monkeypatch: pytest.MonkeyPatch, module: object, wheels: tuple[str, ...]) -> None:
    """Puts `module` in the place of cupy.cuda, with `wheels` installed."""

    def distribution(name: str) -> str:
        if name not in wheels:
            raise metadata.PackageNotFoundError(name)
        return name

    monkeypatch.setattr(nvrtc, "_nvrtc", nvrtc._nvrtc.__wrapped__)
    monkeypatch.setitem(sys.modules, "cupy.cuda", module)
    monkeypatch.setattr(metadata, "distribution", distribution)


def _library_not_found() -> None:
    raise RuntimeError("Failure finding libnvrtc.so")


@pytest.mark.parametrize(
    ("module", "wheels", "wanted"),
    [
        pytest.param(None, (), r"cupy.*pip install 'cumoe\[cuda12\]'", id="no cupy"),
        pytest.param(
            None,
            ("cupy-cuda12x", "cupy-cuda13x"),
            "cupy-cuda12x and cupy-cuda13x overwrite each other's files: uninstall",
            id="two cupys",
        ),
        pytest.param(
            SimpleNamespace(nvrtc=SimpleNamespace(getVersion=_library_not_found)),
            ("cupy-cuda12x",),
            r"Failure finding libnvrtc\.so.*pip install 'cumoe\[cuda12\]'",
            id="no nvrtc",
        ),
    ],
)
def test_missing_cupy_or_nvrtc(
    monkeypatch: pytest.MonkeyPatch, module: object, wheels: tuple[str, ...], wanted: str
) -> None:
    _use_cupy(monkeypatch, module, wheels)
    with pytest.raises(UnsupportedDeviceError, match=wanted):
        nvrtc.compile("", "k.cu", FLAGS)


def test_cupy_that_cannot_write_its_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = (
        "from cumoe.errors import UnsupportedDeviceError\n"
        "from cumoe.store import nvrtc\n"
        "from tests.helpers.child import report\n"
        "try: nvrtc.nvrtc_build()\n"
        "except UnsupportedDeviceError as error: report(message=str(error))\n"
    )
    facts = child.result(child.start(code, CUPY_CACHE_DIR=str(tmp_path / "file/inside")))
    assert "CUPY_CACHE_DIR" in facts["message"]


def test_import_of_the_store_does_not_import_cupy() -> None:
    code = (
        "import sys\n"
        "from cumoe.store import digest, store\n"
        "from tests.helpers.child import report\n"
        "report(cupy='cupy' in sys.modules)\n"
    )
    assert child.result(child.start(code)) == {"cupy": False}
