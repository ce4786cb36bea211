"""Small kernels in a source folder of their own, and an empty cache."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cumoe import _settings
from cumoe.store import source, store
from tests.store.tiny_kernels import write_kernels


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of the kernel sources: tiny.cu and common/scale.cuh."""
    root = write_kernels(tmp_path / "kernels")
    monkeypatch.setattr(source, "kernels_root", lambda: root)
    return root


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """The cache folder of a process that has just started."""
    root = tmp_path / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUMOE_CACHE_DIR", str(root))
        _settings.settings.cache_clear()
        store.forget()
        yield root
    _settings.settings.cache_clear()
    store.forget()


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users can enter; `tmp_path` is closed to them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
