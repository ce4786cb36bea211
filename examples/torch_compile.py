"""A MoE layer inside torch.compile: one graph, for any number of tokens.

    python examples/torch_compile.py

On the CPU the NumPy reference computes, through the same graph.
"""

from __future__ import annotations

import torch

import cumoe.torch_ops  # registers torch.ops.cumoe  # noqa: F401

topk, E, K, N = 2, 8, 512, 256
device = "cuda" if torch.cuda.is_available() else "cpu"


def layer(x: torch.Tensor, router: torch.Tensor, *experts: torch.Tensor) -> torch.Tensor:
    weights, ids = (x @ router).float().softmax(-1).topk(topk)
    w1, w2, s1, s2 = experts
    return x + torch.ops.cumoe.fused_experts_fp8(x, w1, w2, weights, ids, w1_scale=s1, w2_scale=s2)


def main() -> None:
    router = torch.randn(K, E, device=device).bfloat16()
    w1 = torch.randn(E, 2 * N, K, device=device).to(torch.float8_e4m3fn)
    w2 = torch.randn(E, K, N, device=device).to(torch.float8_e4m3fn)
    s1 = torch.full((E, 2 * N // 128, K // 128), 0.02, device=device)
    s2 = torch.full((E, K // 128, N // 128), 0.02, device=device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (4, 7, 64):
        x = torch.randn(tokens, K, device=device).bfloat16()
        out, eager = (f(x, router, w1, w2, s1, s2) for f in (compiled, layer))
        print(f"{tokens} tokens: {out.dtype}{list(out.shape)}, as eager: {torch.equal(out, eager)}")


if __name__ == "__main__":
    main()
