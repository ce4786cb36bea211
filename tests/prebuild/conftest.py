"""Small kernels in a source folder of their own, and the cache of a process that has just begun."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cumoe import _settings
from cumoe.store import source, store
from tests.store.tiny_kernels import write_kernels


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of the kernel sources: tiny.cu, and broken.cu, which does not compile."""
    root = write_kernels(tmp_path / "kernels")
    (root / "broken.cu").write_text('static_assert(A == 1, "A is one");\n')
    monkeypatch.setattr(source, "kernels_root", lambda: root)
    return root


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, and settings and store that have seen nothing yet."""
    root = tmp_path / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUMOE_CACHE_DIR", str(root))
        _settings.settings.cache_clear()
        store.forget()
        yield root
    _settings.settings.cache_clear()
    store.forget()
