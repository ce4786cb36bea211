"""Stacked experts against the tensors that were written, and every way a layer can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from cumoe.checkpoint import Experts, load_experts, open_checkpoint
from cumoe.checkpoint.experts import expert_layers
from cumoe.errors import ArgumentError, CheckpointError

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


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": K, "intermediate_size": 18432,
    "moe_intermediate_size": N, "n_routed_experts": E, "num_experts_per_tok": 2, "n_group": 3,
    "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
GLM_4_5 = {
    "model_type": "glm4_moe", "hidden_size": K, "moe_intermediate_size": N, "n_routed_experts": E,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1,
}  # fmt: skip
GLM_5 = GLM_4_5 | {
    "model_type": "glm_moe_dsa", "scoring_func": "sigmoid", "swiglu_limit": 10,
    "quantization_config": {"scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": K, "moe_intermediate_size": N, "num_experts": E,
    "num_experts_per_tok": 2, "norm_topk_prob": False,
}  # fmt: skip
CONFIGS = {
    "deepseek_v3": (
        DEEPSEEK_V3,
        {"scoring": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 3,
         "topk_group": 2},
    ),
    "glm4_moe": (
        GLM_4_5,
        {"scoring": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1,
         "topk_group": 1},
    ),
    "glm_moe_dsa": (
        GLM_5,
        {"scoring": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 1.0,
         "swiglu_limit": 10.0, "scale_format": "ue8m0", "n_group": 1, "topk_group": 1},
    ),
    "qwen3_moe": (QWEN3_MOE, {"scoring": "softmax", "norm_topk_prob": False}),
    "with images": (
        {"model_type": "glm4v_moe", "text_config": GLM_4_5},
        {"scoring": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1,
         "topk_group": 1},
    ),
    "groups that are not used": (
        DEEPSEEK_V3 | {"topk_method": "greedy"},
        {"scoring": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
}  # fmt: skip
UNKNOWN = dict.fromkeys(
    ["top_k", "scoring", "norm_topk_prob", "routed_scaling_factor", "swiglu_limit", "scale_format",
     "n_group", "topk_group"]
)  # fmt: skip


def config_of(experts: Experts) -> dict[str, object]:
    return {name: getattr(experts.config, name) for name in UNKNOWN}


@pytest.mark.parametrize("model", CONFIGS)
def test_config_of_known_models(tmp_path, model):
    config, want = CONFIGS[model]
    experts = load_experts(save(tmp_path, layer(0), config), 0)
    assert config_of(experts) == UNKNOWN | {"top_k": 2} | want


def test_without_config_only_the_sizes_are_known(tmp_path):
    experts = load_experts(save(tmp_path, layer(0)), 0)
    assert config_of(experts) == UNKNOWN
    sizes = experts.config.hidden_size, experts.config.intermediate_size, experts.config.num_experts
    assert sizes == (K, N, E)


CONFIG_ERRORS = {
    "hidden_size": ({"hidden_size": 512}, "wanted 256, as the tensors .* found 512"),
    "moe_intermediate_size": ({"moe_intermediate_size": 256}, "wanted 128, .* found 256"),
    "n_routed_experts": (
        {"n_routed_experts": 4},
        "wanted 3, as the tensors have it, found 4; complete the checkpoint",
    ),
    "num_experts_per_tok": ({"num_experts_per_tok": "8"}, "wanted a value of type int, found '8'"),
    "norm_topk_prob": ({"norm_topk_prob": 1}, "wanted a value of type bool, found 1"),
    "swiglu_limit": ({"swiglu_limit": [7, 7]}, r"wanted a value of type float, found \[7, 7\]"),
    "weight_block_size": (
        {"quantization_config": {"weight_block_size": [64, 128]}},
        r"wanted \[128, 128\], found \[64, 128\]",
    ),
    "scale_fmt": ({"quantization_config": {"scale_fmt": "e5m3"}}, "wanted ue8m0 or .* 'e5m3'"),
    "hidden_act": ({"hidden_act": "gelu"}, "wanted silu, found 'gelu'"),
    "quantization_config": ({"quantization_config": "fp8"}, "wanted an object, found 'fp8'"),
    "quantization_config.quant_method": (
        {"quantization_config": {"quant_method": "gptq"}},
        "wanted fp8, found 'gptq'",
    ),
    "quantization_config.activation_scheme": (
        {"quantization_config": {"activation_scheme": "static"}},
        "wanted dynamic, found 'static'",
    ),
    "swiglu_alpha": ({"swiglu_alpha": "1.7"}, "wanted a value of type float, found '1.7'"),
}


@pytest.mark.parametrize("name", CONFIG_ERRORS)
def test_a_wrong_config_names_file_and_value(tmp_path, name):
    changes, message = CONFIG_ERRORS[name]
    path = save(tmp_path, layer(0), DEEPSEEK_V3 | changes)
    with pytest.raises(CheckpointError, match=rf"config\.json: {name}.*{message}"):
        load_experts(path, 0)


@pytest.mark.parametrize("act", ["silu", "swish", None])
def test_silu_by_any_of_its_names(tmp_path, act):
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    changes = {"hidden_act": act, "quantization_config": quantization}
    assert load_experts(save(tmp_path, layer(0), DEEPSEEK_V3 | changes), 0).config.top_k == 2


def test_swiglu_of_the_config(tmp_path):
    changes = {"swiglu_alpha": 1.702, "swiglu_beta": 1}
    config = load_experts(save(tmp_path, layer(0), DEEPSEEK_V3 | changes), 0).config
    assert (config.swiglu_alpha, config.swiglu_beta) == (1.702, 1.0)


def test_a_config_that_is_no_json(tmp_path):
    path = save(tmp_path, layer(0))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: wanted JSON"):
        load_experts(path, 0)
