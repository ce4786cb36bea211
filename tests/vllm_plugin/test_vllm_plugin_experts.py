"""The plugin in a fake of vLLM: what its oracle chooses, and what the chosen experts compute."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import cumoe
from cumoe import ArgumentError, _settings, vllm_plugin
from cumoe.vllm_plugin import experts
from tests.helpers import cases, fake_vllm
from tests.helpers.backends import TorchBackend
from tests.helpers.fake_vllm import BLOCK_FP8, Activation, Backend, Theirs, moe_config, quant_config
from tests.helpers.torch_ops import require_same


@pytest.fixture
def oracle(monkeypatch):
    module = fake_vllm.install(monkeypatch)
    for cached in (experts.experts_class, experts.say_once):
        cached.cache_clear()
    yield module
    experts.experts_class.cache_clear()


def with_setting(monkeypatch, **change):
    found = SimpleNamespace(vllm=True, disable_jit=False)
    vars(found).update(change)
    for module in ("cumoe.vllm_plugin", "cumoe.vllm_plugin.ahead"):
        __import__(module)
        monkeypatch.setattr(sys.modules[module], "settings", lambda: found)


def chosen(oracle, keys=BLOCK_FP8, **change):
    return oracle.select_fp8_moe_backend(moe_config(**change), *keys)


def layer_case(rng, topk=2):
    """Arguments of a layer of 8 experts, and its scales."""
    c = cases.experts_case(rng, num_tokens=5, topk=topk, intermediate=128)
    put = TorchBackend("cpu").put
    arrays = {"x": c.x, "w1": c.experts.w1, "w2": c.experts.w2, "topk_weights": c.weights}
    call = {name: put(a) for name, a in (arrays | {"topk_ids": c.ids}).items()}
    return call, {name: put(a) for name, a in c.experts.scales.items()}


def applied(ours, call, expert_map=None, on_input=False, **change):
    """What `apply` writes over a poisoned output."""
    given = {**call, **change}
    output = torch.full(given["x"].shape, 123.0).bfloat16()
    num_experts = -1 if expert_map is None else len(expert_map)
    ours.apply(
        output, given["x"], given["w1"], given["w2"], given["topk_weights"], given["topk_ids"],
        given.get("activation", Activation.SILU), num_experts, expert_map,
        given.get("a1q_scale"), None, None, None, None, on_input,
    )  # fmt: skip
    return output


def made(oracle, scales, limit=None, **change):
    vllm_plugin.register()
    weights = quant_config(**scales, gemm1_clamp_limit=limit)
    return experts.experts_class()(moe_config=moe_config(**change), quant_config=weights)


# What the oracle chooses


def test_ours_are_chosen_before_backends_that_vllm_prefers(oracle):
    assert chosen(oracle) == (Backend.FLASHINFER_CUTLASS, Theirs)
    vllm_plugin.register()
    backend, cls = chosen(oracle)
    assert (backend, cls.__name__) == (Backend.TRITON, "CumoeExperts")
    assert issubclass(cls, fake_vllm.ExpertsModular)


@pytest.mark.parametrize(
    ("keys", "change"),
    [
        (("per tensor", "dynamic"), {}),
        (BLOCK_FP8, {"activation": Activation.GELU}),
        (BLOCK_FP8, {"swiglu_limit": float("inf")}),
        (BLOCK_FP8, {"is_lora_enabled": True}),
        (BLOCK_FP8, {"use_batched_activation_format": True, "use_all2all_kernels": True}),
    ],
)
def test_all_others_are_chosen_as_without_the_plugin(oracle, keys, change):
    before = chosen(oracle, keys, **change)
    vllm_plugin.register()
    assert chosen(oracle, keys, **change) == before == (Backend.FLASHINFER_CUTLASS, Theirs)


def test_another_gpu_is_left(monkeypatch):
    oracle = fake_vllm.install(monkeypatch, capability=(10, 0))
    vllm_plugin.register()
    assert chosen(oracle) == (Backend.FLASHINFER_CUTLASS, Theirs)


def test_our_class_refuses_tokens_in_batches(oracle):
    vllm_plugin.register()
    cls = experts.experts_class()
    is_ours, why = cls.is_supported_config(
        cls, moe_config(), *BLOCK_FP8, fake_vllm.Format.BatchedExperts
    )
    assert not is_ours
    assert "activation format" in why


def test_registering_twice_wraps_once(oracle):
    vllm_plugin.register()
    wrapped = oracle.backend_to_kernel_cls
    vllm_plugin.register()
    assert oracle.backend_to_kernel_cls is wrapped
    assert len(oracle.backend_to_kernel_cls(Backend.TRITON)) == 2


def test_the_switch_turns_it_off(oracle, monkeypatch):
    untouched = dict(vars(oracle))
    with_setting(monkeypatch, vllm=False)
    vllm_plugin.register()
    assert vars(oracle) == untouched


def test_the_switch_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("CUMOE_VLLM", "0")
    assert not _settings.settings.__wrapped__().vllm


@pytest.mark.parametrize("version", ["0.25.1", "0.27.0", "0.260.0", "1.0"])
def test_another_vllm_is_left_and_named(oracle, monkeypatch, caplog, version):
    untouched = dict(vars(oracle))
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    vllm_plugin.register()
    assert vars(oracle) == untouched
    assert f"want vLLM 0.26, got {version}" in caplog.text


def test_importing_the_plugin_imports_neither_vllm_nor_torch():
    code = "import sys, cumoe.vllm_plugin; print({'vllm', 'torch', 'cupy'} & set(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    assert run.stdout.strip() == "set()"


def test_the_reason_is_in_the_log_once(oracle, caplog):
    caplog.set_level(logging.INFO, "vllm.plugins.cumoe")
    vllm_plugin.register()
    for _ in range(3):
        chosen(oracle, is_lora_enabled=True)
    assert caplog.text.count("left to vLLM: LoRA: want none, got LoRA") == 1


# What they compute


@pytest.mark.parametrize("limit", [None, 0.5])
def test_a_layer(oracle, rng, limit):
    call, scales = layer_case(rng)
    ours = made(oracle, scales, limit, swiglu_limit=limit)
    assert ours.expects_unquantized_inputs
    assert ours.workspace_shapes(5, 256, 256, 2, 8, 8, None, None)[2] == (5, 256)
    want = cumoe.fused_experts_fp8(**call, **scales, swiglu_limit=limit)
    require_same((applied(ours, call),), (want,))


@pytest.mark.parametrize(("layer", "weights"), [(0.5, None), (None, 0.5)])
def test_a_clamp_that_is_stated_once_is_applied(oracle, rng, layer, weights):
    call, scales = layer_case(rng)
    got = applied(made(oracle, scales, weights, swiglu_limit=layer), call)
    want = cumoe.fused_experts_fp8(**call, **scales, swiglu_limit=0.5)
    require_same((got,), (want,))
    with pytest.raises(AssertionError, match="bytes of result 0 differ"):
        require_same((got,), (cumoe.fused_experts_fp8(**call, **scales),))


def test_a_rank_of_experts(oracle, rng):
    call, scales = layer_case(rng)
    table = torch.full((16,), -1, dtype=torch.int32)
    table[2:10] = torch.arange(8)
    got = applied(made(oracle, scales, num_experts=16), call, table)
    want = cumoe.fused_experts_fp8(**call, **scales, expert_map=table, num_experts=16)
    require_same((got,), (want,))


def test_a_weight_on_the_input_is_not_applied_again(oracle, rng):
    call, scales = layer_case(rng, topk=1)
    got = applied(made(oracle, scales), call, on_input=True)
    call["topk_weights"] = torch.ones_like(call["topk_weights"])
    require_same((got,), (cumoe.fused_experts_fp8(**call, **scales),))


def test_ids_and_weights_of_other_types(oracle, rng):
    call, scales = layer_case(rng)
    call["topk_weights"] = call["topk_weights"].bfloat16()
    others = {"topk_ids": call["topk_ids"].long()}
    got = applied(made(oracle, scales), call, **others)
    require_same((got,), (cumoe.fused_experts_fp8(**call, **scales),))


def test_the_scale_format_is_vllms(oracle, rng, monkeypatch):
    monkeypatch.setattr(sys.modules["vllm.utils.deep_gemm"], "is_deep_gemm_e8m0_used", lambda: True)
    call, scales = layer_case(rng)
    want = cumoe.fused_experts_fp8(**call, **scales, scale_format="ue8m0")
    require_same((applied(made(oracle, scales), call),), (want,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": Activation.GELU}, "activation: want silu"),
        ({"a1q_scale": torch.ones(5, 2)}, "hidden_states: want bf16, got quantized ones"),
    ],
)
def test_calls_that_are_refused(oracle, rng, change, message):
    call, scales = layer_case(rng)
    with pytest.raises(ArgumentError, match=message):
        applied(made(oracle, scales), call, **change)


# Weights that turn out to be others


def test_other_blocks_get_vllms_own_experts(oracle):
    vllm_plugin.register()
    layer, weights = moe_config(), quant_config(block_shape=[64, 64])
    found = experts.experts_class()(moe_config=layer, quant_config=weights)
    assert type(found) is Theirs
    assert (found.moe_config, found.quant_config) == (layer, weights)


def test_vllms_own_experts_may_not_lose_a_clamp(oracle):
    vllm_plugin.register()
    weights = quant_config(block_shape=[64, 64])
    with pytest.raises(ArgumentError, match=r"want the layer's swiglu_limit 7.0, got None"):
        experts.experts_class()(moe_config(swiglu_limit=7.0), weights)
    weights.gemm1_clamp_limit = 7.0
    assert type(experts.experts_class()(moe_config(swiglu_limit=7.0), weights)) is Theirs


# Kernels compiled ahead, and loaded


QWEN = {
    "model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": 256, "num_experts": 8,
    "moe_intermediate_size": 256, "num_experts_per_tok": 2,
    "quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}  # fmt: skip


@pytest.fixture
def selections(monkeypatch):
    """What `cumoe.prebuild` is asked for, with the layers of its config.json."""
    from cumoe.models import selected_layers
    from cumoe.vllm_plugin import ahead

    found = []
    report = SimpleNamespace(causes=(), count=lambda state: 0, seconds=0.0)

    def prebuild(**selection):
        found.extend(selected_layers(selection))
        return report

    monkeypatch.setattr(ahead, "prebuild", prebuild)
    return found


@pytest.mark.parametrize(
    ("ranks", "N", "local"),
    [
        ({}, 256, 8),
        ({"tensor_parallel_size": 2}, 128, 8),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, 256, 4),
    ],
)
def test_the_parent_builds_when_the_config_is_known(oracle, selections, ranks, N, local):
    vllm_plugin.register()
    config = fake_vllm.vllm_config(QWEN, **ranks)
    arguments = sys.modules["vllm.engine.arg_utils"].EngineArgs(config)
    assert arguments.create_engine_config(headless=True) is config
    (layer,) = selections
    assert (layer.K, layer.N, layer.num_local_experts, layer.topk) == (256, N, local, 2)
    assert layer.scale_formats == ("fp32", "ue8m0")


@pytest.mark.parametrize(
    ("hf", "change", "setting", "message"),
    [
        (QWEN, {"moe_backend": "triton"}, {}, "moe_backend is triton"),
        (QWEN, {"data_parallel_size": 2}, {}, "2 data-parallel ranks exchange tokens"),
        (QWEN, {}, {"disable_jit": True}, "CUMOE_DISABLE_JIT=1"),
        ({"hidden_size": 256}, {}, {}, "config.json"),
        ({**QWEN, "hidden_act": "gelu"}, {}, {}, "gelu"),
    ],
)
def test_nothing_is_built_and_nothing_stops(
    oracle, selections, monkeypatch, caplog, hf, change, setting, message
):
    caplog.set_level(logging.INFO, "vllm.plugins.cumoe")
    with_setting(monkeypatch, **setting)
    vllm_plugin.register()
    config = fake_vllm.vllm_config(hf, **change)
    arguments = sys.modules["vllm.engine.arg_utils"].EngineArgs(config)
    assert arguments.create_engine_config() is config
    assert selections == []
    assert "nothing prebuilt: " in caplog.text
    assert message in caplog.text


def test_a_worker_loads_each_kind_of_layer_once(oracle, rng, monkeypatch):
    _, scales = layer_case(rng)
    asked = []
    monkeypatch.setattr(experts, "warmup", lambda **selection: asked.append(selection) or 1)
    experts._load.cache_clear()
    for limit in (None, None, 0.5):
        made(oracle, scales, limit, device="cuda", num_experts=16)
    experts._load.cache_clear()
    sizes = {"hidden": 256, "intermediate": 128, "experts": 16, "top_k": 2, "ep": 2}
    kinds = [{**sizes, "swiglu_limit": c, "scale_format": "fp32"} for c in (float("inf"), 0.5)]
    assert asked == kinds
