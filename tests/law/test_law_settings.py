"""The environment variables in the code, in the settings and in the documents are the same."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from cumoe._settings import Settings

ROOT = Path(__file__).parents[2]
VARIABLES = {f"CUMOE_{field.name.upper()}" for field in fields(Settings)}


def tabled(text: str) -> list[str]:
    """The variables that have a row of their own in a Markdown table, in order."""
    return re.findall(r"^\| `(CUMOE_[A-Z_]+)` \|", text, re.MULTILINE)


def named(text: str) -> set[str]:
    return set(re.findall(r"\bCUMOE_[A-Z_]+", text))


def test_the_table_of_the_readme_has_one_row_per_setting():
    rows = tabled((ROOT / "README.md").read_text())
    assert len(rows) == len(set(rows))
    assert set(rows) == VARIABLES


def test_each_setting_is_read():
    assert named((ROOT / "cumoe/_settings.py").read_text()) == VARIABLES


@pytest.mark.parametrize("folder", ["cumoe", "docs", "examples"])
def test_no_other_variable_is_named(folder):
    texts = [p for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".md"}]
    assert {name for p in texts for name in named(p.read_text())} <= VARIABLES


def test_a_missing_row_and_a_foreign_variable_are_seen():
    assert tabled("| `CUMOE_A` | x |\n| y | `CUMOE_B` |\nCUMOE_C") == ["CUMOE_A"]
    assert named("see `CUMOE_CACHE_DIRS`, XCUMOE_A") == {"CUMOE_CACHE_DIRS"}
