"""The rooms and who may enter which: data flows ops -> arrays -> plan -> store -> launch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "cumoe"

# What each room may import of cumoe, besides itself and errors.
ROOMS = {
    "arrays": {"errors"},
    "plan": {"errors"},
    "store": {"errors", "plan", "_settings"},
    "launch": {"errors", "plan", "arrays", "store", "_settings"},
    "reference": {"errors"},
    "ops": {"errors", "plan", "arrays", "launch", "reference", "_settings"},
}
# Third-party modules that only some rooms may import.
RESERVED = {"cupy": {"launch", "store"}, "torch": {"launch", "arrays"}}


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def forbidden(room: str, names: set[str]) -> list[str]:
    """Those imports that the room may not have."""
    allowed = {room, *ROOMS[room]}
    own = [n for n in names if n.startswith("cumoe.") and n.split(".")[1] not in allowed]
    third = [n for n in names if room not in RESERVED.get(n.split(".")[0], {room})]
    return sorted(own + third)


def files(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_they_may(room):
    found = {path.name: forbidden(room, imports(path)) for path in files(room)}
    assert {name: names for name, names in found.items() if names} == {}


def test_plan_needs_the_standard_library_only():
    for path in files("plan"):
        names = imports(path)
        assert not [n for n in names if n.split(".")[0] in {"numpy", "os", "cupy", "torch"}], path


def test_the_environment_is_read_in_one_file():
    readers = [p.name for p in PACKAGE.rglob("*.py") if "os.environ" in p.read_text()]
    assert readers == ["_settings.py"]


def test_a_forbidden_import_is_seen():
    assert forbidden("plan", {"cumoe.launch.run", "cumoe.plan.spec"}) == ["cumoe.launch.run"]
    assert forbidden("plan", {"cupy.cuda"}) == ["cupy.cuda"]
