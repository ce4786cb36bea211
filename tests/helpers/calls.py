"""Ops called with NumPy arrays, run on a backend, their results as NumPy arrays of bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cumoe
from tests.helpers.backends import NumpyBackend
from tests.helpers.cases import BF16, E4M3, poisoned_codes
from tests.helpers.layouts import scale_buffer

Arguments = dict[str, Any]
Quantized = tuple[np.ndarray, np.ndarray]
"""Codes as uint8, and scales."""


def placed(backend: NumpyBackend, arguments: Arguments) -> Arguments:
    """Arguments with their arrays on the backend; functions of the backend make theirs there."""
    return {name: _put(backend, value) for name, value in arguments.items()}


def _put(backend: NumpyBackend, value: Any) -> Any:
    if callable(value):
        return value(backend)
    return backend.put(value) if isinstance(value, np.ndarray) else value


def quantize_by_reference(x: np.ndarray, **options: Any) -> Quantized:
    q, scale = cumoe.reference.per_token_group_quant_fp8(x, **options)
    return q.view(np.uint8), scale


def quantize_on(backend: NumpyBackend, x: np.ndarray, **options: Any) -> Quantized:
    """``per_token_group_quant_fp8`` of [M, K] into poisoned outputs."""
    outputs = _poisoned(backend, *x.shape, options.get("scale_layout", "row"))
    result = cumoe.per_token_group_quant_fp8(backend.put(x), **outputs, **options)
    return _filled(backend, result, outputs)


def activate_by_reference(x: np.ndarray, **options: Any) -> Quantized:
    q, scale = cumoe.reference.silu_and_mul_quant_fp8(x, **options)
    return q.view(np.uint8), scale


def activate_on(backend: NumpyBackend, x: np.ndarray, **options: Any) -> Quantized:
    """``silu_and_mul_quant_fp8`` of [R, 2H] into poisoned outputs."""
    rows, columns = x.shape[0], x.shape[1] // 2
    outputs = _poisoned(backend, rows, columns, options.get("scale_layout", "row"))
    result = cumoe.silu_and_mul_quant_fp8(backend.put(x), **outputs, **placed(backend, options))
    return _filled(backend, result, outputs)


def _poisoned(backend: NumpyBackend, rows: int, columns: int, layout: str) -> Arguments:
    return {
        "out": backend.put(poisoned_codes(rows, columns)),
        "out_scale": scale_buffer(backend, rows, columns // 128, layout).view,
    }


def _filled(backend: NumpyBackend, result: Any, outputs: Arguments) -> Quantized:
    q, scale = result
    assert q is outputs["out"]
    assert scale is outputs["out_scale"]
    return backend.codes(q), backend.raw(scale)


def fused_experts_on(backend: NumpyBackend) -> Callable[..., np.ndarray]:
    """``fused_experts_fp8`` that takes NumPy arrays, or arrays that are on the backend already.

    The result goes to the given ``out``, or to one that held NaN.
    """

    def op(x: Any, *arrays: Any, **options: Any) -> np.ndarray:
        if "out" not in options:
            options["out"] = np.full(tuple(x.shape), np.nan, np.float32).astype(BF16)
        moved = placed(backend, options)
        result = cumoe.fused_experts_fp8(*(_put(backend, a) for a in (x, *arrays)), **moved)
        assert moved["out"] is None or result is moved["out"]
        return backend.bf16(result)

    return op


RIGHT_ARGUMENTS: dict[str, Callable[[], Arguments]] = {
    "per_token_group_quant_fp8": lambda: {"x": np.zeros((4, 256), BF16)},
    "silu_and_mul_quant_fp8": lambda: {"gate_up": np.zeros((4, 512), BF16)},
    "moe_align_block_size": lambda: {
        "topk_ids": np.zeros((4, 2), np.int32),
        "block_size": 16,
        "num_experts": 8,
    },
    "fused_experts_fp8": lambda: {
        "x": np.zeros((4, 256), BF16),
        "w1": np.zeros((8, 256, 256), E4M3),
        "w2": np.zeros((8, 256, 128), E4M3),
        "topk_weights": np.zeros((4, 2), np.float32),
        "topk_ids": np.zeros((4, 2), np.int32),
        "w1_scale": np.zeros((8, 2, 2), np.float32),
        "w2_scale": np.zeros((8, 2, 1), np.float32),
    },
    "pad_experts": lambda: {
        "w1": np.zeros((2, 384, 128), E4M3),
        "w2": np.zeros((2, 128, 192), E4M3),
        "w1_scale": np.zeros((2, 4, 1), np.float32),
        "w2_scale": np.zeros((2, 1, 2), np.float32),
    },
}
"""Arguments that each op takes, by its name: what a test of errors changes."""


def random_arguments(op: str) -> Arguments:
    """A call with random values in all its arrays."""
    rng = np.random.default_rng(5)

    def random(a: np.ndarray) -> np.ndarray:
        if a.dtype == np.int32:
            return rng.integers(-1, 8, a.shape, np.int32)
        values = rng.standard_normal(a.shape, np.float32)
        return np.abs(values) if a.dtype == np.float32 else values.astype(a.dtype)

    right = RIGHT_ARGUMENTS[op]()
    return {name: random(v) if isinstance(v, np.ndarray) else v for name, v in right.items()}
