"""``cumoe cache``: what each action prints, changes and returns."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cumoe import _settings
from cumoe.cli import main, output, values
from cumoe.plan.device import H200
from cumoe.plan.enumerate import layer_specs
from cumoe.plan.spec import kernel_spec
from cumoe.store import disk, key, locks, store

SPEC = kernel_spec("moe_sum", "sm_90a", A=1)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A writable folder with three kernels and a read-only one with a fourth."""
    monkeypatch.setenv("CUMOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUMOE_CACHE_PATH", str(tmp_path / "image"))
    monkeypatch.setattr(_settings, "settings", _settings.settings.__wrapped__)
    monkeypatch.setattr(store, "settings", _settings.settings)
    for age, number in enumerate((1, 2, 3)):
        path = publish(tmp_path / "cache", number)
        then = time.time() - age * 86400
        os.utime(path.with_suffix(".json"), (then, then))
    publish(tmp_path / "image", 4)
    yield tmp_path / "cache"
    locks.let_go()


def publish(root: Path, number: int) -> Path:
    fields = (
        ("schema", str(key.SCHEMA)), ("stem", "moe_sum"), ("arch", "sm_90a"),
        ("constants", f"A={number}"),
    )  # fmt: skip
    return disk.publish(root, key.digest(fields), bytes(1000), fields)


def run(capsys, *arguments: object) -> tuple[int, str]:
    """Status and output of ``cumoe cache``, which says nothing on stderr."""
    status = main(["cache", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert err == ""
    return status, out


def run_json(capsys, *arguments: object):
    status, out = run(capsys, *arguments, "--json")
    assert status == 0
    return json.loads(out)


def cubins(root: Path) -> list[Path]:
    return sorted(root.rglob("*.cubin"))


def test_path_prints_the_writable_folder_first(cache, capsys, tmp_path):
    assert run(capsys, "path") == (0, f"{cache}\n{tmp_path / 'image'}\n")
    assert run_json(capsys, "path") == {
        "writable": str(cache),
        "read_only": [str(tmp_path / "image")],
    }


def test_list_prints_each_kernel_by_folder(cache, capsys, tmp_path):
    status, out = run(capsys, "list")
    lines = out.splitlines()
    assert status == 0
    assert lines[0].startswith(f"{cache}: 3 kernels, ")
    assert lines[1].split() == ["bytes", "age", "last", "use", "kernel"]
    assert [line.split()[-1] for line in lines[2:5]] == [f"moe_sum-sm_90a-A={n}" for n in (1, 2, 3)]
    assert lines[3].split()[2:6] == ["s", "24", "h", "moe_sum-sm_90a-A=2"]
    assert lines[5].startswith(f"{tmp_path / 'image'}: 1 kernel, ")
    assert "\x1b" not in out


def test_list_as_json(cache, capsys, tmp_path):
    folders = run_json(capsys, "list")["folders"]
    assert list(folders) == [str(cache), str(tmp_path / "image")]
    third = folders[str(cache)][2]
    assert third["kernel"] == "moe_sum-sm_90a-A=3"
    assert third["arch"] == "sm_90a"
    assert Path(third["file"]) in cubins(cache)
    assert third["bytes"] > 1000
    assert third["last_use_s"] == pytest.approx(2 * 86400, abs=60)
    assert 0 <= third["age_s"] < 60


def test_list_names_what_has_no_manifest_by_its_file(cache, capsys):
    for path in cubins(cache):
        path.with_suffix(".json").unlink()
    assert f"(no readable manifest) {cubins(cache)[0].name}\n" in run(capsys, "list")[1]


def test_explain_a_miss_beside_the_nearest(cache, capsys):
    status, out = run(capsys, "explain", "moe_sum-sm_90a-A=9")
    lines = out.splitlines()
    assert status == 0
    assert lines[0].startswith("moe_sum-sm_90a-A=9: miss; nearest is moe_sum-sm_90a-A=")
    assert lines[1].split() == ["field", "wanted", "there"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert rows["constants"][0] == "A=9"
    assert rows["source"][1:] == ["nothing"]
    assert len(rows["source"][0]) == 12


def test_explain_as_json(cache, capsys):
    (found,) = run_json(capsys, "explain", "moe_sum-sm_90a-A=9")["kernels"]
    assert found["kernel"] == "moe_sum-sm_90a-A=9"
    assert (found["hit"], found["file"], found["damaged"]) == (False, None, [])
    assert Path(found["nearest"]).is_file()
    assert {"label", "wanted", "found"} == set(found["differences"][0])
    fields = key.fields(kernel_spec("moe_sum", "sm_90a", A=9))
    assert found["key"] == key.digest(fields)


def test_explain_a_hit_damage_and_a_stranger(cache, capsys):
    fields = key.fields(SPEC)
    path = disk.publish(cache, key.digest(fields), b"cubin", fields)
    assert run(capsys, "explain", SPEC.text)[1] == f"{SPEC.text}: hit, {path}\n"
    assert run_json(capsys, "explain", SPEC.text)["kernels"][0]["file"] == str(path)
    os.truncate(path, 1)
    out = run(capsys, "explain", SPEC.text)[1]
    assert out.splitlines() == [
        f"{SPEC.text}: miss",
        f"  damaged, so it is compiled anew: {path}: 1 bytes, not 5",
    ]
    disk.entry_path(cache, path.stem).unlink()
    out = run(capsys, "explain", "moe_gemm_fp8-sm_90a")[1]
    assert out == "moe_gemm_fp8-sm_90a: miss; there is no kernel of moe_gemm_fp8 in any folder\n"


def test_verify(cache, capsys):
    assert run(capsys, "verify") == (0, "4 kernels verified, 0 damaged\n")
    damaged = cubins(cache)[0]
    os.truncate(damaged, 3)
    for flags in ([], ["--json"]):
        assert main(["cache", "verify", *flags]) == 1
        out, err = capsys.readouterr()
        assert err.startswith(f"cumoe: error: {damaged}: 3 bytes, not 1000; ")
        assert err.count("\n") == 1
    assert json.loads(out) == {
        "verified": 4,
        "damaged": [{"file": str(damaged), "damage": "3 bytes, not 1000"}],
    }


def test_prune_by_age_and_by_size(cache, capsys, tmp_path):
    done = run_json(capsys, "prune", "--max-age", "36h")
    assert (len(done["removed"]), done["in_use"]) == (1, [])
    assert done["freed"] > 1000
    out = run(capsys, "prune", "--max-size", "2K")[1]
    assert out.splitlines()[0].split()[:3] == ["removed", "1", "kernel,"]
    assert len(cubins(cache)) == 1
    assert len(cubins(tmp_path / "image")) == 1


def test_clean_leaves_what_is_used_and_other_folders(cache, capsys, tmp_path):
    used = cubins(cache)[1]
    locks.hold(used)
    assert run_json(capsys, "clean")["in_use"] == [str(used)]
    assert cubins(cache) == [used]
    locks.let_go()
    assert run(capsys, "clean")[1].splitlines()[2].split() == ["left", "0", "bytes"]
    assert cubins(cache) == []
    assert len(cubins(tmp_path / "image")) == 1


def test_export_and_import(cache, capsys, tmp_path, monkeypatch):
    file = tmp_path / "kernels.tar"
    assert "4 kernels, " in run(capsys, "export", file)[1]
    assert run_json(capsys, "export", file)["kernels"] == 4
    assert run_json(capsys, "import", file)["kept"] == 3
    monkeypatch.setenv("CUMOE_CACHE_DIR", str(tmp_path / "new"))
    out = run(capsys, "import", file)[1]
    assert out.splitlines()[1].split()[:3] == ["added", "4", "kernels,"]
    assert len(cubins(tmp_path / "new")) == 4


def test_export_says_what_it_leaves_out(cache, capsys, tmp_path):
    damaged = cubins(cache)[0]
    os.truncate(damaged, 3)
    out = run(capsys, "export", tmp_path / "f.tar")[1]
    assert out.splitlines()[-1].split() == ["left", "out", str(damaged)]
    assert run_json(capsys, "export", tmp_path / "f.tar")["left_out"] == [str(damaged)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "gone.tar"], "gone.tar: wanted an exported cache that can be read, got: No s"),
        (["import", "/"], "/: wanted an exported cache that can be read, got: it is no regular"),
        (["import", __file__], "wanted an exported cache, got no whole tar file"),
        (["export", "/nowhere/f.tar"], "/nowhere/f.tar: wanted a file that can be written, got: "),
    ],
)
def test_failures_are_one_line(cache, capsys, arguments, message):
    assert main(["cache", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("cumoe: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert ".tmp" not in err


def test_a_pipe_is_not_waited_for(cache, capsys, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert main(["cache", "import", str(tmp_path / "pipe")]) == 1
    assert "got: it is no regular file; check the path" in capsys.readouterr().err


def test_import_into_what_cannot_be_written_names_the_folder(cache, capsys, tmp_path, monkeypatch):
    file = tmp_path / "kernels.tar"
    run(capsys, "export", file)
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below"
    monkeypatch.setenv("CUMOE_CACHE_DIR", str(folder))
    assert main(["cache", "import", str(file)]) == 1
    assert capsys.readouterr().err == (
        f"cumoe: error: {folder}: wanted a cache folder that can be written, got: Not a directory; "
        "name one in CUMOE_CACHE_DIR\n"
    )


@pytest.mark.parametrize(
    "action", [["list"], ["verify"], ["prune", "--max-age", "1d"], ["clean"], ["export", "f.tar"]]
)
def test_a_file_where_the_folder_should_be_is_named(cache, capsys, tmp_path, monkeypatch, action):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUMOE_CACHE_DIR", str(tmp_path / "file"))
    assert main(["cache", *action]) == 0
    assert capsys.readouterr().err == (
        f"cumoe: warning: {tmp_path}/file: wanted a folder of kernels, got: Not a directory; name "
        "another in CUMOE_CACHE_DIR\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: ACTION; see cumoe cache --help"),
        (["wash"], "invalid choice: 'wash'"),
        (["prune"], "one of the arguments --max-size and --max-age is required"),
        (["prune", "--max-size", "2X"], "--max-size: wanted a size as 500M or 2G, got '2X'"),
        (["prune", "--max-size", "-1"], "--max-size: wanted a size as 500M or 2G, got '-1'"),
        (["prune", "--max-age", "30"], "--max-age: wanted an age as 30d or 12h, got '30'"),
        (["explain"], "the following arguments are required: KERNEL"),
        (["explain", "nonsense"], "wanted its name as stem-arch-A=1-B=2, each constant once, got"),
        (["export"], "the following arguments are required: file"),
    ],
)
def test_usage_errors(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(["cache", *arguments])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("cumoe: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_sizes_and_ages():
    assert [values.size(t) for t in ("0", "12", "3K", "500M", "2G", "1T")] == [
        0, 12, 3072, 500 << 20, 2 << 30, 1 << 40,
    ]  # fmt: skip
    assert [values.age(t) for t in ("9s", "2m", "12h", "30d")] == [9, 120, 43200, 30 * 86400]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.4, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7199, "119 min"),
        (7200, "2 h"),
        (200000, "2 d"),
    ],
)
def test_durations(value, text):
    assert output.duration(value) == text


def test_a_terminal_gets_a_table(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    output.print_columns(("a", "b"), [("[bold]", "2")])
    out = capsys.readouterr().out
    assert "[bold]" in out
    assert len(out.splitlines()) == 2


def test_the_command_of_the_error_builds_what_was_missing(tmp_path):
    """As a user would: the first call fails, the command it names is run, the next call works."""
    spec = next(
        spec
        for spec in layer_specs(H200, K=512, N=256, num_experts=8, topk=2)
        if spec.stem == "moe_sum"
    )
    call = (
        "import sys\n"
        "from cumoe.plan.spec import parse_spec\n"
        "from cumoe.store import store\n"
        "print(store.get(parse_spec(sys.argv[1])).path)\n"
    )
    env = {"CUMOE_CACHE_DIR": str(tmp_path / "new"), "CUMOE_DISABLE_JIT": "1"}
    first = process("-c", call, spec.text, **env)
    assert first.returncode == 1
    (command,) = (line[4:] for line in first.stderr.splitlines() if line.startswith("    cumoe "))
    built = process("-m", *shlex.split(command), **env)
    assert (built.returncode, built.stderr) == (0, "")
    again = process("-c", call, spec.text, **env)
    assert again.returncode == 0
    assert Path(again.stdout.strip()).is_relative_to(tmp_path / "new")


def process(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, in an environment of its own."""
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        timeout=60,
    )  # fmt: skip


def test_listing_needs_no_compiler(cache):
    code = (
        "import sys\n"
        "sys.modules['cupy'] = None\n"
        "from cumoe.cli import main\n"
        "sys.exit(main(['cache', 'list']))\n"
    )
    done = process("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{cache}: 3 kernels")
