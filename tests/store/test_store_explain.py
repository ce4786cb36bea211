"""Why a kernel would be compiled: what is wanted beside what is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cumoe.plan.spec import KernelSpec, kernel_spec
from cumoe.store import explain as explaining
from cumoe.store import key, store
from cumoe.store.explain import Difference, explain
from tests.helpers.tiny_kernels import TINY

SPEC = kernel_spec("tiny", "sm_90a", A=5, B=6)


def _labels(spec: KernelSpec = SPEC) -> list[str]:
    return [difference.label for difference in explain(spec).differences]


def _key(spec: KernelSpec) -> str:
    return key.digest(key.fields(spec))


def test_an_empty_cache_has_nothing_near(kernels: Path, cache: Path) -> None:
    found = explain(SPEC)
    assert (found.spec, found.key) == (SPEC, _key(SPEC))
    assert (found.path, found.damages, found.nearest, found.differences) == (None, (), None, ())
    assert not cache.exists()


def test_a_hit_is_its_file(kernels: Path, cache: Path) -> None:
    cubin = store.get(SPEC)
    found = explain(SPEC)
    assert found.path == cubin.path
    assert (found.nearest, found.differences) == (None, ())


def test_a_hit_in_a_lower_folder(
    kernels: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.get(SPEC)
    image = cache.rename(tmp_path / "image")
    monkeypatch.setattr(store, "roots", lambda: (cache, image))
    path = explain(SPEC).path
    assert path is not None
    assert path.is_relative_to(image)
    (kernels / "tiny.cu").write_text(TINY + "\n")
    assert _labels() == ["source"]


def test_other_constants_are_shown_without_the_common_ones(kernels: Path, cache: Path) -> None:
    store.get(SPEC)
    found = explain(kernel_spec("tiny", "sm_90a", A=7, B=6, C=1))
    assert found.nearest is not None
    assert found.nearest.kernel == SPEC.text
    assert Difference("constants", "A=7 C=1", "A=5") in found.differences


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        pytest.param(
            lambda patch: patch.setattr(key, "nvrtc_build", lambda: "V13.0.1"),
            lambda real: Difference("nvrtc", "V13.0.1", real["nvrtc"]),
            id="another compiler",
        ),
        pytest.param(
            lambda patch: patch.setattr(key, "nvrtc_flags", lambda arch: ("-arch=sm_90a", "-new")),
            lambda real: Difference(
                "flags", "-new", real["flags"].removeprefix("-arch=sm_90a ")
            ),
            id="another flag",
        ),
        pytest.param(
            lambda patch: patch.setattr(key, "SCHEMA", 7),
            lambda real: Difference("schema", "7", real["schema"]),
            id="another schema",
        ),
    ],
)  # fmt: skip
def test_other_surroundings(kernels, cache, monkeypatch, change, difference) -> None:
    store.get(SPEC)
    real = dict(key.fields(SPEC))
    change(monkeypatch)
    assert explain(SPEC).differences == (difference(real),)


def test_an_edited_source(kernels: Path, cache: Path) -> None:
    store.get(SPEC)
    (kernels / "common/scale.cuh").write_text("__device__ float scale(float x) { return x; }")
    assert _labels() == ["source"]


def test_the_same_kernel_is_nearer_than_another_one(kernels: Path, cache: Path) -> None:
    """An older build of the wanted kernel says more than a new build of its neighbour."""
    store.get(SPEC)
    (kernels / "tiny.cu").write_text(TINY + "\n")
    for other in (kernel_spec("tiny", "sm_90a", A=5, B=7), kernel_spec("tiny", "sm_90", A=5, B=6)):
        store.get(other)
    found = explain(SPEC)
    assert found.nearest is not None
    assert found.nearest.kernel == SPEC.text
    assert _labels() == ["source"]


def test_another_kernel_is_never_near(kernels: Path, cache: Path) -> None:
    (kernels / "twin.cu").write_text(TINY)
    store.get(SPEC)
    assert explain(kernel_spec("twin", "sm_90a", A=5, B=6)).nearest is None


def test_damage_is_said_instead(kernels: Path, cache: Path) -> None:
    path = store.get(SPEC).path
    assert path is not None
    os.truncate(path, 9)
    found = explain(SPEC)
    assert found.path is None
    assert found.damages == (f"{path}: 9 bytes, not {len(store.get(SPEC).data)}",)
    assert found.nearest is None


def test_explaining_touches_nothing(
    kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.get(SPEC).path
    assert path is not None
    os.utime(path.with_suffix(".json"), (1, 1))
    monkeypatch.setattr(explaining.store, "get", None)
    explain(SPEC)
    explain(kernel_spec("tiny", "sm_90a", A=1))
    assert path.with_suffix(".json").stat().st_mtime == 1
    assert store.stats().compiled == 1
