"""vLLM with the plugin: a small Qwen3-MoE model in block FP8, its weights random.

    pip install 'cumoe[vllm]' && python examples/vllm_offline.py

Nothing here names cumoe: vLLM finds the plugin, and its log says "experts of cumoe: ...".
With CUMOE_VLLM=0 vLLM's own experts compute.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm import LLM, SamplingParams

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
    "hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
    "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "vocab_size": 1024, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "attention_bias": False, "use_sliding_window": False,
    "quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
}  # fmt: skip


def main() -> None:
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        engine = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=256,
            gpu_memory_utilization=0.2, enforce_eager=True, attention_backend="TRITON_ATTN",
        )  # fmt: skip
        how = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": [first, 5, 8, 13]} for first in (3, 4, 5)]
        for result in engine.generate(prompts, how, use_tqdm=False):
            print("tokens:", *result.outputs[0].token_ids)


if __name__ == "__main__":
    main()
