"""A block-FP8 layer of vLLM, with the experts that its oracle chooses without the plugin and with
it. Both are called as vLLM's FusedMoE does, through its modular kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from bench import experts, peers
from bench.harness import measure_beside
from bench.peers import Layer
from bench.record import Row
from bench.shapes import Shape
from bench.table import WRONG
from cumoe.checkpoint.accuracy import row_errors

OP = "vllm layer"
TOKENS = (1, 8, 64, 512)
OURS = "CumoeExperts"


class Arm(NamedTuple):
    """A modular kernel and the name of its class of experts."""

    name: str
    kernel: Any


def rows(name: str, shape: Shape) -> Iterator[Row]:
    """A row for each of TOKENS: times of both arms, and how far their results are apart."""
    import torch

    with peers.vllm_context():
        from vllm.v1.worker import workspace

        if not workspace.is_workspace_manager_initialized():
            workspace.init_workspace_manager(torch.device("cuda"))
        layer = experts.make_layer(shape)
        theirs, ours = _arms(shape, layer)
        for m in TOKENS:
            inputs = experts.make_inputs(shape, m, "uniform")
            calls = tuple(_caller(arm, shape, layer, inputs) for arm in (theirs, ours))
            key = {"op": OP, "shape": name, "m": m, "vllm_class": theirs.name}
            yield key | figures(calls, ours.name)
    del layer, theirs, ours, calls
    torch.cuda.empty_cache()


def _caller(arm: Arm, shape: Shape, layer: Layer, inputs: experts.Inputs) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    def call(i: int) -> Any:
        x, weights, ids = inputs.of(i)
        return arm.kernel.apply(
            x, layer.w1, layer.w2, weights, ids, MoEActivation.SILU, shape.E, layer.expert_map,
            False,
        )  # fmt: skip

    return call


def figures(calls: tuple[Any, ...], class_name: str) -> Row:
    """What is measured of vLLM's call and ours, whose class of experts is named.

    An error where they are not what they should be.
    """
    theirs, ours = calls
    if class_name != OURS:
        return {"error": f"want experts of {OURS}, got {class_name}: not timed"}
    difference = worst_difference(_host(ours(0)), _host(theirs(0)))
    if not difference <= WRONG:  # NaN too
        return {"error": f"row difference {difference:.2e}, want below {WRONG:g}: not timed"}
    us = measure_beside({"vllm": theirs, "cumoe": ours})
    return {
        "us_vllm": us["vllm"], "us_cumoe": us["cumoe"],
        "ratio": round(us["vllm"] / us["cumoe"], 3), "row_difference": round(difference, 5),
    }  # fmt: skip


def worst_difference(ours: Any, theirs: Any) -> float:
    """norm(ours - theirs) / norm(theirs) of the worst token."""
    return float(row_errors(ours, theirs).max())


def _host(result: Any) -> Any:
    """A copy: vLLM's results may lie in its workspace, where the next call writes."""
    return result.float().cpu().numpy().copy()


def _arms(shape: Shape, layer: Layer) -> tuple[Arm, Arm]:
    theirs = _arm(shape, layer)
    with _plugin():
        return theirs, _arm(shape, layer)


@contextmanager
def _plugin() -> Iterator[None]:
    """The plugin in this process's vLLM."""
    import vllm.model_executor.layers.fused_moe.oracle.fp8 as oracle

    from cumoe import vllm_plugin

    saved = oracle.backend_to_kernel_cls, oracle._get_priority_backends
    vllm_plugin.register()
    try:
        yield
    finally:
        oracle.backend_to_kernel_cls, oracle._get_priority_backends = saved


def _arm(shape: Shape, layer: Layer) -> Arm:
    """What the oracle chooses now."""
    import torch
    import vllm.model_executor.layers.fused_moe.oracle.fp8 as oracle
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.quantization.utils import quant_utils

    moe = config.FusedMoEConfig(
        num_experts=shape.E, experts_per_token=shape.topk, hidden_dim=shape.K,
        intermediate_size=shape.N, num_local_experts=len(layer.w1), num_logical_experts=shape.E,
        activation=MoEActivation.SILU, device=layer.w1.device.type,
        routing_method=config.RoutingMethodType.TopK,
        moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16, max_num_tokens=8192, swiglu_limit=shape.limit,
    )  # fmt: skip
    backend, chosen = oracle.select_fp8_moe_backend(
        moe, quant_utils.kFp8Static128BlockSym, quant_utils.kFp8Dynamic128Sym
    )
    quantization = oracle.make_fp8_moe_quant_config(
        backend, layer.w1_scale, layer.w2_scale, None, None, block_shape=[128, 128],
        swiglu_limit=shape.limit,
    )  # fmt: skip
    return Arm(chosen.__name__, oracle.make_fp8_moe_kernel(quantization, moe, chosen, backend))
