"""Calling the experts on the CPU or a GPU, and timing it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

from cumoe.checkpoint.config import MoeConfig
from cumoe.checkpoint.experts import Experts, to_cuda
from cumoe.checkpoint.safetensors import Array

_CALLS, _BUDGET_S = 20, 2.0


@dataclass(frozen=True, eq=False)
class Case:
    """The inputs of one call: x [M, K] bf16, topk_weights [M, topk] fp32, topk_ids int32."""

    x: Any
    topk_weights: Any
    topk_ids: Any
    config: MoeConfig

    def rows(self, rows: Array) -> Case:
        """The same call for some of the tokens."""
        x, weights, ids = self.x[rows], self.topk_weights[rows], self.topk_ids[rows]
        return replace(self, x=x, topk_weights=weights, topk_ids=ids)


@dataclass(frozen=True, slots=True)
class Backend:
    """How to call the op, complete when it returns, and how to bring its result to the host."""

    name: str
    call: Callable[[], Any]
    fetch: Callable[[Any], Array]


def apply(op: Callable[..., Any], experts: Experts, case: Case, **options: Any) -> Any:
    """``op``, with the signature of ``fused_experts_fp8``, on these experts and tokens."""
    return op(
        case.x,
        experts.w1,
        experts.w2,
        case.topk_weights,
        case.topk_ids,
        w1_scale=experts.w1_scale,
        w2_scale=experts.w2_scale,
        swiglu_limit=case.config.swiglu_limit,
        swiglu_alpha=case.config.swiglu_alpha,
        swiglu_beta=case.config.swiglu_beta,
        routed_scaling_factor=case.config.routed_scaling_factor,
        **options,
    )


def on_cpu(experts: Experts, case: Case) -> Backend:
    """The op on NumPy arrays, which is the reference."""
    import cumoe

    op, scale_format = cumoe.fused_experts_fp8, case.config.scale_format
    call = lambda: apply(op, experts, case, scale_format=scale_format)  # noqa: E731
    return Backend("cpu", call, np.asarray)


def on_cuda(experts: Experts, case: Case, index: int) -> Backend:
    """The op on CuPy arrays of one GPU."""
    import cumoe
    from cumoe.launch.memory import to_device, to_host

    op, scale_format = cumoe.fused_experts_fp8, case.config.scale_format
    there = to_cuda(experts, index)
    x, weights, ids = (to_device(a, index) for a in (case.x, case.topk_weights, case.topk_ids))
    moved = Case(x, weights, ids, case.config)

    def call() -> Any:
        out = apply(op, there, moved, scale_format=scale_format)
        out.device.synchronize()
        return out

    return Backend(_gpu_name(index), call, lambda out: to_host(out).view(ml_dtypes.bfloat16))


def _gpu_name(index: int) -> str:
    from cumoe.launch.device import cupy

    name: bytes = cupy().cuda.runtime.getDeviceProperties(index)["name"]
    return f"cuda:{index} ({name.decode()})"


def measure(backend: Backend) -> tuple[Array, float, float]:
    """The first call's result, its seconds, and the median seconds of the calls after it."""
    out, first = _timed(backend.call)
    times = [_timed(backend.call)[1]]
    while len(times) < _CALLS and sum(times) < _BUDGET_S:
        times.append(_timed(backend.call)[1])
    return backend.fetch(out), first, median(times)


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    out = call()
    return out, time.perf_counter() - start
