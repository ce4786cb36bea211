"""Checkpoints of small layers, written tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

E, N, K = 3, 128, 256
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
Tensors = dict[str, np.ndarray]


def layer(number: int, *, prefix: str = "model.", seed: int = 0, experts: int = E) -> Tensors:
    """Random bytes as weights: what counts is that each comes out where it belongs."""
    rng = np.random.default_rng(seed)
    mlp = f"{prefix}layers.{number}.mlp"
    out: Tensors = {}
    for e in range(experts):
        for projection, shape in (("gate", (N, K)), ("up", (N, K)), ("down", (K, N))):
            name = f"{mlp}.experts.{e}.{projection}_proj.weight"
            out[name] = rng.integers(0, 256, shape, dtype=np.uint8).view(E4M3)
            out[f"{name}_scale_inv"] = rng.random([s // 128 for s in shape], dtype=np.float32)
    out[f"{mlp}.gate.weight"] = rng.normal(size=(experts, K)).astype(ml_dtypes.bfloat16)
    out[f"{mlp}.gate.e_score_correction_bias"] = rng.random(experts, dtype=np.float32)
    return out


def save(folder: Path, tensors: Tensors, config: object = None) -> Path:
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.safetensors"
