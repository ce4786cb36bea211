"""The plugin of vLLM: its block-FP8 experts computed by `cumoe.fused_experts_fp8`.

vLLM calls `register` through the entry point ``vllm.general_plugins``, in each of its processes.
vLLM 0.26 has no register of expert backends; three functions of it are wrapped instead:

- ``oracle.fp8.backend_to_kernel_cls``: before vLLM's Triton experts, whose weights are kept as the
  checkpoint has them, it names our class. The oracle asks each class in turn whether it will do.
- ``oracle.fp8._get_priority_backends``: has that pair first where ours will do.
- ``EngineArgs.create_engine_config``: compiles the model's kernels once its configuration is known,
  in the parent process, before workers are started.

Nothing here imports vLLM until `register` runs.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from cumoe._settings import settings

__all__ = ["register"]

SERIES = "0.26"
"""The vLLM whose functions these are."""

log = logging.getLogger("vllm.plugins.cumoe")
"""Below vLLM's logger, so that its lines are in vLLM's log."""

_ORACLE = "vllm.model_executor.layers.fused_moe.oracle.fp8"
_MARK = "_of_cumoe"


def register() -> None:
    """Wraps vLLM's functions, once per process; does nothing with CUMOE_VLLM=0.

    Raises: ArgumentError where a CUMOE_ variable has a value that it cannot have.
    """
    if not settings().vllm:
        log.info("off: CUMOE_VLLM=0")
        return
    version = str(import_module("vllm").__version__)
    if version.split(".")[:2] != SERIES.split("."):
        log.warning("off: want vLLM %s, got %s", SERIES, version)
        return
    oracle = import_module(_ORACLE)
    _wrap(oracle, "backend_to_kernel_cls", _with_ours(oracle))
    _wrap(oracle, "_get_priority_backends", _ours_first(oracle))
    # A worker has not loaded it, and needs no kernels compiled ahead.
    if (arguments := sys.modules.get("vllm.engine.arg_utils")) is not None:
        _wrap(arguments.EngineArgs, "create_engine_config", _prebuilding)


def _wrap(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    theirs = getattr(owner, name)
    if not hasattr(theirs, _MARK):
        ours = functools.wraps(theirs)(around(theirs))
        setattr(ours, _MARK, True)
        setattr(owner, name, ours)


def _with_ours(oracle: Any) -> Callable[[Any], Any]:
    def around(theirs: Any) -> Any:
        def backend_to_kernel_cls(backend: Any) -> list[type]:
            from cumoe.vllm_plugin.experts import experts_class

            ours = [experts_class()] if backend == oracle.Fp8MoeBackend.TRITON else []
            return [*ours, *theirs(backend)]

        return backend_to_kernel_cls

    return around


def _ours_first(oracle: Any) -> Callable[[Any], Any]:
    def around(theirs: Any) -> Any:
        def _get_priority_backends(moe_config: Any, weight_key: Any, activation_key: Any) -> Any:
            from cumoe.vllm_plugin.experts import why_not

            found = list(theirs(moe_config, weight_key, activation_key))
            if why_not(moe_config, weight_key, activation_key) is None:
                found.sort(key=lambda backend: backend != oracle.Fp8MoeBackend.TRITON)
            return found

        return _get_priority_backends

    return around


def _prebuilding(theirs: Any) -> Any:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from cumoe.vllm_plugin.ahead import prebuild_model

        config = theirs(self, *args, **kwargs)
        prebuild_model(config)
        return config

    return create_engine_config
