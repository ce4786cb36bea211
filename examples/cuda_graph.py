"""A MoE layer in a CUDA graph: kernels are loaded before, replays read what the inputs hold then.

python examples/cuda_graph.py
"""

from __future__ import annotations

import torch

import cumoe

M, topk, E, K, N = 8, 2, 16, 512, 256


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: there is no CUDA graph without one")
    torch.set_default_device("cuda")
    w1 = torch.randn(E, 2 * N, K).to(torch.float8_e4m3fn)
    w2 = torch.randn(E, K, N).to(torch.float8_e4m3fn)
    scales = {
        "w1_scale": torch.full((E, 2 * N // 128, K // 128), 0.02),
        "w2_scale": torch.full((E, K // 128, N // 128), 0.02),
    }

    def layer(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        weights, ids = logits.softmax(-1).topk(topk)
        return cumoe.fused_experts_fp8(x, w1, w2, weights, ids.int(), **scales)

    x, logits = torch.randn(M, K).bfloat16(), torch.randn(M, E)
    torch.randn(M, E).softmax(-1).topk(topk)  # torch's own kernels want one run too
    cumoe.warmup(hidden=K, intermediate=N, experts=E, top_k=topk)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, logits)
    for step in range(3):
        x.normal_()
        logits.normal_()
        graph.replay()
        print(f"step {step}, as eager: {out.equal(layer(x, logits))}")


if __name__ == "__main__":
    main()
