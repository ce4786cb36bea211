"""``cumoe prebuild``: options, progress, output and exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cumoe.cli import main
from cumoe.errors import ArgumentError
from cumoe.models import known_models
from cumoe.prebuild import BuiltKernel, PrebuildReport

GOOD = BuiltKernel("a-sm_90a-A=1", "built", 1000, 0.5)
KNOWN = BuiltKernel("b-sm_90a", "cached", 2000, 0.0001)
BAD = BuiltKernel("c-sm_90a", "failed", 0, 0.1, "NVRTC 12.9 cannot compile c.cu\nc.cu(1): error")


@pytest.fixture
def prebuild(monkeypatch):
    """Stands for the function; `calls` are its arguments, `kernels` what becomes of them."""

    class Fake:
        kernels = (GOOD, KNOWN)
        calls: list[dict] = []  # noqa: RUF012

        def __call__(self, *, progress, **options):
            self.calls.append(options)
            for kernel in self.kernels if progress else ():
                progress(kernel, len(self.kernels))
            return PrebuildReport(Path("/cache"), ("sm_90a",), self.kernels, 1.5)

    fake = Fake()
    fake.calls = []
    monkeypatch.setattr(sys.modules["cumoe.prebuild"], "prebuild", fake)
    return fake


def test_options_reach_the_function(prebuild):
    line = (
        "prebuild --model glm-5.3 --model kimi-k2 --config c --kernel k --hidden 256 "
        "--intermediate 128 --experts 4 --top-k 2 --swiglu-limit 7 --swiglu-alpha 1.7 "
        "--swiglu-beta 1 --scale-format both --tp 4 --tp 8 --ep 2 --pad --all "
        "--arch sm_90a,sm_89 --jobs 3"
    )
    assert main(line.split()) == 0
    assert prebuild.calls == [
        {
            "model": ["glm-5.3", "kimi-k2"], "config": ["c"], "kernel": ["k"], "hidden": 256,
            "intermediate": 128, "experts": 4, "top_k": 2, "swiglu_limit": 7.0,
            "swiglu_alpha": 1.7, "swiglu_beta": 1.0, "scale_format": "both", "tp": [4, 8],
            "ep": [2], "pad": True, "everything": True, "arch": "sm_90a,sm_89", "jobs": 3,
        }
    ]  # fmt: skip


def test_options_left_out_are_left_to_the_function(prebuild):
    assert main(["prebuild", "--model", "glm-5.3"]) == 0
    (call,) = prebuild.calls
    assert call == {
        "model": ["glm-5.3"], "kernel": [], "everything": False, "arch": None, "jobs": None,
        "pad": False,
    }  # fmt: skip


def test_plain_lines_off_a_terminal(prebuild, capsys):
    assert main(["prebuild", "--model", "glm-5.3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.split() for line in out.splitlines()] == [
        ["built", "500", "ms", "a-sm_90a-A=1"],
        ["cached", "100", "us", "b-sm_90a"],
        ["cache", "/cache"],
        ["arch", "sm_90a"],
        ["kernels", "1", "built,", "1", "cached,", "0", "failed"],
        ["size", "3,000", "bytes"],
        ["time", "1.5", "s"],
        ["result", "ok"],
    ]


def test_a_bar_on_a_terminal(prebuild, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["prebuild", "--model", "glm-5.3"]) == 0
    out = capsys.readouterr().out
    assert "built     500 ms" not in out
    assert "1 built, 1 cached, 0 failed" in out


def test_a_failure_shows_its_log_and_status_1(prebuild, capsys):
    prebuild.kernels = (GOOD, BAD)
    assert main(["prebuild", "--model", "glm-5.3"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].split() == ["result", "FAILED"]
    assert err == f"cumoe: error: {BAD.name}: {BAD.log}\n"


def test_equal_causes_are_one_line(prebuild, capsys):
    prebuild.kernels = tuple(BuiltKernel(f"k-sm_90a-A={a}", "failed", 9, 1, "no") for a in range(3))
    assert main(["prebuild", "--model", "glm-5.3"]) == 1
    assert capsys.readouterr().err == "cumoe: error: k-sm_90a-A=0 and 2 more kernels: no\n"


@pytest.mark.parametrize("kernels", [(GOOD, KNOWN), (GOOD, BAD)])
def test_json(prebuild, capsys, kernels):
    prebuild.kernels = kernels
    assert main(["prebuild", "--model", "glm-5.3", "--json"]) == (kernels[1] is BAD)
    report = json.loads(capsys.readouterr().out)
    assert report["cache"] == "/cache"
    assert (report["built"], report["cached"] + report["failed"]) == (1, 1)
    assert report["kernels"][0] == {
        "name": "a-sm_90a-A=1", "state": "built", "num_bytes": 1000, "seconds": 0.5, "log": "",
    }  # fmt: skip


def test_list_names_models_and_sources(capsys, prebuild):
    assert main(["prebuild", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("glm-5.3 ")
    assert "E=288 topk=8 K=4096 N=2048, limit 10, fp32 or ue8m0 scales  https://" in lines[1]
    assert prebuild.calls == []


@pytest.mark.parametrize("names", [["kimi-k2"], ["Kimi-K2", "glm-5.3"]])
def test_list_of_some_models(capsys, prebuild, names):
    line = ["prebuild", "--list", *(word for name in names for word in ("--model", name))]
    assert main(line) == 0
    listed = [text.split()[0] for text in capsys.readouterr().out.splitlines()]
    assert listed == [name.lower() for name in names]
    assert main([*line, "--json"]) == 0
    assert [m["name"] for m in json.loads(capsys.readouterr().out)["models"]] == listed
    assert prebuild.calls == []


def test_list_of_an_unknown_model_is_status_2(capsys):
    assert main(["prebuild", "--list", "--model", "gpt"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("cumoe: error: model: want one of glm-5.3")


def test_list_as_json(capsys, prebuild):
    assert main(["prebuild", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["models"]
    assert [model["name"] for model in listed] == list(known_models())
    assert listed[0]["hidden_size"] == 6144


def test_trouble_is_one_line(monkeypatch, capsys):
    def refuse(**_):
        raise ArgumentError("qwen3-235b: want N a multiple of 128")

    monkeypatch.setattr(sys.modules["cumoe.prebuild"], "prebuild", refuse)
    assert main(["prebuild", "--model", "qwen3-235b", "--tp", "8"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "cumoe: error: qwen3-235b: want N a multiple of 128\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "0"], "--tp: wanted an integer of at least 1, got '0'"),
        (["--jobs", "x"], "--jobs: wanted an integer of at least 1, got 'x'"),
        (["--scale-format", "fp16"], "--scale-format: invalid choice: 'fp16'"),
        (["glm-5.3"], "unrecognized arguments: glm-5.3"),
    ],
)
def test_usage_errors(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(["prebuild", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "prebuild: want a model, a config, sizes or a kernel"),
        (["--model", "gpt"], "model: want one of glm-5.3"),
        (["--model", "glm-5.3", "--arch", "sm_1"], "arch (--arch): want one of sm_89"),
        (["--model", "glm-5.3", "--arch", ""], "arch (--arch): want one of sm_89"),
        (["--model", "glm-5.3", "--tp", "3"], "tp: want a divisor of glm-5.3's"),
        (["--model", "glm-5.3", "--hidden", "512"], "got hidden alone beside model"),
    ],
)
def test_names_and_sizes_that_cannot_be_used_are_status_2(capsys, arguments, message):
    assert main(["prebuild", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("cumoe: error: ")
    assert message in err
    assert err.count("\n") == 1
