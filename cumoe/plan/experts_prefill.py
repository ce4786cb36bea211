"""Plan of fused_experts_fp8 for many tokens on a GPU with wgmma: five launches, or seven.

Sort slots (1, or 3 for the most slots); quantize x; gate, up, activation and its quantization;
down; combine. Each launch but the first and gate/up may be scheduled while its predecessor runs,
and waits before it reads. Gate/up is slower beside the quantizer (docs/decisions/0004). The
quantizer of x, which reads nothing that the sort writes, does its work beside that, and waits for
it at its end. So the first launch must not overlap its own predecessor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from cumoe.plan import experts_ends, moe_align_block_size
from cumoe.plan import moe_down_prefill_fp8 as down
from cumoe.plan import moe_gate_up_prefill_fp8 as gate_up
from cumoe.plan.device import DeviceInfo, has_wgmma
from cumoe.plan.scales import GROUP_SIZE
from cumoe.plan.spec import Step
from cumoe.plan.wgmma_tile import BLOCK_M
from cumoe.plan.workspace import offsets

if TYPE_CHECKING:
    from cumoe.plan.fused_experts_fp8 import Problem


class Workspace(NamedTuple):
    """Byte offsets of the regions."""

    a: int
    a_scale: int
    counts: int
    bases: int
    sorted_token_ids: int
    expert_ids: int
    num_tokens_post_padded: int
    q: int
    """[capacity, N] codes of the activation, in the order of the sorted slots; so its scales."""
    q_scale: int
    d: int
    """[slots, K] bf16."""
    total: int


class Plan(NamedTuple):
    """The launches in their order, and the workspace they share."""

    align: moe_align_block_size.Plan
    align_problem: moe_align_block_size.Problem
    quantize_x: Step
    gate_up: Step
    down: Step
    combine: Step
    workspace: Workspace

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every launch, in order."""
        return (*self.align.steps, self.quantize_x, self.gate_up, self.down, self.combine)


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> Plan | None:
    """The whole call; None where the GPU or the strides of the weights lack what it needs."""
    p, arch = problem, device.arch
    if not (has_wgmma(arch) and p.weights_mappable):
        return None
    align_problem = moe_align_block_size.Problem(
        p.M * p.topk, BLOCK_M, p.num_experts, p.num_local_experts, p.ids, p.has_map
    )
    align = moe_align_block_size.plan(align_problem, device)
    blocks = align.max_blocks
    first = gate_up.Problem(p.K, p.N, p.topk, p.scale_format, p.clamp, p.scaled, blocks)
    return Plan(
        align,
        align_problem,
        experts_ends.quantize_x(p, arch),
        gate_up.plan(first, device),
        down.plan(down.Problem(p.K, p.N, blocks), device),
        experts_ends.combine(p, arch),
        workspace(p, align),
    )


def workspace(p: Problem, align: moe_align_block_size.Plan) -> Workspace:
    """Offsets of the regions. In bytes, with S = M * topk and G = 128:

    M K (1 + 4/G) + capacity N (1 + 4/G) + 2 S K + 4 (capacity + blocks + 1),
    and 4 (chunks + 1) E where the sort takes three launches
    """
    sizes = (
        p.M * p.K,
        p.M * (p.K // GROUP_SIZE) * 4,
        *moe_align_block_size.counts_bytes(align, p.num_local_experts),
        align.capacity * 4,
        align.max_blocks * 4,
        4,
        align.capacity * p.N,
        align.capacity * (p.N // GROUP_SIZE) * 4,
        p.M * p.topk * p.K * 2,
    )
    return Workspace(*offsets(sizes))
