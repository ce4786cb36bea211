"""The command line of the benchmarks, with measurements that are made up."""

from __future__ import annotations

import json

import pytest

from bench import __main__ as command
from bench import activation, coldstart, environment, experts, stress

WHERE = {"device": "D", "driver": "1", "nvrtc": "13", "torch": "2", "kernels_digest": {"a": "b"}}


def parse(*words: str):
    return command.parser().parse_args(words)


def test_the_options_of_experts():
    found = parse(
        "experts", "--shape", "glm-5.3-tp8,e8-top2-k512-n256", "--m", "1,512", "--peers", "vllm",
        "--routing", "zipf,one", "--scale-format", "fp32,ue8m0", "--out", "x.json", "--keep",
    )  # fmt: skip
    assert found.shape == ["glm-5.3-tp8", "e8-top2-k512-n256"]
    assert (found.m, found.routing) == ([1, 512], ["zipf", "one"])
    assert found.peers == ["vllm-triton", "vllm-deepgemm", "vllm-marlin"]
    assert (found.scale_format, found.out.name, found.keep) == (["fp32", "ue8m0"], "x.json", True)


def test_what_is_measured_without_options():
    found = parse("experts")
    assert (found.shape, found.routing) == (["glm-5.3-tp8"], ["uniform"])
    assert (found.scale_format, found.m[0], found.m[-1], found.keep) == (["fp32"], 1, 4096, False)
    assert parse("activation").shape is None
    assert parse("activation").peers == ["vllm-two-kernel", "vllm-fused", "vllm-quant"]


def test_the_options_of_stress():
    found = parse("stress")
    assert (found.m, found.peers) == ([1, 2, 4, 8, 16, 32, 64, 128, 256], ["vllm-triton"])
    assert parse("stress", "--m", "512", "--peers", "none").m == [512]


def test_no_peers_or_some():
    assert parse("experts", "--peers", "none").peers == []
    assert parse("experts", "--peers", "vllm-marlin").peers == ["vllm-marlin"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("experts", "--shape", "glm-9"), "shape: want one of glm-5.3-tp8"),
        (("experts", "--m", "1,0"), "want a number of tokens above 0, got '0'"),
        (("experts", "--m", "1,,2"), "want a number of tokens above 0, got ''"),
        (("experts", "--routing", "even"), "want one of uniform, zipf, one, round-robin"),
        (("experts", "--peers", "sglang"), "want one of vllm-triton"),
        (("plot", "x.json"), "--out"),
        (("speed",), "invalid choice: 'speed'"),
        ((), "WHAT"),
    ],
)
def test_what_is_not_an_option_is_told(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def row(m: int, us: float) -> dict:
    return {
        "op": "fused_experts_fp8", "shape": "s", "m": m, "routing": "uniform", "limit": None,
        "scale_format": "fp32", "us": us, "p20": us, "p80": us, "floor_us": us / 2,
        "read_only_us": us, "host_us": 1.0, "tflops": 1.0, "tbytes_s": 1.0, "active": 8.0,
        "peers": {"vllm-triton": 2 * us},
    }  # fmt: skip


@pytest.fixture
def measured(monkeypatch):
    """What the measurement is asked for; it answers with a row for each number of tokens."""
    asked = []

    def run(arguments):
        asked.append(arguments)
        yield from (row(m, 10.0 * m) for m in arguments.m)

    monkeypatch.setattr(experts, "run", run)
    monkeypatch.setattr(environment, "environment", lambda: dict(WHERE))
    return asked


def test_rows_are_written_and_shown(measured, tmp_path, capsys):
    out = tmp_path / "experts.json"
    line = ["experts", "--m", "1,4", "--peers", "none", "--out", str(out)]
    assert command.main(line) == 0
    assert measured[0].m == [1, 4]
    assert json.loads(out.read_text()) == {
        "environment": WHERE,
        "rows": [row(1, 10.0), row(4, 40.0)],
    }
    text = capsys.readouterr().out
    assert "s M=4 uniform: 40.00 us, reads 40.00, vllm-triton 80.00" in text
    assert "vllm-triton: 2.00x our time, the geometric mean of 2 rows" in text


def test_a_stress_table_is_written_and_its_losses_told(monkeypatch, measured, tmp_path, capsys):
    slow = {**row(4, 10.0), "routing": "one", "peers": {"vllm-triton": 9.0}}
    monkeypatch.setattr(stress, "run", lambda arguments: iter([row(1, 10.0), slow]))
    out = tmp_path / "stress.json"
    assert command.main(["stress", "--out", str(out)]) == 0
    assert [r["m"] for r in json.loads(out.read_text())["rows"]] == [1, 4]
    assert "vllm-triton: faster than ours in 1 rows: s M=4 one (0.90x)" in capsys.readouterr().out


def test_a_second_run_keeps_the_rows_of_the_first(measured, tmp_path):
    out = tmp_path / "experts.json"
    for tokens in ("1,4", "4,8"):
        command.main(["experts", "--m", tokens, "--peers", "none", "--keep", "--out", str(out)])
    assert [r["m"] for r in json.loads(out.read_text())["rows"]] == [1, 4, 8]


def test_a_wrong_row_makes_the_command_fail(monkeypatch, measured, tmp_path, capsys):
    key = ("op", "shape", "m", "routing", "scale_format")
    wrong = {k: row(2, 1.0)[k] for k in key} | {"error": "row error 1.0e-01: not timed"}
    monkeypatch.setattr(experts, "run", lambda arguments: iter([wrong, row(4, 10.0)]))
    out = tmp_path / "experts.json"
    assert command.main(["experts", "--peers", "none", "--out", str(out)]) == 1
    assert json.loads(out.read_text())["failed"] == [wrong]
    assert "s M=2 uniform: row error 1.0e-01: not timed" in capsys.readouterr().out


def test_installed_peers_are_named_in_the_record(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(command.peers, "versions", lambda: {"vllm": "0.26.0"})
    out = tmp_path / "experts.json"
    command.main(["experts", "--m", "1", "--out", str(out)])
    assert json.loads(out.read_text())["environment"]["peers"] == {"vllm": "0.26.0"}


def test_plot_reads_a_record(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("bench.plot.draw", lambda *call: drawn.append(call))
    record = tmp_path / "r.json"
    record.write_text('{"environment": {}, "rows": []}')
    assert command.main(["plot", str(record), "--out", "x.png"]) == 0
    ((content, out),) = drawn
    assert (content, out.name) == ({"environment": {}, "rows": []}, "x.png")


def test_coldstart_has_its_own_options(monkeypatch):
    monkeypatch.setattr(coldstart, "main", lambda words: 7 if words == ["--runs", "2"] else 0)
    assert command.main(["coldstart", "--runs", "2"]) == 7


def test_the_activation_of_layers():
    names = ["glm-5.3-tp8", "deepseek-v4-flash-ep8"]
    found = list(activation.layer_cases(names, [1, 16]))
    assert [(c.H, c.rows, c.filter) for c in found] == [
        (256, 8, None),
        (256, 128, None),
        (2048, 6, "map"),
        (2048, 96, "map"),
    ]
