"""Builds killed by SIGKILL at any moment: the next process is right, and hardly later."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cumoe.store import store
from tests.helpers import child
from tests.store.scenes import SPEC

LATER_S = 1.0


@pytest.fixture
def sha256(kernels: Path, cache: Path) -> str:
    return hashlib.sha256(store.get(SPEC).data).hexdigest()


def _scene(name: str, *args: object) -> dict[str, Any]:
    scene = child.start(f"from tests.store.scenes import {name}; {name}()", *args)
    try:
        return child.result(scene)
    finally:
        child.end(scene)


def _check(rounds: list[dict[str, Any]], sha256: str, normal_s: float) -> None:
    """Each next process had the right bytes in time, and left a whole entry."""
    for facts in rounds:
        assert facts["sha256"] == sha256
        assert facts["whole"]
        assert facts["damaged"] == 0
        assert facts["compiled"] == (".cubin" not in facts["left"])
        assert facts["seconds"] < normal_s + LATER_S


def test_fifty_random_moments(kernels: Path, tmp_path: Path, sha256: str) -> None:
    facts = _scene("killed_at_random", kernels, tmp_path / "caches", 50)
    rounds = facts["rounds"]
    _check(rounds, sha256, facts["normal_s"])
    assert len(rounds) == 50
    states = Counter(" ".join(round_["left"]) for round_ in rounds)
    assert len(states) >= 3, states  # else the moments were all alike
    assert sum(round_["killed"] for round_ in rounds) >= 25
    assert any(".tmp" in state for state in states), states


def test_before_within_and_after_each_file_call(kernels: Path, tmp_path: Path, sha256: str) -> None:
    facts = _scene("killed_at_each_call", kernels, tmp_path / "caches")
    assert {"flock", "open", "write", "fsync", "replace", "unlink"} <= set(facts["names"])
    assert all(round_["killed"] for round_ in facts["rounds"])
    _check(facts["rounds"], sha256, 0.0)
    states = {" ".join(round_["left"]) for round_ in facts["rounds"]}
    assert states >= {
        "",
        ".lock",
        ".json.tmp .lock",
        ".cubin.tmp .json.tmp .lock",
        ".cubin.tmp .json .lock",
        ".cubin .json .lock",
    }
