"""The examples do what they say: workers that never compile, and an image with its kernels."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(line: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUMOE_", "CUPY_"))}
    return subprocess.run(
        line, env=kept | {"PYTHONPATH": str(ROOT)} | env, capture_output=True, text=True, cwd=ROOT
    )


def test_workers_that_were_spawned_after_prebuild_compile_nothing(tmp_path):
    script = str(EXAMPLES / "prebuild_before_spawn.py")
    done = run([sys.executable, script, "--workers", "4"], CUMOE_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    parent, header, *rows = done.stdout.splitlines()
    built = int(re.match(r"parent: (\d+) built, 0 cached", parent)[1])
    assert built == len(list(tmp_path.rglob("*.cubin"))) > 7
    assert header.startswith("rank  device  compiled  from disk")
    cells = [row.split() for row in rows]
    assert [int(rank) for rank, *_ in cells] == [0, 1, 2, 3]
    assert {compiled for _, _, compiled, *_ in cells} == {"0"}
    assert all(int(disk_hits) == built for _, _, _, disk_hits, *_ in cells)
    assert len({total for *_, total in cells}) == 1


def instructions(text: str) -> list[tuple[str, str]]:
    """Keyword and rest of each instruction of a Dockerfile, comments left out."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(" ", 1)) for line in joined.splitlines()]


@pytest.fixture
def image(tmp_path):
    """The commands of the Dockerfile run in order, /opt and /tmp being folders of the test."""
    env: dict[str, str] = {}
    ran = []
    for keyword, rest in instructions((EXAMPLES / "Dockerfile.prebuild").read_text()):
        rest = re.sub(r"(?<==)/(?=opt|tmp)", f"{tmp_path}/", rest)
        if keyword == "ENV":
            name, value = rest.split("=", 1)
            env[name] = value
        elif keyword == "RUN" and "pip install" not in rest:
            *assignments, command = re.fullmatch(r"((?:\w+=\S+ )*)(.+)", rest).groups()
            extra = dict(a.split("=", 1) for a in assignments[0].split())
            program, *arguments = shlex.split(command)
            assert program == "cumoe"
            done = run([sys.executable, "-m", "cumoe", *arguments], **env, **extra)
            assert (done.returncode, done.stderr) == (0, "")
            ran.append(arguments)
    return env, ran


def test_the_image_brings_its_kernels_and_its_workers_only_read(image, tmp_path):
    env, ran = image
    assert [arguments[0] for arguments in ran] == ["prebuild", "cache"]
    again = run([sys.executable, "-m", "cumoe", *ran[0], "--json"], **env)
    report = json.loads(again.stdout)
    assert (report["built"], report["failed"]) == (0, 0)
    assert report["cached"] > 7
    missing = (
        "from cumoe.plan.spec import parse_spec; from cumoe.store import store\n"
        "store.get(parse_spec('moe_align_block_size-sm_90a-IDS=1-MAP=0-NUM_LOCAL_EXPERTS=99'))"
    )
    done = run([sys.executable, "-c", missing], **env)
    assert "KernelNotBuiltError" in done.stderr
    assert "cumoe prebuild --kernel moe_align_block_size-sm_90a-" in done.stderr
    assert list((tmp_path / "tmp").rglob("*.cubin")) == []
    doctor = run([sys.executable, "-m", "cumoe", "doctor"], **env)
    assert (doctor.returncode, doctor.stderr) == (0, "")
