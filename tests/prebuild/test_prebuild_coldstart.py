"""The benchmark of a worker's first call runs, and compares what it says it compares."""

from __future__ import annotations

import json

from bench import coldstart


def test_prebuilt_workers_compile_nothing_and_start_sooner(tmp_path, capsys):
    out = tmp_path / "coldstart.json"
    coldstart.main(["--runs", "1", "--out", str(out)])
    results = json.loads(out.read_text())["results"]
    prebuilt, cold = results["prebuilt"], results["cold"]
    assert (prebuilt["compiled"], cold["disk_hits"]) == (0, 0)
    assert prebuilt["disk_hits"] == cold["compiled"] > 5
    assert prebuilt["on_top_s"] < cold["on_top_s"]
    parts = prebuilt["seconds"]
    assert prebuilt["on_top_s"] == parts["import cumoe"] + parts["first call"]
    assert {"import torch", "import cupy", "second call"} <= set(parts)
    assert capsys.readouterr().out.startswith("prebuilt  ")
