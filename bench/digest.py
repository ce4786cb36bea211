"""What a GPU record vouches for: one digest per op.

A digest covers all that decides what runs on the GPU: the kernel's source with its includes, its
plan with the plans that it imports, the launcher and the compiler flags. Comments, docstrings and
layout do not count, so a record stays valid while only words change.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from cumoe.store.digest import source_digest
from cumoe.store.flags import nvrtc_flags
from cumoe.store.source import kernels_root

PACKAGE = Path(__file__).resolve().parent.parent / "cumoe"
LAUNCHER = (
    "launch/driver.py", "launch/module.py", "launch/run.py", "launch/tensor_map.py",
)  # fmt: skip
COMPOSED = "fused_experts_fp8"
"""The op without a kernel of its own: plans and sequences of launches."""
SEQUENCES = (
    "ops/fused_experts_fp8.py", "ops/_experts_inputs.py", "ops/moe_align_block_size.py",
)  # fmt: skip
"""What makes a problem of its arguments, and launches of its plan."""


def kernel_stems() -> list[str]:
    """The ops that have a kernel file."""
    return sorted(path.stem for path in kernels_root().glob("*.cu"))


def kernels_digest() -> dict[str, str]:
    """Digest of each op, by stem."""
    shared = [*_codes(LAUNCHER), " ".join(nvrtc_flags("sm_90a"))]
    digests = {
        stem: _digest(source_digest(stem), *_codes(plans(stem)), *shared) for stem in kernel_stems()
    }
    composed = _codes([*plans(COMPOSED), *SEQUENCES])
    digests[COMPOSED] = _digest(*composed, *digests.values())
    return digests


def plans(stem: str) -> list[str]:
    """Files of the op's plan and of all that it imports of that room, directly or not."""
    found: set[str] = set()
    new = {stem}
    while new:
        found |= new
        new = set().union(*(_imported_plans(_text(f"plan/{name}.py")) for name in new)) - found
    return [f"plan/{name}.py" for name in sorted(found)]


def _codes(files: Iterable[str]) -> list[str]:
    return [_code(_text(file)) for file in files]


def _text(file: str) -> str:
    return (PACKAGE / file).read_text()


@cache
def _imported_plans(text: str) -> set[str]:
    """Modules of that room that a module names, wherever the import stands."""
    modules = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {module.split(".")[2] for module in modules if module.startswith("cumoe.plan.")}


@cache
def _code(text: str) -> str:
    """A module as its syntax tree, docstrings dropped."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not _is_string(s)]  # type: ignore[attr-defined]
    return ast.dump(tree).replace(", type_params=[]", "")  # a field that 3.12 added


def _is_string(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _digest(*parts: str) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(f"{len(part)}:{part}".encode())
    return state.hexdigest()[:32]
