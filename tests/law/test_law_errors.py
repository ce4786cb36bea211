"""Every error says what was wanted, what came, and is tested."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cumoe import errors

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "cumoe").rglob("*.py"))
CLASSES = [name for name in errors.__all__ if name not in {"CumoeError", "CacheWarning"}]

# How a message says what was wanted, what came (an f-string's value is the caller's own), and what
# to do. Two of the three are the least: "want one of fp32, ue8m0, got x" needs no remedy.
WANTED = re.compile(
    r"\b(wants?|wanted|needs?|must|cannot|not|has no|only|missing|was initialised)\b"
)
CAME = re.compile(r"◊|\bgot\b")
REMEDY = re.compile(
    r"[;:,(] (or |and |then )?(pass|give|use|name|move|pad|split|call|load|install|reinstall|"
    r"update|declare|correct|start|allow|convert|check|see|make|report|leave|pip|\n)\b|\n    ◊"
)
PARTS = {"wanted": WANTED, "came": CAME, "remedy": REMEDY}


def constructions(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every place where an error of the library is made, with the name of its class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            if name in errors.__all__ and name != "CacheWarning":
                yield name, node


def literal(node: ast.expr) -> str:
    """The fixed words of a message; every value in it is a lozenge."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return literal(node.left) + literal(node.right)
    return "◊"


def faults(source: str) -> list[str]:
    """Errors that are made without saying enough."""
    found = []
    for name, call in constructions(ast.parse(source)):
        text = literal(call.args[0]) if call.args else ""
        if not re.search(r"[a-z]", text) and "◊" in text:  # put together from judged parts
            continue
        missing = [n for n, r in PARTS.items() if not r.search(text)]
        if len(missing) > 1:
            found.append(f"line {call.lineno}: {name} lacks {' and '.join(missing)}: {text!r}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_messages_say_what_was_wanted_what_came_and_what_to_do(path):
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("raise ArgumentError()", "lacks wanted and came and remedy"),
        ("raise ArgumentError('K is odd: {K}')", "lacks wanted and came and remedy"),
        ("raise ArgumentError(f'bad K {K}')", "lacks wanted and remedy"),
        ("raise ArgumentError('K: want a multiple of 128')", "lacks came and remedy"),
        ("raise ArgumentError(f'K: want a multiple of 128, got {K}')", None),
        ("raise DTypeError('x: must be bf16' + f', got {x}')", None),
        ("raise ArgumentError('expert_map: has no ids to map; pass topk_ids too')", None),
        ("raise CompileError(_message(log))", None),
    ],
)
def test_a_silent_error_is_seen(source, fault):
    found = faults(source)
    assert (found == []) if fault is None else any(fault in line for line in found)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_is_raised_and_tested(name):
    made = [
        p.name for p in FILES if any(n == name for n, _ in constructions(ast.parse(p.read_text())))
    ]
    assert made
    tests = "\n".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py"))
    assert re.search(rf"(raises\(\s*|wrong\(|error=){name}\b|\b{name}, ", tests), name


def test_the_classes_are_exported():
    import cumoe

    assert set(errors.__all__) <= set(cumoe.__all__)
    assert all(issubclass(getattr(errors, name), errors.CumoeError) for name in CLASSES)
