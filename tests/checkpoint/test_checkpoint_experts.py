"""Stacked experts against the tensors that were written, and every way a layer can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from cumoe.checkpoint import Experts, load_experts, open_checkpoint
from cumoe.checkpoint.experts import expert_layers
from cumoe.errors import ArgumentError, CheckpointError
from tests.helpers.checkpoints import E4M3, E, K, N, Tensors, layer, save


def require_same_layer(experts: Experts, wrote: Tensors, mlp: str) -> None:
    """Every weight and scale of the stack is the one that was written, gate before up."""
    for e in range(len(experts.w1)):
        name = f"{mlp}.experts.{e}"
        for got, rows, projection in (
            (experts.w1[e], slice(0, N), "gate"),
            (experts.w1[e], slice(N, 2 * N), "up"),
            (experts.w2[e], slice(0, K), "down"),
        ):
            want = wrote[f"{name}.{projection}_proj.weight"]
            same = np.array_equal(got[rows].view(np.uint8), want.view(np.uint8))
            assert same, (e, projection)
        want_w1 = [wrote[f"{name}.{p}_proj.weight_scale_inv"] for p in ("gate", "up")]
        np.testing.assert_array_equal(experts.w1_scale[e], np.concatenate(want_w1))
        want_w2 = wrote[f"{name}.down_proj.weight_scale_inv"]
        np.testing.assert_array_equal(experts.w2_scale[e], want_w2)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_the_stack_is_what_was_written(tmp_path, prefix):
    tensors = layer(4, prefix=prefix)
    experts = load_experts(save(tmp_path, tensors), 4)
    require_same_layer(experts, tensors, f"{prefix}layers.4.mlp")
    assert (experts.w1.dtype, experts.w1.shape) == (E4M3, (E, 2 * N, K))
    assert (experts.w2.dtype, experts.w2.shape) == (E4M3, (E, K, N))
    assert (experts.w1_scale.dtype, experts.w1_scale.shape) == (np.float32, (E, 2, 2))
    assert (experts.w2_scale.dtype, experts.w2_scale.shape) == (np.float32, (E, 2, 1))


@pytest.mark.parametrize("spoil", ["w1", "w2", "w1_scale", "w2_scale"])
def test_the_comparison_notices_swapped_experts(tmp_path, spoil):
    tensors = layer(0)
    experts = load_experts(save(tmp_path, tensors), 0)
    values = getattr(experts, spoil)
    values[[0, 2]] = values[[2, 0]]
    with pytest.raises(AssertionError):
        require_same_layer(experts, tensors, "model.layers.0.mlp")


def test_the_comparison_notices_up_before_gate(tmp_path):
    tensors = layer(0)
    experts = load_experts(save(tmp_path, tensors), 0)
    experts.w1[...] = np.roll(experts.w1, N, axis=1)
    with pytest.raises(AssertionError):
        require_same_layer(experts, tensors, "model.layers.0.mlp")


def test_more_than_ten_experts_keep_their_order(tmp_path):
    tensors = layer(0, experts=12)
    experts = load_experts(save(tmp_path, tensors), 0)
    require_same_layer(experts, tensors, "model.layers.0.mlp")
    assert experts.config.num_experts == 12


def test_each_layer_has_its_own_experts(tmp_path):
    tensors = layer(1, seed=1) | layer(10, seed=2)
    path = save(tmp_path, tensors)
    assert expert_layers(open_checkpoint(path)) == [1, 10]
    require_same_layer(load_experts(path, 1), tensors, "model.layers.1.mlp")
    require_same_layer(load_experts(path, 10), tensors, "model.layers.10.mlp")


def test_experts_spread_over_shards(tmp_path):
    tensors = layer(0)
    shards: list[Tensors] = [{}, {}]
    for i, name in enumerate(tensors):
        shards[i % 2][name] = tensors[name]
    weight_map = {}
    for i, shard in enumerate(shards):
        save_file(shard, tmp_path / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(shard, f"part-{i}.safetensors")
    index = {"weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    require_same_layer(load_experts(tmp_path, 0), tensors, "model.layers.0.mlp")


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "float8_e8m0fnu"])
def test_scales_of_any_float_type_become_fp32_exactly(tmp_path, kind):
    tensors = layer(0)
    dtype = np.dtype(getattr(ml_dtypes, kind, None) or kind)
    for name in list(tensors):
        if name.endswith("scale_inv"):
            tensors[name] = (2.0 ** np.round(8 * tensors[name] - 6)).astype(dtype)
    wide = {n: t.astype(np.float32) if n.endswith("scale_inv") else t for n, t in tensors.items()}
    experts = load_experts(save(tmp_path, tensors), 0)
    assert experts.w1_scale.dtype == np.float32
    require_same_layer(experts, wide, "model.layers.0.mlp")


def test_router(tmp_path):
    tensors = layer(0)
    router = load_experts(save(tmp_path, tensors), 0).router
    assert router is not None
    weight = tensors["model.layers.0.mlp.gate.weight"].astype(np.float32)
    np.testing.assert_array_equal(router.weight, weight)
    bias = tensors["model.layers.0.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(router.correction_bias, bias)


def test_router_parts_may_be_absent(tmp_path):
    tensors = layer(0)
    del tensors["model.layers.0.mlp.gate.e_score_correction_bias"]
    router = load_experts(save(tmp_path, tensors), 0).router
    assert router is not None
    assert router.correction_bias is None
    del tensors["model.layers.0.mlp.gate.weight"]
    assert load_experts(save(tmp_path, tensors), 0).router is None


BASE = "model.layers.0.mlp.experts.1."


def drop(*suffixes: str) -> Callable[[Tensors], None]:
    def spoil(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith(suffixes)]:
            del tensors[name]

    return spoil


def put(name: str, value: np.ndarray) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


def pad_gates(tensors: Tensors) -> None:
    for name in tensors:
        if "gate_proj.weight" in name or "up_proj.weight" in name:
            shape = (2, 2) if name.endswith("inv") else (192, K)
            tensors[name] = np.zeros(shape, tensors[name].dtype)


def rename_scales(tensors: Tensors) -> None:
    for name in [n for n in tensors if n.endswith("_scale_inv")]:
        tensors[name.removesuffix("_inv")] = tensors.pop(name)


def wrong(shape: tuple[int, ...], kind: object = E4M3) -> np.ndarray:
    return np.zeros(shape, kind)


BIAS = "model.layers.0.mlp.gate.e_score_correction_bias"
SPOILED = {
    "missing weight": (
        drop("experts.1.up_proj.weight"),
        BASE + "up_proj.weight: wanted this tensor",
    ),
    "missing scale": (
        drop("experts.1.down_proj.weight_scale_inv"),
        BASE + "down_proj.weight_scale_inv: wanted this tensor",
    ),
    "missing expert": (drop(*(f"experts.1.{p}_proj.weight{s}" for p in ("gate", "up", "down")
                              for s in ("", "_scale_inv"))),
                       r"experts\.1: wanted experts 0 to 2, found none numbered 1; "),
    "wrong dtype": (
        put(BASE + "up_proj.weight", wrong((N, K), np.int8)),
        BASE + "up_proj.weight: wanted float8_e4m3fn .* found int8;",
    ),
    "the other fp8": (
        put(BASE + "up_proj.weight", wrong((N, K), ml_dtypes.float8_e5m2)),
        BASE + "up_proj.weight: wanted float8_e4m3fn .* found float8_e5m2;",
    ),
    "unquantized": (
        put("model.layers.0.mlp.experts.0.gate_proj.weight", wrong((N, K), ml_dtypes.bfloat16)),
        r"experts\.0\.gate_proj\.weight: .* found bfloat16, an unquantized .* block-FP8 release",
    ),
    "weight shape": (
        put(BASE + "up_proj.weight", wrong((N, 2 * K))),
        BASE + r"up_proj.weight: wanted \[128, 256\], as the other .* found \[128, 512\]",
    ),
    "down not transposed": (
        put(BASE + "down_proj.weight", wrong((N, K))),
        BASE + r"down_proj.weight: wanted \[256, 128\], .* found \[128, 256\]",
    ),
    "no matrix": (
        put("model.layers.0.mlp.experts.0.gate_proj.weight", wrong((N,))),
        r"experts\.0\.gate_proj\.weight: wanted a matrix, .* found \[128\]",
    ),
    "scale shape": (
        put(BASE + "up_proj.weight_scale_inv", wrong((2, 1), np.float32)),
        BASE + r"up_proj.weight_scale_inv: wanted \[1, 2\], one scale per .* found \[2, 1\]",
    ),
    "scale dtype": (
        put(BASE + "up_proj.weight_scale_inv", wrong((1, 2), np.int32)),
        BASE + "up_proj.weight_scale_inv: wanted an element type .* found int32",
    ),
    "scales of rows": (rename_scales, r"weight_scale_inv: wanted one scale .* found \S+_scale, "),
    "ragged intermediate size": (
        pad_gates,
        r"experts\.0\.gate_proj\.weight: wanted an intermediate size .* 128, found 192; .*pad_exp",
    ),
    "empty experts": (
        put("model.layers.0.mlp.experts.0.gate_proj.weight", wrong((0, K))),
        "wanted an intermediate size that is a multiple of 128, found 0",
    ),
    "router shape": (
        put("model.layers.0.mlp.gate.weight", wrong((E + 1, K), np.float32)),
        r"mlp\.gate\.weight: wanted \[3, 256\], one row per expert, found \[4, 256\]",
    ),
    "bias shape": (
        put(BIAS, wrong((E + 1,), np.float32)),
        r"correction_bias: wanted \[3\], one value per expert, found \[4\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_layer_is_refused(tmp_path, case):
    spoil, message = SPOILED[case]
    tensors = layer(0)
    spoil(tensors)
    path = save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}"):
        load_experts(path, 0)


def test_a_layer_without_experts_names_those_that_have_some(tmp_path):
    tensors = layer(3) | layer(4) | layer(5) | layer(9)
    path = save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"layer 2: .* in layer 3 to 5, 9; name one of"):
        load_experts(path, 2)


def test_a_checkpoint_without_experts(tmp_path):
    path = save(tmp_path, {"model.layers.0.mlp.gate_proj.weight": np.ones((2, 2))})
    with pytest.raises(CheckpointError, match=r"layer 0: .* found experts in no layer; this is no"):
        load_experts(path, 0)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:0", ""])
def test_a_wrong_device(tmp_path, device):
    with pytest.raises(ArgumentError, match=rf"device: wanted 'cpu', .* got '{device}'"):
        load_experts(save(tmp_path, layer(0)), 0, device=device)
