"""One layer of a checkpoint on random tokens, measured against the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cumoe.checkpoint.accuracy import REFERENCE_ROW, Errors, compare, reference_row
from cumoe.checkpoint.calls import Case, measure, on_cpu, on_cuda
from cumoe.checkpoint.config import MoeConfig
from cumoe.checkpoint.experts import Experts, Router, device_index, expert_layers, read_experts
from cumoe.checkpoint.routing import route
from cumoe.checkpoint.shards import Checkpoint, open_checkpoint
from cumoe.errors import ArgumentError, UnsupportedDeviceError


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What to run. None leaves it to the checkpoint."""

    layer: int | None = None
    """By default the first layer that has experts."""
    tokens: int = 64
    seed: int = 0
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    top_k: int | None = None
    scoring: str | None = None
    routed_scaling_factor: float | None = None
    scale_format: str | None = None
    swiglu_limit: float | None = None
    """inf for no clamp."""


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What ran, how right it is, and how long it took."""

    file: str
    layer: int
    tokens: int
    config: MoeConfig
    """As it ran: the checkpoint's, the options, and defaults."""
    router: str
    """``checkpoint``, or ``random`` where that has none."""
    backend: str
    """``cpu``, which is the NumPy reference itself, or the GPU."""
    distinct_experts: int
    """How many experts the tokens were sent to."""
    errors: Errors
    first_call_s: float
    """The first call: compiling or loading kernels included."""
    call_s: float
    """Median of the calls after it."""


def run_layer(path: str | Path, options: RunOptions | None = None) -> LayerReport:
    """Loads a layer, sends ``options.tokens`` tokens of N(0, 1) through it, and measures.

    Up to 16 tokens are compared with `cumoe.reference.fused_experts_fp8` and with its float64
    evaluation, both of which see these tokens only.

    Raises: CheckpointError; ArgumentError for an option that does not fit the layer;
    UnsupportedDeviceError for a GPU that is not there.
    """
    options = options or RunOptions()
    index = _require_device(options.device)
    checkpoint = open_checkpoint(path)
    layer = _first_layer(checkpoint) if options.layer is None else options.layer
    experts = read_experts(checkpoint, layer)
    rng = np.random.default_rng(options.seed)
    case = _draw_case(experts, _configure(experts, options), options.tokens, rng)
    backend = on_cpu(experts, case) if index is None else on_cuda(experts, case, index)
    out, first_call_s, call_s = measure(backend)
    size = *case.topk_ids.shape, *experts.w2.shape[1:]
    bound = REFERENCE_ROW if index is None else reference_row(*size)
    return LayerReport(
        file=str(path),
        layer=layer,
        tokens=options.tokens,
        config=case.config,
        router="random" if experts.router is None else "checkpoint",
        backend=backend.name,
        distinct_experts=len(np.unique(case.topk_ids)),
        errors=compare(out, experts, case, rng, bound),
        first_call_s=first_call_s,
        call_s=call_s,
    )


def _first_layer(checkpoint: Checkpoint) -> int:
    """Layer 0 stands for none: reading it says what is missing."""
    return next(iter(expert_layers(checkpoint)), 0)


def _require_device(device: str) -> int | None:
    """The GPU's number, None for the CPU."""
    if device == "cpu":
        return None
    from cumoe.launch.device import device_count

    count = device_count()
    if device == "auto":
        return 0 if count else None
    index = device_index(device)
    if index is not None and index >= count:
        raise UnsupportedDeviceError(
            f"device: wanted {device}, found {count} usable GPUs; choose --device cpu, or install "
            "a driver and cumoe[cuda12]"
        )
    return index


def _configure(experts: Experts, options: RunOptions) -> MoeConfig:
    """The checkpoint's configuration, then the options, then defaults."""
    names = ("top_k", "scoring", "routed_scaling_factor", "scale_format", "swiglu_limit")
    values: dict[str, Any] = {"routed_scaling_factor": 1.0, "scale_format": "fp32"}
    if experts.router is None:
        values["scoring"] = "softmax"
    for source in (experts.config, options):
        values |= {n: v for n in names if (v := getattr(source, n)) is not None}
    if values.get("swiglu_limit") == math.inf:
        values["swiglu_limit"] = None
    return replace(experts.config, **values)


def _draw_case(experts: Experts, config: MoeConfig, tokens: int, rng: np.random.Generator) -> Case:
    if tokens < 1:
        raise ArgumentError(f"tokens: wanted at least 1, got {tokens}; give more")
    x = rng.standard_normal((tokens, config.hidden_size), np.float32).astype(ml_dtypes.bfloat16)
    router = experts.router or _random_router(config, rng)
    topk_weights, topk_ids = route(x, router, config)
    return Case(x, topk_weights, topk_ids, config)


def _random_router(config: MoeConfig, rng: np.random.Generator) -> Router:
    shape = (config.num_experts, config.hidden_size)
    return Router(rng.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5))
