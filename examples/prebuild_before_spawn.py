"""Workers that never compile: the parent builds every kernel before it spawns them.

    python examples/prebuild_before_spawn.py --workers 8

Each worker's first call is timed. With GPUs the workers share them; without one they find the same
kernels in the cache, and the NumPy reference computes the call.

Under torchrun there is no parent of yours: run `cumoe prebuild` before it with the same sizes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from typing import Any

import ml_dtypes
import numpy as np

import cumoe

LAYER = {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4}
NUM_TOKENS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    workers = parser.parse_args().workers

    report = cumoe.prebuild(**LAYER)
    if not report.ok:
        raise SystemExit("\n".join(report.causes))
    built, cached = report.count("built"), report.count("cached")
    print(f"parent: {built} built, {cached} cached in {report.seconds:.2f} s, {report.cache_dir}")

    spawn = multiprocessing.get_context("spawn")  # a fork would break once CUDA is initialised
    barrier, results = spawn.Barrier(workers), spawn.Queue()
    processes = [
        spawn.Process(target=work, args=(rank, barrier, results)) for rank in range(workers)
    ]
    for process in processes:
        process.start()
    rows = sorted(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()

    print("rank  device  compiled  from disk  kernels ms  first call ms  sum of the result")
    for rank, device, compiled, disk_hits, kernels_ms, call_ms, total in rows:
        print(
            f"{rank:4}  {device:6}  {compiled:8}  {disk_hits:9}  {kernels_ms:10.1f}  "
            f"{call_ms:13.1f}  {total:.6f}"
        )
    return 0


def work(rank: int, barrier: Any, results: Any) -> None:
    """One worker: loads the kernels, calls the layer once, and says how long each took."""
    cupy, device = choose_device(rank)
    arrays, scales = make_layer(cupy)
    barrier.wait()  # all at once, as the ranks of an engine start

    start = time.perf_counter()
    if cupy is None:
        cumoe.prebuild(**LAYER)  # finds everything; on a GPU, warmup loads it too
    else:
        cumoe.warmup(**LAYER)
    loaded = time.perf_counter()
    out = cumoe.fused_experts_fp8(*arrays, **scales)
    host = out if cupy is None else cupy.asnumpy(out).view(ml_dtypes.bfloat16)
    done = time.perf_counter()

    counters = cumoe.cache_info().counters
    total = float(host.astype(np.float64).sum())
    times = (1e3 * (loaded - start), 1e3 * (done - loaded))
    results.put((rank, device, counters.compiled, counters.disk_hits, *times, total))


def choose_device(rank: int) -> tuple[Any, str]:
    """CuPy with a GPU of this worker's own, or None."""
    try:
        import cupy

        ordinal = rank % cupy.cuda.runtime.getDeviceCount()
    except (ImportError, ZeroDivisionError, RuntimeError):  # no CuPy, no GPU, no driver
        return None, "cpu"
    cupy.cuda.Device(ordinal).use()
    return cupy, f"cuda:{ordinal}"


def make_layer(cupy: Any) -> tuple[list[Any], dict[str, Any]]:
    """The same arrays in every worker, on its GPU if it has one."""
    K, N, E, topk = LAYER.values()
    rng = np.random.default_rng(0)

    def e4m3(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(ml_dtypes.float8_e4m3fn)

    def put(a: np.ndarray) -> Any:
        bits = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8}.get(a.dtype.name, a.dtype)
        return a if cupy is None else cupy.asarray(a.view(bits))

    x = rng.standard_normal((NUM_TOKENS, K), np.float32).astype(ml_dtypes.bfloat16)
    topk_ids = np.argsort(rng.random((NUM_TOKENS, E)), axis=1)[:, :topk].astype(np.int32)
    topk_weights = np.full((NUM_TOKENS, topk), 1 / topk, np.float32)
    scales = {
        "w1_scale": np.full((E, 2 * N // 128, K // 128), 0.02, np.float32),
        "w2_scale": np.full((E, K // 128, N // 128), 0.02, np.float32),
    }
    arrays = [x, e4m3(E, 2 * N, K), e4m3(E, K, N), topk_weights, topk_ids]
    return [put(a) for a in arrays], {name: put(a) for name, a in scales.items()}


if __name__ == "__main__":
    raise SystemExit(main())
