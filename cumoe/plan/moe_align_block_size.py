"""Plan of moe_align_block_size: a counting sort in one launch, or in three for many slots."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cumoe.plan.codes import ID_TYPE
from cumoe.plan.device import DeviceInfo, has_dependent_launch
from cumoe.plan.scales import ceil_to
from cumoe.plan.spec import KernelSpec, LaunchSpec, Step, kernel_spec

AT_ONCE_ABI = "PPPPPqqqqqq"
COUNT_ABI = "PPPPPqqqqq"
SCAN_ABI = "PPPqq"
SCATTER_ABI = "PPPPPPqqqq"

MAX_EXPERTS = 4096
MAX_TOPK = 64
WARP = 32
THREADS = 1024
"""Of a CTA of the one launch, and of the scan."""
MAX_SLOTS_AT_ONCE = 65_536
"""Every CTA of the one launch reads all ids."""
MAX_BLOCK_AT_ONCE = 1024
"""There one warp fills up the last block of an expert."""
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
    """The launches and the sizes of what they fill."""

    steps: tuple[Step, ...]
    """Count, scan, scatter; or all at once."""
    chunks: int
    """Rows of the counts in memory; 0 where one launch keeps its own."""
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


def representative_slot_counts() -> tuple[int, ...]:
    """Numbers of slots that together need every kernel."""
    return 1, MAX_SLOTS_AT_ONCE + 1


@lru_cache(4096)
def plan(problem: Problem, device: DeviceInfo) -> Plan:
    """All launches. A call with no slots still fills num_tokens_post_padded."""
    p = problem
    kernel = kernel_spec(
        "moe_align_block_size",
        device.arch,
        NUM_LOCAL_EXPERTS=p.num_local_experts,
        IDS=ID_TYPE[p.ids],
        MAP=p.has_map,
    )
    capacity = padded_bound(p.num_slots, p.num_experts, p.block_size)
    few = p.num_slots <= MAX_SLOTS_AT_ONCE and p.block_size <= MAX_BLOCK_AT_ONCE
    launches = _at_once(p, kernel, device) if few else _by_chunks(p, kernel)
    return Plan(*launches, capacity, max_blocks=capacity // p.block_size)


def _at_once(
    p: Problem, kernel: KernelSpec, device: DeviceInfo
) -> tuple[tuple[Step, ...], int, int]:
    """The one launch, no chunks in memory, and the slots that a CTA places."""
    chunk_slots = min(THREADS, max(WARP, ceil_to(-(-p.num_slots // device.num_sms), WARP)))
    grid = max(1, -(-p.num_slots // chunk_slots))
    return (_step(kernel, "at_once", grid, THREADS, AT_ONCE_ABI, overlap=False),), 0, chunk_slots


def _by_chunks(p: Problem, kernel: KernelSpec) -> tuple[tuple[Step, ...], int, int]:
    """Three launches, their chunks, and the slots of each."""
    chunk_slots = max(MIN_CHUNK_SLOTS, ceil_to(-(-p.num_slots // MAX_CHUNKS), WARP))
    chunks = max(1, -(-p.num_slots // chunk_slots))
    steps = (
        _step(kernel, "count", chunks, WARP, COUNT_ABI, overlap=False),
        _step(kernel, "scan", 1, THREADS, SCAN_ABI),
        _step(kernel, "scatter", chunks, WARP, SCATTER_ABI),
    )
    return steps, chunks, chunk_slots


def _step(
    kernel: KernelSpec, name: str, grid: int, block: int, abi: str, overlap: bool = True
) -> Step:
    launch = LaunchSpec(grid, block, overlap=overlap and has_dependent_launch(kernel.arch))
    return Step(kernel, f"moe_align_block_size_{name}", launch, abi)


def counts_bytes(plan: Plan, num_local_experts: int) -> tuple[int, int]:
    """Sizes of what the launches hand on: the counts and the bases of the experts."""
    experts = num_local_experts if plan.chunks else 0
    return plan.chunks * experts * 4, experts * 4
