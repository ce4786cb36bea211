"""Rows of the experts' benchmark, on the CPU: what is made, what is checked, what is written."""

from __future__ import annotations

import argparse
import sys
from itertools import product

import numpy as np
import pytest
import torch

import cumoe
from bench import experts, peers
from bench.harness import CALLS, Timing
from cumoe.launch import device
from cumoe.plan import fused_experts_fp8 as planning
from cumoe.plan.device import H200
from cumoe.plan.enumerate import steps_in

PLAIN = "e16-top4-k256-n128"
LOCAL = "e16-top4-k256-n128-limit10-local4"
KEYS = {
    "op", "shape", "m", "us", "p20", "p80", "floor_us", "read_only_us", "host_us",
    "host_us_allocating", "max_row_error", "tflops", "tbytes_s", "E", "K", "N", "topk", "active",
    "slots", "num_local_experts", "routing", "limit", "scale_format", "peers", "peers_host_us",
    "peers_row_error",
}  # fmt: skip
ROUNDING = 2e-3
"""Of a row: a sum that falls to the other side of a bf16 or e4m3 value."""


def scene(name: str, m: int, routing: str = "uniform", scale_format: str = "fp32"):
    shape = experts.shapes.shape(name)
    layer = experts.make_layer(shape, "cpu")
    inputs = experts.make_inputs(shape, m, routing, "cpu")
    sample = experts.make_sample(shape, layer, inputs, scale_format)
    return layer, inputs, sample, experts.caller(shape, layer, inputs, scale_format)


@pytest.mark.parametrize("name", [PLAIN, LOCAL])
@pytest.mark.parametrize("m", [1, 3, 8, 20])
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_a_right_call_has_no_error(name, m, scale_format):
    """The op on CPU tensors is the reference, to which the truth in torch is held here."""
    _, _, sample, ours = scene(name, m, scale_format=scale_format)
    assert len(sample.picks) == len(sample.want) == 8
    assert len(set(sample.picks)) == 8
    assert np.abs(sample.want).max() > 0
    assert experts.checked_error(ours, sample) < ROUNDING


def test_the_last_token_is_in_the_sample():
    _, _, sample, _ = scene(PLAIN, 20)
    assert {token for _, token in sample.picks} >= {0, 19}


@pytest.mark.parametrize("spoil", [lambda out: out * 1.02, lambda out: out * torch.nan])
def test_a_wrong_call_is_not_timed(spoil):
    _, _, sample, ours = scene(PLAIN, 20)

    def wrong(i: int) -> torch.Tensor:
        out = ours(i).clone()
        out[19] = spoil(out[19])
        return out

    with pytest.raises(experts.NotTimed, match=r"row error .* want below 0\.005: not timed"):
        experts.checked_error(wrong, sample)


@pytest.mark.parametrize("change", ["limit", "expert_map", "scale"])
def test_a_call_that_leaves_something_out_is_not_timed(change):
    layer, inputs, sample, _ = scene(LOCAL, 20)
    shape = experts.shapes.shape(LOCAL)
    if change == "limit":
        shape = shape._replace(limit=None)
    if change == "expert_map":
        layer = layer._replace(expert_map=layer.expert_map.roll(1))
    if change == "scale":
        layer = layer._replace(w2_scale=layer.w2_scale.flip(1))
    with pytest.raises(experts.NotTimed):
        experts.checked_error(experts.caller(shape, layer, inputs, "fp32"), sample)


def test_layers_are_like_those_of_checkpoints():
    """Codes use the whole range, and a limit is one that some values pass."""
    shape = experts.shapes.shape(LOCAL)
    layer = experts.make_layer(shape, "cpu")
    assert layer.w1.shape == (4, 256, 256)
    assert layer.w2.shape == (4, 256, 128)
    codes = layer.w1.float()
    assert codes.abs().max() == 448
    assert codes.isfinite().all()
    scale = layer.w1_scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    x = experts.make_inputs(shape, 64, "uniform", "cpu").xs[0].float()
    gate = x @ (codes * scale)[0].T
    assert 0.01 < (gate.abs() > shape.limit).float().mean() < 0.2


def test_inputs_rotate_and_router_weights_sum_to_one():
    inputs = experts.make_inputs(experts.shapes.shape(PLAIN), 5, "uniform", "cpu")
    assert [len(part) for part in inputs] == [2, CALLS, CALLS]
    first, second, third = (inputs.of(i) for i in range(3))
    assert first[0] is third[0] is not second[0]
    assert not torch.equal(first[2], third[2])
    torch.testing.assert_close(first[1].sum(1), torch.ones(5))


def test_local_slots_and_what_must_be_read():
    shape = experts.shapes.shape(LOCAL)
    layer = experts.make_layer(shape, "cpu")
    ids = torch.tensor([[0, 4, 5], [8, 0, 15]], dtype=torch.int32)
    slots = experts.local_slots(ids, layer.expert_map)
    assert slots.tolist() == [0, 1, 2, 0]
    assert experts.local_slots(ids, None).tolist() == [0, 4, 5, 8, 0, 15]
    inputs = experts.make_inputs(shape, 2, "uniform", "cpu")
    (read, nothing) = experts.read_only_inputs(layer, inputs, [np.unique(slots), np.array([])])
    starts = [layer.w1[0], layer.w2[0], layer.w1[1], layer.w2[1], layer.w1[2], layer.w2[2]]
    assert [t.data_ptr() for t in read] == [t.data_ptr() for t in [*starts, inputs.xs[0]]]
    assert [t.data_ptr() for t in nothing] == [inputs.xs[1].data_ptr()]


@pytest.mark.parametrize("name", [PLAIN, LOCAL])
def test_a_workspace_is_as_large_as_the_plan_of_the_calls_wants(name, monkeypatch):
    monkeypatch.setattr(device, "info", lambda ordinal: H200)
    shape, sizes = experts.shapes.shape(name), []
    layer = experts.make_layer(shape, "cpu")
    for m in (8, 64):
        inputs = experts.make_inputs(shape, m, "uniform", "cpu")
        out = torch.empty_like(inputs.xs[0])
        made = experts.new_workspace(shape, layer, inputs, "fp32", out)
        assert (made.dtype, made.is_contiguous()) == (torch.uint8, True)
        sizes.append(made.numel())
        assert made.numel() >= m * (shape.K + shape.topk * shape.N)  # e4m3 of x and activation
    assert sizes[1] > sizes[0]


def test_all_kernels_of_the_calls_are_compiled_before(monkeypatch):
    compiled: list = []
    monkeypatch.setattr(device, "info", lambda ordinal: H200)
    monkeypatch.setattr(experts, "compile_kernels", compiled.extend)
    experts.compile_layers([PLAIN, LOCAL], ["fp32", "ue8m0"])
    for name, scale_format in product((PLAIN, LOCAL), ("fp32", "ue8m0")):
        s = experts.shapes.shape(name)
        local, limited = s.num_local_experts or s.E, s.limit is not None
        for m in (1, 20, 200):
            problem = planning.Problem(
                m, s.K, s.N, s.E, local, s.topk, "int32", "fp32", local != s.E, scale_format,
                int(limited), False, False, True, True,
            )  # fmt: skip
            plan = planning.plan(problem, H200)
            assert {step.kernel for step in steps_in(plan)} <= set(compiled)


@pytest.fixture
def fake_gpu(monkeypatch):
    """Every array on the CPU, and clocks that always say the same."""
    make_layer, make_inputs = experts.make_layer, experts.make_inputs
    monkeypatch.setattr(experts, "make_layer", lambda shape: make_layer(shape, "cpu"))
    monkeypatch.setattr(experts, "make_inputs", lambda *call: make_inputs(*call, "cpu"))
    monkeypatch.setattr(experts, "new_workspace", lambda *call: None)
    monkeypatch.setattr(experts, "measure", lambda *call: Timing(50.0, 49.0, 51.0, 30.0))
    monkeypatch.setattr(experts, "host_us", lambda *call: 40.0)
    monkeypatch.setattr(experts, "compile_kernels", list)
    monkeypatch.setattr(device, "info", lambda ordinal: H200)
    monkeypatch.setattr(experts, "reader", list)
    monkeypatch.setattr(peers, "vllm_context", experts.nullcontext)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def arguments(**options) -> argparse.Namespace:
    named = {"shape": [PLAIN], "m": [3], "routing": ["uniform"], "scale_format": ["fp32"]}
    return argparse.Namespace(**{**named, "peers": [], "quick": False, **options})


@pytest.mark.usefixtures("fake_gpu")
def test_a_row_has_every_figure():
    (row,) = experts.run(arguments(shape=[LOCAL], m=[20]))
    assert set(row) == KEYS
    assert (row["us"], row["p20"], row["p80"], row["read_only_us"]) == (50.0, 49.0, 51.0, 50.0)
    assert (row["host_us"], row["host_us_allocating"]) == (30.0, 40.0)
    assert row["max_row_error"] < ROUNDING
    assert (row["E"], row["num_local_experts"], row["active"]) == (16, 4, 4)
    assert 10 < row["slots"] < 30  # a quarter of 80
    assert row["tflops"] == round(row["slots"] * 6 * 256 * 128 / 50 / 1e6, 2)
    assert row["tbytes_s"] == round((4 * 3 * 256 * 128 + 4 * 20 * 256) / 50 / 1e6, 3)
    assert row["floor_us"] == pytest.approx(2.5, abs=0.2)


@pytest.mark.usefixtures("fake_gpu")
def test_rows_of_every_combination():
    named = {"m": [1, 8], "routing": ["uniform", "one"], "scale_format": ["fp32", "ue8m0"]}
    rows = list(experts.run(arguments(**named)))
    found = [(row["routing"], row["scale_format"], row["m"]) for row in rows]
    expected = [(r, f, m) for r in ("uniform", "one") for f in ("fp32", "ue8m0") for m in (1, 8)]
    assert found == expected


@pytest.mark.usefixtures("fake_gpu")
def test_a_wrong_row_is_told_and_the_next_one_measured(monkeypatch):
    right = experts.caller

    def caller(shape, layer, inputs, scale_format):
        ours = right(shape, layer, inputs, scale_format)
        off = 2.0 if len(inputs.xs[0]) == 3 else 1.0
        return lambda i, **buffers: ours(i, **buffers) * off

    monkeypatch.setattr(experts, "caller", caller)
    wrong, fine = experts.run(arguments(m=[3, 4]))
    assert wrong.keys() == {"op", "shape", "m", "routing", "scale_format", "error"}
    assert wrong["m"] == 3
    assert "row error 1.00e+00" in wrong["error"]
    assert fine["m"] == 4
    assert fine["max_row_error"] < ROUNDING


@pytest.mark.usefixtures("fake_gpu")
def test_peers_are_timed_with_their_errors_and_the_others_left_out(monkeypatch, capsys):
    def same(shape, layer):
        return lambda x, weights, ids: cumoe.fused_experts_fp8(
            x, layer.w1, layer.w2, weights, ids, w1_scale=layer.w1_scale,
            w2_scale=layer.w2_scale, expert_map=layer.expert_map,
        )  # fmt: skip

    def absent(shape, layer):
        raise ImportError("no such kernels")

    def picky(shape, layer):
        def call(x, weights, ids):
            raise RuntimeError("not these sizes")

        return call

    made = {"no-clamp": same, "absent": absent, "picky": picky}
    monkeypatch.setattr(peers, "EXPERTS", made)
    peers.say_once.cache_clear()
    rows = list(experts.run(arguments(shape=[LOCAL, PLAIN], m=[20], peers=list(made))))
    assert [row["peers"] for row in rows] == [{"no-clamp": 50.0}] * 2
    assert [row["peers_host_us"] for row in rows] == [{"no-clamp": 30.0}] * 2
    assert rows[0]["peers_row_error"]["no-clamp"] > 0.1  # the limit of this layer is left out
    assert rows[1]["peers_row_error"]["no-clamp"] < ROUNDING
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "absent: absent (ImportError: no such kernels)",
        *(
            f"picky: left out of {name} M=20 uniform (RuntimeError: not these sizes)"
            for name in (LOCAL, PLAIN)
        ),
    ]


@pytest.mark.usefixtures("fake_gpu")
def test_a_peer_whose_result_is_not_a_number_has_the_error_of_a_wrong_one(monkeypatch):
    broken = lambda shape, layer: lambda x, weights, ids: x * torch.nan  # noqa: E731
    monkeypatch.setattr(peers, "EXPERTS", {"p": broken})
    (row,) = experts.run(arguments(peers=["p"]))
    assert row["peers_row_error"] == {"p": 1.0}


@pytest.mark.usefixtures("fake_gpu")
def test_peers_have_fp32_scales_only(monkeypatch):
    monkeypatch.setattr(peers, "EXPERTS", {"p": lambda shape, layer: lambda *call: call[0]})
    rows = list(experts.run(arguments(scale_format=["fp32", "ue8m0"], peers=["p"])))
    assert [list(row["peers"]) for row in rows] == [["p"], []]


def test_vllm_is_named_as_absent(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    peers.say_once.cache_clear()
    layer = experts.make_layer(experts.shapes.shape(PLAIN), "cpu")
    assert peers.experts_peers(peers.EXPERTS, experts.shapes.shape(PLAIN), layer) == {}
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == ["vllm-triton", "vllm-deepgemm", "vllm-marlin"]
    assert all("absent (ModuleNotFoundError" in line for line in told)
