"""One cache for many: checkouts, environments, versions, compilers and users."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cumoe
from cumoe.plan.spec import kernel_spec
from cumoe.store import key, store
from tests.helpers import child
from tests.helpers.tiny_kernels import write_kernels

ROOT = Path(__file__).parents[2]
SPEC = kernel_spec("tiny", "sm_90a", A=5)
INSTALLED = """
import cumoe
from cumoe.plan.spec import kernel_spec
from cumoe.store import store
from tests.helpers.child import report
cubin = store.get(kernel_spec("tiny", "sm_90a", A=5))
report(data=cubin.data.hex(), compiled=store.stats().compiled, library=cumoe.__file__)
"""


def _install(folder: Path, kernels: str = "_kernels_src") -> Path:
    """A copy of the library with the tiny kernels, as a wheel has them, or a checkout."""
    package = folder / "cumoe"
    shutil.copytree(
        Path(cumoe.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    write_kernels(package / kernels)
    return folder


def _run(folder: Path, cache: Path) -> dict[str, Any]:
    """The tiny kernel by the library in this folder."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    started = child.start(INSTALLED, cwd=folder, PYTHONPATH=path, CUMOE_CACHE_DIR=str(cache))
    facts = child.result(started)
    assert Path(facts["library"]).is_relative_to(folder)
    return facts


@pytest.fixture
def first(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """An installed library, and what its first process did."""
    folder = _install(tmp_path / "venv/lib/site-packages")
    facts = _run(folder, tmp_path / "shared")
    assert facts["compiled"] == 1
    return folder, facts


def test_a_moved_environment_compiles_nothing(
    tmp_path: Path, first: tuple[Path, dict[str, Any]]
) -> None:
    (tmp_path / "venv").rename(tmp_path / "moved")
    facts = _run(tmp_path / "moved/lib/site-packages", tmp_path / "shared")
    assert (facts["compiled"], facts["data"]) == (0, first[1]["data"])


def test_a_checkout_elsewhere_shares(tmp_path: Path, first: tuple[Path, dict[str, Any]]) -> None:
    checkout = _install(tmp_path / "src/deeper", kernels="../kernels_src")
    facts = _run(checkout, tmp_path / "shared")
    assert (facts["compiled"], facts["data"]) == (0, first[1]["data"])


def _edit(file: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(package: Path) -> None:
        text = (package / file).read_text()
        assert old in text
        (package / file).write_text(text.replace(old, new))

    return edit


@pytest.mark.parametrize(
    ("edit", "compiled"),
    [
        pytest.param(_edit("_version.py", '= "', '= "9.'), 0, id="only the version"),
        pytest.param(_edit("store/locks.py", "30.0", "40.0"), 0, id="other Python code"),
        pytest.param(_edit("_kernels_src/tiny.cu", "+ A", "- A"), 1, id="the kernel"),
        pytest.param(_edit("_kernels_src/common/scale.cuh", "3.0f", "4.0f"), 1, id="a header"),
        pytest.param(_edit("store/flags.py", "-ftz=false", "-ftz=true"), 1, id="a flag"),
        pytest.param(_edit("store/key.py", "\nSCHEMA = ", "\nSCHEMA = 1"), 1, id="the schema"),
    ],
)
def test_another_version_shares_what_is_the_same(
    tmp_path: Path,
    first: tuple[Path, dict[str, Any]],
    edit: Callable[[Path], None],
    compiled: int,
) -> None:
    other = _install(tmp_path / "other")
    edit(other / "cumoe")
    assert _run(other, tmp_path / "shared")["compiled"] == compiled
    for folder in (other, first[0]):  # both versions find their own from now on
        assert _run(folder, tmp_path / "shared")["compiled"] == 0


def test_another_build_of_the_compiler_has_its_own_kernels(
    kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = set()
    for build in ("release 12.9, V12.9.86", "release 12.9, V12.9.87", "release 13.0, V13.0.48"):
        monkeypatch.setattr(key, "nvrtc_build", lambda build=build: build)
        for compiled in (1, 0):
            store.forget()
            keys.add(store.get(SPEC).key)
            assert store.stats().compiled == compiled
    assert len(keys) == 3


USER = """
import os, sys, warnings
from pathlib import Path
from cumoe.plan.spec import kernel_spec
from cumoe.store import nvrtc, source, store
from tests.helpers.child import report
source.kernels_root = lambda: Path(sys.argv[1])
nvrtc.nvrtc_build()
os.umask(int(sys.argv[3], 8))
os.setgid(100)
os.setuid(int(sys.argv[2]))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cubins = [store.get(kernel_spec("tiny", "sm_90a", A=int(a))) for a in sys.argv[4:]]
report(
    data=[cubin.data.hex() for cubin in cubins],
    compiled=store.stats().compiled,
    on_disk=[cubin.path is not None for cubin in cubins],
    warnings=len(caught),
)
"""


def _user(uid: int, umask: int, public: Path, *constants: int) -> dict[str, Any]:
    return child.result(
        child.start(
            USER, public / "kernels", uid, oct(umask)[2:], *constants,
            CUMOE_CACHE_DIR=str(public / "shared"),
        )
    )  # fmt: skip


@pytest.fixture
def shared(public: Path) -> Path:
    """A cache folder in which all may write, and kernels that all may read."""
    write_kernels(public / "kernels")
    (public / "shared").mkdir()
    (public / "shared").chmod(0o777)
    return public


@pytest.mark.parametrize(
    ("umask", "compiled", "warnings"),
    [
        pytest.param(0o022, 0, 0, id="the first lets others read"),
        pytest.param(0o000, 0, 0, id="and write"),
        pytest.param(0o077, 1, 1, id="neither"),
    ],
)
def test_a_second_user_finds_what_the_first_lets_him_read(
    shared: Path, umask: int, compiled: int, warnings: int
) -> None:
    one = _user(1001, umask, shared, 5)
    two = _user(1002, umask, shared, 5)
    assert (one["compiled"], one["on_disk"], one["warnings"]) == (1, [True], 0)
    assert two["data"] == one["data"]
    assert (two["compiled"], two["warnings"]) == (compiled, warnings)


def test_a_second_user_adds_kernels_of_his_own(shared: Path) -> None:
    _user(1001, 0o022, shared, *range(8))
    two = _user(1002, 0o022, shared, *range(16))
    assert two["compiled"] == 8
    assert two["warnings"] <= 1  # a folder of two hex digits may belong to the first user
    assert _user(1001, 0o022, shared, *range(16))["data"] == two["data"]
