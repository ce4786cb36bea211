"""vLLM with the plugin and without it: options, tables, and what says that two arms agree."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from rich.console import Console

import cumoe
from bench import __main__ as command
from bench import environment, vllm, vllm_engine, vllm_layer, vllm_model
from bench.record import read

LAYER = {
    "op": vllm_layer.OP, "shape": "s-tp8", "m": 8, "vllm_class": "TritonExperts", "us_vllm": 150.0,
    "us_cumoe": 100.0, "ratio": 1.5, "row_difference": 0.0123,
}  # fmt: skip
ENGINE = {
    "op": vllm_engine.OP, "shape": "qwen", "m": 64, "layers": 2, "tokens_s_vllm": 1000.0,
    "tokens_s_cumoe": 900.0, "ratio": 0.9, "generated": 256, "same_tokens": 70, "tokens": 128,
    "equal_sequences": 1, "logprob_difference": None, "logprob_error": 0.01,
}  # fmt: skip


def shown(rows: list[dict], **options) -> list[str]:
    text = io.StringIO()
    vllm.show(rows, Console(file=text, width=150, **options))
    return text.getvalue().splitlines()


def test_a_table_for_each_part():
    lines = [line.split() for line in shown([LAYER, ENGINE])]
    assert ["s-tp8", "8", "150.0", "100.0", "1.50x", "0.0123", "TritonExperts"] in lines
    assert ["qwen", "64", "1000.0", "900.0", "0.90x", "70", "128", "1", "-", "0.0100"] in lines


def test_a_loss_is_red(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = "\n".join(shown([LAYER, ENGINE], force_terminal=True, color_system="standard"))
    assert "\x1b[32m1.50x" in text
    assert "\x1b[31m0.90x" in text


def test_the_options():
    plain = vllm.parser().parse_args([])
    assert (plain.part, plain.shape, plain.layers, plain.keep) == (None, None, 36, False)
    some = vllm.parser().parse_args(["--part", "layer", "--shape", "glm-5.3-tp4", "--keep"])
    assert (some.part, some.shape, some.keep) == (["layer"], ["glm-5.3-tp4"], True)
    with pytest.raises(SystemExit):
        vllm.parser().parse_args(["--part", "kernel"])


def test_without_vllm_nothing_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    out = tmp_path / "vllm.json"
    assert command.main(["vllm", "--out", str(out)]) == 1
    assert "vllm: absent, nothing measured" in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.parametrize(("rows", "status"), [([LAYER, ENGINE], 0), ([{**LAYER, "error": "x"}], 1)])
def test_rows_are_written(monkeypatch, tmp_path, rows, status):
    monkeypatch.setattr(vllm, "find_spec", lambda name: object())
    monkeypatch.setattr(vllm, "measured", lambda arguments: iter(rows))
    monkeypatch.setattr(environment, "environment", lambda: {"device": "D"})
    out = tmp_path / "vllm.json"
    assert command.main(["vllm", "--out", str(out)]) == status
    record = read(out)
    assert record["environment"]["device"] == "D"
    assert [*record["rows"], *record.get("failed", [])] == rows


def test_the_parts_that_are_measured(monkeypatch):
    monkeypatch.setattr(vllm_engine, "rows", lambda model, layers: iter([(model, layers)]))
    monkeypatch.setattr(vllm_layer, "rows", lambda name, shape: iter([(name, shape.E)]))
    both = list(vllm.measured(vllm.parser().parse_args(["--layers", "2"])))
    assert both == [
        ("qwen3-30b-a3b", 2), ("glm-5.3-tp8", 256), ("glm-5.3-flash-tp8", 288),
        ("e128-top8-k2048-n768", 128),
    ]  # fmt: skip
    line = ["--part", "engine", "--model", "qwen3-with-glm-5.3-tp8-experts"]
    engines = list(vllm.measured(vllm.parser().parse_args(line)))
    assert engines == [("qwen3-with-glm-5.3-tp8-experts", 36)]


# The layer


@pytest.fixture
def untimed(monkeypatch):
    monkeypatch.setattr(vllm_layer, "measure_beside", lambda calls: {"vllm": 30.0, "cumoe": 20.0})


def test_a_layer_is_timed_where_both_arms_compute_the_same(untimed):
    want = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    got = want + torch.tensor([[0.0, 0.05], [0.0, 0.0]])
    found = vllm_layer.figures((lambda i: want, lambda i: got), "CumoeExperts")
    assert found == {"us_vllm": 30.0, "us_cumoe": 20.0, "ratio": 1.5, "row_difference": 0.01}


def test_results_in_a_workspace_that_both_arms_share_are_told_apart(untimed):
    shared = torch.zeros(2, 4)
    calls = [lambda i, v=value: shared.fill_(v) for value in (1.0, 3.0)]
    assert "not timed" in vllm_layer.figures(tuple(calls), "CumoeExperts")["error"]


@pytest.mark.parametrize("wrong", [0.0, float("nan"), -1.0])
def test_a_layer_with_one_wrong_token_is_not_timed(untimed, wrong):
    want = torch.ones(8, 4)
    got = want.clone()
    got[5] *= wrong
    found = vllm_layer.figures((lambda i: want, lambda i: got), "CumoeExperts")
    assert "not timed" in found["error"]


def test_an_arm_that_is_not_ours_is_not_timed(untimed):
    same = torch.ones(1, 4)
    found = vllm_layer.figures((lambda i: same, lambda i: same), "TritonExperts")
    assert found == {"error": "want experts of CumoeExperts, got TritonExperts: not timed"}


# The engine


def answer(*sequences: list[int], logprobs: float = -1.0) -> dict:
    return {"ids": list(sequences), "logprobs": [[logprobs] * len(s) for s in sequences]}


def test_arms_that_agree():
    one = answer([1, 2, 3], [4, 5, 6])
    assert vllm_engine.agreement(one, answer([1, 2, 3], [4, 5, 6], logprobs=-1.25)) == {
        "same_tokens": 6, "tokens": 6, "equal_sequences": 2, "logprob_difference": 0.25,
    }  # fmt: skip


def test_nothing_counts_after_the_first_difference():
    one, other = answer([1, 2, 3], [4, 5, 6]), answer([1, 9, 3], [4, 5, 6])
    other["logprobs"][0] = [-1.5, -7.0, -7.0]
    assert vllm_engine.agreement(one, other) == {
        "same_tokens": 4, "tokens": 6, "equal_sequences": 1, "logprob_difference": 0.5,
    }  # fmt: skip


def test_arms_that_agree_in_nothing():
    found = vllm_engine.agreement(answer([1, 2]), answer([2, 1]))
    assert (found["same_tokens"], found["logprob_difference"]) == (0, None)


def test_the_error_of_logprobs():
    one = [[0.0, 4.0], [-4.0]]
    assert vllm_engine.logprob_error(one, one) == 0
    assert vllm_engine.logprob_error(one, [[0.0, 4.0], [-3.0]]) == pytest.approx(1 / 32**0.5)
    assert math.isnan(vllm_engine.logprob_error([[1.0, 1.0]], [[1.0, 1.0]]))
    with pytest.raises(ValueError, match="zip"):
        vllm_engine.logprob_error(one, [[0.0], [-4.0]])


class Arm:
    def __init__(self, *prompt_logprobs: float) -> None:
        self.prompt_logprobs, self.timed = [list(prompt_logprobs)], 0

    def generate(self, tokens, count, *, logprobs=False):
        self.timed += not logprobs
        return answer([1, 2]) | {"seconds": 0.5, "prompt_logprobs": self.prompt_logprobs}


def test_arms_of_one_model_are_timed_and_others_are_not():
    found = vllm_engine._figures(Arm(1.0, 2.0), Arm(1.0, 2.01), [[3, 4, 5]])
    assert (found["tokens_s_cumoe"], found["ratio"], found["same_tokens"]) == (256, 1, 2)
    assert found["rounds_vllm"] == found["rounds_cumoe"] == [256.0] * vllm_engine.ROUNDS
    assert 0 < found["logprob_error"] < 0.02
    for other in (Arm(2.0, 1.0), Arm(math.nan, 2.0)):
        found = vllm_engine._figures(Arm(1.0, 2.0), other, [[3, 4, 5]])
        assert (list(found), other.timed) == (["error"], 0)
    assert "error" in vllm_engine._figures(Arm(1.0, 1.0), Arm(1.0, 1.0), [[3, 4, 5]])


SMALL = vllm_engine.MODELS["qwen3-30b-a3b"] | {
    "hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 4, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
}  # fmt: skip


def test_a_model_is_a_checkpoint_whose_experts_can_be_loaded(tmp_path):
    vllm_model.write(tmp_path, SMALL, device="cpu")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == [
        "model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head",
    ]  # fmt: skip
    layers = [cumoe.load_experts(tmp_path, layer) for layer in (0, 1)]
    for layer in layers:
        assert (layer.w1.shape, layer.w2.shape) == ((4, 256, 256), (4, 256, 128))
        assert (layer.w1_scale.shape, layer.w2_scale.shape) == ((4, 2, 2), (4, 2, 1))
        w1 = np.asarray(layer.w1).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        values = w1 * np.asarray(layer.w1_scale).repeat(128, 1).repeat(128, 2)
        assert values.std() == pytest.approx(1 / 16, rel=0.1)
    assert (np.asarray(layers[0].w1) != np.asarray(layers[1].w1)).mean() > 0.5


def test_other_numbers_of_sequences_are_seen():
    with pytest.raises(ValueError, match="zip"):
        vllm_engine.agreement(answer([1]), answer([1], [2]))


@pytest.mark.parametrize(
    ("log", "with_plugin"), [("no such line", True), ("INFO experts of cumoe: 256", False)]
)
def test_an_arm_that_is_the_other_one_is_seen(log, with_plugin):
    with pytest.raises(SystemExit, match="want an engine with"):
        vllm_engine.require_arm(log, with_plugin)
    vllm_engine.require_arm(log, not with_plugin)


def test_prompts_are_the_same_for_both_arms():
    assert vllm_engine.prompts(8) == vllm_engine.prompts(8)
    assert [len(p) for p in vllm_engine.prompts(8)] == [vllm_engine.PROMPT] * 8


def test_a_checkout_gets_an_entry_point(tmp_path):
    site = vllm_engine.entry_point(tmp_path)
    (found,) = metadata.distributions(path=[str(site)], name="cumoe")
    (plugin,) = found.entry_points
    assert (plugin.group, plugin.name) == ("vllm.general_plugins", "cumoe")
    assert plugin.value == "cumoe.vllm_plugin:register"


def child(code: str, tmp_path) -> vllm_engine.Engine:
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    (tmp_path / "log").write_text("last words")
    return vllm_engine.Engine(process, tmp_path / "log")


ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


def test_an_engine_answers_what_it_is_asked(tmp_path):
    engine = child(ECHO, tmp_path)
    assert engine.generate([[1, 2]], 3) == {"prompts": [[1, 2]], "count": 3, "logprobs": False}
    engine.process.communicate("")
    assert engine.process.returncode == 0


@pytest.mark.parametrize("code", ["", "import time; time.sleep(60)"])
def test_an_engine_that_ends_or_hangs_is_told_with_its_log(tmp_path, code):
    engine = child(code, tmp_path)
    with pytest.raises(SystemExit, match="the engine ended early:\nlast words"):
        engine.answer(0.2)
    engine.process.communicate()


def test_an_engine_that_died_between_two_questions_is_told(tmp_path):
    engine = child("", tmp_path)
    engine.process.wait()
    with pytest.raises(SystemExit, match="the engine ended early"):
        engine.generate([[1]], 1)
    engine.process.stdout.close()
    with suppress(BrokenPipeError):
        engine.process.stdin.close()


def test_what_an_engine_answers(monkeypatch):
    """With a vLLM that is made up."""
    asked = []

    class Engine:
        def generate(self, texts, how, use_tqdm):
            asked.append((texts, how))
            logprobs = [{7: SimpleNamespace(logprob=-0.5)}] if how.logprobs else None
            output = SimpleNamespace(token_ids=(7,), logprobs=logprobs)
            of_prompt = how.prompt_logprobs == 0 and [None, {2: SimpleNamespace(logprob=-3.0)}]
            return [SimpleNamespace(outputs=[output], prompt_logprobs=of_prompt)]

    params = SimpleNamespace(SamplingParams=lambda **named: SimpleNamespace(**named))
    monkeypatch.setitem(sys.modules, "vllm", params)
    for logprobs, want in ((True, [[-0.5]]), (False, [[]])):
        ask = {"prompts": [[1, 2]], "count": 1, "logprobs": logprobs}
        found = vllm_engine._generated(Engine(), ask)
        assert (found["ids"], found["logprobs"], found["seconds"] >= 0) == ([[7]], want, True)
        assert found["prompt_logprobs"] == ([[-3.0]] if logprobs else [[]])
    assert asked[0][0] == [{"prompt_token_ids": [1, 2]}]
