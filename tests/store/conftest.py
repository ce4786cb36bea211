"""Small kernels in a source folder of their own, and an empty cache."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.fresh_store import cache, kernels

__all__ = ["cache", "kernels", "public"]


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users can enter; `tmp_path` is closed to them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
