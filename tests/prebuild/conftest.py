"""Small kernels in a source folder of their own, and the cache of a process that has just begun."""

from __future__ import annotations

from tests.helpers.fresh_store import cache, kernels

__all__ = ["cache", "kernels"]
