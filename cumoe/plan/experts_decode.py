"""Plan of fused_experts_fp8 for few tokens: two to four launches that read the weights once.

[quantize x]; gate, up and activation; [quantize y]; down and combine. In the smallest calls the two
products quantize for themselves. Each launch but the first overlaps its predecessor: it requests
weights, which none of them writes, and then waits. So the first one must not overlap its own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from cumoe.plan import moe_down_decode_fp8 as down
from cumoe.plan import moe_gate_up_decode_fp8 as gate_up
from cumoe.plan import per_token_group_quant_fp8 as quantize
from cumoe.plan.device import DeviceInfo, has_dependent_launch
from cumoe.plan.scales import GROUP_SIZE
from cumoe.plan.spec import Step
from cumoe.plan.workspace import offsets

if TYPE_CHECKING:
    from cumoe.plan.fused_experts_fp8 import Problem

SMALLEST_TOKENS = 8
"""Tokens that every CTA quantizes for itself: it costs less than a launch."""
MAX_QUANTIZED_BYTES = 49_152
"""Slots that every CTA quantizes for itself, in bytes of their codes."""


class Regime(NamedTuple):
    """A range of calls that share their kernels."""

    max_slots: int
    n_tiles: int


class Workspace(NamedTuple):
    """Byte offsets of the regions."""

    a: int
    a_scale: int
    y: int
    """[slots, N] bf16, in the order of the experts, as are q and its scales."""
    q: int
    q_scale: int
    total: int


class Plan(NamedTuple):
    """The launches in their order, and the workspace they share."""

    quantize_x: Step | None
    gate_up: Step
    quantize_y: Step | None
    down: down.Plan
    workspace: Workspace

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every launch, in order."""
        launches = (self.quantize_x, self.gate_up, self.quantize_y, self.down.step)
        return tuple(step for step in launches if step is not None)


def regimes(num_experts: int, topk: int) -> tuple[Regime, ...]:
    """From few slots to many: up to 8 an expert on average, where weights are most of the work."""
    return (
        Regime(SMALLEST_TOKENS * topk, 1),
        Regime(min(512, 4 * num_experts), 1),
        Regime(4 * num_experts, 1),
        Regime(8 * num_experts, 2),
    )


def representative_token_counts(problem: Problem) -> set[int]:
    """One number of tokens in each regime and for each kernel, and one beyond all of them."""
    topk = problem.topk
    ends = {r.max_slots // topk for r in regimes(problem.num_experts, topk)}
    rows = {-(-rows // topk) for rows in quantize.representative_rows(problem.N)}
    return {1, *(ends - {0}), *(end + 1 for end in ends), *rows}


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> Plan | None:
    """The whole call; None where it has too many tokens or the GPU lacks what the kernels need."""
    p = problem
    ranges, whole = regimes(p.num_experts, p.topk), p.whole_M or p.M
    regime = next((r for r in ranges if whole * p.topk <= r.max_slots), None)
    if p.M == 0 or regime is None or not p.down_contiguous or not has_dependent_launch(device.arch):
        return None
    tokens = regime.max_slots // p.topk
    smallest = whole <= SMALLEST_TOKENS
    own_x = smallest and p.x_aligned and not p.weight_on_input
    own_y = smallest and tokens * p.topk * p.N <= MAX_QUANTIZED_BYTES
    alike = max(r.max_slots for r in ranges if r.n_tiles == regime.n_tiles) // p.topk
    first = gate_up.plan(
        gate_up.Problem(
            tokens if own_x else alike, p.K, p.N, p.num_local_experts, p.topk, regime.n_tiles,
            p.ids, p.has_map, p.scale_format if own_x else "fp32", p.clamp, p.scaled, own_x,
        ),
        device,
    )  # fmt: skip
    second = down.plan(
        down.Problem(
            tokens, p.K, p.N, p.num_local_experts, p.topk, regime.n_tiles, p.ids, p.has_map,
            None if p.weight_on_input else p.weight, p.scale_format if own_y else "fp32",
            p.out_aligned, own_y,
        ),
        device,
    )  # fmt: skip
    if first is None or second is None:
        return None
    return Plan(
        None if own_x else _alone(_quantize_x(p, device.arch)),
        first,
        None if own_y else _quantize_y(p, device.arch),
        second,
        workspace(p),
    )


def _quantize_x(p: Problem, arch: str) -> Step:
    weight = p.weight if p.weight_on_input else None
    return quantize.plan(
        quantize.Problem(p.M, p.K, "bf16", p.scale_format, False, p.x_aligned, weight), arch
    )


def _quantize_y(p: Problem, arch: str) -> Step:
    return quantize.plan(
        quantize.Problem(p.M * p.topk, p.N, "bf16", p.scale_format, packed=False, aligned=True),
        arch,
    )


def _alone(step: Step) -> Step:
    """Without overlap: its successors read what the caller's last kernel wrote before they wait."""
    return step._replace(launch=step.launch._replace(overlap=False))


def workspace(p: Problem) -> Workspace:
    """Offsets of the regions. In bytes, with S = M * topk and G = 128:

    M K (1 + 4/G) + S N (3 + 4/G)
    """
    S = p.M * p.topk
    tokens, slots = p.M * (p.K // GROUP_SIZE) * 4, S * (p.N // GROUP_SIZE) * 4
    return Workspace(*offsets((p.M * p.K, tokens, S * p.N * 2, S * p.N, slots)))
