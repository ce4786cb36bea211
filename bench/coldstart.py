"""How long a worker's first call takes: ``python -m bench.coldstart --out FILE``.

Each sample is a process of its own. What any user of torch and CuPy pays (their imports, a CUDA
context) is timed apart from what comes on top: importing cumoe and the first call of
fused_experts_fp8, either with a cache that `cumoe prebuild` has filled, or with an empty one. Where
there is no GPU, getting all kernels of the layer from the cache stands for the call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SELECTION = {"model": "glm-5.3", "tp": 8, "scale_format": "fp32"}
NUM_TOKENS = 8
BARS_S = {"prebuilt": 0.150, "cold": 6.0}
"""What may come on top of the imports and the context on an H200."""

CHILD = """\
import json, sys, time
clock, spent = time.perf_counter, {}

def timed(name, function):
    start = clock()
    result = function()
    spent[name] = clock() - start
    return result

torch = timed("import torch", lambda: __import__("torch"))
cupy = timed("import cupy", lambda: __import__("cupy"))
gpu = torch.cuda.is_available()

def context():
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()

if gpu:
    timed("context", context)
timed("import cumoe", lambda: __import__("cumoe"))
from bench.coldstart import first_call
call = first_call(gpu)
timed("first call", call)
timed("second call", call)
from cumoe.store import store
counts = store.stats()
print(json.dumps({"seconds": spent, "compiled": counts.compiled, "disk_hits": counts.disk_hits}))
"""


def first_call(gpu: bool) -> Any:
    """The call to time, its arrays made; without a GPU, what the call wants from the cache."""
    from cumoe.models import selected_layers

    (layer,) = selected_layers(SELECTION)  # type: ignore[arg-type]
    return _experts_call(layer) if gpu else _store_calls(layer)


def _experts_call(layer: Any) -> Any:
    import torch

    import cumoe

    E, K, N, M = layer.num_local_experts, layer.K, layer.N, NUM_TOKENS

    def array(shape: Sequence[int], dtype: Any) -> Any:
        return torch.zeros(tuple(shape), dtype=torch.uint8, device="cuda").to(dtype)

    x = array((M, K), torch.bfloat16)
    w1, w2 = array((E, 2 * N, K), torch.uint8), array((E, K, N), torch.uint8)
    s1 = array((E, 2 * N // 128, K // 128), torch.float32)
    s2 = array((E, K // 128, N // 128), torch.float32)
    ids, weights = array((M, layer.topk), torch.int32), array((M, layer.topk), torch.float32)
    torch.cuda.synchronize()

    def call() -> None:
        cumoe.fused_experts_fp8(x, w1, w2, weights, ids, w1_scale=s1, w2_scale=s2)
        torch.cuda.synchronize()

    return call


def _store_calls(layer: Any) -> Any:
    from cumoe.plan.device import H200
    from cumoe.plan.enumerate import serving_steps, specs_of
    from cumoe.store import store

    specs = specs_of(serving_steps(H200, layer))

    def call() -> None:
        for spec in specs:
            store.get(spec)

    return call


def sample(cache: Path) -> dict[str, Any]:
    """One process's first call with this cache folder."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=Path(__file__).resolve().parent.parent,
        env={**os.environ, "CUMOE_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the worker ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    seconds = found["seconds"]
    found["on_top_s"] = seconds["import cumoe"] + seconds["first call"]
    return found


def measure(runs: int) -> dict[str, Any]:
    """Medians over ``runs`` processes for each state of the cache, and every sample."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        sample(Path(root, "unused"))  # files of torch and CuPy into the page cache
        prebuilt = Path(root, "prebuilt")
        _prebuild(prebuilt)
        for state in ("prebuilt", "cold"):
            caches = [prebuilt if state == "prebuilt" else Path(root, str(i)) for i in range(runs)]
            results[state] = _summary([sample(cache) for cache in caches], BARS_S[state])
    return results


def _prebuild(cache: Path) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SELECTION.items()]
    line = [sys.executable, "-m", "cumoe", "prebuild", *options]
    env = {**os.environ, "CUMOE_CACHE_DIR": str(cache)}
    subprocess.run(line, env=env, check=True, stdout=subprocess.DEVNULL)


def _summary(samples: list[dict[str, Any]], bar_s: float) -> dict[str, Any]:
    names = samples[0]["seconds"]
    return {
        "on_top_s": statistics.median(s["on_top_s"] for s in samples),
        "bar_s": bar_s,
        "seconds": {n: statistics.median(s["seconds"][n] for s in samples) for n in names},
        "compiled": samples[0]["compiled"],
        "disk_hits": samples[0]["disk_hits"],
        "samples": samples,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per state of the cache; 1 where a bar is missed on a GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.coldstart", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--runs", type=int, default=5, help="processes per state of the cache")
    arguments = parser.parse_args(argv)
    results = measure(arguments.runs)
    for state, found in results.items():
        parts = ", ".join(f"{name} {s * 1e3:.0f}" for name, s in found["seconds"].items())
        on_top, bar = found["on_top_s"] * 1e3, found["bar_s"] * 1e3
        print(f"{state:8}  {on_top:.0f} ms on top (bar {bar:.0f}), of: {parts} ms")
    on_gpu = "context" in results["cold"]["seconds"]
    if arguments.out:
        record = {"selection": SELECTION, "num_tokens": NUM_TOKENS, "results": results}
        if on_gpu:
            from bench.environment import environment

            record["environment"] = environment()
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(on_gpu and any(r["on_top_s"] > r["bar_s"] for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
