"""Every file call of the store fails once, in every way: results stay right, warnings few."""

from __future__ import annotations

import ast
import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from cumoe.errors import CacheWarning
from cumoe.plan.spec import kernel_spec
from cumoe.store import disk, locks, manage, nvrtc, store
from tests.helpers.faults import Fault, FileCalls, failing, failing_late

SPEC = kernel_spec("tiny", "sm_90a", A=5)
MODULES = (disk, locks, manage)
ERRORS = (
    errno.EIO, errno.ESTALE, errno.EBUSY, errno.EINTR, errno.ENOSPC, errno.EDQUOT, errno.EACCES,
    errno.EROFS, errno.ENOENT, errno.ENOLCK,
)  # fmt: skip
FAULTS = [failing(e) for e in ERRORS] + [failing_late(e) for e in ERRORS]
Scene = Callable[[Path], None]


@pytest.fixture
def bytes_of_spec(kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What SPEC compiles to; from then on the compiler costs nothing."""
    data = store.get(SPEC).data
    monkeypatch.setattr(nvrtc, "compile", lambda *args: data)
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # slow, and no power fails here
    manage.clean(cache)
    return data


def _cold(root: Path) -> None:
    store.forget()
    manage.clean(root)


def _on_disk(root: Path) -> None:
    _cold(root)
    store.get(SPEC)
    store.forget()


def _damaged(root: Path) -> None:
    _on_disk(root)
    os.truncate(next(root.rglob("*.cubin")), 100)


def _with_stray(root: Path) -> None:
    _cold(root)
    (root / "ab").mkdir(parents=True, exist_ok=True)
    (root / "ab/.x.tmp").touch()
    os.utime(root / "ab/.x.tmp", (0, 0))


def _get(calls: FileCalls) -> tuple[bytes, int]:
    """What get returns while the calls are counted, and the number of warnings."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calls.install(MODULES, patch.setattr)
        data = store.get(SPEC).data
        assert {w.category for w in caught} <= {CacheWarning}
    return data, len(caught)


@pytest.mark.parametrize("scene", [_cold, _on_disk, _damaged, _with_stray])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_a_failing_call_costs_at_most_a_warning(
    bytes_of_spec: bytes, cache: Path, scene: Scene, lasting: bool
) -> None:
    scene(cache)
    calls = FileCalls()
    assert _get(calls) == (bytes_of_spec, 0)
    for number in range(len(calls.names)):
        for fault in FAULTS:
            _check(bytes_of_spec, cache, scene, fault, number, lasting)


def _check(
    wanted: bytes, cache: Path, scene: Scene, fault: Fault, number: int, lasting: bool
) -> None:
    """A faulty process, and a sound one after it."""
    scene(cache)
    data, warned = _get(FileCalls(fault, lambda n: n >= number if lasting else n == number))
    assert data == wanted
    assert warned <= 1
    found = disk.read(cache, next(iter(store._memory.values())).key)
    assert found.data in (None, wanted)
    store.forget()
    assert _get(FileCalls()) == (wanted, 0)


def test_the_calls_that_fail_are_all_that_there_are(bytes_of_spec: bytes, cache: Path) -> None:
    names: set[str] = set()
    for scene in (_cold, _on_disk, _damaged, _with_stray):
        scene(cache)
        calls = FileCalls()
        _get(calls)
        names |= set(calls.names)
    assert names >= {
        "open", "read", "write", "fsync", "close", "replace", "unlink", "makedirs", "listdir",
        "stat", "fstat", "utime", "flock",
    }  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_files_are_touched_by_functions_of_os_and_fcntl_alone(module: object) -> None:
    """Else a call would escape the tests above."""
    tree = ast.parse(Path(module.__file__).read_text())  # type: ignore[attr-defined]
    assert _strays(tree) == []


def _strays(tree: ast.AST) -> list[str]:
    """Calls of `open`, and of methods by which a Path touches files."""
    methods = {name for name in dir(Path) if callable(getattr(Path, name)) and name[0] != "_"}
    pure = {"with_suffix", "with_name", "is_relative_to", "relative_to", "joinpath", "match"}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        f = node.func
        if isinstance(f, ast.Name) and f.id == "open":
            found.append("open")
        if isinstance(f, ast.Attribute) and f.attr in methods - pure and not _is_module(f.value):
            found.append(f.attr)
    return found


def _is_module(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in {"os", "disk"}


def test_a_stray_call_is_seen() -> None:
    assert _strays(ast.parse("open(p); p.read_bytes(); os.stat(p); p.with_suffix('.x')")) == [
        "open", "read_bytes",
    ]  # fmt: skip


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_pruning_never_fails_and_never_takes_what_is_used(
    bytes_of_spec: bytes, cache: Path, lasting: bool
) -> None:
    def scene() -> Path:
        store.forget()
        _with_stray(cache)
        path = store.get(SPEC).path
        assert path is not None
        return path

    path = scene()
    calls = FileCalls()
    with pytest.MonkeyPatch.context() as patch:
        calls.install(MODULES, patch.setattr)
        assert [entry.path for entry in manage.clean(cache).in_use] == [path]
    for number in range(len(calls.names)):
        for fault in (failing(errno.EIO), failing_late(errno.ESTALE), failing(errno.ENOLCK)):
            path = scene()
            faulty = FileCalls(fault, lambda n, k=number: n >= k if lasting else n == k)
            with pytest.MonkeyPatch.context() as patch:
                faulty.install(MODULES, patch.setattr)
                assert manage.clean(cache).removed == ()
            assert path.exists()
