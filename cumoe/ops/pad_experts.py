"""pad_experts: weights of any size to the multiples of 128 that the kernels want."""

from __future__ import annotations

from typing import Any

from cumoe.arrays.check import require_dtype, require_ndim, require_same_device, require_shape
from cumoe.arrays.exchange import view
from cumoe.arrays.view import ArrayView, Facts
from cumoe.errors import ArgumentError
from cumoe.launch import memory
from cumoe.ops._inputs import whole_number
from cumoe.plan.scales import GROUP_SIZE, ceil_to


def pad_experts(
    w1: Any, w2: Any, w1_scale: Any, w2_scale: Any, multiple: int = 128
) -> tuple[Any, Any, Any, Any]:
    """Pads N and K of expert weights, and their scales, with zeros.

    The padded layer computes the same function: padded intermediate channels are 0. Where K grows,
    pad x to the same K and drop the added columns of the output.

    Args:
        w1: [E, 2N, K] e4m3 (or uint8), gate rows first; both halves are padded.
        w2: [E, K, N] e4m3.
        w1_scale: [E, 2 ceil(N/128), ceil(K/128)] fp32; gate and up have blocks of their own.
        w2_scale: [E, ceil(K/128), ceil(N/128)] fp32.
        multiple: what N and K become multiples of; itself a multiple of 128.

    Returns:
        (w1, w2, w1_scale, w2_scale), new arrays in the framework and on the device of w1.

    Raises:
        ArgumentError: shapes that do not fit each other, or a multiple that is none of 128.
        DTypeError: weights are not e4m3, scales not fp32, or multiple no whole number.
        DeviceMismatchError: the arrays are on different devices.
        UnsupportedDeviceError: no usable CUDA installation for arrays on a GPU.

    Example:
        >>> import numpy as np, cumoe
        >>> w1, w2 = np.ones((2, 384, 128), np.uint8), np.ones((2, 128, 192), np.uint8)
        >>> s1, s2 = np.ones((2, 4, 1), np.float32), np.ones((2, 1, 2), np.float32)
        >>> [a.shape for a in cumoe.pad_experts(w1, w2, s1, s2)]
        [(2, 512, 128), (2, 128, 256), (2, 4, 1), (2, 1, 2)]
    """
    multiple = whole_number(multiple, "multiple")
    if multiple < GROUP_SIZE or multiple % GROUP_SIZE:
        raise ArgumentError(f"multiple: want a multiple of {GROUP_SIZE}, got {multiple}")
    v1, v2 = view(w1, "w1"), view(w2, "w2")
    s1, s2 = view(w1_scale, "w1_scale"), view(w2_scale, "w2_scale")
    require_same_device(
        (name, v.facts) for name, v in (("w1", v1), ("w2", v2), ("w1_scale", s1), ("w2_scale", s2))
    )
    E, N, K = _require_shapes(v1.facts, v2.facts, s1.facts, s2.facts)
    n, k = ceil_to(N, multiple), ceil_to(K, multiple)
    blocks_n, blocks_k = n // GROUP_SIZE, k // GROUP_SIZE
    return (
        _pad_halves(v1, (E, 2 * n, k), v1),
        _pad(v2, (E, k, n), v1),
        _pad_halves(s1, (E, 2 * blocks_n, blocks_k), v1),
        _pad(s2, (E, blocks_k, blocks_n), v1),
    )


def _require_shapes(w1: Facts, w2: Facts, w1_scale: Facts, w2_scale: Facts) -> tuple[int, int, int]:
    require_ndim(w2, "w2", 3, "[E, K, N]")
    E, K, N = w2.shape
    require_shape(w1, "w1", E, 2 * N, K, means="[E, 2N, K] of w2")
    blocks_n, blocks_k = -(-N // GROUP_SIZE), -(-K // GROUP_SIZE)
    require_shape(w1_scale, "w1_scale", E, 2 * blocks_n, blocks_k, means="blocks of gate and up")
    require_shape(w2_scale, "w2_scale", E, blocks_k, blocks_n, means="blocks of w2")
    for v, name in ((w1, "w1"), (w2, "w2")):
        require_dtype(v, name, "e4m3")
    for v, name in ((w1_scale, "w1_scale"), (w2_scale, "w2_scale")):
        require_dtype(v, name, "fp32")
    return E, N, K


def _pad(v: ArrayView, shape: tuple[int, int, int], like: ArrayView) -> Any:
    _, rows, columns = v.facts.shape
    return memory.embed(v, like, shape, [(slice(0, rows), slice(0, rows), slice(0, columns))])


def _pad_halves(v: ArrayView, shape: tuple[int, int, int], like: ArrayView) -> Any:
    """Gate rows to the start of the first half, up rows to the start of the second."""
    _, rows, columns = v.facts.shape
    half, target = rows // 2, shape[1] // 2
    gate = (slice(0, half), slice(0, half), slice(0, columns))
    up = (slice(half, rows), slice(target, target + half), slice(0, columns))
    return memory.embed(v, like, shape, [gate, up])
