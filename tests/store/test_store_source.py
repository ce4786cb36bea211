"""The text that NVRTC gets: constants, includes inlined once, true file names in errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from cumoe.errors import CompileError
from cumoe.plan.spec import kernel_spec
from cumoe.store import nvrtc, source
from cumoe.store.flags import nvrtc_flags

SPEC = kernel_spec("tiny", "sm_90a", A=5)


def test_text_is_constants_then_files_with_their_lines(kernels: Path) -> None:
    assert source.read_source(SPEC) == (
        '#line 1 "constants"\n'
        "constexpr int A = 5;\n"
        '#line 1 "tiny.cu"\n'
        '#line 1 "common/scale.cuh"\n'
        "\n"
        "__device__ inline float scale(float x) { return x * 3.0f; }\n"
        "\n"
        '#line 2 "tiny.cu"\n'
        "\n"
        'extern "C" __global__ void tiny(float* x) {  // [A]\n'
        "    x[threadIdx.x] = scale(x[threadIdx.x]) + A;\n"
        "}\n"
        "\n"
    )


def test_constants_beyond_int_keep_their_value(kernels: Path) -> None:
    (kernels / "big.cu").write_text(
        "static_assert(BIG == 5000000000 && sizeof(BIG) == 8 && sizeof(SMALL) == 4 && SMALL < 0);\n"
    )
    spec = kernel_spec("big", "sm_90a", BIG=5_000_000_000, SMALL=-(2**31))
    nvrtc.compile(source.read_source(spec), "big.cu", nvrtc_flags("sm_90a"))


def test_a_constant_may_share_its_name_with_a_template_parameter(kernels: Path) -> None:
    (kernels / "t.cu").write_text("template <int A> __device__ int f() { return A; }\n")
    spec = kernel_spec("t", "sm_90a", A=1)
    nvrtc.compile(source.read_source(spec), "t.cu", nvrtc_flags("sm_90a"))


def test_each_file_is_inlined_once_even_in_a_circle(kernels: Path) -> None:
    (kernels / "common/a.cuh").write_text('#include "common/b.cuh"\nint a;\n')
    (kernels / "common/b.cuh").write_text('#include "common/a.cuh"\nint b;\n')
    (kernels / "m.cu").write_text('#include "common/a.cuh"\n# include "common/b.cuh" // again\n')
    text = source.amalgamate("m")
    assert text.count("int a;") == text.count("int b;") == 1
    assert text.index("int b;") < text.index("int a;")


def test_includes_in_comments_are_text(kernels: Path) -> None:
    (kernels / "m.cu").write_text('// #include <a>\n/*\n#include <b>\n#include "no.cuh"\n*/\n')
    assert "#include <b>" in source.amalgamate("m")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("#include <cuda_fp8.h>", r"m\.cu:2: #include <cuda_fp8\.h>: kernels include only quoted"),
        ("  #  include <stdint.h> // x", r"m\.cu:2: #include <stdint\.h>: .*quoted"),
        ("#include HEADER", r"m\.cu:2: #include HEADER: .*quoted"),
        ('#include "../secret.cuh"', r"m\.cu:2: .*stay inside"),
        ('#include "/etc/passwd"', r"m\.cu:2: .*stay inside"),
        ('#include "common/none.cuh"', r"m\.cu:2: cannot read common/none\.cuh under .*No such"),
        (
            '#if A\n#include "common/scale.cuh"\n#endif',
            r'm\.cu:3: #include "common/scale\.cuh" inside #if: .*#pragma once',
        ),
    ],
)
def test_refused_includes_name_place_and_remedy(kernels: Path, line: str, wanted: str) -> None:
    (kernels / "m.cu").write_text(f"// first line\n{line}\n")
    with pytest.raises(CompileError, match=wanted):
        source.amalgamate("m")


def test_include_after_a_closed_conditional_is_fine(kernels: Path) -> None:
    (kernels / "m.cu").write_text('#ifdef X\n#if 1\n#endif\n#endif\n#include "common/scale.cuh"\n')
    assert "float scale" in source.amalgamate("m")


def test_missing_kernel_is_a_compile_error(kernels: Path) -> None:
    with pytest.raises(CompileError, match=r"cannot read none\.cu under .*reinstall cumoe"):
        source.amalgamate("none")


def test_errors_name_true_files_and_lines_and_no_folder(kernels: Path) -> None:
    (kernels / "common/bad.cuh").write_text("// one\n\n__device__ int f() { return lost; }\n")
    (kernels / "m.cu").write_text('#include "common/bad.cuh"\n\n__device__ int g() { return 1 }\n')
    text = source.read_source(kernel_spec("m", "sm_90a", A=1))
    with pytest.raises(CompileError) as caught:
        nvrtc.compile(text, "m.cu", nvrtc_flags("sm_90a"))
    assert "common/bad.cuh(3): error" in caught.value.log
    assert "m.cu(3): error" in caught.value.log
    assert str(kernels) not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("a // b\nc", "a  \nc"),
        ("a // b \\\n still\nc", "a  \n\nc"),
        ("a /* b\n\n // */ c", "a  \n\n c"),
        ("a /* never closed\n", "a  \n"),
        ('"http://x" // y', '"http://x"  '),
        (r'"\"//" // y', r'"\"//"  '),
        ("'\"' // y", "'\"'  "),
        ("1'000'0 // it's", "1'000'0  "),
        ("x = 1'0; // don't", "x = 1'0;  "),
        ('R"(// "kept" /*)" // y', 'R"(// "kept" /*)"  '),
        ('R"--( )" // )--" // y', 'R"--( )" // )--"  '),
        ("a / b /c", "a / b /c"),
    ],
)
def test_strip_comments(text: str, bare: str) -> None:
    assert source.strip_comments(text) == bare


def test_sources_lie_in_the_wheel_or_in_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "cumoe"
    package.mkdir()
    monkeypatch.setattr(source, "_PACKAGE", package)
    assert source.kernels_root() == tmp_path / "kernels_src"
    (package / "_kernels_src").mkdir()
    assert source.kernels_root() == package / "_kernels_src"


def test_the_sources_of_this_library_are_found() -> None:
    assert (source.kernels_root() / "common").is_dir()
