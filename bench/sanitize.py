"""Every kernel on small shapes under compute-sanitizer: ``python -m bench.sanitize --out FILE``.

With ``--workload`` it only runs the kernels, each array in a cudaMalloc of its own so that one byte
past an array is seen.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

TOOLS = ("memcheck", "racecheck", "synccheck")


def main() -> int:
    """Writes one line per tool; 1 where a tool reported anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.workload:
        workload()
        return 0
    with ThreadPoolExecutor() as pool:  # each tool slows the host down more than the GPU
        results = dict(zip(TOOLS, pool.map(_run_tool, TOOLS), strict=True))
    if arguments.out:
        from bench.environment import environment

        record = {**environment(), "errors": results}
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    return int(any(results.values()))


def _run_tool(tool: str) -> int:
    """Number of errors that the tool saw, -1 where it did not finish."""
    command = ["compute-sanitizer", "--tool", tool, sys.executable, "-m", "bench.sanitize"]
    done = subprocess.run([*command, "--workload"], capture_output=True, text=True)
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", done.stdout)
    errors = int(found[1]) if found and done.returncode == 0 else -1
    print(f"{tool}: {errors} errors")
    if errors:
        print(done.stdout[-4000:], done.stderr[-2000:])
    return errors


def workload() -> None:
    """Every kernel, every compile-time branch of it, on shapes around its tile edges."""
    import cupy
    import numpy as np

    import cumoe

    cupy.cuda.set_allocator(cupy.cuda.memory._malloc)
    rng = np.random.default_rng(5)
    put = cupy.asarray

    def bf16(*shape: int) -> Any:
        return put((rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16))

    def ids(rows: int, topk: int, experts: int, dtype: type) -> Any:
        return put(rng.integers(-2, experts + 2, (rows, topk)).astype(dtype))

    layouts = [("fp32", k) for k in ("row", "column", "tma")] + [("ue8m0", "packed")]
    for (scale_format, layout), rows in itertools.product(layouts, (1, 17)):
        named: dict[str, Any] = {"scale_format": scale_format, "scale_layout": layout}
        for dtype in (np.float16, np.float32):
            x = put(rng.standard_normal((rows, 640)).astype(dtype))
            cumoe.per_token_group_quant_fp8(x, **named)
        cumoe.per_token_group_quant_fp8(bf16(rows, 641)[:, 1:], **named)
        for id_type in (np.int32, np.int64):
            cumoe.silu_and_mul_quant_fp8(
                bf16(rows, 768), limit=7.0, alpha=1.7, topk_ids=ids(rows, 1, 8, id_type),
                expert_map=put(np.array([0, -1, 1, 9, 2, -1, 3, -5], np.int32)), **named,
            )  # fmt: skip
    for rows, experts, block in ((0, 3, 16), (1, 1, 1), (33, 257, 16), (500, 4096, 64)):
        cumoe.moe_align_block_size(ids(rows, 6, experts, np.int64), block, experts)
    for M, topk in ((1, 2), (19, 3), (150, 2)):
        E, K, N = 4, 256, 128
        w1, w2 = (put(rng.integers(0, 0x78, s, np.uint8)) for s in ((E, 2 * N, K), (E, K, N)))
        scale1, scale2 = (put(rng.random(s, np.float32)) for s in ((E, 2, 2), (E, 2, 1)))
        for first in (w1, w1[::-1]):  # no tensor map holds the second: the chain for any GPU
            cumoe.fused_experts_fp8(
                bf16(M, K), first, w2, put(rng.random((M, topk), np.float32)),
                ids(M, topk, E, np.int32), w1_scale=scale1, w2_scale=scale2,
            )  # fmt: skip
    for case in EXPERTS:
        M, topk, E, K, N = case.M, case.topk, case.E, case.K, case.N
        local = E // 2 if case.mapped else E
        w1, w2 = (
            put(rng.integers(0, 0x78, s, np.uint8)) for s in ((local, 2 * N, K), (local, K, N))
        )
        scale1, scale2 = (
            put(rng.random((local, rows // 128, columns // 128), np.float32))
            for rows, columns in ((2 * N, K), (K, N))
        )
        table = np.where(np.arange(E) % 2, np.arange(E) // 2, -1).astype(np.int32)
        cumoe.fused_experts_fp8(
            bf16(M, K + case.gap)[:, case.gap :], w1, w2, put(rng.random((M, topk), np.float32)),
            ids(M, topk, E, np.int64 if case.mapped else np.int32), w1_scale=scale1,
            w2_scale=scale2, expert_map=put(table) if case.mapped else None,
            swiglu_limit=7.0 if case.mapped else None, scale_format=case.scale_format,
        )  # fmt: skip
    cupy.cuda.runtime.deviceSynchronize()


class Experts(NamedTuple):
    """A call of the experts."""

    M: int
    topk: int
    E: int
    K: int
    N: int
    mapped: bool = False
    gap: int = 0
    """Elements by which rows of x are not aligned."""
    scale_format: str = "fp32"


EXPERTS = (
    # The fewest tokens.
    Experts(1, 2, 4, 128, 128),  # one 128-block
    Experts(8, 4, 8, 1152, 256, mapped=True),  # 32 slots; a ragged stage
    Experts(5, 6, 16, 2304, 640, scale_format="ue8m0"),  # stages are used again
    # Few tokens.
    Experts(10, 4, 64, 1152, 384),  # chunks of 8
    Experts(5, 4, 8, 256, 128, gap=1),  # of 16; rows of x are not aligned; half of a stage
    Experts(8, 8, 2, 256, 2048),  # more tokens than an expert has room for: the chain for many
    Experts(13, 4, 16, 1152, 384, mapped=True),  # nine 128-blocks
    Experts(30, 4, 16, 1152, 256),  # of 32
    Experts(16, 8, 16, 2304, 512, mapped=True, scale_format="ue8m0"),  # two steps of a row of w2
    # Many tokens.
    Experts(70, 2, 4, 128, 128),  # one 128-block, fewer than stages; half of a tile outside
    Experts(131, 3, 8, 640, 384, mapped=True, scale_format="ue8m0"),
    Experts(90, 4, 8, 1152, 640, gap=1),  # the codes of down lie in the ring
)


if __name__ == "__main__":
    sys.exit(main())
