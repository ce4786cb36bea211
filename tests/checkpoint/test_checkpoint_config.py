"""What config.json says of a layer, and every way it can be wrong."""

from __future__ import annotations

import pytest

from cumoe.checkpoint import Experts, load_experts
from cumoe.errors import CheckpointError
from tests.helpers.checkpoints import E, K, N, layer, save

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
