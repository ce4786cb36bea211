"""get, lookup and build in one process: memory, disk, compiler, and what goes wrong."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cumoe.errors import CacheWarning, CompileError
from cumoe.plan.spec import KernelSpec, kernel_spec
from cumoe.store import disk, locks, nvrtc, source, store
from tests.helpers import child
from tests.helpers.tiny_kernels import TINY, write_kernels

SPEC = kernel_spec("tiny", "sm_90a", A=5)
OTHER = kernel_spec("tiny", "sm_90a", A=6)
BAD = kernel_spec("tiny", "sm_90a")  # A is not defined


def _tallies() -> tuple[int, int, int, int]:
    now = store.stats()
    return now.compiled, now.disk_hits, now.memory_hits, now.damaged


def test_first_compiles_then_memory_then_disk(kernels: Path, cache: Path) -> None:
    made = store.get(SPEC)
    assert made.data.startswith(b"\x7fELF")
    assert made.path == disk.entry_path(cache, made.key)
    assert made.path.read_bytes() == made.data
    assert _tallies() == (1, 0, 0, 0)
    assert store.stats().compile_s > 0
    assert store.get(kernel_spec("tiny", "sm_90a", A=5)) is made
    assert _tallies() == (1, 0, 1, 0)
    store.forget()
    assert store.get(SPEC) == made
    assert _tallies() == (0, 1, 0, 0)


def test_constants_make_other_kernels(kernels: Path, cache: Path) -> None:
    assert store.get(SPEC).data != store.get(OTHER).data


def test_an_edited_source_is_compiled_anew(kernels: Path, cache: Path) -> None:
    before = store.get(SPEC)
    (kernels / "tiny.cu").write_text(TINY.replace("+ A", "- A"))
    store.forget()
    after = store.get(SPEC)
    assert _tallies() == (1, 0, 0, 0)
    assert after.data != before.data


def test_what_is_hashed_is_what_is_compiled(
    kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit while get() runs must not put the bytes of one text under the key of another."""
    wanted = store.get(SPEC)
    store.forget()
    cache.rename(cache.with_name("aside"))

    def read_then_edit(spec: KernelSpec) -> str:
        text = source.read_source(spec)
        (kernels / "tiny.cu").write_text(TINY.replace("+ A", "- A"))
        return text

    monkeypatch.setattr(store, "read_source", read_then_edit)
    assert store.get(SPEC) == wanted


def test_own_bytes_are_used_not_read_back(
    kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = disk.publish

    def publish_and_damage(*args: object) -> Path:
        path = publish(*args)  # type: ignore[arg-type]
        path.write_bytes(b"other")
        return path

    monkeypatch.setattr(disk, "publish", publish_and_damage)
    assert store.get(SPEC).data.startswith(b"\x7fELF")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: os.truncate(path, path.stat().st_size - 1), id="one less"),
        pytest.param(lambda path: os.truncate(path, 1 << 16), id="longer"),
        pytest.param(lambda path: path.with_suffix(".json").write_text("{"), id="half a manifest"),
    ],
)
def test_damage_is_a_miss_and_is_mended(
    kernels: Path, cache: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    good, other = store.get(SPEC), store.get(OTHER)
    assert good.path is not None
    damage(good.path)
    store.forget()
    assert store.lookup(SPEC) is None
    assert _tallies() == (0, 0, 0, 0)
    assert store.get(SPEC) == good
    assert _tallies() == (1, 0, 0, 1)
    assert good.path.name in caplog.text
    store.forget()
    assert store.get(SPEC) == good
    assert store.get(OTHER) == other
    assert _tallies() == (0, 2, 0, 0)


def test_compile_error_is_raised_each_time_and_caches_nothing(kernels: Path, cache: Path) -> None:
    for _ in range(2):
        with pytest.raises(CompileError) as caught:
            store.get(BAD)
        assert 'tiny.cu(4): error: identifier "A" is undefined' in caught.value.log
    assert [path.suffix for path in cache.rglob("*") if path.is_file()] == [".lock"]
    assert _tallies() == (0, 0, 0, 0)


def test_one_line_of_log_per_compile(
    kernels: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "cumoe"):
        store.get(SPEC)
        store.get(SPEC)
        store.forget()
        store.get(SPEC)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"compiled {SPEC.text} in ")


def test_lookup_compiles_nothing(kernels: Path, cache: Path) -> None:
    assert store.lookup(SPEC) is None
    assert not cache.exists()
    made = store.get(SPEC)
    assert store.lookup(SPEC) is made
    store.forget()
    assert store.lookup(SPEC) == made
    assert store.lookup(SPEC) is store.get(SPEC)
    assert _tallies() == (0, 1, 2, 0)


def test_lookup_waits_for_nobody(kernels: Path, cache: Path) -> None:
    key = store.get(SPEC).key
    store.forget()
    with locks.compiling(disk.entry_path(cache, key), "k"):
        start = time.monotonic()
        assert store.lookup(SPEC) is not None
        assert time.monotonic() - start < 1


def test_sixteen_threads_compile_once(kernels: Path, cache: Path) -> None:
    barrier = threading.Barrier(16)

    def get(_: int) -> store.Cubin:
        barrier.wait()
        return store.get(SPEC)

    with ThreadPoolExecutor(16) as pool:
        cubins = list(pool.map(get, range(16)))
    assert all(cubin is cubins[0] for cubin in cubins)
    assert _tallies() == (1, 0, 15, 0)


def test_threads_with_other_kernels_do_not_wait(
    kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = nvrtc.compile
    both = threading.Barrier(2, timeout=20)

    def meet_then_compile(*args: object) -> bytes:
        both.wait()  # breaks if the second compile waits for the first
        return compiler(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(nvrtc, "compile", meet_then_compile)
    with ThreadPoolExecutor(2) as pool:
        cubins = list(pool.map(store.build, [SPEC, OTHER]))
    assert [cubin.spec for cubin in cubins] == [SPEC, OTHER]


def _warned_about(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if w.category is CacheWarning]


def test_a_root_that_cannot_be_made_warns_once(
    kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {spec: store.get(spec).data for spec in (SPEC, OTHER)}
    store.forget()
    cache.rename(cache.with_name("aside"))
    cache.write_text("a regular file")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cubins = {spec: store.get(spec) for spec in wanted}
        assert store.get(SPEC) is cubins[SPEC]
    assert {spec: cubin.data for spec, cubin in cubins.items()} == wanted
    assert [cubin.path for cubin in cubins.values()] == [None, None]
    assert _tallies() == (2, 0, 1, 0)
    (message,) = _warned_about(caught)
    assert str(cache) in message
    assert "CUMOE_CACHE_DIR" in message


READ_ONLY = """
import os, sys, warnings
from pathlib import Path
from cumoe.plan.spec import kernel_spec
from cumoe.store import nvrtc, source, store
from tests.helpers.child import report
source.kernels_root = lambda: Path(sys.argv[1])
nvrtc.nvrtc_build()
if os.geteuid() == 0:
    os.setuid(65534)  # root would write in spite of the mode
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    cubins = [store.get(kernel_spec("tiny", "sm_90a", A=a)) for a in (5, 6, 7)]
report(
    data=[cubin.data.hex() for cubin in cubins],
    on_disk=[cubin.path is not None for cubin in cubins],
    warned=[w.category.__name__ for w in caught],
    compiled=store.stats().compiled,
)
"""


def test_a_read_only_root_serves_what_it_has_and_warns_once() -> None:
    with tempfile.TemporaryDirectory() as name:  # tmp_path is closed to other users
        folder = Path(name)
        folder.chmod(0o755)
        kernels = write_kernels(folder / "kernels")
        cache = folder / "cache"
        writable = child.result(
            child.start(
                "from cumoe.plan.spec import kernel_spec\n"
                "from cumoe.store import source, store\n"
                "from pathlib import Path\n"
                "import sys\n"
                "from tests.helpers.child import report\n"
                "source.kernels_root = lambda: Path(sys.argv[1])\n"
                "get = lambda a: store.get(kernel_spec('tiny', 'sm_90a', A=a)).data.hex()\n"
                "report(data=[get(5)])\n",
                kernels,
                CUMOE_CACHE_DIR=str(cache),
            )
        )
        before = sorted(cache.rglob("*"))
        for path in (*before, cache):
            path.chmod(0o555 if path.is_dir() else 0o444)
        facts = child.result(child.start(READ_ONLY, kernels, CUMOE_CACHE_DIR=str(cache)))
        assert sorted(cache.rglob("*")) == before
        for path in (cache, *before):
            path.chmod(0o755)
    assert facts["data"][0] == writable["data"][0]
    assert len(set(facts["data"])) == 3
    assert facts["on_disk"] == [True, False, False]
    assert facts["warned"] == ["CacheWarning"]
    assert facts["compiled"] == 2


def test_a_lock_that_is_never_released_is_waited_for_and_then_ignored(
    kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = store.get(SPEC)
    assert made.path is not None
    made.path.unlink()
    store.forget()
    monkeypatch.setattr(locks, "LOCK_TIMEOUT_S", 0.3)
    with caplog.at_level(logging.INFO, "cumoe"), locks.compiling(made.path, "holder"):
        start = time.monotonic()
        assert store.get(SPEC) == made
        assert 0.3 <= time.monotonic() - start < 5
    assert f"another process compiles {SPEC.text}: waiting up to 0.3 s" in caplog.text
    assert re.search(r"held for 0\.3\d* s; compiling .* all the same", caplog.text)


def test_strays_of_dead_processes_are_swept(kernels: Path, cache: Path) -> None:
    stray = cache / "ab" / ".x.cubin.0.tmp"
    stray.parent.mkdir(parents=True)
    stray.touch()
    os.utime(stray, (0, 0))
    store.get(SPEC)
    assert not stray.exists()


def test_counters_are_a_copy(kernels: Path, cache: Path) -> None:
    before = store.stats()
    store.get(SPEC)
    assert before.compiled == 0
    assert store.stats().compiled == 1


def test_cubin_is_immutable(kernels: Path, cache: Path) -> None:
    cubin = store.get(SPEC)
    with pytest.raises(AttributeError):
        cubin.data = b""  # type: ignore[misc]
    assert isinstance(cubin.spec, KernelSpec)
