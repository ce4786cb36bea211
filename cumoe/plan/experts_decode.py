"""Plan of fused_experts_fp8 for few tokens on a GPU with wgmma: four launches, weights read once.

Quantize x in the order of the experts; gate, up and activation; quantize y; down and combine. Each
launch but the first overlaps its predecessor: it requests weights, which none of them writes, and
then waits. So the first one must not overlap its own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from cumoe.plan import moe_down_decode_fp8 as down
from cumoe.plan import moe_gate_up_decode_fp8 as gate_up
from cumoe.plan import moe_permute_quant_fp8 as permute
from cumoe.plan import per_token_group_quant_fp8 as quantize
from cumoe.plan.decode_tile import ROUTE_BYTES, scale_pitch
from cumoe.plan.device import DeviceInfo, has_wgmma
from cumoe.plan.spec import Step
from cumoe.plan.workspace import offsets

if TYPE_CHECKING:
    from cumoe.plan.fused_experts_fp8 import Problem

MOST_SLOTS = 0xFFFF
"""Exclusive: places and experts are 16-bit numbers."""
MOST_TOPK = 32
"""Slots of a token that a thread keeps in registers."""


class Regime(NamedTuple):
    """A range of calls that share their kernels."""

    max_slots: int
    n_tiles: int


class Workspace(NamedTuple):
    """Byte offsets of the regions; all but the last are in the order of the experts."""

    a: int
    a_scale: int
    routes: int
    counter: int
    y: int
    q: int
    q_scale: int
    sums: int
    total: int


class Plan(NamedTuple):
    """The launches in their order, and the workspace they share."""

    permute: Step
    gate_up: Step
    quantize_y: Step
    down: down.Plan
    workspace: Workspace

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every launch, in order."""
        return (self.permute, self.gate_up, self.quantize_y, self.down.step)


def regimes(num_experts: int) -> tuple[Regime, ...]:
    """From few slots to many: up to 8 an expert on average, where weights are most of the work."""
    E = num_experts
    return Regime(E, 1), Regime(4 * E, 2), Regime(8 * E, 4)


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> Plan | None:
    """The whole call; None where it has too many tokens or the GPU lacks what the kernels need."""
    p = problem
    slots = (p.whole_M or p.M) * p.topk
    all_regimes = regimes(p.num_experts)
    regime = next((r for r in all_regimes if slots <= r.max_slots), None)
    able = has_wgmma(device.arch) and p.weights_mappable and p.num_local_experts < MOST_SLOTS
    if (
        p.M == 0
        or p.topk > MOST_TOPK
        or regime is None
        or regime.max_slots >= MOST_SLOTS
        or not able
    ):
        return None
    most = regime.max_slots // p.topk * p.topk
    first = gate_up.plan(
        gate_up.Problem(
            most, p.K, p.N, p.num_local_experts, regime.n_tiles, p.ids, p.has_map, p.clamp, p.scaled
        ),
        device,
    )
    second = down.plan(
        down.Problem(
            most, p.K, p.N, p.num_local_experts, p.topk, regime.n_tiles, p.ids, p.has_map,
            p.out_aligned,
        ),
        device,
    )  # fmt: skip
    if first is None or second is None:
        return None
    return Plan(
        _permute(p, device.arch), first, _quantize_y(p, device.arch), second, workspace(p, second)
    )


def _permute(p: Problem, arch: str) -> Step:
    return permute.plan(
        permute.Problem(
            p.M, p.K, p.topk, p.ids, p.has_map, p.scale_format, p.x_aligned, p.weight,
            p.weight_on_input,
        ),
        arch,
    )  # fmt: skip


def _quantize_y(p: Problem, arch: str) -> Step:
    return quantize.plan(
        quantize.Problem(p.M * p.topk, p.N, "bf16", p.scale_format, packed=False, aligned=True),
        arch,
    )


def workspace(p: Problem, second: down.Plan) -> Workspace:
    """Offsets of the regions. In bytes, with S = M * topk, pitch(n) = scale_pitch(n) * 4:

    S (K + pitch(K) + 8 + 3 N + pitch(N)) + 4, and 4 K / passes for each token beyond down's
    shared_tokens, K rounded up to whole passes.
    """
    S = p.M * p.topk
    sizes = (
        S * p.K,
        S * scale_pitch(p.K) * 4,
        S * ROUTE_BYTES,
        4,
        S * p.N * 2,
        S * p.N,
        S * scale_pitch(p.N) * 4,
        second.memory_bytes(p.M),
    )
    return Workspace(*offsets(sizes))
