"""The kernel that the tests of the store compile: one file, one header, ten milliseconds."""

from __future__ import annotations

from pathlib import Path

TINY = """\
#include "common/scale.cuh"

extern "C" __global__ void tiny(float* x) {  // [A]
    x[threadIdx.x] = scale(x[threadIdx.x]) + A;
}
"""
SCALE = """\
#pragma once
__device__ inline float scale(float x) { return x * 3.0f; }
"""


def write_kernels(root: Path) -> Path:
    """Writes tiny.cu and common/scale.cuh under `root`."""
    (root / "common").mkdir(parents=True)
    (root / "tiny.cu").write_text(TINY)
    (root / "common/scale.cuh").write_text(SCALE)
    return root
