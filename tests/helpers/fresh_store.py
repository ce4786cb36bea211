"""Fixtures of a store that has seen nothing yet: its kernels, and its empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cumoe import _settings
from cumoe.store import source, store
from tests.helpers.tiny_kernels import write_kernels


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
