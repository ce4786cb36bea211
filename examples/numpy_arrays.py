"""A MoE layer on NumPy arrays: the reference, on any machine, in the numbers that the kernels give.

python examples/numpy_arrays.py
"""

from __future__ import annotations

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

import cumoe

M, topk, E, K, N = 8, 2, 16, 512, 256


def main() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((M, K), np.float32).astype(bfloat16)
    w1 = rng.standard_normal((E, 2 * N, K), np.float32).astype(float8_e4m3fn)
    w2 = rng.standard_normal((E, K, N), np.float32).astype(float8_e4m3fn)
    w1_scale = np.full((E, 2 * N // 128, K // 128), 0.02, np.float32)
    w2_scale = np.full((E, K // 128, N // 128), 0.02, np.float32)
    topk_ids = np.argsort(rng.random((M, E)), axis=1)[:, :topk].astype(np.int32)
    topk_weights = np.full((M, topk), 1 / topk, np.float32)

    out = cumoe.fused_experts_fp8(
        x, w1, w2, topk_weights, topk_ids, w1_scale=w1_scale, w2_scale=w2_scale, swiglu_limit=7.0
    )
    q, scale = cumoe.per_token_group_quant_fp8(out)
    restored = q.astype(np.float32).reshape(M, -1, 128) * scale[..., None]
    error = abs(restored.reshape(M, K) - out.astype(np.float32)).max() / abs(out).max()
    print(f"{out.dtype}{list(out.shape)}, {q.dtype} within {error:.3f}")


if __name__ == "__main__":
    main()
