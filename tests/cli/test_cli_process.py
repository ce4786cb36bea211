"""The command as its users start it: a process, its output and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cumoe.checkpoint.demo import write_demo

WITHOUT_CUPY = (
    "import sys; sys.modules['cupy'] = None; from cumoe.cli import main; sys.exit(main())"
)


def cumoe(*arguments: str | Path, program: tuple[str, ...] = ("-m", "cumoe")):
    """Runs the command on a machine that shows no GPU."""
    root = Path(__file__).parents[2]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "CUMOE_ARCH": "", "PYTHONPATH": str(root)}
    return subprocess.run(
        [sys.executable, *program, *map(str, arguments)],
        capture_output=True, text=True, env=env, timeout=120,
    )  # fmt: skip


def one_error_line(done) -> str:
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("cumoe: error: ")
    return done.stderr


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    return write_demo(tmp_path_factory.mktemp("demo"))


def values(text: str) -> dict[str, str]:
    """The plain table: names and values, two spaces or more apart."""
    pairs = (line.split("  ", 1) for line in text.splitlines())
    return {name: value.strip() for name, value in pairs}


def test_demo_verifies_and_compiles_and_keeps_the_checkpoint(tmp_path):
    done = cumoe("demo", "--keep", tmp_path / "kept")
    assert (done.returncode, done.stderr) == (0, "")
    table = values(done.stdout)
    assert table["result"] == "ok"
    assert table["backend"] == "cpu (NumPy)"
    assert table["file"] == str(tmp_path / "kept" / "model.safetensors")
    number, _, arch, size, *_ = table["kernels"].split()
    assert int(number) > 3
    assert arch == "sm_90a,"
    assert int(size.replace(",", "")) > 10_000
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    again = cumoe("demo", "--keep", tmp_path / "kept")
    assert again.returncode == 1
    assert "wanted a folder without a checkpoint" in one_error_line(again)


def test_demo_with_a_cache_that_cannot_be_written_warns_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUMOE_CACHE_DIR", str(tmp_path / "file"))
    done = cumoe("demo")
    assert done.returncode == 0
    assert values(done.stdout)["result"] == "ok"
    assert done.stderr.startswith("cumoe: warning: ")
    assert f"compiled, but {tmp_path}/file cannot be written; name a" in done.stderr
    assert done.stderr.count("\n") == 1


def test_demo_with_kernels_that_do_not_compile_fails():
    spoil = (
        "import sys\nfrom cumoe.cli import main\nfrom cumoe.errors import CompileError\n"
        "from cumoe.store import store\n"
        "def refuse(spec): raise CompileError('NVRTC says no')\n"
        "store.lookup, store.build = lambda spec: None, refuse\nsys.exit(main())"
    )
    done = cumoe("demo", program=("-c", spoil))
    assert done.returncode == 1
    assert values(done.stdout)["result"] == "FAILED"
    assert " more kernels: NVRTC says no\n" in done.stderr
    assert done.stderr.count("\n") == 1


def test_demo_without_cupy_still_verifies_the_reference():
    done = cumoe("demo", program=("-c", WITHOUT_CUPY))
    assert (done.returncode, done.stderr) == (0, "")
    table = values(done.stdout)
    assert table["result"] == "ok"
    assert table["kernels"].startswith("not compiled: ")
    assert "pip install 'cumoe[cuda12]'" in table["kernels"]
    assert not Path(table["file"]).parent.exists()


def test_run_prints_json(demo):
    done = cumoe("run", demo.parent, "--json", "--tokens", 20, "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["passed"] is True
    assert report["failures"] == []
    assert (report["tokens"], report["backend"]) == (20, "cpu")
    assert report["config"]["num_experts"] == 8
    assert report["errors"]["sampled_tokens"] == 16
    assert 0.02 < report["errors"]["error_float64"] < 0.06


def test_run_prints_plain_lines_off_a_terminal(demo):
    done = cumoe("run", demo, "--swiglu-limit", "inf", "--scale-format", "ue8m0")
    assert (done.returncode, done.stderr) == (0, "")
    table = values(done.stdout)
    assert table["shapes"] == "x [64, 512], w1 [8, 512, 512], w2 [8, 512, 256]"
    assert table["activation"] == "SwiGLU, no limit"
    assert table["scale format"] == "ue8m0"
    assert "the backend is the reference" in table["error to reference"]
    assert "\x1b" not in done.stdout


def test_a_missing_file_is_one_line_and_status_1(tmp_path):
    done = cumoe("run", tmp_path / "gone.safetensors")
    assert done.returncode == 1
    assert "gone.safetensors: " in one_error_line(done)


def test_a_wrong_option_is_one_line_and_status_2(demo):
    done = cumoe("run", demo, "--tokens", "0")
    assert done.returncode == 2
    assert "argument --tokens: wanted an integer of at least 1, got '0'" in one_error_line(done)


def test_version_and_help():
    from cumoe._version import __version__

    assert cumoe("--version").stdout == f"cumoe {__version__}\n"
    done = cumoe("--help")
    assert done.returncode == 0
    assert "demo" in done.stdout
    assert "run" in done.stdout


def test_help_imports_neither_cupy_nor_torch_nor_rich():
    code = (
        "import sys\nfrom cumoe.cli import main\n"
        "try: main(['run', '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('cupy', 'torch', 'rich', 'safetensors') if m in sys.modules])"
    )
    assert cumoe(program=("-c", code)).stdout.splitlines()[-1] == "[]"


def test_a_reader_that_has_enough_is_no_error():
    """As in ``cumoe prebuild --list | head -1``."""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", "from cumoe.cli import main; import sys; sys.exit(main())",
         "prebuild", "--list"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 1
