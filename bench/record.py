"""A JSON file of rows, written after each one: a run that is cut short keeps what it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]

SAME = ("device", "driver", "nvrtc", "torch", "kernels_digest")
"""What two runs must share for their rows to stand in one file."""
_IDENTITY = ("op", "shape", "m", "routing", "hidden", "rows", "filter", "scale_format", "form")


class Record:
    """The rows of a run, and with ``keep`` those in the file that the run does not measure again.

    Raises: SystemExit where the kept rows are of other kernels or another machine.
    """

    def __init__(self, path: Path | None, environment: dict[str, Any], *, keep: bool) -> None:
        self._path, self._environment = path, environment
        self._rows: dict[tuple[Any, ...], Row] = {}
        if keep and path is not None and path.exists():
            old = read(path)
            _require_same(path, old["environment"], environment)
            self._environment = old["environment"] | environment
            self._rows = {_identity(row): row for row in [*old["rows"], *old.get("failed", [])]}

    def add(self, row: Row) -> None:
        """Takes a row, in place of an older one of the same call, and writes the file."""
        self._rows[_identity(row)] = row
        if self._path is None:
            return
        record = {"environment": self._environment, "rows": self.rows, "failed": self.failed}
        if not self.failed:
            del record["failed"]
        self._path.write_text(json.dumps(record, indent=1) + "\n")

    @property
    def rows(self) -> list[Row]:
        """Those that were timed."""
        return [row for row in self._rows.values() if "error" not in row]

    @property
    def failed(self) -> list[Row]:
        """Those that were wrong, and why."""
        return [row for row in self._rows.values() if "error" in row]


def read(path: Path) -> dict[str, Any]:
    """The content of a record."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def comparable(row: Row) -> bool:
    """Whether summaries and comparisons use this row: uniform routing, fp32 scales, no filter."""
    plain = row["scale_format"] == "fp32" and row.get("filter") is None
    return plain and row.get("routing", "uniform") == "uniform"


def name_of(row: Row) -> str:
    """Which call it is, in a few words."""
    if "shape" in row:
        return f"{row['shape']} M={row['m']} {row['routing']}"
    filtered = f" {row['filter']}" if row["filter"] else ""
    return f"{row['op'].split('_')[0]} {row['rows']}x{row['hidden']}{filtered}"


def _identity(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in _IDENTITY)


def _require_same(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    other = [key for key in SAME if old.get(key) != new.get(key)]
    if other:
        raise SystemExit(
            f"{path}: its rows were measured with another {', '.join(other)}; "
            f"measure all of them again, without --keep"
        )
