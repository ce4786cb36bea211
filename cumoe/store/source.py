"""A kernel's complete translation unit: its constants, then its file with all includes inlined."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from cumoe.errors import CompileError
from cumoe.plan.spec import KernelSpec

_PACKAGE = Path(__file__).resolve().parent.parent

_TOKEN = re.compile(
    r"""
      (?P<comment> //(?:\\\n|[^\n])* | /\*.*?(?:\*/|\Z) )
    | R"(?P<fence>[^()\\\s]{0,16})\(.*?\)(?P=fence)"
    | "(?:\\.|[^"\\\n])*"
    | \b\d(?:'?[\w.])*              # 1'000: here a quote opens no character literal
    | '(?:\\.|[^'\\\n])*'
    """,
    re.DOTALL | re.VERBOSE,
)
_INCLUDE = re.compile(r"\s*#\s*include\b\s*(.*?)\s*$")
_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")
_IF = re.compile(r"\s*#\s*if")
_ENDIF = re.compile(r"\s*#\s*endif\b")


def kernels_root() -> Path:
    """The folder of the kernel sources: inside the wheel, or in the checkout."""
    inside = _PACKAGE / "_kernels_src"
    return inside if inside.is_dir() else _PACKAGE.parent / "kernels_src"


def read_source(spec: KernelSpec) -> str:
    """The whole text that NVRTC gets for `spec`: nothing else is read while it compiles.

    The constants come first, as ``constexpr`` integers; ``#line`` makes errors name the files
    under `kernels_root()`.

    Raises:
        CompileError: a file is missing, or an include is not a quoted path under `kernels_root()`.
    """
    constants = [_constant(name, value) for name, value in spec.constants]
    return "\n".join(['#line 1 "constants"', *constants, amalgamate(spec.stem)])


def amalgamate(stem: str) -> str:
    """``<stem>.cu`` with each quoted include inlined where it is first named."""
    main = f"{stem}.cu"
    return "\n".join([*_inline(main, {main}, "the kernel"), ""])


def strip_comments(text: str) -> str:
    """`text` with every comment replaced by a blank and the newlines it held."""

    def blank(match: re.Match[str]) -> str:
        comment = match["comment"]
        return match[0] if comment is None else " " + "\n" * comment.count("\n")

    return _TOKEN.sub(blank, text)


def _constant(name: str, value: int) -> str:
    kind = "int" if -(2**31) <= value < 2**31 else "long long"
    return f"constexpr {kind} {name} = {value};"


def _inline(file: str, seen: set[str], wanted_by: str) -> Iterator[str]:
    text = _read(file, wanted_by)
    conditionals = 0
    yield f'#line 1 "{file}"'
    lines = zip(text.split("\n"), strip_comments(text).split("\n"), strict=True)
    for number, (line, bare) in enumerate(lines, 1):
        conditionals += bool(_IF.match(bare)) - bool(_ENDIF.match(bare))
        include = _INCLUDE.match(bare)
        if include is None:
            yield "" if _ONCE.match(bare) else line
            continue
        place = f"{file}:{number}"
        target = _target(include[1], place, conditionals)
        if target not in seen:
            seen.add(target)
            yield from _inline(target, seen, place)
        yield f'#line {number + 1} "{file}"'


def _target(written: str, place: str, conditionals: int) -> str:
    """The included file's path under `kernels_root()`."""
    if re.fullmatch(r'"[^"]+"', written) is None:
        raise CompileError(
            f"{place}: #include {written}: kernels include only quoted files of their own source "
            'folder (as "common/types.cuh"); declare here what you need of the header'
        )
    target = PurePosixPath(written[1:-1])
    if target.is_absolute() or ".." in target.parts:
        raise CompileError(
            f"{place}: #include {written}: the path must be relative to the root of the kernel "
            "sources and stay inside it"
        )
    if conditionals:
        raise CompileError(
            f"{place}: #include {written} inside #if: a file is inlined once, where it is first "
            "named, so it would be lost to later includes; move it out, and guard headers with "
            "#pragma once"
        )
    return str(target)


def _read(file: str, wanted_by: str) -> str:
    path = kernels_root() / file
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CompileError(
            f"{wanted_by}: cannot read {file} under {kernels_root()}: {error.strerror}; "
            "correct the name, or reinstall cumoe"
        ) from error
