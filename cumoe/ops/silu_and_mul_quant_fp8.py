"""silu_and_mul_quant_fp8: clamped SwiGLU fused with block quantization and an expert filter."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from cumoe import reference
from cumoe._settings import settings
from cumoe.arrays.check import (
    require_contiguous,
    require_dtype,
    require_multiple,
    require_same_device,
)
from cumoe.arrays.view import Facts
from cumoe.errors import ArgumentError
from cumoe.launch import device
from cumoe.launch.memory import Output
from cumoe.launch.run import At, Launch
from cumoe.ops import _inputs
from cumoe.ops._inputs import at
from cumoe.ops._op import Call, Op, Starts
from cumoe.ops._outputs import quantizer_outputs
from cumoe.plan import silu_and_mul_quant_fp8 as planning
from cumoe.plan.scales import GROUP_SIZE
from cumoe.plan.scales import scale_layout as layout_of


def silu_and_mul_quant_fp8(
    gate_up: Any,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    group_size: int = 128,
    scale_format: str = "fp32",
    scale_layout: str = "row",
    topk_ids: Any = None,
    expert_map: Any = None,
    num_experts: int | None = None,
    out: Any = None,
    out_scale: Any = None,
) -> tuple[Any, Any]:
    """SwiGLU of gate | up, quantized to e4m3 in groups of 128.

        g = bf16(min(gate, limit))       u = clamp(up, -limit, limit)      only with a limit
        s = bf16(g / (1 + exp(-alpha g)))
        y = bf16(s (u + beta))           the one place where the activation becomes bf16
        q, scale = per_token_group_quant_fp8(y)

    The gate is clamped from above only; NaN stays NaN; a gate of -inf gives s = -0. These are, bit
    for bit on finite input, the bytes of a clamped activation kernel followed by a quantizer.

    Args:
        gate_up: [R, 2H] bf16, first half gate, second half up; H a multiple of 128. R rows are
            (token, slot) pairs in row-major order, and may lie apart.
        limit: clamp, > 0; None or inf for none.
        alpha, beta: 1.702 and 1 in SwiGLU-OAI style models.
        group_size: 128.
        scale_format, scale_layout: as in `per_token_group_quant_fp8`.
        topk_ids: int32 or int64 with R elements, contiguous. Row r is computed only if its id is in
            [0, num_experts) and expert_map, if given, maps it to a local expert; the other rows of
            both outputs keep the bytes they had.
        expert_map: [num_experts] int32, global to local expert, -1 where not on this rank.
        num_experts: size of the id space; by default the length of expert_map. Without either,
            only negative ids are invalid.
        out: [R, H] e4m3 (or uint8), contiguous; allocated if None, then skipped rows hold anything.
        out_scale: an array of the chosen layout, whose padding is left alone; allocated if None.

    Returns:
        (q, scale) in the framework and on the device of gate_up.

    Raises:
        ArgumentError: a shape, limit, alpha, beta, format or layout that is not one of these, an
            expert_map without topk_ids, an output that is read-only or overlaps an input.
        DTypeError: gate_up is not bf16, topk_ids not int32 or int64, expert_map not int32, an
            output not of its type, or a scalar argument of another type.
        DeviceMismatchError: the arrays are on different devices.
        UnsupportedDeviceError: no kernel for this GPU, no usable CUDA installation, or a tensor on
            neither the CPU nor an NVIDIA GPU.
        KernelNotBuiltError: a kernel is not loaded and the stream is being captured, or it is in no
            cache and CUMOE_DISABLE_JIT=1. `cumoe.warmup` loads it, `cumoe prebuild` builds it.
        CompileError: NVRTC refused a kernel.
        CumoeError: the driver refused a launch.

    Example:
        >>> import ml_dtypes, numpy as np, cumoe
        >>> gate_up = np.ones((1, 256), ml_dtypes.bfloat16)
        >>> q, scale = cumoe.silu_and_mul_quant_fp8(gate_up, limit=10.0)
        >>> round(float(q[0, 0]) * float(scale[0, 0]), 3)
        0.73
    """
    result: tuple[Any, Any] = _op(
        (gate_up, topk_ids, expert_map, out, out_scale),
        (limit, alpha, beta, group_size, scale_format, scale_layout, num_experts),
    )
    return result


class _Scalars(NamedTuple):
    """The arguments that are no arrays, as plain Python values: a key that equals by value."""

    limit: float | None
    alpha: float
    beta: float
    group_size: int
    scale_format: str
    scale_layout: str
    num_experts: int | None


def _scalars(
    limit: Any, alpha: Any, beta: Any, group_size: Any, fmt: Any, layout: Any, num_experts: Any
) -> _Scalars:
    number, whole_number = _inputs.number, _inputs.whole_number
    return _Scalars(
        None if limit is None else number(limit, "limit"),
        number(alpha, "alpha"),
        number(beta, "beta") + 0.0,  # -0 would be another key and another kernel
        whole_number(group_size, "group_size"),
        _inputs.word(fmt, "scale_format"),
        _inputs.word(layout, "scale_layout"),
        None if num_experts is None else whole_number(num_experts, "num_experts"),
    )


@lru_cache(4096)
def _checked(
    x: Facts,
    ids: Facts | None,
    expert_map: Facts | None,
    out: Facts | None,
    out_scale: Facts | None,
    starts: Starts,
    plain: _Scalars,
) -> Call:
    _inputs.require_group_size(plain.group_size)
    _inputs.require_scale(plain.scale_format, plain.scale_layout)
    plain = plain._replace(limit=_inputs.require_limit(plain.limit, "limit"))
    _inputs.require_alpha_beta(plain.alpha, plain.beta)
    R, H, row_stride = _require_gate_up(x)
    _inputs.require_expert_map(expert_map)
    id_type = _require_ids(ids, expert_map, R)
    experts = _inputs.id_space(plain.num_experts, expert_map, default=_inputs.UNBOUNDED)
    layout = layout_of(R, H, plain.scale_layout, plain.scale_format)
    where = require_same_device(zip(ARRAYS, (x, ids, expert_map, out, out_scale), strict=True))
    made = quantizer_outputs((*x.shape[:-1], H), layout, out, out_scale)
    if where.kind == "cpu":
        return Call(plain._asdict())
    problem = planning.Problem(
        rows=layout.rows if out_scale is None else R,  # a caller's padding may not exist
        H=H,
        scale_format=plain.scale_format,
        packed=plain.scale_layout == "packed",
        clamp=planning.clamp_kind(plain.limit),
        scaled=(plain.alpha, plain.beta) != (1.0, 0.0),
        ids=id_type,
        has_map=expert_map is not None,
        aligned=_inputs.is_aligned(starts[0], row_stride, 2, 16) and starts[3] % 8 == 0,
        num_experts=0 if expert_map is None else expert_map.shape[0],
    )
    fused, info = settings().fused_act_quant, device.info(where.ordinal)
    if not fused:
        made["activated"] = Output((R, H), "bf16")
    arguments = (
        At("gate_up"), row_stride, at("topk_ids", ids), at("expert_map", expert_map),
        0 if fused else At("activated"), At("out"), At("out_scale"), *layout.strides, R,
        problem.rows, experts, experts,
    )  # fmt: skip
    scalars = plain.limit or 0.0, plain.alpha, plain.beta
    steps = (planning.BOTH,) if fused else (planning.ACTIVATE, planning.QUANTIZE)
    plans = [planning.plan(problem._replace(step=step), info) for step in steps]
    launches = tuple(Launch(p.step, (*arguments, *p.walk, *scalars)) for p in plans)
    return Call(plain._asdict(), launches, made)


def _require_gate_up(x: Facts) -> tuple[int, int, int]:
    require_dtype(x, "gate_up", "bf16")
    R, columns, row_stride = _inputs.require_rows(x, "gate_up")
    require_multiple(
        columns,
        "gate_up",
        "the last dimension (2H, with H a multiple of 128)",
        2 * GROUP_SIZE,
        "pad both halves with zeros to the next multiple",
    )
    return R, columns // 2, row_stride


def _require_ids(ids: Facts | None, expert_map: Facts | None, R: int) -> str | None:
    if ids is None:
        if expert_map is not None:
            raise ArgumentError("expert_map: has no ids to map; pass topk_ids too")
        return None
    dtype = require_dtype(ids, "topk_ids", "int32", "int64")
    require_contiguous(ids, "topk_ids")
    if prod(ids.shape) != R:
        raise ArgumentError(
            f"topk_ids: want one id per row of gate_up, {R}, got shape {list(ids.shape)}"
        )
    return dtype


ARRAYS = ("gate_up", "topk_ids", "expert_map", "out", "out_scale")
_op = Op(
    ARRAYS,
    required=1,
    inputs=3,
    results=("out", "out_scale"),
    scalars=_scalars,
    check=_checked,
    reference=reference.silu_and_mul_quant_fp8,
)
