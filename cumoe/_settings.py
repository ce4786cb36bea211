"""The settings of a process: the only reader of the environment.

Read once, at first use, never at import and never in a call that has run before.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """One field per variable; `docs/cache.md` and the README list the same ones."""

    cache_dir: Path
    """CUMOE_CACHE_DIR: where compiled kernels are kept; by default the user's cache folder."""
    arch: str | None
    """CUMOE_ARCH: compile for this architecture (as ``sm_90a``) when no GPU is present."""


def _user_cache_dir() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("cumoe", appauthor=False))


@cache
def settings() -> Settings:
    """The settings of this process, resolved once."""
    env = os.environ
    root = env.get("CUMOE_CACHE_DIR")
    return Settings(
        cache_dir=Path(root).expanduser() if root else _user_cache_dir(),
        arch=env.get("CUMOE_ARCH") or None,
    )
