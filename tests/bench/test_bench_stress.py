"""The layers of the stress table: every pair of values, in as few layers as can be."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from itertools import combinations, product

import pytest

from bench import peers, shapes, stress
from bench.harness import QUICK

FACTORS = {
    "E": {256, 288}, "K": {4096, 6144}, "N": {256, 2048}, "limit": {None, 10.0},
    "routing": set(shapes.ROUTINGS),
}  # fmt: skip


def values() -> list[dict[str, object]]:
    return [
        {**shapes.shape(name)._asdict(), "routing": routing} for name, routing in stress.layers()
    ]


@pytest.mark.parametrize("pair", list(combinations(FACTORS, 2)), ids="-".join)
def test_every_pair_of_values_is_in_some_layer(pair):
    first, second = pair
    found = {(layer[first], layer[second]) for layer in values()}
    assert found == set(product(FACTORS[first], FACTORS[second]))


def test_weights_are_made_once():
    names = [name for name, _ in stress.layers()]
    assert len(set(names)) == len(names) == 8
    assert all(layer["topk"] == 8 and layer["num_local_experts"] is None for layer in values())


def test_each_layer_has_every_number_of_tokens(monkeypatch):
    asked, compiled = [], []

    def rows(cases, names, effort):
        asked.append((list(cases), names, effort))
        yield from ({"m": case.m} for case in asked[-1][0])

    monkeypatch.setattr(stress, "layer_rows", rows)
    monkeypatch.setattr(stress, "compile_layers", lambda names, formats: compiled.extend(names))
    monkeypatch.setattr(peers, "vllm_context", nullcontext)
    arguments = argparse.Namespace(m=[1, 256], peers=["vllm-triton"])
    assert [row["m"] for row in stress.run(arguments)] == [1, 256] * 8
    assert [(c[0].shape, c[0].routing) for c, _, _ in asked] == stress.layers()
    assert compiled == [name for name, _ in stress.layers()]
    assert all((names, effort) == (["vllm-triton"], QUICK) for _, names, effort in asked)
