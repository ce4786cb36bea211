"""A MoE layer of torch tensors, called as a module, into an output of its own.

    python examples/torch_layer.py

On a GPU the kernels run on torch's current stream; on the CPU the NumPy reference computes.
"""

from __future__ import annotations

import torch

import cumoe

device = "cuda" if torch.cuda.is_available() else "cpu"


class Experts(torch.nn.Module):
    def __init__(self, E: int, K: int, N: int, topk: int) -> None:
        super().__init__()
        self.topk, self.router = topk, torch.nn.Linear(K, E, bias=False, dtype=torch.bfloat16)
        self.register_buffer("w1", torch.randn(E, 2 * N, K).to(torch.float8_e4m3fn))
        self.register_buffer("w2", torch.randn(E, K, N).to(torch.float8_e4m3fn))
        self.register_buffer("w1_scale", torch.full((E, 2 * N // 128, K // 128), 0.02))
        self.register_buffer("w2_scale", torch.full((E, K // 128, N // 128), 0.02))

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        weights, ids = self.router(x).float().softmax(-1).topk(self.topk)
        return cumoe.fused_experts_fp8(
            x, self.w1, self.w2, weights, ids, w1_scale=self.w1_scale, w2_scale=self.w2_scale,
            swiglu_limit=7.0, out=out,
        )  # fmt: skip


@torch.no_grad()
def main() -> None:
    layer = Experts(E=16, K=512, N=256, topk=2).to(device)
    x = torch.randn(8, 512, device=device).bfloat16()
    out = torch.empty_like(x)
    filled, new = layer(x, out), layer(x)
    print(f"{new.dtype}{list(new.shape)} on {new.device.type}, same bytes: {out.equal(new)}")
    print(f"the output given is returned: {filled is out}")


if __name__ == "__main__":
    main()
