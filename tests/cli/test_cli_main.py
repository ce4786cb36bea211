"""The command in this process: parsing, exit status and what is printed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import cumoe
from cumoe.checkpoint import run as checkpoint_run
from cumoe.checkpoint.demo import write_demo
from cumoe.cli import main, output, parser, values
from cumoe.errors import CumoeError


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    return write_demo(tmp_path_factory.mktemp("demo"))


def refuse(monkeypatch, error: BaseException) -> None:
    def run_layer(*_):
        raise error

    monkeypatch.setattr(checkpoint_run, "run_layer", run_layer)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (CumoeError("w1: wrong"), "cumoe: error: w1: wrong\n"),
        (PermissionError(13, "Permission denied", "f"), "cumoe: error: [Errno 13] Permission "),
        (MemoryError(), "cumoe: error: out of memory"),
        (KeyboardInterrupt(), "cumoe: error: interrupted\n"),
    ],
)
def test_a_users_trouble_is_one_line(monkeypatch, capsys, error, line):
    refuse(monkeypatch, error)
    assert main(["run", "x"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_a_fault_of_the_library_is_not_hidden(monkeypatch):
    refuse(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["run", "x"])


@pytest.mark.parametrize("as_json", [True, False])
def test_a_wrong_result_fails(monkeypatch, capsys, demo, as_json):
    right = cumoe.fused_experts_fp8

    def wrong(*args, **kwargs):
        out = np.array(right(*args, **kwargs))
        out[2] = np.nan
        return out

    monkeypatch.setattr(cumoe, "fused_experts_fp8", wrong)
    flags = ["--json"] if as_json else []
    assert main(["run", str(demo), "--tokens", "8", "--device", "cpu", *flags]) == 1
    out, err = capsys.readouterr()
    assert f"cumoe: error: {demo}: worst token against the reference: wanted" in err
    if as_json:
        report = json.loads(out)
        assert report["passed"] is False
        assert report["errors"]["max_row_error"] is None
        assert len(report["failures"]) == 3
    else:
        assert out.splitlines()[-1].split() == ["result", "FAILED"]


def test_options_reach_the_run(monkeypatch):
    seen = []

    def run_layer(path, options):
        seen.append((path, options))
        raise CumoeError("enough")

    monkeypatch.setattr(checkpoint_run, "run_layer", run_layer)
    line = (
        "run f --layer 3 --tokens 7 --seed 9 --swiglu-limit 2.5 --top-k 4 --router sigmoid "
        "--routed-scaling-factor -1.5 --scale-format ue8m0 --device cuda:1"
    )
    main(line.split())
    want = checkpoint_run.RunOptions(3, 7, 9, "cuda:1", 4, "sigmoid", -1.5, "ue8m0", 2.5)
    assert seen == [("f", want)]
    main(["run", "f"])
    assert seen[1] == ("f", checkpoint_run.RunOptions())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND; see cumoe --help"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["run"], "the following arguments are required: file; see cumoe run --help"),
        (["run", "f", "--bogus"], "unrecognized arguments: --bogus"),
        (["run", "f", "--layer", "-1"], "--layer: wanted an integer of at least 0, got '-1'"),
        (["run", "f", "--seed", "1.5"], "--seed: wanted an integer of at least 0, got '1.5'"),
        (["run", "f", "--top-k", "many"], "--top-k: wanted an integer of at least 1, got 'many'"),
        (["run", "f", "--tokens", "9" * 30], "--tokens: wanted an integer from 1 to 9999999"),
        (
            ["run", "f", "--seed", "9" * 20],
            "--seed: wanted an integer from 0 to 999999999999999999",
        ),
        (["run", "f", "--swiglu-limit", "0"], "--swiglu-limit: wanted a positive number or inf"),
        (["run", "f", "--swiglu-limit", "nan"], "--swiglu-limit: wanted a positive number or inf"),
        (["run", "f", "--swiglu-limit", "x"], "--swiglu-limit: wanted a number, got 'x'"),
        (["run", "f", "--routed-scaling-factor", "inf"], "wanted a finite number, got 'inf'"),
        (["run", "f", "--router", "relu"], "--router: invalid choice: 'relu'"),
        (["run", "f", "--scale-format", "fp16"], "--scale-format: invalid choice: 'fp16'"),
        (["run", "f", "--device", "gpu"], "--device: wanted auto, cpu, cuda or cuda:N, got 'gpu'"),
        (["demo", "x"], "unrecognized arguments: x"),
    ],
)
def test_usage_errors(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("cumoe: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_infinite_limit_and_devices_are_taken():
    parse = parser().parse_args
    assert parse(["run", "f", "--swiglu-limit", "inf"]).swiglu_limit == math.inf
    assert [values.device(d) for d in ("auto", "cpu", "cuda", "cuda:12")][3] == "cuda:12"


def test_a_terminal_gets_a_table(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    output.print_rows([("name", "a [bold] path"), ("other", "2")])
    out = capsys.readouterr().out
    assert "a [bold] path" in out
    assert len(out.splitlines()) == 2


def test_plain_lines_are_aligned(capsys):
    output.print_rows([("a", "1"), ("long", "2")])
    assert capsys.readouterr().out == "a     1\nlong  2\n"


def test_json_has_no_nan(capsys):
    output.print_json({"a": math.nan, "b": [math.inf, 1.5], "c": (True, "x")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": [True, "x"]}


@pytest.mark.parametrize(
    ("value", "text"), [(2.5, "2.5 s"), (1.0, "1 s"), (0.0123, "12.3 ms"), (45.6e-6, "45.6 us")]
)
def test_seconds(value, text):
    assert output.seconds(value) == text
