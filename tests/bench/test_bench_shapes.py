"""Shapes by name and spelled out, routings and expert maps, floors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench import roofline, shapes
from bench.shapes import Shape


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("glm-5.3-tp4", Shape(256, 8, 6144, 512)),
        ("e288-top8-k4096-n256", Shape(288, 8, 4096, 256)),
        ("e256-top6-k4096-n2048-limit7.5-local32", Shape(256, 6, 4096, 2048, 7.5, 32)),
        ("e8-top2-k512-n256-local2", Shape(8, 2, 512, 256, None, 2)),
    ],
)
def test_shapes_by_name_and_spelled_out(name, expected):
    assert shapes.shape(name) == expected


@pytest.mark.parametrize("name", ["glm", "e8-top2-k512", "e8-top2-k512-n256-local3", ""])
def test_an_unknown_shape_is_refused(name):
    with pytest.raises(ValueError, match=r"^shape: want .* got "):
        shapes.shape(name)


@pytest.mark.parametrize("kind", shapes.ROUTINGS)
@pytest.mark.parametrize("m", [1, 7, 64])
def test_routings_name_distinct_experts_of_the_layer(kind, m):
    ids = shapes.routing(kind, m, 32, 4, 3, "cpu")
    assert (ids.dtype, ids.shape, ids.is_contiguous()) == (torch.int32, (m, 4), True)
    assert 0 <= ids.min() <= ids.max() < 32
    assert all(len(set(row)) == 4 for row in ids.tolist())


@pytest.mark.parametrize("kind", shapes.ROUTINGS)
def test_each_seed_gives_another_routing(kind):
    every = {tuple(shapes.routing(kind, 1, 256, 8, s, "cpu").flatten().tolist()) for s in range(16)}
    assert len(every) == 16
    again = shapes.routing(kind, 1, 256, 8, 3, "cpu")
    assert torch.equal(again, shapes.routing(kind, 1, 256, 8, 3, "cpu"))


def test_what_the_routings_differ_in():
    one = shapes.routing("one", 100, 64, 4, 0, "cpu")
    assert len(torch.unique(one)) == 4
    turn = shapes.routing("round-robin", 32, 64, 4, 0, "cpu")
    assert torch.bincount(turn.flatten()).tolist() == [2] * 64
    zipf = torch.bincount(shapes.routing("zipf", 500, 64, 4, 0, "cpu").flatten(), minlength=64)
    even = torch.bincount(shapes.routing("uniform", 500, 64, 4, 0, "cpu").flatten(), minlength=64)
    assert zipf[0] > 4 * zipf[32:].float().mean()
    assert even.max() < 4 * even.float().mean()


def test_an_expert_map_has_each_local_expert_once():
    assert shapes.expert_map(shapes.SHAPES["glm-5.3-tp8"], "cpu") is None
    found = shapes.expert_map(shapes.SHAPES["deepseek-v4-flash-ep8"], "cpu")
    assert (found.dtype, found.shape) == (torch.int32, (256,))
    assert found[found >= 0].tolist() == list(range(32))
    assert (found == -1).sum() == 224


@pytest.mark.parametrize(
    ("m", "active", "expected"), [(1, 8.0, 10.6), (64, 220.9, 226.5), (4096, 256.0, 283.3)]
)
def test_floors_of_glm(m, active, expected):
    named = {"M": m, "K": 6144, "N": 256, "active": active, "slots": 8 * m}
    assert roofline.experts_floor_us("NVIDIA H200", **named) == pytest.approx(expected, rel=0.005)
    assert roofline.experts_floor_us("another GPU", **named) is None


def test_a_floor_of_operations():
    named = {"M": 16_384, "K": 4096, "N": 256, "active": 1.0, "slots": 16_384 * 8}
    floor = roofline.experts_floor_us("NVIDIA H200", **named)
    assert floor == pytest.approx(np.prod([16_384, 8, 6, 4096, 256]) / 1.3e9)
