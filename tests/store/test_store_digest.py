"""The digest that says whether a kernel must be tested anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cumoe.store.digest import source_digest
from tests.helpers.tiny_kernels import SCALE, TINY

Edit = Callable[[Path], object]


def _edit(file: str, text: str) -> Edit:
    return lambda root: (root / file).write_text(text)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(_edit("tiny.cu", TINY.replace("+ A", "- A")), id="the kernel"),
        pytest.param(_edit("common/scale.cuh", SCALE.replace("3.0", "4.0")), id="a header"),
    ],
)
def test_differs_on(kernels: Path, edit: Edit) -> None:
    before = source_digest("tiny")
    edit(kernels)
    assert source_digest("tiny") != before


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(_edit("tiny.cu", "// A new comment\n" + TINY), id="comment line above"),
        pytest.param(_edit("tiny.cu", TINY.replace("// [A]", "/* a\nb */")), id="other comment"),
        pytest.param(_edit("common/scale.cuh", SCALE.replace(" {", "\t {  ")), id="blanks"),
        pytest.param(_edit("common/scale.cuh", "\n\n" + SCALE), id="empty lines"),
        pytest.param(lambda root: (root / "new.cu").write_text("int a;"), id="another kernel"),
    ],
)
def test_same_for(kernels: Path, edit: Edit) -> None:
    before = source_digest("tiny")
    edit(kernels)
    assert source_digest("tiny") == before


def test_what_looks_like_a_comment_in_a_string_counts(kernels: Path) -> None:
    (kernels / "s.cu").write_text('__device__ const char* s = "// a";\n')
    before = source_digest("s")
    (kernels / "s.cu").write_text('__device__ const char* s = "// b";\n')
    assert source_digest("s") != before
