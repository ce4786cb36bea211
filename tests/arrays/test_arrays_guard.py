"""Tensors like others: a guard that says yes means it."""

from __future__ import annotations

import pytest
import torch

from cumoe.arrays.guard import in_lines, torch_guard


def test_torch_has_a_guard():
    assert torch_guard([torch.zeros(4, 6)]) is not None


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 7), torch.zeros(24), torch.zeros(6, 4).t(), torch.zeros(8, 6)[::2],
        torch.zeros(4, 6).half(), torch.zeros(4, 6, device="meta"),
        torch._neg_view(torch.zeros(4, 6)), torch.nn.Parameter(torch.zeros(4, 6)),
        torch.zeros(4, 6).to_sparse(), torch.zeros(4, 6, requires_grad=True),
    ],
)  # fmt: skip
def test_a_guard_tells_other_tensors(other):
    x, y = torch.zeros(4, 6), torch.zeros(3, dtype=torch.int32)
    guard = torch_guard([x, y])
    assert guard(x, y)
    assert guard(torch.ones(4, 6), y.clone())
    assert not guard(other, y)
    assert not guard(y, x)


def test_addresses_in_lines():
    assert in_lines([256, 1024])
    assert not in_lines([256, 1024 + 16])
    assert not in_lines([256, 0])
