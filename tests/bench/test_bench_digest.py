"""What a GPU record vouches for: every file that decides what runs changes a digest."""

from __future__ import annotations

import shutil
from functools import cache

import pytest

from bench import digest
from bench.digest import COMPOSED, LAUNCHER, SEQUENCES, kernel_stems, kernels_digest, plans
from tests.helpers import child

LOADED = """
import importlib, sys, types

package = sys.modules["cumoe"] = types.ModuleType("cumoe")  # whose __init__ imports every plan
package.__path__ = [sys.argv[1]]
from tests.helpers.child import report

loaded = {}
for stem in sys.argv[2:]:
    for name in [n for n in sys.modules if n.startswith("cumoe.plan")]:
        del sys.modules[name]
    importlib.import_module(f"cumoe.plan.{stem}")
    loaded[stem] = sorted(n.split(".")[2] for n in sys.modules if n.startswith("cumoe.plan."))
report(**loaded)
"""


kernel = cache(digest.source_digest)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the package that can be changed."""
    copy = tmp_path / "cumoe"
    shutil.copytree(digest.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(digest, "PACKAGE", copy)
    monkeypatch.setattr(digest, "source_digest", kernel)  # which no test here changes
    return copy


def changed(package, file: str, text: str) -> set[str]:
    """The ops whose digest is another one when `text` is added to a file."""
    before, path = kernels_digest(), package / file
    path.write_text(path.read_text() + text)
    after = kernels_digest()
    return {stem for stem in before if after[stem] != before[stem]}


def test_the_plans_of_an_op_are_those_that_python_loads_with_it():
    stems = [*kernel_stems(), COMPOSED]
    loaded = child.result(child.start(LOADED, digest.PACKAGE, *stems))
    assert {stem: [f"plan/{name}.py" for name in loaded[stem]] for stem in stems} == {
        stem: plans(stem) for stem in stems
    }


@pytest.mark.parametrize("file", [*plans(COMPOSED), *SEQUENCES, *LAUNCHER])
def test_a_change_in_a_file_changes_the_digests_of_the_ops_that_use_it(package, file):
    users = {stem for stem in kernel_stems() if file in [*plans(stem), *LAUNCHER]}
    assert changed(package, file, "\nCHANGED = 1\n") == {*users, COMPOSED}


@pytest.mark.parametrize(
    ("file", "users"),
    [
        ("plan/spec.py", {*kernel_stems()}),
        ("plan/small_table.py", {"moe_gate_up_tiny_fp8", "moe_down_tiny_fp8"}),
        ("plan/experts_decode.py", set()),
        ("ops/_experts_inputs.py", set()),
    ],
)
def test_which_ops_use_a_file(package, file, users):
    assert changed(package, file, "\nCHANGED = 1\n") == {*users, COMPOSED}


def test_words_change_no_digest(package):
    assert changed(package, "plan/spec.py", '\n# A comment.\n"""A word."""\n') == set()


def test_what_decides_nothing_on_a_gpu_is_in_no_digest(package):
    assert changed(package, "plan/enumerate.py", "\nCHANGED = 1\n") == set()
