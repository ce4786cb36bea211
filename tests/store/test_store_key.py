"""What the key of a kernel depends on, and what it does not."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cumoe.plan.spec import KernelSpec, kernel_spec
from cumoe.store import key, source
from tests.helpers.tiny_kernels import SCALE, TINY, write_kernels

SPEC = kernel_spec("tiny", "sm_90a", A=5, B=6)
Patch = pytest.MonkeyPatch


def _key(spec: KernelSpec = SPEC) -> str:
    return key.digest(key.fields(spec))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(kernel_spec("tiny", "sm_90a", A=5, B=7), id="constant"),
        pytest.param(kernel_spec("tiny", "sm_90a", A=5, C=6), id="name of a constant"),
        pytest.param(kernel_spec("tiny", "sm_90a", A=5, B=6, C=0), id="another constant"),
        pytest.param(kernel_spec("tiny", "sm_90a", A=56), id="fewer constants"),
        pytest.param(kernel_spec("tiny", "sm_90", A=5, B=6), id="arch"),
        pytest.param(kernel_spec("twin", "sm_90a", A=5, B=6), id="stem"),
    ],
)
def test_differs_on_spec(kernels: Path, other: KernelSpec) -> None:
    (kernels / "twin.cu").write_text(TINY)
    assert _key(other) != _key()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            lambda root, patch: (root / "tiny.cu").write_text(TINY.replace("+ A", "- A")),
            id="kernel source",
        ),
        pytest.param(
            lambda root, patch: (root / "common/scale.cuh").write_text(SCALE + "\n"),
            id="header source",
        ),
        pytest.param(
            lambda root, patch: patch.setattr(key, "nvrtc_flags", lambda arch: (f"-arch={arch}",)),
            id="flags",
        ),
        pytest.param(
            lambda root, patch: patch.setattr(key, "nvrtc_build", lambda: "V12.9.87"),
            id="compiler build",
        ),
        pytest.param(lambda root, patch: patch.setattr(key, "SCHEMA", 2), id="schema"),
    ],
)
def test_differs_on_surroundings(
    kernels: Path, monkeypatch: Patch, change: Callable[[Path, Patch], object]
) -> None:
    before = _key()
    change(kernels, monkeypatch)
    assert _key() != before


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda root, patch: os.utime(root / "tiny.cu", (1, 1)), id="time of a file"),
        pytest.param(lambda root, patch: (root / "tiny.cu").chmod(0o600), id="mode of a file"),
        pytest.param(lambda root, patch: (root / "new.cu").write_text("x"), id="another kernel"),
        pytest.param(lambda root, patch: patch.chdir(root), id="working directory"),
        pytest.param(
            lambda root, patch: patch.setenv("CUMOE_CACHE_DIR", "/elsewhere"), id="cache folder"
        ),
    ],
)
def test_same_for_surroundings(
    kernels: Path, monkeypatch: Patch, change: Callable[[Path, Patch], object]
) -> None:
    before = _key()
    change(kernels, monkeypatch)
    assert _key() == before


@pytest.mark.parametrize(
    "same",
    [
        pytest.param(kernel_spec("tiny", "sm_90a", B=6, A=5), id="order of constants"),
        pytest.param(kernel_spec("tiny", "sm_90a", A=np.int64(5), B=6), id="integer type"),
    ],
)
def test_same_for_spec(kernels: Path, same: KernelSpec) -> None:
    assert _key(same) == _key()


def test_same_for_sources_in_another_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    roots = [write_kernels(tmp_path / name) for name in ("one", "two/deeper")]
    keys = []
    for root in roots:
        monkeypatch.setattr(source, "kernels_root", lambda root=root: root)
        keys.append(_key())
    assert keys[0] == keys[1]


def test_fields_have_labels_and_no_path(kernels: Path) -> None:
    fields = dict(key.fields(SPEC))
    assert fields["constants"] == "A=5 B=6"
    assert fields["nvrtc"].startswith("Cuda compilation tools, release ")
    assert "-arch=sm_90a" in fields["flags"]
    assert not any(str(kernels) in value for value in fields.values())


def test_the_document_lists_what_is_hashed(kernels: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/cache.md").read_text()
    table = text.split("## What is hashed")[1].split("##")[0]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    labels = [label for row in rows for label in re.findall(r"`(\w+)`", row)]
    assert labels == [label for label, _ in key.fields(SPEC)]


def test_a_source_in_hand_is_not_read_again(kernels: Path) -> None:
    text = source.read_source(SPEC)
    wanted = key.fields(SPEC)
    (kernels / "tiny.cu").unlink()
    assert key.fields(SPEC, text) == wanted


@pytest.mark.parametrize(
    "pairs",
    [
        (("ab", "c"),),
        (("a", "bc"), ("", "")),
        (("a", ""), ("bc", "")),
        (("a", "1:b"), ("c", "")),
        (("bc", "a"),),
    ],
)
def test_digest_keeps_the_bounds_of_its_parts(pairs: key.Fields) -> None:
    assert key.digest(pairs) != key.digest((("a", "bc"),))
