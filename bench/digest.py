"""What a GPU record vouches for: one digest per op.

A digest covers all that decides what runs on the GPU: the kernel's source with its includes, its
plan, the launcher and the compiler flags. Comments, docstrings and layout do not count, so a record
stays valid while only words change.
"""

from __future__ import annotations

import ast
import hashlib
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
CHAINS = (
    "plan/fused_experts_fp8.py", "plan/experts_decode.py", "plan/experts_prefill.py",
    "plan/experts_tiny.py", "plan/experts_ends.py", "plan/small_table.py", "plan/decode_tile.py",
    "plan/tensor_map.py", "plan/wgmma_tile.py",
    "plan/workspace.py", "ops/fused_experts_fp8.py",
)  # fmt: skip


def kernel_stems() -> list[str]:
    """The ops that have a kernel file."""
    return sorted(path.stem for path in kernels_root().glob("*.cu"))


def kernels_digest() -> dict[str, str]:
    """Digest of each op, by stem."""
    shared = [_code(PACKAGE / name) for name in LAUNCHER]
    shared.append(" ".join(nvrtc_flags("sm_90a")))
    digests = {
        stem: _digest(source_digest(stem), _code(PACKAGE / "plan" / f"{stem}.py"), *shared)
        for stem in kernel_stems()
    }
    composed = [_code(PACKAGE / name) for name in CHAINS]
    digests[COMPOSED] = _digest(*composed, *digests.values())
    return digests


def _code(path: Path) -> str:
    """The module as its syntax tree, docstrings dropped."""
    tree = ast.parse(path.read_text())
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
