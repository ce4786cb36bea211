"""What a layer of experts needs to know from a model's ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cumoe.checkpoint.shards import read_json
from cumoe.errors import CheckpointError

_SCORING = {
    "deepseek_v3": "sigmoid",
    "deepseek_v32": "sigmoid",
    "glm4_moe": "sigmoid",
    "glm_moe_dsa": "sigmoid",
    "kimi_k2": "sigmoid",
    "deepseek_v2": "softmax",
    "qwen2_moe": "softmax",
    "qwen3_moe": "softmax",
    "qwen3_next": "softmax",
}
"""Scoring of the models whose ``config.json`` may leave ``scoring_func`` out."""

_HIDDEN = ("hidden_size",)
_INTERMEDIATE = ("moe_intermediate_size",)
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")

_SCALE_FORMATS = {"ue8m0": "ue8m0", "float": "fp32", "float32": "fp32", "fp32": "fp32"}
_BLOCK = [128, 128]
_SILU = ("silu", "swish")
_OTHER_RELEASE = "load the release with dynamic block-FP8 activations"


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """One layer of experts. The sizes are those of the tensors; None is what no file says."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int | None = None
    scoring: str | None = None
    """``softmax`` or ``sigmoid`` of the router's logits."""
    norm_topk_prob: bool | None = None
    """Whether a token's weights are divided by their sum; None counts as yes."""
    routed_scaling_factor: float | None = None
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
    swiglu_beta: float = 0.0
    scale_format: str | None = None
    """``fp32`` or ``ue8m0``: the scales that the activations get."""
    n_group: int | None = None
    """Groups of experts, of which a token may use ``topk_group``; None is one group."""
    topk_group: int | None = None


def read_config(folder: Path, *, hidden: int, intermediate: int, experts: int) -> MoeConfig:
    """The layer's MoeConfig from ``folder/config.json``, or its sizes alone where there is none.

    Names as in the configurations of DeepSeek-V3, GLM-4.5, GLM-5 and Qwen3-MoE. Raises
    CheckpointError where a value has the wrong type, a size is not that of the tensors, or the
    layer computes something else than these kernels do.
    """
    path = folder / "config.json"
    if not path.is_file():
        return MoeConfig(hidden, intermediate, experts)
    values = _Values(path)
    values.require_size(_HIDDEN, hidden)
    values.require_size(_INTERMEDIATE, intermediate)
    values.require_size(_EXPERTS, experts)
    return _config(values, hidden, intermediate, experts)


def read_model_config(path: Path) -> MoeConfig:
    """The MoeConfig of a model whose tensors are not at hand, from its ``config.json`` or folder.

    The sizes are those that the file states; ``top_k`` is never None. Raises CheckpointError where
    one is missing or has the wrong type, or the layer computes something else.
    """
    values = _Values(path / "config.json" if path.is_dir() else path)
    # Models without dense layers (MiniMax-M2) call the size of an expert intermediate_size.
    all_sparse = values.get(int, "num_local_experts") is not None
    names = (*_INTERMEDIATE, "intermediate_size") if all_sparse else _INTERMEDIATE
    hidden, intermediate = values.need_size(*_HIDDEN), values.need_size(*names)
    values.need_size("num_experts_per_tok")
    return _config(values, hidden, intermediate, values.need_size(*_EXPERTS))


def _config(values: _Values, hidden: int, intermediate: int, experts: int) -> MoeConfig:
    values.require_silu()
    values.require_dynamic_block_fp8()
    grouped = values.get(str, "topk_method") != "greedy"
    return MoeConfig(
        hidden,
        intermediate,
        experts,
        top_k=values.get(int, "num_experts_per_tok"),
        scoring=values.scoring(),
        norm_topk_prob=values.get(bool, "norm_topk_prob"),
        routed_scaling_factor=values.get(float, "routed_scaling_factor"),
        swiglu_limit=values.get(float, "swiglu_limit"),
        swiglu_alpha=values.get(float, "swiglu_alpha", default=1.0),
        swiglu_beta=values.get(float, "swiglu_beta", default=0.0),
        scale_format=values.scale_format(),
        n_group=values.get(int, "n_group") if grouped else None,
        topk_group=values.get(int, "topk_group") if grouped else None,
    )


class _Values:
    """Typed reading of one ``config.json``; a model with images keeps its values in text_config."""

    def __init__(self, path: Path) -> None:
        self.path = path
        whole = read_json(path)
        text = whole.get("text_config")
        self.raw: dict[str, Any] = whole | text if isinstance(text, dict) else whole
        self.quantization = self._mapping("quantization_config")

    def get(self, kind: type, *names: str, default: Any = None) -> Any:
        """The first of ``names``, as ``kind``; ``default`` where all are absent or null."""
        name = next((n for n in names if self.raw.get(n) is not None), None)
        if name is None:
            return default
        value = self.raw[name]
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits:
            raise self._wrong(name, f"a value of type {kind.__name__}", value, "correct it")
        return kind(value)

    def require_size(self, names: tuple[str, ...], found: int) -> None:
        wanted = self.get(int, *names)
        if wanted not in (None, found):
            raise self._wrong(
                "/".join(names),
                f"{found}, as the tensors have it",
                wanted,
                "complete the checkpoint, or use its own config.json",
            )

    def need_size(self, *names: str) -> int:
        size: int | None = self.get(int, *names)
        if size is None or size < 1:
            raise self._wrong(
                "/".join(names),
                "a positive integer",
                size,
                "use the config.json of a Mixture-of-Experts model",
            )
        return size

    def require_silu(self) -> None:
        act = self.get(str, "hidden_act")
        if act not in (None, *_SILU):
            raise self._wrong("hidden_act", "silu", act, "other activations are not supported")

    def require_dynamic_block_fp8(self) -> None:
        for name, wanted in (("quant_method", "fp8"), ("activation_scheme", "dynamic")):
            found = self.quantization.get(name)
            if found not in (None, wanted):
                raise self._wrong(f"quantization_config.{name}", wanted, found, _OTHER_RELEASE)
        block = self.quantization.get("weight_block_size")
        if block not in (None, _BLOCK):
            raise self._wrong(
                "weight_block_size", f"{_BLOCK}", block, "other block sizes are not supported"
            )

    def scoring(self) -> str | None:
        named: str | None = self.get(str, "scoring_func")
        return named or _SCORING.get(self.raw.get("model_type", ""))

    def scale_format(self) -> str | None:
        name = self.quantization.get("scale_fmt")
        if name is not None and name not in _SCALE_FORMATS:
            raise self._wrong("scale_fmt", "ue8m0 or fp32", name, "this format is not supported")
        return None if name is None else _SCALE_FORMATS[name]

    def _mapping(self, name: str) -> dict[str, Any]:
        value = self.raw.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._wrong(name, "an object", value, "correct it")
        return value

    def _wrong(self, name: str, wanted: str, found: Any, remedy: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name}: wanted {wanted}, found {found!r}; {remedy}")
