"""The plugin in the real vLLM 0.26 on the CPU: its oracle, its modular kernel, its log.

Not collected with the tests, since vLLM is not installed with them. With vLLM's source and its
dependencies (a torch without CUDA will do) on PYTHONPATH:

    python -m pytest tests/vllm_plugin/check_real_vllm.py -W ignore

The platform is told to be an H200. What needs the GPU (kernels, graphs, the engine) is not shown.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

import cumoe
from bench import experts as bench_experts
from bench import shapes, vllm_layer
from cumoe import vllm_plugin
from cumoe.vllm_plugin import experts
from tests.helpers import cases
from tests.helpers.backends import TorchBackend
from tests.helpers.torch_ops import require_same

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
mk = import_module(f"{FUSED_MOE}.modular_kernel")
config = import_module(f"{FUSED_MOE}.config")
oracle = import_module(f"{FUSED_MOE}.oracle.fp8")
keys = import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
platforms = import_module("vllm.platforms")
BLOCK = keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym
Activation = import_module(f"{FUSED_MOE}.activation").MoEActivation


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    """The platform of an H200, a workspace on the CPU, and vLLM's functions as they were."""
    platform = platforms.current_platform
    capability = platforms.interface.DeviceCapability(9, 0)
    answers = {
        "is_cuda": True, "is_cuda_alike": True, "supports_fp8": True,
        "get_device_capability": capability, "is_device_capability_family": False,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(type(platform), name, lambda *a, answer=answer, **k: answer)
    for name in ("backend_to_kernel_cls", "_get_priority_backends"):
        monkeypatch.setattr(oracle, name, getattr(oracle, name))
    workspace = import_module("vllm.v1.worker.workspace")
    monkeypatch.setattr(workspace, "_manager", workspace.WorkspaceManager(torch.device("cpu")))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    experts.say_once.cache_clear()


def layer_config(*, ep=1, **change):
    ranks = config.FusedMoEParallelConfig.make_no_parallel()
    ranks = type(ranks)(**{**vars(ranks), "ep_size": ep, "use_ep": ep > 1})
    sizes = {
        "num_experts": 8 * ep, "num_local_experts": 8, "num_logical_experts": 8 * ep,
        "experts_per_token": 2, "hidden_dim": 256, "intermediate_size": 128,
    }  # fmt: skip
    return config.FusedMoEConfig(**{
        **sizes, "activation": Activation.SILU, "device": "cpu", "in_dtype": torch.bfloat16,
        "routing_method": config.RoutingMethodType.TopK, "moe_parallel_config": ranks, **change,
    })  # fmt: skip


@pytest.mark.parametrize("ep", [1, 4])
def test_the_oracle_takes_ours(ep):
    before = oracle.select_fp8_moe_backend(layer_config(ep=ep), *BLOCK)
    assert before[1].__name__ != "CumoeExperts"
    vllm_plugin.register()
    backend, cls = oracle.select_fp8_moe_backend(layer_config(ep=ep), *BLOCK)
    assert (backend.value, cls.__name__) == ("TRITON", "CumoeExperts")


@pytest.mark.parametrize(
    ("change", "weight_key"),
    [
        ({"moe_backend": "triton"}, keys.kFp8Static128BlockSym),
        ({"activation": Activation.GELU}, keys.kFp8Static128BlockSym),
        ({"in_dtype": torch.float16}, keys.kFp8Static128BlockSym),
        ({"is_lora_enabled": True}, keys.kFp8Static128BlockSym),
        ({"swiglu_limit": float("inf")}, keys.kFp8Static128BlockSym),
    ],
)
def test_the_oracle_chooses_others_as_before(change, weight_key):
    ask = layer_config(**change), weight_key, keys.kFp8Dynamic128Sym
    before = oracle.select_fp8_moe_backend(*ask)
    vllm_plugin.register()
    assert oracle.select_fp8_moe_backend(*ask) == before


def test_methods_take_what_vllm_passes():
    cls = experts.experts_class()
    assert not inspect.isabstract(cls)
    for name in ("apply", "workspace_shapes", "is_supported_config"):
        theirs = inspect.signature(getattr(mk.FusedMoEExpertsModular, name))
        assert list(inspect.signature(getattr(cls, name)).parameters) == list(theirs.parameters)
    shapes = inspect.signature(oracle._get_priority_backends)
    assert list(shapes.parameters) == ["moe_config", "weight_key", "activation_key"]


@pytest.mark.parametrize("ep", [1, 4])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_a_layer_through_the_modular_kernel(rng, limit, ep):
    vllm_plugin.register()
    c = cases.experts_case(rng, num_tokens=5, topk=2, intermediate=128)
    put = TorchBackend("cpu").put
    x, w1, w2, weights, ids = map(put, (c.x, c.experts.w1, c.experts.w2, c.weights, c.ids))
    scales = {name: put(a) for name, a in c.experts.scales.items()}
    layer = layer_config(swiglu_limit=limit, ep=ep)
    backend, cls = oracle.select_fp8_moe_backend(layer, *BLOCK)
    quant = oracle.make_fp8_moe_quant_config(
        backend, scales["w1_scale"], scales["w2_scale"], None, None, block_shape=[128, 128],
        swiglu_limit=limit,
    )  # fmt: skip
    kernel = oracle.make_fp8_moe_kernel(quant, layer, cls, backend)
    table = None
    if ep > 1:
        table = torch.full((8 * ep,), -1, dtype=torch.int32)
        table[2:10] = torch.arange(8)
    got = kernel.apply(x, w1, w2, weights, ids, Activation.SILU, 8 * ep, table, False)
    want = cumoe.fused_experts_fp8(
        x, w1, w2, weights, ids, **scales, swiglu_limit=limit, expert_map=table
    )
    require_same((got,), (want,))


def test_other_blocks_get_vllms_triton_experts():
    vllm_plugin.register()
    layer = layer_config()
    backend, cls = oracle.select_fp8_moe_backend(layer, *BLOCK)
    quant = oracle.make_fp8_moe_quant_config(
        backend, torch.ones(8, 4, 4), torch.ones(8, 4, 2), None, None, block_shape=[64, 64]
    )
    kernel = oracle.make_fp8_moe_kernel(quant, layer, cls, backend)
    assert type(kernel.fused_experts).__name__ == "TritonExperts"


def test_the_engines_arguments_build_ahead(monkeypatch):
    arguments = import_module("vllm.engine.arg_utils")
    made, asked = SimpleNamespace(), []
    monkeypatch.setattr(arguments.EngineArgs, "create_engine_config", lambda self: made)
    vllm_plugin.register()
    ahead = import_module("cumoe.vllm_plugin.ahead")
    monkeypatch.setattr(ahead, "prebuild_model", asked.append)
    assert arguments.AsyncEngineArgs.create_engine_config(SimpleNamespace()) is made
    assert asked == [made]


@pytest.mark.parametrize("limit", ["", "-limit10"])
def test_the_arms_of_the_benchmark(limit):
    shape = shapes.shape(f"e16-top2-k256-n128{limit}")
    layer = bench_experts.make_layer(shape, "cpu")
    before = oracle.backend_to_kernel_cls, oracle._get_priority_backends
    theirs, ours = vllm_layer._arms(shape, layer)
    assert (oracle.backend_to_kernel_cls, oracle._get_priority_backends) == before
    assert (ours.name, theirs.name != ours.name) == (vllm_layer.OURS, True)
    inputs = bench_experts.make_inputs(shape, 5, "uniform", "cpu")
    got = vllm_layer._caller(ours, shape, layer, inputs)(3)
    want = bench_experts.caller(shape, layer, inputs, "fp32")(3)
    require_same((got,), (want,))
