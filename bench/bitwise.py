"""Activation and quantization against vLLM's two kernels, byte for byte.

``python -m bench.bitwise``: 10^8 random finite elements, and every finite bf16 value as gate and as
up, with limit 10 and without, fp32 and power-of-two scales. Groups in which a product overflows are
left out and counted: there the two differ on purpose (an infinity gets the NaN code here, and a
finite one there).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import peers

H, ROWS = 2048, 49_152  # 10^8 outputs


def main() -> int:
    """Writes the numbers of bytes and scales that differ; 1 where there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with peers.vllm_context():
        rows = list(compare_all())
    for row in rows:
        print(row)
    if arguments.out:
        from bench.environment import environment

        record = {"environment": environment(), "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(row["wrong_codes"] or row["wrong_scales"] for row in rows))


def compare_all() -> Iterator[dict[str, Any]]:
    """One row per input, limit and scale format."""
    for name, x in inputs():
        for limit in (10.0, None):
            for scale_format in ("fp32", "ue8m0"):
                yield {"input": name, "limit": limit, "scale_format": scale_format} | compare(
                    x, limit, scale_format
                )


def inputs() -> Iterator[tuple[str, Any]]:
    """bf16 [rows, 2H] tensors on the GPU, all finite."""
    import torch

    generator = torch.Generator("cuda").manual_seed(3)
    shape = (ROWS, 2 * H)
    normal = torch.randn(shape, device="cuda", generator=generator) * 8
    yield "normal, sigma 8", normal.bfloat16()
    bits = torch.randint(-(1 << 15), 1 << 15, shape, device="cuda", generator=generator)
    yield "random bits", _finite(bits.to(torch.int16).view(torch.bfloat16))
    every = torch.arange(-(1 << 15), 1 << 15, device="cuda").to(torch.int16).view(torch.bfloat16)
    every = _finite(every).view(-1, 128)
    other = torch.randn(every.shape, device="cuda", generator=generator).bfloat16()
    for name, gate, up in (
        ("every gate", every, torch.ones_like(every)),
        ("every gate, random up", every, other),
        ("every up", torch.ones_like(every), every),
        ("every up, random gate", other, every),
    ):
        yield name, torch.cat([gate, up], dim=1).contiguous()


def compare(x: Any, limit: float | None, scale_format: str) -> dict[str, Any]:
    """Bytes and scales that differ, over groups with finite scales."""
    import torch

    import cumoe

    q, scale = cumoe.silu_and_mul_quant_fp8(x, limit=limit, scale_format=scale_format)
    theirs_q, theirs_scale = peers.two_kernels(x, limit, scale_format == "ue8m0")
    finite = torch.isfinite(scale)
    same = (q.view(torch.uint8) == theirs_q.view(torch.uint8)).view(*scale.shape, 128)
    return {
        "elements": q.numel(),
        "overflowing_groups": int((~finite).sum()),
        "wrong_codes": int((~same & finite[..., None]).sum()),
        "wrong_scales": int(((scale != theirs_scale) & finite).sum()),
    }


def _finite(x: Any) -> Any:
    import torch

    return torch.where(torch.isfinite(x), x, torch.ones_like(x))


if __name__ == "__main__":
    raise SystemExit(main())
