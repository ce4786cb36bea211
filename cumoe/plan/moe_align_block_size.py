"""Plan of moe_align_block_size: a counting sort in three launches."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cumoe.plan.codes import ID_TYPE
from cumoe.plan.device import has_dependent_launch
from cumoe.plan.scales import ceil_to
from cumoe.plan.spec import LaunchSpec, Step, kernel_spec

COUNT_ABI = "PPPPPqqqqq"
SCAN_ABI = "PPPqq"
SCATTER_ABI = "PPPPPPqqqq"

MAX_EXPERTS = 4096
MAX_TOPK = 64
WARP = 32
MIN_CHUNK_SLOTS = 256
MAX_CHUNKS = 512
"""The scan walks the chunks one after another: enough of them to fill a GPU, no more."""


class Problem(NamedTuple):
    """One sort of num_slots ids."""

    num_slots: int
    block_size: int
    num_experts: int
    """Size of the id space."""
    num_local_experts: int
    """Size of the id space behind expert_map; num_experts without a map."""
    ids: str
    has_map: bool


class Plan(NamedTuple):
    """Three launches and the sizes of what they fill."""

    count_slots: Step
    scan_counts: Step
    scatter_slots: Step
    chunks: int
    chunk_slots: int
    capacity: int
    """Length of sorted_token_ids, in slots."""
    max_blocks: int
    """Length of expert_ids."""


def padded_bound(num_slots: int, num_experts: int, block_size: int) -> int:
    """Most slots that the sort can fill, padding included, as a multiple of block_size.

    Each expert pads at most block_size - 1 slots, and each slot opens at most one block.
    """
    bound = min(num_slots + num_experts * (block_size - 1), num_slots * block_size)
    return ceil_to(bound, block_size)


@lru_cache(4096)
def plan(problem: Problem, arch: str) -> Plan:
    """The three launches. A call with no slots still fills num_tokens_post_padded."""
    p = problem
    chunk_slots = max(MIN_CHUNK_SLOTS, ceil_to(-(-p.num_slots // MAX_CHUNKS), WARP))
    chunks = max(1, -(-p.num_slots // chunk_slots))
    capacity = padded_bound(p.num_slots, p.num_experts, p.block_size)

    kernel = kernel_spec(
        "moe_align_block_size",
        arch,
        NUM_LOCAL_EXPERTS=p.num_local_experts,
        IDS=ID_TYPE[p.ids],
        MAP=p.has_map,
    )

    def step(name: str, grid: int, block: int, abi: str, overlap: bool = True) -> Step:
        launch = LaunchSpec(grid, block, overlap=overlap and has_dependent_launch(arch))
        return Step(kernel, f"moe_align_block_size_{name}", launch, abi)

    return Plan(
        count_slots=step("count", chunks, WARP, COUNT_ABI, overlap=False),
        scan_counts=step("scan", 1, 1024, SCAN_ABI),
        scatter_slots=step("scatter", chunks, WARP, SCATTER_ABI),
        chunks=chunks,
        chunk_slots=chunk_slots,
        capacity=capacity,
        max_blocks=capacity // p.block_size,
    )
