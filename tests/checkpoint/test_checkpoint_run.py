"""run_layer: that it passes a right op, refuses a wrong one, and says what ran."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import cumoe
from cumoe.checkpoint.accuracy import Errors, row_errors
from cumoe.checkpoint.demo import demo_tensors, write_demo
from cumoe.checkpoint.experts import load_experts, to_cuda
from cumoe.checkpoint.run import RunOptions, run_layer
from cumoe.errors import ArgumentError, CheckpointError, UnsupportedDeviceError

CPU = RunOptions(device="cpu", tokens=16)


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    return write_demo(tmp_path_factory.mktemp("demo"))


@pytest.fixture
def bare(tmp_path) -> Path:
    """The demo's experts without a router and without a config.json."""
    tensors = {n: t for n, t in demo_tensors().items() if ".mlp.gate." not in n}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_the_demo_layer_passes(demo):
    report = run_layer(demo, replace(CPU, tokens=64))
    assert report.errors.failures == ()
    assert report.errors.sampled_tokens == 16
    assert 0.02 < report.errors.error_float64 < 0.06
    assert (report.layer, report.tokens, report.router) == (0, 64, "checkpoint")
    assert report.backend == "cpu"
    assert 2 < report.distinct_experts <= 8
    assert report.first_call_s > 0
    assert report.call_s > 0


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_the_same_seed_gives_the_same_errors(demo, scale_format):
    options = replace(CPU, scale_format=scale_format, seed=5)
    a, b = run_layer(demo, options), run_layer(demo, options)
    assert a.errors == b.errors
    assert a.config.scale_format == scale_format
    assert run_layer(demo, replace(options, seed=6)).errors != a.errors


def spoil(monkeypatch, change) -> None:
    """Lets the op under test change its result."""
    right = cumoe.fused_experts_fp8

    def wrong(x, *args, **kwargs):
        out = np.array(right(x, *args, **kwargs))
        change(out)
        return out

    monkeypatch.setattr(cumoe, "fused_experts_fp8", wrong)


def zero_row(out) -> None:
    out[11] = 0


def nan_element(out) -> None:
    out[3, 400] = np.nan


def swap_rows(out) -> None:
    out[[4, 5]] = out[[5, 4]]


def one_percent(out) -> None:
    out[8] = (out[8].astype(np.float32) * 1.01).astype(out.dtype)


@pytest.mark.parametrize("change", [zero_row, nan_element, swap_rows, one_percent])
def test_one_wrong_row_fails(demo, monkeypatch, change):
    spoil(monkeypatch, change)
    failures = run_layer(demo, CPU).errors.failures
    assert failures[0].startswith("worst token against the reference: wanted an error below 0.005")


def test_an_op_that_forgets_the_clamp_fails(demo, monkeypatch):
    right = cumoe.fused_experts_fp8

    def forgetful(*args, swiglu_limit, **kwargs):
        return right(*args, **kwargs)

    monkeypatch.setattr(cumoe, "fused_experts_fp8", forgetful)
    assert run_layer(demo, CPU).errors.failures


def test_alpha_and_beta_of_the_config_reach_the_op(tmp_path, monkeypatch):
    write_demo(tmp_path)
    file = tmp_path / "config.json"
    changed = json.loads(file.read_text()) | {"swiglu_alpha": 1.702, "swiglu_beta": 1}
    file.write_text(json.dumps(changed))
    right, seen = cumoe.fused_experts_fp8, set()

    def spy(*args, **kwargs):
        seen.add((kwargs["swiglu_alpha"], kwargs["swiglu_beta"]))
        return right(*args, **kwargs)

    monkeypatch.setattr(cumoe, "fused_experts_fp8", spy)
    assert run_layer(tmp_path, CPU).errors.failures == ()
    assert seen == {(1.702, 1.0)}

    def forgetful(*args, swiglu_alpha, swiglu_beta, **kwargs):
        return right(*args, **kwargs)

    monkeypatch.setattr(cumoe, "fused_experts_fp8", forgetful)
    assert run_layer(tmp_path, CPU).errors.failures


def test_a_token_that_sees_another_fails(demo, monkeypatch):
    def leak(out) -> None:
        out[1:] += out[:-1] / 64

    spoil(monkeypatch, leak)
    assert run_layer(demo, CPU).errors.failures


def test_row_errors_by_hand():
    want = np.array([[3.0, 4.0], [0, 0], [0, 0], [1, 1]])
    got = np.array([[3.0, 4.5], [0, 0], [0, 1], [np.nan, 1]])
    errors = row_errors(got, want)
    assert errors[:3].tolist() == [0.1, 0.0, math.inf]
    assert math.isnan(errors[3])


@pytest.mark.parametrize(
    ("errors", "failing"),
    [
        (Errors(16, 4.9e-3, 0.119, 0.059), ()),
        (Errors(16, 5e-3, 0.119, 0.059), ("worst token against the reference",)),
        (Errors(16, 0, 0.12, 0.059), ("worst token against float64",)),
        (Errors(16, 0, 0.119, 0.06), ("all tokens against float64",)),
        (Errors(1, 0, 0.07, 0.07), ()),
        (Errors(1, 0, 0.13, 0.13), ("worst token against float64",)),
        (Errors(16, math.nan, math.inf, math.nan), ("worst", "worst", "all")),
    ],
)
def test_bounds(errors, failing):
    found = errors.failures
    assert len(found) == len(failing)
    assert all(f.startswith(start) for f, start in zip(found, failing, strict=True))


def test_options_override_the_checkpoint(demo):
    options = replace(
        CPU, top_k=3, scoring="softmax", routed_scaling_factor=1.5, swiglu_limit=math.inf
    )
    config = run_layer(demo, options).config
    assert (config.top_k, config.scoring, config.routed_scaling_factor) == (3, "softmax", 1.5)
    assert config.swiglu_limit is None


def test_without_config_and_router(bare):
    with pytest.raises(ArgumentError, match=r"top_k: wanted 1 to 8 .* got None; .*--top-k"):
        run_layer(bare, CPU)
    report = run_layer(bare, replace(CPU, top_k=4))
    assert report.errors.failures == ()
    assert (report.router, report.config.scoring) == ("random", "softmax")
    assert report.config.scale_format == "fp32"
    assert report.config.routed_scaling_factor == 1.0


def test_a_router_of_unknown_scoring_is_not_guessed(tmp_path):
    save_file(demo_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ArgumentError, match=r"scoring: wanted softmax or sigmoid, .*--router"):
        run_layer(tmp_path, replace(CPU, top_k=2))


def test_the_first_layer_with_experts_is_the_default(tmp_path):
    tensors = {n.replace("layers.0.", "layers.7."): t for n, t in demo_tensors().items()}
    tensors["model.layers.0.mlp.gate_proj.weight"] = np.ones((2, 2))
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"num_experts_per_tok": 2, "scoring_func": "sigmoid"})
    )
    assert run_layer(tmp_path, CPU).layer == 7
    with pytest.raises(CheckpointError, match=r"layer 0: .* found experts in layer 7; name one"):
        run_layer(tmp_path, replace(CPU, layer=0))


def test_no_experts_at_all(tmp_path):
    save_file({"x": np.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="found experts in no layer"):
        run_layer(tmp_path, CPU)


def test_no_tokens(demo):
    with pytest.raises(ArgumentError, match="tokens: wanted at least 1, got 0"):
        run_layer(demo, replace(CPU, tokens=0))


def test_a_gpu_that_is_not_there(demo):
    with pytest.raises(UnsupportedDeviceError, match=r"device: wanted cuda:99, found \d+ usable"):
        run_layer(demo, replace(CPU, device="cuda:99"))


def test_to_cuda_moves_the_four_arrays_and_nothing_else(demo, monkeypatch):
    from cumoe.launch import memory

    moved = []

    def to_device(a, index):
        moved.append((a, index))
        return len(moved)

    monkeypatch.setattr(memory, "to_device", to_device)
    experts = load_experts(demo, 0)
    there = to_cuda(experts, 3)
    arrays = (experts.w1, experts.w2, experts.w1_scale, experts.w2_scale)
    assert [id(a) for a, _ in moved] == [id(a) for a in arrays]
    assert (there.w1, there.w2, there.w1_scale, there.w2_scale) == (1, 2, 3, 4)
    assert {index for _, index in moved} == {3}
    assert there.router is experts.router


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_the_demo_layer_passes_on_the_gpu(demo, device):
    report = run_layer(demo, RunOptions(device=device))
    assert report.errors.failures == ()
    assert report.backend.startswith("cuda:0")


@pytest.mark.gpu
def test_experts_on_the_gpu_have_the_bytes_of_the_host(demo):
    from cumoe.launch.memory import to_host

    host, there = load_experts(demo, 0), load_experts(demo, 0, device="cuda")
    for name in ("w1", "w2", "w1_scale", "w2_scale"):
        assert to_host(getattr(there, name)).tobytes() == getattr(host, name).tobytes()
