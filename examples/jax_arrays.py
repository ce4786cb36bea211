"""A MoE layer on JAX arrays: the results are JAX arrays too, on the same device.

    python examples/jax_arrays.py

On a GPU (JAX with CUDA, and CuPy) the kernels run on CuPy's current stream, after JAX's work on the
inputs and before its work on the results. JAX cannot trace them: call them outside of jax.jit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import cumoe

M, topk, E, K, N = 8, 2, 16, 512, 256


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (M, K), jnp.bfloat16)
    w1 = jax.random.normal(keys[1], (E, 2 * N, K)).astype(jnp.float8_e4m3fn)
    w2 = jax.random.normal(keys[2], (E, K, N)).astype(jnp.float8_e4m3fn)
    w1_scale = jnp.full((E, 2 * N // 128, K // 128), 0.02)
    w2_scale = jnp.full((E, K // 128, N // 128), 0.02)
    topk_weights, topk_ids = jax.lax.top_k(jax.nn.softmax(jax.random.normal(keys[3], (M, E))), topk)

    out = cumoe.fused_experts_fp8(
        x, w1, w2, topk_weights, topk_ids, w1_scale=w1_scale, w2_scale=w2_scale
    )
    q, scale = cumoe.per_token_group_quant_fp8(out)
    restored = (q.astype(jnp.float32).reshape(M, -1, 128) * scale[..., None]).reshape(M, K)
    error = float(jnp.abs(restored - out).max() / jnp.abs(out).max())
    print(f"{out.dtype}{list(out.shape)} on {out.device}, {q.dtype} within {error:.3f}")


if __name__ == "__main__":
    main()
