"""Plan of fused_experts_fp8 for the fewest tokens: two launches that read the weights once.

Gate, up and activation; down and combine: the products quantize for themselves. Each
launch but the first overlaps its predecessor: it requests weights, which none of them writes, and
then waits. So the first one must not overlap its own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from cumoe.plan import moe_down_tiny_fp8 as down
from cumoe.plan import moe_gate_up_tiny_fp8 as gate_up
from cumoe.plan.device import DeviceInfo, has_dependent_launch
from cumoe.plan.small_table import SIZES
from cumoe.plan.spec import Step
from cumoe.plan.workspace import offsets

if TYPE_CHECKING:
    from cumoe.plan.fused_experts_fp8 import Problem

MAX_TOKENS = 8
"""That every CTA quantizes for itself: it costs less than a launch."""
MAX_CODES_BYTES = 49_152
"""Of the slots that every CTA quantizes for itself."""
MAX_WEIGHT_BYTES = 320 << 20
"""Of the experts of more than 32 slots, each with its own: for more the chain for few tokens, which
reads faster, makes up for its two more launches."""


class Workspace(NamedTuple):
    """Byte offsets of the regions."""

    y: int
    """[slots, N] bf16, in the order of the experts."""
    total: int


class Plan(NamedTuple):
    """The launches in their order, and the workspace they share."""

    gate_up: Step
    down: Step
    workspace: Workspace

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every launch, in order."""
        return (self.gate_up, self.down)


def sizes(topk: int, K: int, N: int) -> tuple[int, ...]:
    """Tokens that kernels have room for, ascending: those of 32 slots, and of 64."""
    found = []
    for most in SIZES:
        tokens = min(most // topk, MAX_TOKENS)
        slots = tokens * topk
        is_quick = slots <= SIZES[0] or slots * 3 * N * K <= MAX_WEIGHT_BYTES
        if tokens and slots * N <= MAX_CODES_BYTES and is_quick:
            found.append(tokens)
    return tuple(sorted({*found}))


def max_tokens(topk: int, K: int, N: int) -> int:
    """Of a call of the fewest tokens, if the GPU and the arrays allow it."""
    return max(sizes(topk, K, N), default=0)


def takes(num_tokens: int, topk: int, K: int, N: int) -> bool:
    """Whether a call of this size is one of the fewest tokens, if the GPU and the arrays allow."""
    return num_tokens <= max_tokens(topk, K, N)


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> Plan | None:
    """The whole call; None where it has too many slots or lacks what the kernels need."""
    p = problem
    tokens = next((n for n in sizes(p.topk, p.K, p.N) if n >= (p.whole_M or p.M)), None)
    able = p.x_aligned and p.down_contiguous and not p.weight_on_input
    if tokens is None or p.M == 0 or not (able and has_dependent_launch(device.arch)):
        return None
    first = gate_up.plan(
        gate_up.Problem(
            tokens, p.K, p.N, p.topk, p.ids, p.has_map, p.scale_format, p.clamp, p.scaled
        ),
        device,
    )
    second = down.plan(
        down.Problem(
            tokens, p.K, p.N, p.topk, p.ids, p.has_map, p.weight, p.scale_format, p.out_aligned
        ),
        device,
    )
    if first is None or second is None:
        return None
    return Plan(first, second, workspace(p))


def workspace(p: Problem) -> Workspace:
    """Offsets of the regions. In bytes: 2 M topk N."""
    return Workspace(*offsets((p.M * p.topk * p.N * 2,)))
