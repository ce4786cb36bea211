"""The kernels of vLLM's model, compiled before its workers are started."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cumoe._settings import settings
from cumoe.errors import CumoeError
from cumoe.prebuild import PrebuildReport, prebuild
from cumoe.vllm_plugin.conditions import CAPABILITIES
from cumoe.vllm_plugin.experts import machine

log = logging.getLogger("vllm.plugins.cumoe")


def prebuild_model(config: Any) -> PrebuildReport | None:
    """Compiles what the model of a ``VllmConfig`` reaches; None, and a line, where nothing is.

    A failure here stops nothing: a worker compiles what it misses, or says why it cannot.
    """
    if (why := _why_not(config)) is not None:
        log.info("nothing prebuilt: %s", why)
        return None
    try:
        report = _prebuild(config)
    except CumoeError as error:
        log.info("nothing prebuilt: %s", error)
        return None
    for cause in report.causes:
        log.warning("not prebuilt: %s", cause)
    log.info(
        "%d kernels compiled, %d found, in %.1f s",
        report.count("built"), report.count("cached"), report.seconds,
    )  # fmt: skip
    return report


def _why_not(config: Any) -> str | None:
    """What needs no look at the layers, which say the rest in the workers."""
    here = machine()
    if not here.is_cuda or here.capability not in CAPABILITIES:
        return f"no GPU that has kernels: {here.capability}"
    if config.kernel_config.moe_backend != "auto":
        return f"moe_backend is {config.kernel_config.moe_backend}"
    if (count := config.parallel_config.data_parallel_size) != 1:
        return f"{count} data-parallel ranks exchange tokens"
    if settings().disable_jit:
        return "CUMOE_DISABLE_JIT=1"
    return None if config.model_config is not None else "no model"


def _prebuild(config: Any) -> PrebuildReport:
    """Its config.json is written out, since transformers has completed and renamed values."""
    ranks = config.parallel_config
    tp, ep = ranks.tensor_parallel_size, 1
    if ranks.enable_expert_parallel:
        tp, ep = ep, tp
    with TemporaryDirectory(prefix="cumoe-vllm-") as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(config.model_config.hf_config.to_dict(), default=str))
        # vLLM chooses the format by what DeepGEMM is set to, not by the checkpoint.
        return prebuild(config=file, tp=tp, ep=ep, scale_format="both")
