"""Named shapes and routings of the measurements."""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """The routed experts of one layer on one rank."""

    E: int
    topk: int
    K: int
    N: int
    limit: float | None = None
    num_local_experts: int | None = None


# "qwen3-next-tp1" is as wide as Qwen3-Next's layer, with half of its 512 experts and topk 8.
SHAPES = {
    "glm-5.3-tp8": Shape(256, 8, 6144, 256),
    "glm-5.3-tp4": Shape(256, 8, 6144, 512),
    "glm-5.3-flash-tp8": Shape(288, 8, 4096, 256, limit=10.0),
    "qwen3-next-tp1": Shape(256, 8, 2048, 512),
    "deepseek-v4-flash-ep8": Shape(256, 6, 4096, 2048, limit=10.0, num_local_experts=32),
}
ROUTINGS = ("uniform", "zipf", "one", "round-robin")

_SPELLED_OUT = re.compile(
    r"e(\d+)-top(\d+)-k(\d+)-n(\d+)(?:-limit(\d+(?:\.\d+)?))?(?:-local(\d+))?"
)


def shape(name: str) -> Shape:
    """A shape by its name, or spelled out: ``e256-top8-k6144-n256[-limit10][-local32]``.

    Raises: ValueError naming the known ones.
    """
    if name in SHAPES:
        return SHAPES[name]
    found = _SPELLED_OUT.fullmatch(name)
    if found is None:
        raise ValueError(
            f"shape: want one of {', '.join(SHAPES)}, or e256-top8-k6144-n256[-limit10][-local32], "
            f"got {name!r}"
        )
    experts, topk, K, N = (int(size) for size in found.groups()[:4])
    limit, local = found.groups()[4:]
    made = Shape(
        experts, topk, K, N, float(limit) if limit else None, int(local) if local else None
    )
    if made.E % (made.num_local_experts or 1):
        raise ValueError(f"shape: want local to divide {made.E} experts, got {name!r}")
    return made


def expert_map(s: Shape, device: str = "cuda") -> Any:
    """[E] int32, every (E / num_local_experts)-th expert on this rank; None where all are."""
    import torch

    if s.num_local_experts is None:
        return None
    step = s.E // s.num_local_experts
    experts = torch.arange(s.E, dtype=torch.int32, device=device)
    return torch.where(experts % step == 0, experts // step, -1)


def routing(kind: str, M: int, E: int, topk: int, seed: int, device: str = "cuda") -> Any:
    """topk_ids [M, topk] int32 on the GPU.

    uniform: distinct experts at random; zipf: the e-th expert with weight 1/(e+1); one: all tokens
    on the same experts; round-robin: slot after slot the next expert, from where the routing of
    the seed before ended.
    """
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    if kind == "round-robin":
        slots = torch.arange(M * topk, device=device) + seed * M * topk
        return (slots % E).view(M, topk).int()
    if kind == "one":
        experts = torch.randperm(E, generator=generator, device=device)[:topk]
        return experts.expand(M, -1).int().contiguous()
    weights = torch.ones(E, device=device)
    if kind == "zipf":
        weights = 1 / torch.arange(1, E + 1, device=device)
    return torch.multinomial(weights.expand(M, -1), topk, generator=generator).int()
