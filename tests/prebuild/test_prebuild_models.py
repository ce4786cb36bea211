"""Shapes of known models, of a config.json and of given sizes, split over ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from cumoe.checkpoint.demo import write_demo
from cumoe.errors import ArgumentError, CheckpointError
from cumoe.models import known_models, model, model_from_config, selected_layers, shard
from cumoe.plan.enumerate import Layer

BOTH = ("fp32", "ue8m0")

# K, N on a rank, experts, top-k and limit of layers that were measured or published as such.
LAYERS = {
    ("glm-5.3", 8): Layer(6144, 256, 256, 256, 8, BOTH),
    ("glm-5.3", 4): Layer(6144, 512, 256, 256, 8, BOTH),
    ("glm-5.3-flash", 8): Layer(4096, 256, 288, 288, 8, BOTH, limit=10.0),
    ("deepseek-v3", 8): Layer(7168, 256, 256, 256, 8, BOTH),
    ("deepseek-v4-flash", 1): Layer(4096, 2048, 256, 256, 6, ("ue8m0",), limit=10.0),
    ("qwen3-235b", 4): Layer(4096, 384, 128, 128, 8, BOTH),
    ("qwen3-30b-a3b", 2): Layer(2048, 384, 128, 128, 8, BOTH),
    ("qwen3-next", 4): Layer(2048, 128, 512, 512, 10, BOTH),
    ("minimax-m2", 4): Layer(3072, 384, 256, 256, 8, BOTH),
    ("kimi-k2", 8): Layer(7168, 256, 384, 384, 8, BOTH),
}


@pytest.mark.parametrize(("name", "tp"), LAYERS)
def test_layer_of_a_known_model(name, tp):
    assert shard(model(name), tp=tp) == LAYERS[name, tp]


def test_every_known_model_is_tested_and_names_its_source():
    assert {name for name, _ in LAYERS} == set(known_models())
    assert all(m.source.startswith("https://github.com/") for m in known_models().values())


def test_names_are_taken_in_any_case():
    assert model("GLM-5.3") is model("glm-5.3")


def test_an_unknown_model_names_the_known_ones():
    with pytest.raises(ArgumentError, match=r"model: want one of glm-5\.3, .*kimi-k2, got 'gpt'"):
        model("gpt")


def test_expert_parallel_ranks_hold_whole_experts():
    layer = shard(model("deepseek-v3"), ep=8)
    assert (layer.N, layer.num_experts, layer.num_local_experts) == (2048, 256, 32)


def test_a_rank_without_whole_blocks_names_pad_experts_and_the_padded_size():
    wanted = (
        r"qwen3-235b: want N a multiple of 128, got 192 of its intermediate_size on each rank; "
        r"use fewer ranks, or pad the weights to 256 with cumoe\.pad_experts and give --pad"
    )
    with pytest.raises(ArgumentError, match=wanted):
        shard(model("qwen3-235b"), tp=8)
    assert shard(model("qwen3-235b"), tp=8, pad=True).N == 256
    assert shard(model("qwen3-30b-a3b"), tp=8, pad=True).N == 128


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({"tp": 3}, "tp: want a divisor of glm-5.3's intermediate_size 2048, got 3"),
        ({"ep": 7}, "ep: want a divisor of glm-5.3's num_experts 256, got 7"),
        ({"tp": 0}, "tp: want a divisor of glm-5.3's intermediate_size 2048, got 0"),
    ],
)
def test_ranks_that_do_not_divide_are_refused(ranks, message):
    with pytest.raises(ArgumentError) as error:
        shard(model("glm-5.3"), **ranks)
    assert message in str(error.value)


def test_scale_formats():
    assert shard(model("glm-5.3"), scale_format="fp32").scale_formats == ("fp32",)
    assert shard(model("deepseek-v4-flash"), scale_format="both").scale_formats == BOTH
    with pytest.raises(ArgumentError, match="scale_format: want one of fp32, ue8m0, both, got 'x'"):
        shard(model("glm-5.3"), scale_format="x")


# config.json as the releases have them, cut to what decides.
CONFIGS = {
    "deepseek": (
        {"hidden_size": 7168, "moe_intermediate_size": 2048, "intermediate_size": 18432,
         "n_routed_experts": 256, "num_experts_per_tok": 8,
         "quantization_config": {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}},
        Layer(7168, 256, 256, 256, 8, ("ue8m0",)),
    ),
    "qwen": (
        {"hidden_size": 4096, "moe_intermediate_size": 1024, "intermediate_size": 12288,
         "num_experts": 128, "num_experts_per_tok": 8},
        Layer(4096, 128, 128, 128, 8, BOTH),
    ),
    "minimax": (
        {"hidden_size": 3072, "intermediate_size": 2048, "num_local_experts": 256,
         "num_experts_per_tok": 8, "quantization_config": {"weight_block_size": [128, 128]}},
        Layer(3072, 256, 256, 256, 8, BOTH),
    ),
    "glm with images": (
        {"text_config": {"hidden_size": 4096, "moe_intermediate_size": 2048, "swiglu_limit": 10.0,
                         "n_routed_experts": 288, "num_experts_per_tok": 8}},
        Layer(4096, 256, 288, 288, 8, BOTH, limit=10.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("as_folder", [True, False])
def test_layer_of_a_config(tmp_path, name, as_folder):
    config, layer = CONFIGS[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    path = tmp_path if as_folder else file
    assert selected_layers({"config": path, "tp": 8}) == (layer,)


def test_layer_of_a_written_checkpoint(tmp_path):
    folder = write_demo(tmp_path / "demo").parent
    found = model_from_config(folder)
    assert (found.hidden_size, found.intermediate_size, found.num_experts) == (512, 256, 8)
    assert found.swiglu_limit is not None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "hidden_size: wanted a positive integer, found None"),
        ({"hidden_size": 256}, "moe_intermediate_size: wanted a positive integer, found None"),
        (
            {"hidden_size": 256, "moe_intermediate_size": 0},
            "moe_intermediate_size: wanted a positive integer, found 0",
        ),
        (
            {"hidden_size": 256, "moe_intermediate_size": 128},
            "num_experts_per_tok: wanted a positive integer, found None",
        ),
        (
            {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts_per_tok": 2},
            "n_routed_experts/num_experts/num_local_experts: wanted a positive integer, found None",
        ),
    ],
)
def test_a_config_without_experts_names_file_and_value(tmp_path, config, message):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        model_from_config(tmp_path)
    assert str(error.value).startswith(f"{file}: {message}")


def test_a_missing_config_names_the_file(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"config\.json: wanted a JSON file .* check the path"
    ):
        selected_layers({"config": tmp_path})


def test_layer_of_given_sizes():
    sizes = {"hidden": 512, "intermediate": 1024, "experts": 16, "top_k": 2}
    layers = selected_layers({**sizes, "tp": [1, 4], "ep": (1, 2), "swiglu_limit": 7.0})
    assert layers == tuple(
        Layer(512, 1024 // tp, 16, 16 // ep, 2, BOTH, limit=7.0) for tp in (1, 4) for ep in (1, 2)
    )


@pytest.mark.parametrize("missing", ["hidden", "intermediate", "experts", "top_k"])
def test_sizes_are_given_together(missing):
    sizes = {"hidden": 512, "intermediate": 1024, "experts": 16, "top_k": 2}
    del sizes[missing]
    with pytest.raises(ArgumentError, match=f"{missing}: want a positive integer, got None; give"):
        selected_layers(sizes)


def test_the_largest_routing_is_taken():
    sizes = {"hidden": 512, "intermediate": 1024, "experts": 4096, "top_k": 64}
    (layer,) = selected_layers(sizes)
    assert (layer.num_experts, layer.topk) == (4096, 64)


@pytest.mark.parametrize("other", ["model", "config"])
def test_a_lone_size_beside_a_model_says_that_both_were_given(tmp_path, other):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen"][0]))
    named = {"model": "glm-5.3", "config": str(tmp_path)}[other]
    with pytest.raises(ArgumentError, match=rf"got hidden alone beside {other}, which has its"):
        selected_layers({other: named, "hidden": 512})


def test_alpha_and_beta_of_a_config(tmp_path):
    config = CONFIGS["qwen"][0] | {"swiglu_alpha": 1.702, "swiglu_beta": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert selected_layers({"config": tmp_path})[0].scaled


def test_models_configs_and_sizes_are_combined(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen"][0]))
    sizes = {"hidden": 512, "intermediate": 1024, "experts": 16, "top_k": 2}
    layers = selected_layers(
        {"model": ["glm-5.3", "kimi-k2"], "config": str(tmp_path), "tp": 8, **sizes}
    )
    assert [layer.K for layer in layers] == [6144, 7168, 4096, 512]


def test_the_activation_can_be_given():
    (clamped,) = selected_layers({"model": "glm-5.3", "swiglu_limit": 5.0, "swiglu_alpha": 1.702})
    assert (clamped.limit, clamped.scaled) == (5.0, True)
    (free,) = selected_layers({"model": "glm-5.3-flash", "swiglu_limit": math.inf})
    assert (free.limit, free.scaled) == (None, False)


def test_the_data_file_lies_in_the_package():
    import cumoe

    assert (Path(cumoe.__file__).parent / "models.toml").is_file()
