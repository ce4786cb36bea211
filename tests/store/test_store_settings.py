"""Environment variables: what each may be, when they are read, and the log they ask for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cumoe import _settings
from cumoe.errors import ArgumentError
from tests.helpers import child


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has read no variable yet, and finds none."""
    for name in list(os.environ):
        if name.startswith("CUMOE_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(_settings, "settings", _settings.settings.__wrapped__)


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _settings.settings() == _settings.Settings(
        cache_dir=tmp_path / "cumoe",
        cache_path=(),
        disable_jit=False,
        arch=None,
        log=None,
        fused_act_quant=True,
        vllm=True,
    )


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/a/home")
    monkeypatch.setenv("CUMOE_CACHE_DIR", "~/kernels")
    monkeypatch.setenv("CUMOE_CACHE_PATH", os.pathsep.join(["/one", "", "two/three", "~/four"]))
    found = _settings.settings()
    assert found.cache_dir == Path("/a/home/kernels")
    assert found.cache_path == (Path("/one"), tmp_path / "two/three", Path("/a/home/four"))


def test_a_user_without_a_home_gets_no_folder_called_tilde(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import platformdirs

    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda *a, **k: "~/.cache/cumoe")
    with pytest.raises(NotADirectoryError):
        _settings.settings().cache_dir.mkdir(parents=True)


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("True", True), ("0", False), ("false", False)]
)
def test_switches(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    for name, default in (("disable_jit", False), ("fused_act_quant", True), ("vllm", True)):
        monkeypatch.setenv(f"CUMOE_{name.upper()}", text)
        assert getattr(_settings.settings(), name) is value
        monkeypatch.setenv(f"CUMOE_{name.upper()}", "")
        assert getattr(_settings.settings(), name) is default


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("CUMOE_DISABLE_JIT", "yse", "CUMOE_DISABLE_JIT: wanted 1 or 0, got 'yse'"),
        ("CUMOE_FUSED_ACT_QUANT", "2", "CUMOE_FUSED_ACT_QUANT: wanted 1 or 0, got '2'"),
        ("CUMOE_LOG", "loud", "CUMOE_LOG: wanted one of debug, info, .*, got 'loud'; set one"),
    ],
)
def test_a_wrong_value_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ArgumentError, match=message):
        _settings.settings()


def test_nothing_is_read_at_import_and_each_variable_once() -> None:
    code = (
        "import os\n"
        "os.environ['CUMOE_LOG'] = 'nonsense'\n"
        "import cumoe, cumoe.store.store\n"
        "from cumoe._settings import settings\n"
        "os.environ['CUMOE_LOG'] = ''\n"
        "first = settings()\n"
        "os.environ['CUMOE_LOG'] = 'nonsense'\n"
        "from tests.helpers.child import report\n"
        "report(same=settings() is first)\n"
    )
    assert child.result(child.start(code)) == {"same": True}


@pytest.mark.parametrize(("level", "shown"), [("", 0), ("info", 1), ("WARNING", 0), ("debug", 2)])
def test_the_log_goes_to_stderr_from_its_level_up(level: str, shown: int) -> None:
    process = child.start(
        "import logging\n"
        "from cumoe import _settings\n"
        "for _ in range(2):\n"
        "    _settings.settings()\n"
        "    _settings.settings.cache_clear()\n"
        "logging.getLogger('cumoe').info('told')\n"
        "logging.getLogger('cumoe').debug('whispered')\n",
        CUMOE_LOG=level,
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert err.count("cumoe[") == err.count("\n") == shown
    assert err.count("told") == min(shown, 1)
