"""The experts of one layer of a block-FP8 checkpoint, stacked as the kernels take them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cumoe.checkpoint.config import MoeConfig, read_config
from cumoe.checkpoint.safetensors import Array
from cumoe.checkpoint.shards import Checkpoint, open_checkpoint
from cumoe.errors import ArgumentError, CheckpointError

BLOCK = 128
"""Edge of the square of weights that shares one scale."""

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")  # all exact in fp32
_EXPERT = re.compile(r"(model\.(?:language_model\.)?)layers\.(\d+)\.mlp\.experts\.(\d+)\.")
_DEVICE = re.compile(r"cpu|cuda(?::(\d+))?")


@dataclass(frozen=True, eq=False)
class Router:
    """What chooses the experts of a token. NumPy, on the host.

    weight: [E, K] fp32; correction_bias: [E] fp32 or None, added to the scores for choosing only.
    """

    weight: Array
    correction_bias: Array | None = None


@dataclass(frozen=True, eq=False)
class Experts:
    """The experts of one layer, in the form that ``fused_experts_fp8`` takes.

    w1: [E, 2N, K] e4m3, gate rows first, then up; w2: [E, K, N] e4m3;
    w1_scale: [E, 2N/128, K/128] fp32; w2_scale: [E, K/128, N/128] fp32.
    """

    w1: Any
    w2: Any
    w1_scale: Any
    w2_scale: Any
    router: Router | None
    config: MoeConfig


def load_experts(path: str | Path, layer: int, *, device: str = "cpu") -> Experts:
    """Reads the experts of one layer of a block-FP8 checkpoint.

    Takes Hugging Face names: ``model.layers.N.mlp.experts.I.{gate,up,down}_proj.weight`` (e4m3)
    with ``.weight_scale_inv`` (one scale per 128 x 128 weights), and, where they exist,
    ``model.layers.N.mlp.gate.weight``, ``...gate.e_score_correction_bias`` and ``config.json``.

    Args:
        path: a ``.safetensors`` file, a ``.safetensors.index.json``, or a folder holding either.
        layer: number of the layer.
        device: ``"cpu"`` gives NumPy arrays, ``"cuda"`` or ``"cuda:1"`` CuPy arrays. The router
            stays on the host.

    Returns: Experts. Nothing is rounded: weights keep their bytes, scales become fp32 exactly.

    Raises: CheckpointError, naming file and tensor; ArgumentError for another device.
    """
    index = device_index(device)
    experts = read_experts(open_checkpoint(path), layer)
    return experts if index is None else to_cuda(experts, index)


def device_index(device: str) -> int | None:
    """None for ``cpu``, the number of the GPU for ``cuda`` and ``cuda:N``."""
    match = _DEVICE.fullmatch(device)
    if match is None:
        raise ArgumentError(f"device: wanted 'cpu', 'cuda' or 'cuda:N', got {device!r}; name a GPU")
    return None if device == "cpu" else int(match.group(1) or 0)


def to_cuda(experts: Experts, index: int) -> Experts:
    """The same experts as CuPy arrays on GPU ``index``."""
    from cumoe.launch.memory import to_device

    names = ("w1", "w2", "w1_scale", "w2_scale")
    return replace(experts, **{n: to_device(getattr(experts, n), index) for n in names})


def expert_layers(checkpoint: Checkpoint) -> list[int]:
    """The layers that have experts, ascending."""
    found = (_EXPERT.match(name) for name in checkpoint)
    return sorted({int(match.group(2)) for match in found if match})


def read_experts(checkpoint: Checkpoint, layer: int) -> Experts:
    """`load_experts` on the host, from an open checkpoint."""
    prefix, count = _find(checkpoint, layer)
    w1, w2, w1_scale, w2_scale = _stack(checkpoint, f"{prefix}.experts", count)
    _, hidden, intermediate = w2.shape
    config = read_config(checkpoint.folder, hidden=hidden, intermediate=intermediate, experts=count)
    router = _router(checkpoint, f"{prefix}.gate", (count, hidden))
    return Experts(w1, w2, w1_scale, w2_scale, router, config)


def _find(checkpoint: Checkpoint, layer: int) -> tuple[str, int]:
    """``model.layers.N.mlp`` of this layer, and its number of experts."""
    matches = [m for m in map(_EXPERT.match, checkpoint) if m and int(m.group(2)) == layer]
    if not matches:
        layers = expert_layers(checkpoint)
        raise CheckpointError(
            f"{checkpoint.path}: layer {layer}: wanted model.layers.{layer}.mlp.experts.*, found "
            f"experts in {'layer ' + _ranges(layers) if layers else 'no layer'}; "
            + ("name one of these" if layers else "this is no Mixture-of-Experts checkpoint")
        )
    prefix = f"{matches[0].group(1)}layers.{layer}.mlp"
    numbers = sorted({int(m.group(3)) for m in matches})
    missing = sorted(set(range(numbers[-1] + 1)) - set(numbers))
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: {prefix}.experts.{missing[0]}: wanted experts 0 to {numbers[-1]}, "
            f"found none numbered {_ranges(missing)}; the checkpoint is incomplete: download it "
            "again"
        )
    return prefix, len(numbers)


def _ranges(numbers: list[int]) -> str:
    """``0, 3 to 60`` for ``[0, 3, 4, ..., 60]``, which is ascending."""
    starts = [n for n in numbers if n - 1 not in numbers]
    stops = [n for n in numbers if n + 1 not in numbers]
    pairs = zip(starts, stops, strict=True)
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in pairs)


def _stack(checkpoint: Checkpoint, prefix: str, count: int) -> tuple[Array, Array, Array, Array]:
    n, k = _sizes(checkpoint, f"{prefix}.0.gate_proj.weight")
    nb, kb = n // BLOCK, k // BLOCK
    w1, w2 = np.empty((count, 2 * n, k), _E4M3), np.empty((count, k, n), _E4M3)
    w1_scale = np.empty((count, 2 * nb, kb), np.float32)
    w2_scale = np.empty((count, kb, nb), np.float32)
    for e in range(count):
        parts = {
            "gate_proj": (w1[e, :n], w1_scale[e, :nb]),
            "up_proj": (w1[e, n:], w1_scale[e, nb:]),
            "down_proj": (w2[e], w2_scale[e]),
        }
        for projection, (weight, scale) in parts.items():
            name = f"{prefix}.{e}.{projection}.weight"
            weight[...] = _weight(checkpoint, name, weight.shape)
            scale[...] = _scale(checkpoint, f"{name}_scale_inv", scale.shape)
    return w1, w2, w1_scale, w2_scale


def _sizes(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """Intermediate and hidden size, from the first expert's gate."""
    shape = _weight(checkpoint, name).shape
    for size, what in zip(shape, ("intermediate", "hidden"), strict=True):
        if size == 0 or size % BLOCK:
            raise CheckpointError(
                f"{checkpoint.where(name)}: wanted an {what} size that is a multiple of {BLOCK}, "
                f"found {size}; pad the weights with cumoe.pad_experts and save them"
            )
    return shape[0], shape[1]


def _weight(checkpoint: Checkpoint, name: str, shape: tuple[int, ...] | None = None) -> Array:
    """An e4m3 matrix, of this shape if one is given."""
    weight = checkpoint[name]
    if weight.dtype != _E4M3:
        wide = weight.dtype.name in ("bfloat16", "float16", "float32")
        remedy = "load the block-FP8 release of this model" if wide else "load another release"
        kind = f"{weight.dtype.name}, an unquantized checkpoint" if wide else weight.dtype.name
        raise CheckpointError(
            f"{checkpoint.where(name)}: wanted float8_e4m3fn with weight_scale_inv, found {kind}; "
            f"{remedy}"
        )
    if weight.ndim != 2 or shape not in (None, weight.shape):
        raise CheckpointError(
            f"{checkpoint.where(name)}: wanted {list(shape) if shape else 'a matrix'}, as the "
            f"other experts have it, found {list(weight.shape)}; the checkpoint is damaged"
        )
    return weight


def _scale(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Array:
    """Block scales in fp32."""
    other = name.removesuffix("_inv")
    if name not in checkpoint and other in checkpoint:
        raise CheckpointError(
            f"{checkpoint.where(name)}: wanted one scale per {BLOCK} x {BLOCK} weights, found "
            f"{other}, the scales of a tensor or of rows; load the block-FP8 release of this model"
        )
    return _floats(checkpoint, name, shape, f"one scale per {BLOCK} x {BLOCK} weights")


def _router(checkpoint: Checkpoint, prefix: str, shape: tuple[int, int]) -> Router | None:
    weight, bias = f"{prefix}.weight", f"{prefix}.e_score_correction_bias"
    if weight not in checkpoint:
        return None
    return Router(
        _floats(checkpoint, weight, shape, "one row per expert"),
        _floats(checkpoint, bias, shape[:1], "one value per expert")
        if bias in checkpoint
        else None,
    )


def _floats(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], why: str) -> Array:
    """A tensor of this shape, converted exactly to fp32."""
    values = checkpoint[name]
    if values.dtype.name not in _SCALE_DTYPES:
        raise CheckpointError(
            f"{checkpoint.where(name)}: wanted an element type among {', '.join(_SCALE_DTYPES)}, "
            f"found {values.dtype.name}; load another release of this model"
        )
    if values.shape != shape:
        raise CheckpointError(
            f"{checkpoint.where(name)}: wanted {list(shape)}, {why}, found {list(values.shape)}; "
            "the checkpoint is damaged, or its blocks have another size"
        )
    return values.astype(np.float32)
