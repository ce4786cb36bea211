"""A block-FP8 Qwen3-MoE checkpoint with random weights, whose logits depend on every layer.

vLLM's dummy weights would do to time an engine, but not to compare two: nearly all of them round
to zero in e4m3, and any experts then give the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.experts import random_codes, random_scales

EXPERTS_GAIN = 0.5
"""Of down: what the experts add in a layer is small beside the residual.

Where it is as large, what rounding changes in one layer changes the choice of experts in the next,
and two right engines are as far apart as two models.
"""
LOGITS_DEVIATION = 4.0

Tensors = dict[str, Any]


def write(folder: Path, config: dict[str, Any], device: str = "cuda") -> None:
    """config.json, a file of tensors for each layer and one for what is around them."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator(device).manual_seed(11)
    index: dict[str, str] = {}
    for name, tensors in _files(config, generator):
        save_file({k: t.cpu() for k, t in tensors.items()}, folder / name)
        index |= dict.fromkeys(tensors, name)
    kept = [f"model.layers.{i}.mlp.gate" for i in range(config["num_hidden_layers"])]
    quantization = config["quantization_config"] | {"modules_to_not_convert": [*kept, "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    whole = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(whole)


def _files(config: dict[str, Any], generator: Any) -> Iterator[tuple[str, Tensors]]:
    K, words = config["hidden_size"], config["vocab_size"]
    yield (
        "model-ends.safetensors",
        {
            "model.embed_tokens.weight": _normal(generator, words, K, 1.0),
            "model.norm.weight": _ones(generator, K),
            "lm_head.weight": _normal(generator, words, K, LOGITS_DEVIATION / K**0.5),
        },
    )
    for i in range(config["num_hidden_layers"]):
        tensors = _layer(config, generator)
        yield (
            f"model-layer-{i:02}.safetensors",
            {f"model.layers.{i}.{k}": t for k, t in tensors.items()},
        )


def _layer(config: dict[str, Any], generator: Any) -> Tensors:
    K, N, E = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    wide = config["num_attention_heads"] * config["head_dim"]
    narrow = config["num_key_value_heads"] * config["head_dim"]
    made: Tensors = {"mlp.gate.weight": _normal(generator, E, K, 1 / K**0.5)}
    for name, size in (
        ("input_layernorm", K), ("post_attention_layernorm", K),
        ("self_attn.q_norm", config["head_dim"]), ("self_attn.k_norm", config["head_dim"]),
    ):  # fmt: skip
        made[f"{name}.weight"] = _ones(generator, size)
    for name, rows, columns in (
        ("q_proj", wide, K), ("k_proj", narrow, K), ("v_proj", narrow, K), ("o_proj", K, wide),
    ):  # fmt: skip
        made |= _blocks(f"self_attn.{name}", generator, rows, columns)
    for e in range(E):
        for name, rows, columns, gain in (
            ("gate_proj", N, K, 1.0), ("up_proj", N, K, 1.0), ("down_proj", K, N, EXPERTS_GAIN),
        ):  # fmt: skip
            made |= _blocks(f"mlp.experts.{e}.{name}", generator, rows, columns, gain)
    return made


def _blocks(name: str, generator: Any, rows: int, columns: int, gain: float = 1.0) -> Tensors:
    """A projection of deviation ``gain`` for inputs of deviation 1."""
    return {
        f"{name}.weight": random_codes(generator, rows, columns),
        f"{name}.weight_scale_inv": random_scales(generator, (rows, columns), gain),
    }


def _normal(generator: Any, rows: int, columns: int, deviation: float) -> Any:
    import torch

    values = torch.randn(rows, columns, device=generator.device, generator=generator)
    return (values * deviation).bfloat16()


def _ones(generator: Any, size: int) -> Any:
    import torch

    return torch.ones(size, device=generator.device, dtype=torch.bfloat16)
