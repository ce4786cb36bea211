"""The experts in torch, in float64 between the rounding points of docs/numerics.md.

What rows are checked against: the NumPy reference takes seconds for a token of a large layer. A
test holds the two together.
"""

from __future__ import annotations

from typing import Any

from bench.peers import Layer


def fused_experts(
    x: Any, layer: Layer, weights: Any, ids: Any, *, scale_format: str, limit: float | None
) -> Any:
    """[M, K] bf16, on the device of the layer; `ids` are rows of its weights, -1 for none."""
    import torch

    tokens = zip(x, weights, ids, strict=True)
    return torch.stack([_token(*token, layer, scale_format, limit) for token in tokens])


def _token(
    x: Any, weights: Any, ids: Any, layer: Layer, scale_format: str, limit: float | None
) -> Any:
    import torch

    experts = ids.clamp(min=0).long()
    w1, w2 = _values(layer.w1, layer.w1_scale, experts), _values(layer.w2, layer.w2_scale, experts)
    h = (w1 @ _quantized(x, scale_format)).bfloat16()
    y = _swiglu(h, limit)
    d = (w2 @ _quantized(y, scale_format)[..., None])[..., 0].bfloat16()
    kept = torch.where((ids < 0)[:, None], 0, d.double())
    return (weights.double() @ kept).bfloat16()


def _values(codes: Any, scale: Any, experts: Any) -> Any:
    """Of these experts, in float64."""
    import torch

    # As bytes: not every operation takes e4m3.
    chosen = codes.view(torch.uint8)[experts].view(codes.dtype).double()
    blocks = chosen.unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    return (blocks * scale[experts].double()[:, :, None, :, None]).flatten(3).flatten(1, 2)


def _swiglu(h: Any, limit: float | None) -> Any:
    """[topk, 2N] to [topk, N] bf16."""
    gate, up = h.float().chunk(2, 1)
    if limit is not None:
        gate, up = gate.clamp(max=limit).bfloat16().float(), up.clamp(-limit, limit)
    silu = (gate / (1 + (-gate).exp())).bfloat16()
    return (silu.float() * up).bfloat16()


def _quantized(x: Any, scale_format: str) -> Any:
    """What is left of x in e4m3 with a scale for 128 values, in float64."""
    import torch

    groups = x.float().unflatten(-1, (-1, 128))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10)
    # Not `/ 448`, which CUDA turns into a product with 1/448: then codes at exact ties, of which
    # bf16 values have many, fall the other way, and a row is off by 2e-2.
    scale = amax / torch.full_like(amax, 448)
    if scale_format == "ue8m0":
        mantissa, exponent = torch.frexp(scale.clamp(min=1e-10))
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    codes = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.double() * scale.double()).flatten(-2)
