"""Shapes of the routed experts of known models, and of one rank's part of them."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from cumoe.errors import ArgumentError
from cumoe.plan.moe_align_block_size import MAX_EXPERTS, MAX_TOPK
from cumoe.plan.scales import GROUP_SIZE, SCALE_FORMATS, ceil_to

if TYPE_CHECKING:
    from cumoe.plan.enumerate import Layer

_FILE = Path(__file__).with_name("models.toml")
_SIZES = ("hidden", "intermediate", "experts", "top_k")
_SWIGLU = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")


@dataclass(frozen=True, slots=True)
class Model:
    """The routed experts of a model, before they are split over ranks."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    """K of the kernels."""
    intermediate_size: int
    """N of the kernels, of a whole expert."""
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
    swiglu_beta: float = 0.0
    scale_format: str | None = None
    """``fp32`` or ``ue8m0``; None where the checkpoint leaves it to the engine."""
    source: str = ""
    """Where these numbers were read."""


@cache
def known_models() -> dict[str, Model]:
    """The models of ``models.toml``, by name."""
    tables = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    return {name: Model(name, **table) for name, table in tables.items()}


def model(name: str) -> Model:
    """A known model by its name, in any case. Raises ArgumentError naming the known ones."""
    found = known_models().get(name.lower())
    if found is None:
        raise ArgumentError(
            f"model: want one of {', '.join(known_models())}, got {name!r}; for another one give "
            f"its config.json or its sizes"
        )
    return found


def model_from_config(path: str | Path) -> Model:
    """The model that a Hugging Face ``config.json``, or a folder with one, describes.

    Raises: CheckpointError naming the file and the value that is missing or wrong.
    """
    from cumoe.checkpoint.config import read_model_config

    config = read_model_config(Path(path))
    return Model(
        str(path),
        config.num_experts,
        config.top_k or 0,
        config.hidden_size,
        config.intermediate_size,
        swiglu_limit=config.swiglu_limit,
        swiglu_alpha=config.swiglu_alpha,
        swiglu_beta=config.swiglu_beta,
        scale_format=config.scale_format,
    )


def shard(
    of: Model, *, tp: int = 1, ep: int = 1, pad: bool = False, scale_format: str | None = None
) -> Layer:
    """What one rank holds: N over ``tp`` ranks and the experts over ``ep``.

    Args:
        pad: round N (and K) up to multiples of 128, as `cumoe.pad_experts` does with the weights.
        scale_format: "fp32", "ue8m0" or "both"; by default the model's own, else both.

    Raises: ArgumentError where the sizes cannot be split, are no multiples of 128, or there are
    more than 4096 experts, or not 1 to min(64, experts) of them per token.
    """
    from cumoe.plan.enumerate import Layer

    _require_routing(of)
    return Layer(
        K=_blocks(of, "hidden_size", of.hidden_size, "K", pad),
        N=_blocks(of, "intermediate_size", _split(of, "tp", of.intermediate_size, tp), "N", pad),
        num_experts=of.num_experts,
        num_local_experts=_split(of, "ep", of.num_experts, ep),
        topk=of.top_k,
        scale_formats=_scale_formats(scale_format or of.scale_format or "both"),
        limit=None if of.swiglu_limit == math.inf else of.swiglu_limit,
        scaled=(of.swiglu_alpha, of.swiglu_beta) != (1.0, 0.0),
    )


def _require_routing(of: Model) -> None:
    most = min(MAX_TOPK, of.num_experts)
    for name, size, bound in (
        ("experts", of.num_experts, MAX_EXPERTS),
        ("top_k", of.top_k, most),
    ):
        if not 1 <= size <= bound:
            raise ArgumentError(
                f"{name}: want 1 to {bound} in {of.name}, got {size}; no op takes others"
            )


def _split(of: Model, name: str, size: int, ranks: int) -> int:
    what = {"tp": "intermediate_size", "ep": "num_experts"}[name]
    if ranks < 1 or size % ranks:
        raise ArgumentError(
            f"{name}: want a divisor of {of.name}'s {what} {size}, got {ranks}; "
            f"use another number of ranks"
        )
    return size // ranks


def _blocks(of: Model, what: str, size: int, letter: str, pad: bool) -> int:
    padded = ceil_to(size, GROUP_SIZE)
    if size == padded or pad:
        return padded
    raise ArgumentError(
        f"{of.name}: want {letter} a multiple of {GROUP_SIZE}, got {size} of its {what} on each "
        f"rank; use fewer ranks, or pad the weights to {padded} with cumoe.pad_experts and give "
        f"--pad (pad=True)"
    )


def _scale_formats(name: str) -> tuple[str, ...]:
    if name == "both":
        return SCALE_FORMATS
    if name not in SCALE_FORMATS:
        raise ArgumentError(f"scale_format: want one of fp32, ue8m0, both, got {name!r}")
    return (name,)


class Selection(TypedDict, total=False):
    """Layers, named in one or several ways. A sequence stands for each of its values in turn."""

    model: str | Sequence[str]
    """Names in ``models.toml``."""
    config: str | Path | Sequence[str | Path]
    """A ``config.json``, or a folder with one."""
    hidden: int
    """With `intermediate`, `experts` and `top_k`: the sizes of a layer of its own."""
    intermediate: int
    experts: int
    top_k: int
    swiglu_limit: float
    """inf for no clamp; like alpha and beta, by default what the model has."""
    swiglu_alpha: float
    swiglu_beta: float
    scale_format: str
    """``fp32``, ``ue8m0`` or ``both``; by default what the model declares, else both."""
    tp: int | Sequence[int]
    """Ranks that share each expert, 1 by default."""
    ep: int | Sequence[int]
    """Ranks over which the experts are spread, 1 by default."""
    pad: bool
    """Whether weights are padded by `cumoe.pad_experts`."""


def selected_layers(selection: Selection) -> tuple[Layer, ...]:
    """The layers of a selection: each model at each ``tp`` and each ``ep``.

    Raises: ArgumentError, CheckpointError.
    """
    ranks = product(_several(selection.get("tp", 1)), _several(selection.get("ep", 1)))
    pad, scale_format = selection.get("pad", False), selection.get("scale_format")
    layers = [
        shard(one, tp=tp, ep=ep, pad=pad, scale_format=scale_format)
        for one, (tp, ep) in product(_selected_models(selection), ranks)
    ]
    return tuple(dict.fromkeys(layers))


def _selected_models(selection: Selection) -> list[Model]:
    named: dict[str, Any] = {k: v for k, v in selection.items() if v is not None}
    models = [model(name) for name in _several(named.get("model", ()))]
    models += [model_from_config(path) for path in _several(named.get("config", ()))]
    if any(size in named for size in _SIZES):
        models.append(_explicit_model(named))
    swiglu = {name: named[name] for name in _SWIGLU if name in named}
    return [replace(one, **swiglu) for one in models]


def _explicit_model(named: dict[str, Any]) -> Model:
    others = " and ".join(name for name in ("model", "config") if named.get(name))
    for size in _SIZES:
        if others and size not in named:
            given = ", ".join(name for name in _SIZES if name in named)
            raise ArgumentError(
                f"{size}: want {', '.join(_SIZES)} together for a layer of its own, got {given} "
                f"alone beside {others}, which has its sizes; leave out one or the other"
            )
        if named.get(size, 0) < 1:
            raise ArgumentError(
                f"{size}: want a positive integer, got {named.get(size)}; give a layer's "
                f"{', '.join(_SIZES)} together"
            )
    hidden, intermediate, experts, top_k = (named[size] for size in _SIZES)
    return Model("the layer", experts, top_k, hidden, intermediate)


def _several(value: Any) -> tuple[Any, ...]:
    """A value given alone, or the values of a sequence."""
    return (value,) if isinstance(value, str | int | Path) else tuple(value)
