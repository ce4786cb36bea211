"""Host time beside its bars: the forms give the same bytes, and what misses a bar shows."""

from __future__ import annotations

import io
import time

import pytest
import torch
from rich.console import Console

from bench import __main__ as command
from bench import environment, host
from bench.host_forms import ALLOCATING, EXPERTS, GIVEN, QUANT, SILU, Form
from bench.record import read
from tests.helpers import child

FORMS = """
from bench import host, host_forms
host_forms.K, host.CALLS = 512, 1
for op, forms in host_forms.all_forms("cpu"):
    for row in host.measured(op, forms, rounds=1):
        print(op, row["form"], row.get("over"), "error" in row, sep="|")
"""


def test_all_forms_give_the_same_bytes():
    """In a process of its own: forks of one with JAX in it are warned of."""
    out, errors = (running := child.start(FORMS, JAX_PLATFORMS="cpu")).communicate()
    assert (running.returncode, errors) == (0, "")
    lines = [line.split("|") for line in out.splitlines()]
    for op in (SILU, QUANT, EXPERTS):
        names = [form for of, form, *_ in lines if of == op]
        assert names[:4] == [GIVEN, ALLOCATING, "torch.ops .out", "torch.ops"]
        assert {"DLPack, outputs given", "DLPack, allocating", "JAX, allocating"} < set(names)
    assert {over for _, _, over, _ in lines} == {"None", GIVEN, ALLOCATING}
    assert {wrong for *_, wrong in lines} == {"False"}


def slow(us: float, result: int = 1):
    tensor = torch.tensor([result])

    def call():
        end = time.perf_counter() + us / 1e6
        while time.perf_counter() < end:
            pass
        return tensor

    return call


def rows_of(*forms: Form) -> list[dict]:
    return list(host.measured(QUANT, list(forms), rounds=5))


def test_a_bar_is_met_or_missed():
    fast, late, free = rows_of(
        Form("fast", slow(50), 500.0), Form("late", slow(900), 500.0), Form("free", slow(50), None)
    )
    assert (fast["is_met"], late["is_met"], free["is_met"]) == (True, False, True)
    assert 50 <= fast["host_us"] < late["host_us"]
    assert late["host_us"] >= 900


def test_what_torch_ops_adds_is_held_against_its_bar():
    _, near, far = rows_of(
        Form(GIVEN, slow(500), 8.0),
        Form("near", slow(500), 200.0, over=GIVEN), Form("far", slow(900), 200.0, over=GIVEN),
    )  # fmt: skip
    assert (near["is_met"], far["is_met"]) == (True, False)
    assert far["over_us"] > 200


def test_a_form_with_other_bytes_is_not_timed():
    _, wrong = rows_of(Form("one", slow(1), 8.0), Form("two", slow(1, result=2), 8.0))
    assert wrong["error"] == "other bytes than the first form's: not timed"
    assert "host_us" not in wrong


def test_outputs_that_were_given_are_what_is_compared():
    form = Form("into", lambda: None, 8.0, (torch.tensor([1]),))
    assert not [row for row in rows_of(Form("one", slow(1), 8.0), form) if "error" in row]


ROW = {"op": QUANT, "size": "1 x 6144", "form": "torch.ops", "bar_us": 3.0, "host_us": 12.34,
       "over": GIVEN, "over_us": 2.5, "is_met": True}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "status"), [(ROW, 0), (ROW | {"is_met": False}, 1), (ROW | {"error": "x"}, 1)]
)
def test_rows_are_written_and_a_missed_bar_fails(monkeypatch, tmp_path, row, status):
    monkeypatch.setattr(environment, "environment", lambda: {"device": "D"})
    monkeypatch.setattr(host, "all_forms", lambda device: iter([(QUANT, [])]))
    monkeypatch.setattr(host, "measured", lambda op, forms: iter([row, row | {"form": "other"}]))
    out = tmp_path / "host.json"
    assert command.main(["host", "--out", str(out)]) == status
    record = read(out)
    assert len([*record["rows"], *record.get("failed", [])]) == 2
    assert record["environment"] == {"device": "D"}


def test_the_table(monkeypatch):
    text = io.StringIO()
    host.show([ROW, ROW | {"over": None, "bar_us": None}], Console(file=text, width=150))
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert [QUANT, "1", "x", "6144", "torch.ops", "12.34", *GIVEN.split(), "2.50", "3"] in lines
    assert [QUANT, "1", "x", "6144", "torch.ops", "12.34", "-", "-", "-"] in lines
