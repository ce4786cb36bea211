"""Independent oracles: the same results by other means, slow and plain. Nothing here uses cumoe."""

from __future__ import annotations

import math

import numpy as np

E4M3_NAN = 0x7F


def e4m3_value(code: int) -> float:
    """The value of an e4m3 code from its fields: 1 sign, 4 exponent (bias 7), 3 mantissa bits."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3_VALUES = np.array([e4m3_value(code) for code in range(256)])


def nearest_e4m3(values: np.ndarray) -> np.ndarray:
    """Codes (uint8) of the nearest of all e4m3 values, the even code on a tie; NaN gives 0x7F.

    The largest is the nearest to all that lies beyond it, infinity included: saturation.
    """
    values = np.asarray(values)
    numbers = np.where(np.isnan(values), 0, values).astype(np.float64)
    magnitude = np.minimum(np.abs(numbers), 1e6)[..., None]
    distance = np.abs(E4M3_VALUES[:E4M3_NAN] - magnitude)
    is_odd = np.arange(E4M3_NAN) & 1
    nearest = distance == distance.min(axis=-1, keepdims=True)
    code = np.where(nearest, is_odd, 2).argmin(axis=-1)
    code = code | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), E4M3_NAN, code).astype(np.uint8)


def nearest_bf16_bits(values: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) of finite float32 values: round the low half of the word to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def align_by_loops(
    topk_ids: np.ndarray, block_size: int, num_experts: int, expert_map: np.ndarray | None = None
) -> tuple[list[int], list[int], int]:
    """The used part of sorted_token_ids and expert_ids, and its length."""
    slots_of: dict[int, list[int]] = {}
    for slot, expert in enumerate(topk_ids.reshape(-1).tolist()):
        if not 0 <= expert < num_experts:
            continue
        local = expert if expert_map is None else int(expert_map[expert])
        if 0 <= local < num_experts:
            slots_of.setdefault(local, []).append(slot)
    sorted_ids: list[int] = []
    expert_ids: list[int] = []
    for local in sorted(slots_of):
        run = slots_of[local]
        while len(run) % block_size:
            run.append(topk_ids.size)
        sorted_ids += run
        expert_ids += [local] * (len(run) // block_size)
    return sorted_ids, expert_ids, len(sorted_ids)


def align_by_sort(
    topk_ids: np.ndarray, block_size: int, num_experts: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """The same by a stable sort, for valid ids: where a loop would take too long."""
    ids = topk_ids.ravel()
    counts = np.bincount(ids, minlength=num_experts)
    blocks = -(-counts // block_size)
    used = int(blocks.sum()) * block_size
    starts = (np.cumsum(blocks) - blocks) * block_size
    rank = np.arange(ids.size) - np.repeat(np.cumsum(counts) - counts, counts)
    sorted_ids = np.full(used, ids.size)
    sorted_ids[np.repeat(starts, counts) + rank] = np.argsort(ids, kind="stable")
    return sorted_ids, np.repeat(np.arange(num_experts), blocks), used


def dequantize(w: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float64 [N, K] of e4m3 [N, K] and one scale for each 128 x 128."""
    values = E4M3_VALUES[w.view(np.uint8)]
    row, column = np.indices(values.shape)
    return values * scale.astype(np.float64)[row // 128, column // 128]


def block_matmul_float64(
    a: np.ndarray, a_scale: np.ndarray, w: np.ndarray, w_scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """float64 product [T, N] of block-scaled e4m3 matrices, and what its accumulators see.

    The second is, for each element, the sum over blocks of ``a_scale * w_scale`` times the largest
    magnitude among the block's products and running sums.
    """
    codes_a, codes_w = E4M3_VALUES[a.view(np.uint8)], E4M3_VALUES[w.view(np.uint8)]
    value = np.zeros((len(a), len(w)))
    magnitude = np.zeros_like(value)
    for t in range(len(a)):
        for block in range(w_scale.shape[1]):
            depth = slice(block * 128, (block + 1) * 128)
            products = codes_w[:, depth] * codes_a[t, depth]
            running = np.cumsum(products, axis=1)
            factor = np.repeat(w_scale[:, block].astype(np.float64), 128) * a_scale[t, block]
            value[t] += factor * running[:, -1]
            magnitude[t] += factor * np.abs([products, running]).max(axis=(0, 2))
    return value, magnitude


def experts_by_token(
    x: np.ndarray,
    w1: np.ndarray,
    w2: np.ndarray,
    topk_weights: np.ndarray,
    topk_ids: np.ndarray,
    *,
    w1_scale: np.ndarray,
    w2_scale: np.ndarray,
    limit: float = math.inf,
    alpha: float = 1.0,
    beta: float = 0.0,
    expert_map: np.ndarray | None = None,
    weight_on_input: bool = False,
    factor: float = 1.0,
) -> np.ndarray:
    """float64 [M, K] without any rounding, token after token and slot after slot."""
    out = np.zeros(x.shape)
    num_ids = len(w1) if expert_map is None else len(expert_map)
    for token, ids in enumerate(topk_ids.tolist()):
        for j, expert in enumerate(ids):
            local = -1
            if 0 <= expert < num_ids:
                local = expert if expert_map is None else int(expert_map[expert])
            if not 0 <= local < len(w1):
                continue
            weight = float(topk_weights[token, j])
            row = x[token].astype(np.float64) * (weight if weight_on_input else 1.0)
            h = dequantize(w1[local], w1_scale[local]) @ row
            gate, up = h[: len(h) // 2], h[len(h) // 2 :]
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            y = gate / (1 + np.exp(-alpha * gate)) * (up + beta)
            slot = dequantize(w2[local], w2_scale[local]) @ y
            out[token] += slot * (1.0 if weight_on_input else weight)
    return out * factor
