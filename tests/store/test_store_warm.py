"""The warm path: a kernel that this process has is one lookup, and touches nothing outside."""

from __future__ import annotations

import timeit
from pathlib import Path

import pytest

from cumoe.plan.spec import KernelSpec, kernel_spec
from cumoe.store import store
from tests.helpers import child

TRACE = """
import hashlib, os, sys
from pathlib import Path
from cumoe.plan.spec import kernel_spec
from cumoe.store import source, store
from tests.helpers.child import report

class Watched(dict):
    def __getitem__(self, name): seen.append("environ"); return super().__getitem__(name)
    def get(self, *args): seen.append("environ"); return super().get(*args)

def hashed(*args):
    seen.append("hash")
    return sha256(*args)

source.kernels_root = lambda: Path(sys.argv[1])
seen = []
os.environ = Watched(os.environ)
sha256, hashlib.sha256 = hashlib.sha256, hashed
sys.addaudithook(lambda event, args: seen.append(event))

def events(calls):
    seen.clear()
    for a in range(calls):
        store.get(kernel_spec("tiny", "sm_90a", A=5))
    return list(seen)

report(cold=events(1), warm=events(1000))
"""


@pytest.fixture
def large(kernels: Path) -> KernelSpec:
    """A spec with as many constants as any of the library's kernels has."""
    return kernel_spec("tiny", "sm_90a", A=5, **{f"CONSTANT_{i}": i for i in range(11)})


def test_a_lookup_takes_less_than_a_microsecond(cache: Path, large: KernelSpec) -> None:
    store.get(large)
    equal = kernel_spec(large.stem, large.arch, **dict(large.constants))  # not the same object
    for spec in (large, equal):
        best = min(timeit.repeat(lambda spec=spec: store.get(spec), number=1000, repeat=50))
        assert best / 1000 < 1e-6  # seconds; 0.3e-6 and 0.5e-6 on an idle core


def test_no_file_no_hash_no_environment(kernels: Path, cache: Path) -> None:
    facts = child.result(child.start(TRACE, kernels, CUMOE_CACHE_DIR=str(cache)))
    assert {"open", "fcntl.flock", "hash", "environ"} <= set(facts["cold"])  # else nothing is seen
    assert facts["warm"] == []
