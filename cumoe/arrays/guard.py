"""Whether the tensors of a call are like those of the last one, in little of the host's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cumoe.arrays.view import LINE


def torch_guard(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """What tells of other tensors whether they are like these; None where this torch has none.

    It is the one that torch.compile asks, in less of the host's time than `torch_facts`. It
    compares classes, element types, shapes, strides and devices, and modes of torch too, such as
    inference: where it says no, `torch_facts` may still say yes. It does not look at addresses.
    """
    sizes: Any = [list(t.shape) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    try:
        from torch._C._dynamo.guards import TensorGuards

        guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except (ImportError, TypeError):  # it is no public name: that of 2.11 to 2.13
        return None
    check: Callable[..., bool] = guards.check
    return check


def in_lines(addresses: Sequence[int]) -> bool:
    """Whether each is the start of a line of memory."""
    bits = 0
    for address in addresses:
        bits |= address
    return bits % LINE == 0 and 0 not in addresses
