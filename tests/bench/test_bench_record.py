"""Records: rows kept, replaced, refused; which rows are compared."""

from __future__ import annotations

import json

import pytest

from bench.record import Record, comparable, name_of, read

HERE = {"device": "NVIDIA H200", "driver": "1", "nvrtc": "13", "torch": "2", "kernels_digest": {}}


def experts_row(m: int, us: float = 1.0, **more) -> dict:
    key = {"op": "fused_experts_fp8", "shape": "s", "m": m, "routing": "uniform"}
    return {**key, "scale_format": "fp32", "us": us, **more}


def activation_row(rows: int, us: float = 1.0, **more) -> dict:
    key = {"op": "silu_and_mul_quant_fp8", "hidden": 512, "rows": rows, "filter": None}
    return {**key, "scale_format": "fp32", "us": us, **more}


def test_the_file_has_every_row_as_soon_as_it_is_measured(tmp_path):
    out = tmp_path / "r.json"
    record = Record(out, HERE, keep=False)
    for count, row in enumerate((experts_row(1), experts_row(2), activation_row(2)), 1):
        record.add(row)
        assert read(out) == {"environment": HERE, "rows": record.rows}
        assert len(record.rows) == count


def test_a_row_measured_again_stands_in_the_place_of_the_old_one(tmp_path):
    out = tmp_path / "r.json"
    first = Record(out, {**HERE, "date": "1", "peers": {"vllm": "0"}}, keep=False)
    for row in (experts_row(1), experts_row(2), experts_row(2, routing="zipf"), activation_row(8)):
        first.add(row)
    second = Record(out, {**HERE, "date": "2"}, keep=True)
    second.add(experts_row(2, us=5.0))
    second.add(experts_row(4))
    kept = read(out)
    assert kept["environment"] == {**HERE, "date": "2", "peers": {"vllm": "0"}}
    assert [(r.get("m"), r.get("routing"), r["us"]) for r in kept["rows"]] == [
        (1, "uniform", 1.0),
        (2, "uniform", 5.0),
        (2, "zipf", 1.0),
        (None, None, 1.0),
        (4, "uniform", 1.0),
    ]


def test_without_keep_the_old_rows_go(tmp_path):
    out = tmp_path / "r.json"
    Record(out, HERE, keep=False).add(experts_row(1))
    Record(out, HERE, keep=False).add(experts_row(2))
    assert [row["m"] for row in read(out)["rows"]] == [2]


@pytest.mark.parametrize("other", sorted(HERE))
def test_rows_of_other_kernels_or_machines_are_not_kept(tmp_path, other):
    out = tmp_path / "r.json"
    Record(out, HERE, keep=False).add(experts_row(1))
    before = out.read_bytes()
    with pytest.raises(SystemExit, match=f"another {other}; measure all of them again"):
        Record(out, {**HERE, other: "changed"}, keep=True)
    assert out.read_bytes() == before


def test_wrong_rows_stand_apart_and_end_when_they_are_right(tmp_path):
    out = tmp_path / "r.json"
    record = Record(out, HERE, keep=False)
    record.add(experts_row(1))
    wrong = {k: v for k, v in experts_row(1, error="row error 1").items() if k != "us"}
    record.add(wrong)
    assert (read(out)["rows"], read(out)["failed"]) == ([], [wrong])
    again = Record(out, HERE, keep=True)
    again.add(experts_row(2))
    assert read(out)["failed"] == [wrong]
    again.add(experts_row(1))
    assert "failed" not in json.loads(out.read_text())


def test_nothing_is_written_without_a_path():
    record = Record(None, HERE, keep=True)
    record.add(experts_row(1))
    assert len(record.rows) == 1


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (experts_row(1), True),
        (experts_row(1, routing="zipf"), False),
        (experts_row(1, scale_format="ue8m0"), False),
        (activation_row(1), True),
        (activation_row(1, filter="map"), False),
        (activation_row(1, scale_format="ue8m0"), False),
    ],
)
def test_comparable_rows(row, expected):
    assert comparable(row) is expected


def test_names_of_rows():
    assert name_of(experts_row(4)) == "s M=4 uniform"
    assert name_of(activation_row(8, filter="map")) == "silu 8x512 map"
