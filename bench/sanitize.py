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
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

import cumoe
from bench.harness import compile_kernels
from bench.sweep import forced
from cumoe._settings import settings
from cumoe.launch import device
from cumoe.plan import silu_and_mul_quant_fp8 as activation
from cumoe.plan.enumerate import steps_in
from cumoe.plan.fused_experts_fp8 import Problem, plan
from cumoe.plan.silu_and_mul_quant_fp8 import clamp_kind

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
    compile_experts()
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
    start = time.perf_counter()
    done = subprocess.run([*command, "--workload"], capture_output=True, text=True)
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", done.stdout)
    errors = int(found[1]) if found and done.returncode == 0 else -1
    print(f"{tool}: {errors} errors, {time.perf_counter() - start:.0f} s", flush=True)
    if errors:
        print(done.stdout[-4000:], done.stderr[-2000:])
    return errors


class Experts(NamedTuple):
    """A call of the experts."""

    M: int
    topk: int
    E: int
    K: int
    N: int
    local: int | None = None
    """Experts on this rank: then with an expert_map, and ids of 64 bits."""
    limit: float | None = None
    """bf16 holds 7.0, not 7.1."""
    alpha: float = 1.0
    scale_format: str = "fp32"
    gap: int = 0
    """Elements by which rows of x are not aligned."""
    out_gap: int = 0
    backwards: bool = False
    """The experts of w1 from the last to the first: no tensor map holds that."""
    on_input: bool = False
    """Router weights on x."""

    @property
    def problem(self) -> Problem:
        """What the plan knows of it."""
        mapped = self.local is not None
        return Problem(
            self.M, self.K, self.N, self.E, self.local or self.E, self.topk,
            "int64" if mapped else "int32", "fp32", mapped, self.scale_format,
            clamp_kind(self.limit), self.alpha != 1.0, self.on_input, x_aligned=self.gap == 0,
            out_aligned=self.out_gap == 0, weights_mappable=not self.backwards,
        )  # fmt: skip


EXPERTS = (
    # The fewest tokens.
    Experts(1, 2, 4, 128, 128),  # one 128-block
    Experts(8, 4, 8, 1152, 256, local=4, limit=7.0),  # 32 slots; a ragged stage
    Experts(5, 6, 16, 2304, 640, scale_format="ue8m0", out_gap=1),  # stages are used again
    Experts(3, 8, 8, 6144, 256, limit=7.1, alpha=1.7),  # long stages; three tiles of a row
    # Few tokens.
    Experts(10, 4, 64, 1152, 384),  # chunks of 8
    Experts(5, 4, 8, 256, 128, gap=1, out_gap=1),  # of 16; half of a stage
    Experts(8, 8, 2, 256, 2048),  # more tokens than an expert has room for: the chain for many
    Experts(13, 4, 16, 1152, 384, local=8, limit=7.0),  # nine 128-blocks
    Experts(30, 4, 16, 1152, 256),  # of 32
    Experts(16, 8, 16, 2304, 512, local=8, limit=7.1, alpha=1.7, scale_format="ue8m0"),
    Experts(6, 8, 8, 6144, 256),  # 48 rows of w2 a pass
    Experts(12, 1, 8, 640, 256, on_input=True),
    Experts(250, 8, 256, 2304, 256, local=8),  # rings are used again; tokens with an expert twice
    Experts(1100, 1, 256, 2304, 256, local=8),  # more tokens than shared memory has room for
    # Many tokens.
    Experts(19, 3, 4, 256, 128),
    Experts(70, 2, 4, 128, 128),  # one 128-block, fewer than stages; half of a tile outside
    Experts(131, 3, 8, 640, 384, local=4, limit=7.0, scale_format="ue8m0"),
    Experts(90, 4, 8, 1152, 640, limit=7.1, alpha=1.7, gap=1, out_gap=1),  # codes lie in the ring
    Experts(75, 1, 4, 512, 256, on_input=True),  # two tiles at a time
    # Any weights, few and many slots an expert.
    Experts(19, 3, 4, 256, 128, backwards=True),
    Experts(150, 2, 4, 256, 128, backwards=True, local=2, scale_format="ue8m0"),
    Experts(40, 1, 4, 256, 128, backwards=True, on_input=True, gap=1),
)


def compile_experts() -> None:
    """Their kernels: the tools then find them."""
    info = device.info(0)
    plans = (plan(case.problem, info) for case in EXPERTS)
    compile_kernels(step.kernel for found in plans for step in steps_in(found))


def workload() -> None:
    """Every kernel, with the compile-time branches of each, on shapes around its tile edges."""
    import cupy

    cupy.cuda.set_allocator(cupy.cuda.memory._malloc)
    make = Arrays()
    run_quantizers(make)
    run_strategies(make)
    at_once = ((0, 3, 16), (1, 1, 1), (33, 257, 16), (1500, 4096, 64))
    in_three = ((33, 257, 1025), (5500, 257, 16))
    for rows, experts, block in (*at_once, *in_three):
        cumoe.moe_align_block_size(make.ids(rows, 6, experts, np.int64), block, experts)
    for case in EXPERTS:
        run_experts(make, case)
    cupy.cuda.runtime.deviceSynchronize()


class Arrays:
    """Random arrays on the GPU."""

    def __init__(self) -> None:
        import cupy

        self.rng, self.put = np.random.default_rng(5), cupy.asarray

    def bf16(self, rows: int, columns: int, gap: int = 0) -> Any:
        """Rows that begin ``gap`` elements after an aligned address."""
        values = self.rng.standard_normal((rows, columns + gap), np.float32)
        return self.put((values.view(np.uint32) >> 16).astype(np.uint16))[:, gap:]

    def fp32(self, *shape: int) -> Any:
        """In [0, 1)."""
        return self.put(self.rng.random(shape, np.float32))

    def e4m3(self, *shape: int) -> Any:
        """Codes of finite values."""
        return self.put(self.rng.integers(0, 0x78, shape, np.uint8))

    def ids(self, rows: int, topk: int, experts: int, dtype: type, step: int = 1) -> Any:
        """Some of them none. With a step most are its multiples, which a map has on this rank."""
        found = self.rng.integers(-2, experts + 2, (rows, topk))
        often = self.rng.random((rows, topk)) < 0.9
        return self.put(np.where(often, found // step * step, found).astype(dtype))


def run_quantizers(make: Arrays) -> None:
    """The quantizer and the activation: formats, layouts, types, alignments."""
    layouts = [("fp32", k) for k in ("row", "column", "tma")] + [("ue8m0", "packed")]
    table = make.put(np.array([0, -1, 1, 9, 2, -1, 3, -5], np.int32))
    for (scale_format, layout), rows in itertools.product(layouts, (1, 17)):
        named: dict[str, Any] = {"scale_format": scale_format, "scale_layout": layout}
        for dtype in (np.float16, np.float32):
            x = make.put(make.rng.standard_normal((rows, 640)).astype(dtype))
            cumoe.per_token_group_quant_fp8(x, **named)
        cumoe.per_token_group_quant_fp8(make.bf16(rows, 640, gap=1), **named)
        cumoe.silu_and_mul_quant_fp8(make.bf16(rows, 768, gap=1), **named)
        for id_type, limit in ((np.int32, 7.0), (np.int64, 7.1)):  # bf16 holds 7.0
            cumoe.silu_and_mul_quant_fp8(
                make.bf16(rows, 768), limit=limit, alpha=1.7,
                topk_ids=make.ids(rows, 1, 8, id_type), expert_map=table, **named,
            )  # fmt: skip


def run_strategies(make: Arrays) -> None:
    """Every way in which the activation deals its groups out; then it as two kernels."""
    table = make.put(np.arange(8, dtype=np.int32) // 2 - 1)
    for strategy in dict.fromkeys((*activation.UNFILTERED, *activation.FILTERED)):
        with forced(strategy):
            cumoe.silu_and_mul_quant_fp8(make.bf16(321, 512))
            for mapped in (None, table):
                ids = make.ids(321, 1, 8, np.int32)
                cumoe.silu_and_mul_quant_fp8(
                    make.bf16(321, 512), topk_ids=ids, expert_map=mapped, num_experts=8
                )
    apart = replace(settings(), fused_act_quant=False)
    with (
        forced(activation.UNFILTERED[0]),
        patch("cumoe.ops.silu_and_mul_quant_fp8.settings", lambda: apart),
    ):
        cumoe.silu_and_mul_quant_fp8(make.bf16(33, 512), limit=7.0)


def run_experts(make: Arrays, case: Experts) -> None:
    """One call, into an output of its own."""
    M, topk, E, K, N = case[:5]
    local, mapped = case.local or E, case.local is not None
    step = E // local
    experts = np.arange(E)
    table = np.where(experts % step, -1, experts // step).astype(np.int32)
    w1 = make.e4m3(local, 2 * N, K)
    cumoe.fused_experts_fp8(
        make.bf16(M, K, case.gap), w1[::-1] if case.backwards else w1, make.e4m3(local, K, N),
        make.fp32(M, topk), make.ids(M, topk, E, np.int64 if mapped else np.int32, step),
        w1_scale=make.fp32(local, 2 * N // 128, K // 128),
        w2_scale=make.fp32(local, K // 128, N // 128),
        expert_map=make.put(table) if mapped else None, swiglu_limit=case.limit,
        swiglu_alpha=case.alpha, scale_format=case.scale_format,
        apply_router_weight_on_input=case.on_input, out=make.bf16(M, K, case.out_gap),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
