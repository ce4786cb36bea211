"""A MoE layer on CuPy arrays. CuPy has no e4m3 and no bf16: they are uint8 and uint16, as bytes.

python examples/cupy_arrays.py
"""

from __future__ import annotations

import cupy
import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

import cumoe

M, topk, E, K, N = 8, 2, 16, 512, 256


def main() -> None:
    if not cupy.is_available():
        raise SystemExit("no GPU: see examples/numpy_arrays.py for the same on the CPU")
    rng = np.random.default_rng(0)

    def put(shape: tuple[int, ...], dtype: type, bits: type) -> cupy.ndarray:
        return cupy.asarray(rng.standard_normal(shape, np.float32).astype(dtype).view(bits))

    x = put((M, K), bfloat16, np.uint16)
    w1, w2 = (put(s, float8_e4m3fn, np.uint8) for s in ((E, 2 * N, K), (E, K, N)))
    w1_scale = cupy.full((E, 2 * N // 128, K // 128), 0.02, np.float32)
    w2_scale = cupy.full((E, K // 128, N // 128), 0.02, np.float32)
    topk_ids = cupy.asarray(rng.integers(0, E, (M, topk), np.int32))
    topk_weights = cupy.full((M, topk), 1 / topk, np.float32)

    with cupy.cuda.Stream() as stream:  # kernels run on CuPy's current stream
        out = cupy.empty((M, K), np.uint16)
        cumoe.fused_experts_fp8(
            x, w1, w2, topk_weights, topk_ids, w1_scale=w1_scale, w2_scale=w2_scale, out=out
        )
        stream.synchronize()
    values = cupy.asnumpy(out).view(bfloat16)
    print(
        f"{values.dtype}{list(values.shape)} on {out.device}, finite: {np.isfinite(values).all()}"
    )


if __name__ == "__main__":
    main()
