"""The GPU record in the tree vouches for the kernels in the tree."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.digest import kernels_digest

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "h200"
PENDING = RESULTS / "pending.md"


def untested(recorded: dict[str, str], current: dict[str, str], pending: str) -> list[str]:
    """Ops whose code is not the code that was recorded, and that `pending` does not own up to."""
    changed = [stem for stem in current if recorded.get(stem) != current[stem]]
    return [stem for stem in changed if stem not in pending]


def named_current(pending: str) -> set[str]:
    """The records that its first paragraph, after the title, says are of the code as it is."""
    paragraphs = pending.split("\n\n")
    return set(re.findall(r"`(\w+)\.json`", "".join(paragraphs[1:2])))


RECORDS = sorted(path.stem for path in RESULTS.glob("*.json"))


@pytest.mark.parametrize("name", RECORDS)
def test_record_is_of_these_kernels(name):
    record = json.loads((RESULTS / f"{name}.json").read_text())
    recorded = record.get("environment", record)["kernels_digest"]
    pending = PENDING.read_text() if PENDING.exists() else ""
    excused = "" if name in named_current(pending) else pending
    assert untested(recorded, kernels_digest(), excused) == []


def test_every_record_is_checked():
    assert {
        "tests", "sanitizer", "coldstart", "activation", "activation_sweep", "bitwise", "experts",
        "host", "stress", "vllm",
    } <= set(RECORDS)  # fmt: skip


def test_record_is_of_a_run_that_passed():
    record = json.loads((RESULTS / "tests.json").read_text())
    counts = record["counts"]
    assert (counts["failed"], counts["error"]) == (0, 0)
    assert counts["gpu_passed"] > 100
    assert "H200" in record["device"]


def test_sanitizers_found_nothing():
    errors = json.loads((RESULTS / "sanitizer.json").read_text())["errors"]
    assert errors == {"memcheck": 0, "racecheck": 0, "synccheck": 0}


@pytest.mark.parametrize(
    ("recorded", "pending", "expected"),
    [
        ({"a": "1", "b": "2"}, "", []),
        ({"a": "1", "b": "3"}, "", ["b"]),
        ({"a": "1"}, "", ["b"]),
        ({"a": "1", "b": "3"}, "- b: no GPU was free", []),
    ],
)
def test_a_changed_kernel_is_seen(recorded, pending, expected):
    assert untested(recorded, {"a": "1", "b": "2"}, pending) == expected


def test_a_record_that_is_said_to_be_current_is_not_excused():
    pending = "# Title\n\n`tests.json` and\n`a_b.json` are new.\n\n`old.json` is not.\n\n- a: new"
    assert named_current(pending) == {"tests", "a_b"}
    assert named_current("") == set()
