"""A small checkpoint to try the library with."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from cumoe.checkpoint.experts import BLOCK
from cumoe.checkpoint.safetensors import Array
from cumoe.errors import CheckpointError

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 512, 256, 2

# For tokens of N(0, 1), gate and up then have a deviation of 3: the limit of 7 clamps one value of
# up in fifty, and a kernel that forgot it would be found out.
_GATE_UP_DEVIATION = 3.0
_CONFIG = {
    "model_type": "cumoe_demo",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
}


def write_demo(folder: str | Path, *, seed: int = 0) -> Path:
    """Writes a checkpoint of one layer, with random weights, into ``folder``; returns its file.

    8 experts, hidden size 512, intermediate size 256, two experts per token, with a router, a
    correction bias and a ``config.json``: about 3 MB. The same seed gives the same file.

    Raises: CheckpointError where the folder cannot be written, or holds a checkpoint already: it
    is not overwritten.
    """
    try:
        return _write(Path(folder), demo_tensors(seed))
    except OSError as error:
        raise CheckpointError(
            f"{folder}: wanted a folder that can be written, got: {error.strerror}; name another"
        ) from error


def _write(folder: Path, tensors: dict[str, Array]) -> Path:
    from safetensors.numpy import save

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    for file in (path, folder / "config.json"):
        if file.exists():
            raise CheckpointError(
                f"{file}: wanted a folder without a checkpoint, found one; name another folder"
            )
    path.write_bytes(save(tensors))  # save_file would make it private, whatever the umask
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=2) + "\n")
    return path


def demo_tensors(seed: int = 0) -> dict[str, Array]:
    """The tensors of the demo checkpoint, by name."""
    rng = np.random.default_rng(seed)
    prefix = "model.layers.0.mlp"
    wide, narrow = (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    tensors = {}
    for expert in range(EXPERTS):
        for projection, shape in (("gate", wide), ("up", wide), ("down", narrow)):
            deviation = _GATE_UP_DEVIATION if shape == wide else 1.0
            weight = rng.normal(0, deviation / shape[1] ** 0.5, shape).astype(np.float32)
            name = f"{prefix}.experts.{expert}.{projection}_proj.weight"
            tensors[name], tensors[f"{name}_scale_inv"] = block_quantize(weight)
    router = rng.normal(0, HIDDEN**-0.5, (EXPERTS, HIDDEN))
    tensors[f"{prefix}.gate.weight"] = router.astype(ml_dtypes.bfloat16)
    bias = rng.normal(0, 0.05, EXPERTS)
    tensors[f"{prefix}.gate.e_score_correction_bias"] = bias.astype(np.float32)
    return tensors


def block_quantize(weight: Array) -> tuple[Array, Array]:
    """e4m3 weights [R, C] and one fp32 scale per 128 x 128 block, from fp32 weights [R, C].

    R and C are multiples of 128. scale = max|block| / 448; a block of zeros gets scale 1.
    """
    rows, columns = (n // BLOCK for n in weight.shape)
    blocks = weight.reshape(rows, BLOCK, columns, BLOCK)
    largest = np.abs(blocks).max(axis=(1, 3))
    scale = np.where(largest > 0, largest / np.float32(448), np.float32(1))
    codes = np.clip(blocks / scale[:, None, :, None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes.reshape(weight.shape), scale
