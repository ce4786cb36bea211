"""Two engines of vLLM, one with the plugin and one without, that generate the same prompts in turn.

Each is a process of its own: ``python -m bench.vllm_engine MODEL`` answers a line of JSON for each
line that it reads. Its log goes to stderr.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

from bench import vllm_model
from bench.record import Row

OP = "vllm engine"
BATCHES = (1, 8, 64)
PROMPT, GENERATED, COMPARED, ROUNDS = 32, 128, 64, 5
"""Tokens of a prompt, those generated when timed, those generated with logprobs; repetitions."""
MAX_LOGPROB_ERROR = 0.1
"""Of both arms' logprobs of the prompts, as root mean squares: difference by deviation."""
UP_S, ANSWER_S = 240.0, 60.0
"""After these an engine is ended."""
KV_CACHE_BYTES = 8 << 30
OURS_IN_LOG = "experts of cumoe:"
_VOCABULARY = 32_000
_PLUGINS = "vllm.general_plugins"
_QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "vocab_size": _VOCABULARY, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "attention_bias": False,
    "use_sliding_window": False,
    "quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
        "weight_block_size": [128, 128],
    },
}  # fmt: skip
_GLM_EXPERTS = {"hidden_size": 6144, "moe_intermediate_size": 256, "num_experts": 256}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _QWEN3,
    "qwen3-with-glm-5.3-tp8-experts": _QWEN3 | _GLM_EXPERTS,
}
"""The second has the experts of one rank of eight in a model that one GPU runs whole."""


def rows(model: str, num_layers: int) -> Iterator[Row]:
    """A row for each of BATCHES: output tokens per second of both arms, and where they agree."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        vllm_model.write(folder, MODELS[model] | {"num_hidden_layers": num_layers})
        theirs, ours = (stack.enter_context(_engine(folder, on)) for on in (False, True))
        for engine, with_plugin in ((theirs, False), (ours, True)):
            engine.answer(UP_S)
            require_arm(engine.log.read_text(), with_plugin)
        for batch in BATCHES:
            key = {"op": OP, "shape": model, "m": batch, "layers": num_layers}
            yield key | _figures(theirs, ours, prompts(batch))


class Engine:
    """A child process and its log."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self.log = process, log

    def generate(self, tokens: list[list[int]], count: int, *, logprobs: bool = False) -> Any:
        """The answer to these prompts: see `serve`."""
        assert self.process.stdin
        ask = {"prompts": tokens, "count": count, "logprobs": logprobs}
        with suppress(BrokenPipeError):  # told below, with the log
            self.process.stdin.write(json.dumps(ask) + "\n")
            self.process.stdin.flush()
        return self.answer(ANSWER_S)

    def answer(self, seconds: float) -> Any:
        """The next line. Raises: SystemExit with the end of the log where there is none."""
        assert self.process.stdout
        limit = Timer(seconds, self.process.kill)
        limit.start()
        line = self.process.stdout.readline()
        limit.cancel()
        if not line:
            raise SystemExit(f"the engine ended early:\n{self.log.read_text()[-4000:]}")
        return json.loads(line)


@contextmanager
def _engine(folder: Path, with_plugin: bool) -> Iterator[Engine]:
    log = folder / f"log{int(with_plugin)}"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.vllm_engine", str(folder)],
            env=_environment(folder, with_plugin), cwd=Path(__file__).resolve().parents[1],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
        )  # fmt: skip
    engine = Engine(process, log)
    try:
        yield engine
    finally:
        assert process.stdin
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def require_arm(log: str, with_plugin: bool) -> None:
    """Both arms would be the same one if the plugin was not found. Raises: SystemExit."""
    if (OURS_IN_LOG in log) != with_plugin:
        wanted = "with" if with_plugin else "without"
        raise SystemExit(f"want an engine {wanted} {OURS_IN_LOG!r} in its log:\n{log[-4000:]}")


def _environment(folder: Path, with_plugin: bool) -> dict[str, str]:
    path = [os.environ.get("PYTHONPATH", "")]
    if not any(e.name == "cumoe" for e in metadata.entry_points(group=_PLUGINS)):
        path.insert(0, str(entry_point(folder / "site")))
    return os.environ | {
        "CUMOE_VLLM": str(int(with_plugin)), "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "VLLM_LOGGING_LEVEL": "INFO", "VLLM_USE_DEEP_GEMM_E8M0": "0", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_DEEP_GEMM_WARMUP": "skip",
    }  # fmt: skip


def entry_point(site: Path) -> Path:
    """A folder for the path that says of a checkout what an installed cumoe says of itself.

    vLLM finds plugins by the metadata of distributions only.
    """
    from cumoe import __version__

    info = site / f"cumoe-{__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    header = f"Metadata-Version: 2.1\nName: cumoe\nVersion: {__version__}\n"
    (info / "METADATA").write_text(header)
    (info / "entry_points.txt").write_text(f"[{_PLUGINS}]\ncumoe = cumoe.vllm_plugin:register\n")
    return site


def prompts(batch: int) -> list[list[int]]:
    """Token ids, the same for both arms."""
    import random

    chosen = random.Random(batch)  # noqa: S311 - no secrets
    return [[chosen.randrange(3, _VOCABULARY) for _ in range(PROMPT)] for _ in range(batch)]


def _figures(theirs: Engine, ours: Engine, tokens: list[list[int]]) -> Row:
    arms = {"vllm": theirs, "cumoe": ours}
    compared = [arm.generate(tokens, COMPARED, logprobs=True) for arm in arms.values()]
    error = logprob_error(*(answer["prompt_logprobs"] for answer in compared))
    if not error < MAX_LOGPROB_ERROR:  # NaN fails too
        return {"error": f"logprobs differ by {error:.2g} of their deviation: another model"}
    for arm in arms.values():
        arm.generate(tokens, GENERATED)
    count = GENERATED * len(tokens)
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, arm in arms.items():
            rates[name].append(round(count / arm.generate(tokens, GENERATED)["seconds"], 1))
    rate = {name: statistics.median(values) for name, values in rates.items()}
    return {
        **{f"tokens_s_{name}": value for name, value in rate.items()},
        **{f"rounds_{name}": values for name, values in rates.items()},
        "ratio": round(rate["cumoe"] / rate["vllm"], 3), "generated": GENERATED,
        "logprob_error": round(error, 5), **agreement(*compared),
    }  # fmt: skip


def agreement(one: dict[str, Any], other: dict[str, Any]) -> Row:
    """Tokens before the first difference of each sequence, and how far their logprobs are apart.

    What comes after a difference answers another text.
    """
    pairs = list(zip(one["ids"], other["ids"], strict=True))
    same = [common_prefix(a, b) for a, b in pairs]
    apart = [
        abs(p - q)
        for a, b, n in zip(one["logprobs"], other["logprobs"], same, strict=True)
        for p, q in zip(a[:n], b[:n], strict=True)
    ]
    return {
        "same_tokens": sum(same), "tokens": sum(len(a) for a, _ in pairs),
        "equal_sequences": sum(a == b for a, b in pairs),
        "logprob_difference": round(max(apart), 5) if apart else None,
    }  # fmt: skip


def logprob_error(one: list[list[float]], other: list[list[float]]) -> float:
    """Root mean square of the differences by the deviation of one's values; NaN if that is 0.

    Of the tokens of the prompts, which both arms are given, so that all can be compared.
    """
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    deviation = statistics.pstdev(a for a, _ in pairs)
    apart = math.sqrt(statistics.fmean((a - b) ** 2 for a, b in pairs))
    return apart / deviation if deviation else math.nan


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens are the same before the first that is not."""
    differs = (i for i, (p, q) in enumerate(zip(a, b, strict=False)) if p != q)
    return next(differs, min(len(a), len(b)))


def serve(model: str) -> None:
    """The child: an engine that answers what `_generated` tells until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints must not mix with the answers
    from vllm import LLM

    engine = LLM(
        model, skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=64, seed=0,
        # Given, or each arm would look at the memory that is free while the other one starts.
        kv_cache_memory_bytes=KV_CACHE_BYTES, gpu_memory_utilization=0.35,
        enable_prefix_caching=False,
        attention_backend="TRITON_ATTN",
        compilation_config={
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(BATCHES),
        },
    )  # fmt: skip
    print(json.dumps("up"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_generated(engine, json.loads(line))), file=answers, flush=True)


def _generated(engine: Any, ask: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    how = SamplingParams(
        temperature=0, max_tokens=ask["count"], ignore_eos=True, detokenize=False,
        logprobs=1 if ask["logprobs"] else None, prompt_logprobs=0 if ask["logprobs"] else None,
    )  # fmt: skip
    texts = [{"prompt_token_ids": ids} for ids in ask["prompts"]]
    start = time.perf_counter()
    answers = engine.generate(texts, how, use_tqdm=False)
    seconds = time.perf_counter() - start
    results = [answer.outputs[0] for answer in answers]
    return {
        "seconds": seconds, "ids": [list(r.token_ids) for r in results],
        "logprobs": [_of_tokens(r.logprobs, r.token_ids) for r in results],
        "prompt_logprobs": [  # the first token has none
            _of_tokens((answer.prompt_logprobs or [])[1:], prompt[1:])
            for answer, prompt in zip(answers, ask["prompts"], strict=True)
        ],
    }  # fmt: skip


def _of_tokens(logprobs: Any, tokens: Sequence[int]) -> list[float]:
    return [at[token].logprob for at, token in zip(logprobs or (), tokens, strict=False)]


if __name__ == "__main__":
    serve(sys.argv[1])
