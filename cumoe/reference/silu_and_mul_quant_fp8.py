"""SwiGLU with clamp, rounded to bf16, then quantized in groups."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cumoe.errors import ArgumentError
from cumoe.reference.arrays import bf16_values, e4m3_output, num_groups
from cumoe.reference.e4m3 import F32, Array, to_bf16
from cumoe.reference.per_token_group_quant_fp8 import quantize_groups
from cumoe.reference.routing import local_experts
from cumoe.reference.scales import encode, require_layout, scale_output


@np.errstate(all="ignore")
def silu_and_mul_quant_fp8(
    gate_up: Array,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    group_size: int = 128,
    scale_format: str = "fp32",
    scale_layout: str = "row",
    topk_ids: Array | None = None,
    expert_map: Array | None = None,
    num_experts: int | None = None,
    out: Array | None = None,
    out_scale: Array | None = None,
) -> tuple[Array, Array]:
    """Quantize ``silu(gate) * up`` of the rows that belong to a local expert.

    ``g = bf16(min(gate, limit))``, ``u = clamp(up, -limit, limit)``,
    ``y = bf16(bf16(g / (1 + exp(-alpha * g))) * (u + beta))``, then groups of y as in
    ``per_token_group_quant_fp8``.

    Args:
        gate_up: [R, 2H] bf16, gate first; H a multiple of ``group_size``. More leading dimensions
            flatten to R.
        limit: above 0; None or +inf for no clamp.
        topk_ids: R ids, int32 or int64, any shape; rows of ids that are not local stay as they are.
        expert_map: [num_experts] int32, global id to local, -1 for an expert that is elsewhere.
        num_experts: size of the id space; by default the length of ``expert_map``.
        out, out_scale: as in ``per_token_group_quant_fp8``, for [R, H].

    Returns:
        q [R, H] e4m3 and its scales. Rows that are left alone are zero where no ``out`` is given.

    Raises:
        ArgumentError: H is no multiple of ``group_size``; limit, alpha or beta out of range; ids
            that do not fit R; a map without ids.
        DTypeError: an element type that is none of the above.
    """
    require_layout(scale_layout, scale_format)
    constants = swiglu_constants(limit, alpha, beta)
    if gate_up.ndim < 1 or gate_up.shape[-1] % 2:
        raise ArgumentError(f"gate_up must be [..., 2 * H], got shape {list(gate_up.shape)}")
    *leading, width = gate_up.shape
    num_rows, size = int(np.prod(leading)), width // 2
    num_columns = num_groups("H, half the last dimension of gate_up,", size, group_size)
    local = _local_rows(num_rows, topk_ids, num_experts, expert_map)
    out, codes = e4m3_output("out", out, (*leading, size))
    out_scale = scale_output(out_scale, num_rows, num_columns, scale_layout)

    y = swiglu(bf16_values("gate_up", gate_up.reshape(num_rows, width)[local]), *constants)
    q, scale = quantize_groups(y.astype(np.float32), group_size, scale_format)
    codes[local.reshape(leading)] = q
    out_scale[local] = encode(scale, scale_layout)
    return out, out_scale


def swiglu(gate_up: F32, limit: np.float32 | None, alpha: np.float32, beta: np.float32) -> Array:
    """bf16 activation [R, H] of bf16-valued float32 [R, 2H]; NaN stays NaN."""
    gate, up = np.split(gate_up, 2, axis=1)
    if limit is not None:
        gate = to_bf16(np.minimum(gate, limit)).astype(np.float32)
        up = np.clip(up, -limit, limit)
    silu = gate / (np.float32(1) + _exp(-alpha * gate))
    silu = np.where(np.isneginf(gate), np.float32(-0.0), silu)  # the formula gives -inf / inf
    return to_bf16(to_bf16(silu).astype(np.float32) * (up + beta))


def swiglu_constants(
    limit: float | None, alpha: float, beta: float, prefix: str = ""
) -> tuple[np.float32 | None, np.float32, np.float32]:
    """The three constants as float32, checked; an infinite limit is none.

    ``prefix`` is what the caller's names of them begin with.
    """
    slope, shift = np.float32(alpha), np.float32(beta)
    if not (np.isfinite(slope) and slope > 0):
        raise ArgumentError(f"{prefix}alpha must be finite and above 0, got {alpha}")
    if not np.isfinite(shift):
        raise ArgumentError(f"{prefix}beta must be finite, got {beta}")
    clamp = np.float32(np.inf if limit is None else limit)
    if not clamp > 0:
        raise ArgumentError(f"{prefix}limit must be above 0 (None for no clamp), got {limit}")
    return (None if np.isposinf(clamp) else clamp), slope, shift


def _exp(values: F32) -> F32:
    """exp to the nearest float32. NumPy's own float32 exp is off by up to 2 ulp, by CPU type."""
    return np.exp(values.astype(np.float64)).astype(np.float32)


def _local_rows(
    num_rows: int, topk_ids: Array | None, num_experts: int | None, expert_map: Array | None
) -> NDArray[np.bool_]:
    """Which rows are computed."""
    if topk_ids is None:
        if expert_map is not None:
            raise ArgumentError("expert_map filters by topk_ids, which is missing: pass both")
        return np.ones(num_rows, np.bool_)
    if topk_ids.size != num_rows:
        raise ArgumentError(
            f"topk_ids must have one id for each of the {num_rows} rows of gate_up, "
            f"got shape {list(topk_ids.shape)}"
        )
    return local_experts(topk_ids, num_experts, expert_map).ravel() >= 0
