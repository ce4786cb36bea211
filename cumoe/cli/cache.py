"""``cumoe cache``: what lies in the folders of compiled kernels."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cumoe.cli import values
from cumoe.cli.output import duration, print_columns, print_json, print_rows

if TYPE_CHECKING:
    from cumoe.store.explain import Explanation
    from cumoe.store.manage import Entry, Removal

_DESCRIPTION = """\
Kernels are kept in CUMOE_CACHE_DIR (by default the user's cache folder), and looked for in the
read-only folders of CUMOE_CACHE_PATH after that. Only the first is ever changed.
"""


def add_to(subparsers: Any) -> None:
    """Adds the command's parser."""
    p = subparsers.add_parser(
        "cache",
        help="list, explain, verify, prune or move compiled kernels",
        description=_DESCRIPTION,
    )
    actions = p.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add(actions, "path", _path, "print the folders, the writable one first")
    _add(
        actions, "list", _list, "print every kernel with its size, age and time since its last use"
    )
    explain = _add(actions, "explain", _explain, "say whether kernels are there, and if not, why")
    explain.add_argument(
        "kernel", nargs="+", type=values.kernel, metavar="KERNEL", help="as `list` prints it"
    )
    _add(actions, "verify", _verify, "hash every file anew; status 1 if one is damaged")
    prune = _add(actions, "prune", _prune, "remove kernels that no process uses, the oldest first")
    prune.add_argument("--max-size", type=values.size, metavar="SIZE", help="as 500M or 2G")
    prune.add_argument(
        "--max-age", type=values.age, metavar="AGE", help="since the last use: as 30d or 12h"
    )
    prune.set_defaults(refuse=prune.error)
    _add(actions, "clean", _clean, "remove every kernel that no process uses")
    export = _add(actions, "export", _export, "write every kernel to one file")
    export.add_argument("file", type=Path)
    import_ = _add(actions, "import", _import, "add the kernels of an exported file")
    import_.add_argument("file", type=Path)


def _add(
    actions: Any, name: str, execute: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    p: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(execute=execute)
    return p


def _roots() -> tuple[Path, ...]:
    """The folders; one that cannot be listed looks empty, so it is named."""
    from cumoe.store.info import read_error
    from cumoe.store.store import roots

    for index, root in enumerate(roots()):
        error = read_error(root)
        if error is not None:
            variable = "CUMOE_CACHE_PATH" if index else "CUMOE_CACHE_DIR"
            print(
                f"cumoe: warning: {root}: wanted a folder of kernels, got: {error.strerror}; "
                f"name another in {variable}",
                file=sys.stderr,
            )
    return roots()


def _path(args: argparse.Namespace) -> int:
    writable, *others = map(str, _roots())
    if args.json:
        print_json({"writable": writable, "read_only": others})
    else:
        print(writable, *others, sep="\n")
    return 0


def _list(args: argparse.Namespace) -> int:
    from cumoe.store.manage import entries

    found = {root: sorted(entries(root), key=lambda e: e.kernel) for root in _roots()}
    now = time.time()
    if args.json:
        listed = {str(root): [_as_json(e, now) for e in each] for root, each in found.items()}
        print_json({"folders": listed})
        return 0
    for root, each in found.items():
        print(f"{root}: {_kernels(len(each))}, {sum(e.size for e in each):,} bytes")
        rows = [
            (f"{e.size:,}", duration(now - e.created), duration(now - e.used), _name(e))
            for e in each
        ]
        print_columns(("bytes", "age", "last use", "kernel"), rows)
    return 0


def _explain(args: argparse.Namespace) -> int:
    from cumoe.store.explain import explain

    found = [explain(spec) for spec in args.kernel]
    if args.json:
        print_json({"kernels": [_explanation_as_json(e) for e in found]})
        return 0
    for e in found:
        print(f"{e.spec.text}: {_verdict(e)}")
        for damage in e.damages:
            print(f"  damaged, so it is compiled anew: {damage}")
        if e.differences:
            rows = [
                (d.label, _short(d.label, d.wanted), _short(d.label, d.found))
                for d in e.differences
            ]
            print_columns(("field", "wanted", "there"), rows)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from cumoe.store.manage import verify

    found = list(verify(_roots()))
    damaged = [(entry, damage) for entry, damage in found if damage]
    if args.json:
        listed = [{"file": str(entry.path), "damage": damage} for entry, damage in damaged]
        print_json({"verified": len(found), "damaged": listed})
    else:
        print(f"{_kernels(len(found))} verified, {len(damaged)} damaged")
    for entry, damage in damaged:
        remedy = "it is not used, and replaced when it is wanted next"
        print(f"cumoe: error: {entry.path}: {damage}; {remedy}", file=sys.stderr)
    return 1 if damaged else 0


def _prune(args: argparse.Namespace) -> int:
    from cumoe.store.manage import prune

    if args.max_size is None and args.max_age is None:
        args.refuse("one of the arguments --max-size and --max-age is required")
    return _removed(args, prune(_roots()[0], max_size=args.max_size, max_age_s=args.max_age))


def _clean(args: argparse.Namespace) -> int:
    from cumoe.store.manage import clean

    return _removed(args, clean(_roots()[0]))


def _removed(args: argparse.Namespace, removal: Removal) -> int:
    freed = sum(entry.size for entry in removal.removed)
    if args.json:
        print_json(
            {
                "removed": [str(entry.path) for entry in removal.removed],
                "in_use": [str(entry.path) for entry in removal.in_use],
                "freed": freed,
                "size": removal.size,
            }
        )
        return 0
    rows = [
        ("removed", f"{_kernels(len(removal.removed))}, {freed:,} bytes"),
        ("in use", _kernels(len(removal.in_use))),
        ("left", f"{removal.size:,} bytes"),
    ]
    print_rows(rows)
    return 0


def _export(args: argparse.Namespace) -> int:
    from cumoe.store.archive import export_to

    done = export_to(args.file, _roots())
    if args.json:
        print_json(
            asdict(done) | {"file": str(args.file), "left_out": list(map(str, done.left_out))}
        )
        return 0
    rows = [
        ("file", str(args.file)),
        ("exported", f"{_kernels(done.kernels)}, {done.size:,} bytes"),
        *(("left out", str(path)) for path in done.left_out),
    ]
    print_rows(rows)
    return 0


def _import(args: argparse.Namespace) -> int:
    from cumoe.store.archive import import_from
    from cumoe.store.store import roots

    root = roots()[0]
    done = import_from(args.file, root)
    if args.json:
        print_json(asdict(done) | {"folder": str(root)})
        return 0
    rows = [
        ("folder", str(root)),
        ("added", f"{_kernels(done.added)}, {done.size:,} bytes"),
        ("there already", _kernels(done.kept)),
    ]
    print_rows(rows)
    return 0


def _as_json(entry: Entry, now: float) -> dict[str, Any]:
    return {
        "kernel": entry.kernel,
        "arch": entry.arch,
        "file": str(entry.path),
        "bytes": entry.size,
        "age_s": now - entry.created,
        "last_use_s": now - entry.used,
    }


def _explanation_as_json(e: Explanation) -> dict[str, Any]:
    return {
        "kernel": e.spec.text,
        "key": e.key,
        "hit": e.path is not None,
        "file": None if e.path is None else str(e.path),
        "damaged": e.damages,
        "nearest": None if e.nearest is None else str(e.nearest.path),
        "differences": [asdict(d) for d in e.differences],
    }


def _verdict(e: Explanation) -> str:
    if e.path is not None:
        return f"hit, {e.path}"
    if e.damages:
        return "miss"
    if e.nearest is None:
        return f"miss; there is no kernel of {e.spec.stem} in any folder"
    return f"miss; nearest is {e.nearest.kernel}, {e.nearest.path}"


def _short(label: str, value: str) -> str:
    """A hash by its first digits."""
    return (value[:12] if label == "source" else value) or "nothing"


def _name(entry: Entry) -> str:
    return entry.kernel or f"(no readable manifest) {entry.path.name}"


def _kernels(count: int) -> str:
    return f"{count:,} kernel{'' if count == 1 else 's'}"
