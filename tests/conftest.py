"""Fixtures and hooks. Nothing imports from here; helpers live in ``tests/helpers``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.backends import BACKENDS


@cache
def _gpu_missing() -> str | None:
    """Why GPU tests cannot run here, or None."""
    if shutil.which("nvidia-smi") is None:
        return "no NVIDIA driver on this machine"
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    return None if count else "no CUDA device on this machine"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", help="write the outcome of a GPU run to FILE")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """The proof of a run on a GPU: outcome, device, compilers, and digests of what ran."""
    if (path := config.getoption("--record")) is None:
        return
    from bench.environment import environment

    outcomes = ("passed", "failed", "error", "skipped")
    counts = {o: len(terminalreporter.stats.get(o, [])) for o in outcomes}
    counts["gpu_passed"] = sum("gpu" in r.keywords for r in terminalreporter.stats["passed"])
    record = {**environment(), "counts": counts}
    Path(path).write_text(json.dumps(record, indent=2) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and (reason := _gpu_missing()):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A skip is allowed for want of a GPU only: any other one is a failure."""
    report = yield
    if report.skipped and not item.get_closest_marker("gpu") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: skipped, although it needs no GPU: {report.longrepr}"
    return report


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20260911)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest):
    return request.param


@pytest.fixture(scope="session", autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels compiled by tests never touch the user's cache."""
    from cumoe import _settings

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUMOE_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        _settings.settings.cache_clear()
        yield
        _settings.settings.cache_clear()
