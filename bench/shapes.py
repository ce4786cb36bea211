"""Named shapes and routings of the measurements."""

from __future__ import annotations

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """The routed experts of one layer on one rank."""

    E: int
    topk: int
    K: int
    N: int
    limit: float | None = None
    num_local_experts: int | None = None


SHAPES = {
    "glm-5.3-tp8": Shape(256, 8, 6144, 256),
    "glm-5.3-tp4": Shape(256, 8, 6144, 512),
    "glm-5.3-flash-tp8": Shape(288, 8, 4096, 256, limit=10.0),
    "qwen3-next-tp1": Shape(256, 8, 2048, 512),
    "deepseek-v4-flash-ep8": Shape(256, 6, 4096, 2048, limit=10.0, num_local_experts=32),
}


def routing(kind: str, M: int, E: int, topk: int, seed: int) -> Any:
    """topk_ids [M, topk] int32 on the GPU.

    uniform: distinct experts at random; zipf: the e-th expert with weight 1/(e+1); one: all tokens
    on the same experts; round-robin: token t on experts t topk to t topk + topk - 1, modulo E.
    """
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    if kind == "round-robin":
        return (torch.arange(M * topk, device="cuda") % E).view(M, topk).int()
    if kind == "one":
        return (
            torch.randperm(E, generator=generator, device="cuda")[:topk]
            .expand(M, -1)
            .int()
            .contiguous()
        )
    weights = torch.ones(E, device="cuda")
    if kind == "zipf":
        weights = 1 / torch.arange(1, E + 1, device="cuda")
    return torch.multinomial(weights.expand(M, -1), topk, generator=generator).int()
