"""The settings of a process: the only reader of the environment.

Read once, at first use, never at import and never in a call that has run before.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cumoe.errors import ArgumentError

_TRUTH = {"1": True, "true": True, "0": False, "false": False}
_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True)
class Settings:
    """One field per variable, ``CUMOE_`` and its name; the README's table lists the same ones."""

    cache_dir: Path
    """Where compiled kernels are kept; by default the user's cache folder."""
    cache_path: tuple[Path, ...]
    """More folders of compiled kernels, read after `cache_dir` in this order, never written."""
    disable_jit: bool
    """A kernel that is in none of these folders is an error instead of a compile."""
    arch: str | None
    """Compile for this architecture (as ``sm_90a``) where no GPU is present."""
    log: str | None
    """Level of the log on stderr."""
    fused_act_quant: bool
    """Activation and quantization are one kernel; else two, to compare."""
    vllm: bool
    """Whether vLLM's plugin does anything."""


@cache
def settings() -> Settings:
    """The settings of this process, resolved once; attaches the log of CUMOE_LOG.

    Raises:
        ArgumentError: a variable has a value that it cannot have.
    """
    env = os.environ
    root = env.get("CUMOE_CACHE_DIR")
    found = Settings(
        cache_dir=_absolute(root) if root else _user_cache_dir(),
        cache_path=tuple(map(_absolute, filter(None, _paths(env.get("CUMOE_CACHE_PATH", ""))))),
        disable_jit=_truth(env, "CUMOE_DISABLE_JIT", default=False),
        arch=env.get("CUMOE_ARCH") or None,
        log=_level(env, "CUMOE_LOG"),
        fused_act_quant=_truth(env, "CUMOE_FUSED_ACT_QUANT", default=True),
        vllm=_truth(env, "CUMOE_VLLM", default=True),
    )
    if found.log is not None:
        _log_to_stderr(found.log)
    return found


@cache
def make_room_for_cupy() -> OSError | None:
    """Gives CuPy a temporary cache folder where it cannot make its own: its import would fail.

    Nothing of ours is kept there. To be called before CuPy is imported; returns why it was needed.
    """
    if "cupy" in sys.modules or os.environ.get("CUPY_CACHE_DIR"):
        return None
    try:
        os.makedirs(os.path.expanduser("~/.cupy/kernel_cache"), exist_ok=True)
    except OSError as error:
        folder = tempfile.mkdtemp(prefix="cumoe-cupy-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["CUPY_CACHE_DIR"] = folder
        return error
    return None


def _paths(text: str) -> list[str]:
    return text.split(os.pathsep)


def _absolute(path: str) -> Path:
    """A path that stays the same when the process changes its folder."""
    return Path(os.path.expanduser(path)).absolute()


def _user_cache_dir() -> Path:
    import platformdirs

    path = Path(platformdirs.user_cache_dir("cumoe", appauthor=False))
    # A user without a home: below a file nothing can be made, so kernels are kept in memory.
    return path if path.is_absolute() else Path(os.devnull, "no-home", "cumoe")


def _truth(env: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = env.get(name, "").lower()
    if text and text not in _TRUTH:
        raise ArgumentError(
            f"{name}: wanted 1 or 0, got {env[name]!r}; set one of them, or unset it"
        )
    return _TRUTH[text] if text else default


def _level(env: Mapping[str, str], name: str) -> str | None:
    text = env.get(name, "").lower()
    if text and text not in _LEVELS:
        raise ArgumentError(
            f"{name}: wanted one of {', '.join(_LEVELS)}, got {env[name]!r}; set one, or unset it"
        )
    return text or None


@cache
def _log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s cumoe[%(process)d] %(message)s"))
    logger = logging.getLogger("cumoe")
    logger.addHandler(handler)
    logger.setLevel(level.upper())
