"""Listing, verifying and removing: what is old goes first, what is used stays."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cumoe.plan.spec import kernel_spec
from cumoe.store import disk, key, locks, manage, store
from tests.helpers import child

DAY = 86400.0
SIZE = 1000  # bytes of a cubin here


def _publish(root: Path, number: int, age_s: float = 0.0) -> Path:
    """An entry of kernel ``k-sm_90a-A=<number>``, last used `age_s` ago."""
    fields = (("schema", "1"), ("stem", "k"), ("arch", "sm_90a"), ("constants", f"A={number} B=2"))
    path = disk.publish(root, key.digest(fields), bytes([number]) * SIZE, fields)
    then = time.time() - age_s
    os.utime(path.with_suffix(".json"), (then, then))
    return path


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Entries last used 5, 4, 3, 2 and 1 days ago."""
    return [_publish(tmp_path, n, (5 - n) * DAY) for n in range(5)]


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    yield
    locks.let_go()


def _left(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_an_entry_says_what_it_is(tmp_path: Path) -> None:
    path = _publish(tmp_path, 7, 2 * DAY)
    (entry,) = manage.entries(tmp_path)
    assert (entry.path, entry.key) == (path, path.stem)
    assert (entry.kernel, entry.arch) == ("k-sm_90a-A=7-B=2", "sm_90a")
    assert entry.size == SIZE + path.with_suffix(".json").stat().st_size
    assert time.time() - entry.used == pytest.approx(2 * DAY, abs=60)
    assert time.time() - entry.created == pytest.approx(0, abs=60)


def test_the_name_is_that_of_the_kernel(kernels: Path, cache: Path) -> None:
    spec = kernel_spec("tiny", "sm_90a", A=-5, B=6)
    store.get(spec)
    assert [entry.kernel for entry in manage.entries(cache)] == [spec.text]


@pytest.mark.parametrize("text", [None, b"", b"[]", b'{"fields": {}}', b'{"fields": 1}', b"\xff"])
def test_an_entry_without_a_readable_manifest_is_listed(tmp_path: Path, text: bytes | None) -> None:
    manifest = _publish(tmp_path, 1).with_suffix(".json")
    manifest.unlink()
    if text is not None:
        manifest.write_bytes(text)
    (entry,) = manage.entries(tmp_path)
    assert (entry.kernel, entry.arch) == ("", "")
    assert entry.size == SIZE + len(text or b"")


def test_what_is_no_entry_is_not_listed(tmp_path: Path) -> None:
    path = _publish(tmp_path, 1)
    (tmp_path / "ab").mkdir()
    for name in ("README", f"ab/{path.name}", "ab/x.cubin", f"{path.parent.name}/.{path.name}.tmp"):
        (tmp_path / name).touch()
    assert [entry.path for entry in manage.entries(tmp_path)] == [path]
    assert list(manage.entries(tmp_path / "none")) == []


def test_verify_finds_exactly_the_damaged(tmp_path: Path, paths: list[Path]) -> None:
    os.truncate(paths[1], 10)
    paths[3].with_suffix(".json").write_bytes(paths[2].with_suffix(".json").read_bytes())
    paths[4].unlink()
    paths[4].mkdir()
    found = {entry.path: damage for entry, damage in manage.verify([tmp_path])}
    assert found == {
        paths[0]: "",
        paths[1]: f"10 bytes, not {SIZE}",
        paths[2]: "",
        paths[3]: "its SHA-256 differs from the manifest's",
        paths[4]: "it cannot be read",
    }


def test_verify_goes_through_all_folders(tmp_path: Path) -> None:
    paths = [_publish(tmp_path / name, 1) for name in ("a", "b")]
    roots = [tmp_path / name for name in ("a", "none", "b")]
    assert [entry.path for entry, _ in manage.verify(roots)] == paths


def test_the_least_recently_used_go_first(tmp_path: Path, paths: list[Path]) -> None:
    each = next(manage.entries(tmp_path)).size
    removal = manage.prune(tmp_path, max_size=2 * each + 1)
    assert [entry.path for entry in removal.removed] == paths[:3]
    assert removal.size == 2 * each
    assert [path for path in paths if path.exists()] == paths[3:]


def test_nothing_goes_while_there_is_room(tmp_path: Path, paths: list[Path]) -> None:
    before = _left(tmp_path)
    total = sum(entry.size for entry in manage.entries(tmp_path))
    assert manage.prune(tmp_path, max_size=total) == manage.Removal((), (), total)
    assert manage.prune(tmp_path, max_age_s=6 * DAY).removed == ()
    assert _left(tmp_path) == before


def test_the_age_counts_from_the_last_use(tmp_path: Path, paths: list[Path]) -> None:
    removal = manage.prune(tmp_path, max_age_s=3.5 * DAY)
    assert [entry.path for entry in removal.removed] == paths[:2]


def test_size_and_age_together(tmp_path: Path, paths: list[Path]) -> None:
    each = next(manage.entries(tmp_path)).size
    assert len(manage.prune(tmp_path, max_size=4 * each, max_age_s=3.5 * DAY).removed) == 2
    assert len(manage.prune(tmp_path, max_size=each, max_age_s=30 * DAY).removed) == 2


def test_what_is_used_stays_and_others_go_instead(tmp_path: Path, paths: list[Path]) -> None:
    each = next(manage.entries(tmp_path)).size
    locks.hold(paths[0])
    removal = manage.prune(tmp_path, max_size=2 * each)
    assert [entry.path for entry in removal.in_use] == [paths[0]]
    assert [entry.path for entry in removal.removed] == paths[1:4]
    assert disk.read(tmp_path, paths[0].stem).data is not None


def test_clean_leaves_nothing_but_what_is_used(tmp_path: Path, paths: list[Path]) -> None:
    paths[1].with_suffix(".lock").touch()
    locks.hold(paths[2])
    (tmp_path / "README").touch()
    removal = manage.clean(tmp_path)
    assert len(removal.removed) == 4
    kept = {paths[2].with_suffix(suffix) for suffix in (".cubin", ".json", ".lock")}
    assert set(_left(tmp_path)) == {tmp_path / "README", *kept}
    locks.let_go()
    assert len(manage.clean(tmp_path).removed) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["README"]


def test_clean_takes_old_strays_and_leaves_young_ones(tmp_path: Path) -> None:
    path = _publish(tmp_path, 1)
    for old in (True, False):
        folder = path.parent
        for stray in (folder / f".x{old}.tmp", folder / f"{'ab'[old] * 64}.json"):
            stray.touch()
            if old:
                os.utime(stray, (0, 0))
    manage.clean(tmp_path)
    assert [path.name for path in _left(tmp_path)] == [".xFalse.tmp", f"{'a' * 64}.json"]


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert manage.clean(tmp_path / "none") == manage.Removal((), (), 0)


def test_an_entry_of_another_user_is_kept(public: Path) -> None:
    path = _publish(public, 1)
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from cumoe.store import manage\n"
        "from tests.helpers.child import report\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "removal = manage.clean(Path(sys.argv[1]))\n"
        "report(removed=len(removal.removed), kept=len(removal.in_use))\n"
    )
    assert child.result(child.start(code, public)) == {"removed": 0, "kept": 1}
    assert disk.read(public, path.stem).data is not None


USER = """
import os, sys
from pathlib import Path
from cumoe.plan.spec import kernel_spec
from cumoe.store import source, store
from tests.helpers.child import at_barrier, report
source.kernels_root = lambda: Path(sys.argv[1])
SPEC = kernel_spec("tiny", "sm_90a", A=5)
path = store.get(SPEC).path
at_barrier()
report(there=path.exists())
"""


def test_what_a_running_process_loaded_or_compiled_stays(kernels: Path, cache: Path) -> None:
    for _ in ("compiled", "loaded"):
        user = child.start(USER, kernels, CUMOE_CACHE_DIR=str(cache))
        try:
            child.wait_ready(user)
            assert len(manage.clean(cache).in_use) == 1
            child.release([user])
            assert child.result(user) == {"there": True}
        finally:
            child.end(user)
    assert len(manage.clean(cache).removed) == 1


def test_processes_that_prune_and_compile_at_once_are_all_right(kernels: Path, cache: Path) -> None:
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from cumoe.plan.spec import kernel_spec\n"
        "from cumoe.store import source, store\n"
        "from tests.helpers.child import at_barrier, report\n"
        "source.kernels_root = lambda: Path(sys.argv[1])\n"
        "specs = [kernel_spec('tiny', 'sm_90a', A=a) for a in range(4)]\n"
        "at_barrier()\n"
        "lost = 0\n"
        "for _ in range(15):\n"
        "    cubins = [store.get(spec) for spec in specs]\n"
        "    lost += sum(not cubin.path.exists() for cubin in cubins)\n"
        "    store.forget()\n"
        "report(lost=lost)\n"
    )
    users = [child.start(code, kernels, CUMOE_CACHE_DIR=str(cache)) for _ in range(2)]
    try:
        for user in users:
            child.wait_ready(user)
        child.release(users)
        rounds = 0
        while any(user.poll() is None for user in users):
            manage.clean(cache)
            rounds += 1
        assert rounds > 10
        assert [child.result(user) for user in users] == [{"lost": 0}] * 2
    finally:
        for user in users:
            child.end(user)
