"""From tokens to experts: the router of a layer, in NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cumoe.checkpoint.config import MoeConfig
from cumoe.checkpoint.experts import Router
from cumoe.checkpoint.safetensors import Array
from cumoe.errors import ArgumentError

_TINY = np.float32(1e-20)  # keeps a token whose scores all vanish at weights of 0, not NaN


def route(x: Array, router: Router, config: MoeConfig) -> tuple[Array, Array]:
    """Chooses ``config.top_k`` experts for each token and weighs them.

        score   = softmax(x . weight) or sigmoid(x . weight)                    fp32
        chosen  = the top_k of score + correction_bias; equal ones by lower id
        weights = score of the chosen, divided by their sum unless norm_topk_prob is False

    With ``n_group`` groups, only experts of the ``topk_group`` best groups are chosen. A group
    counts by the sum of its two best where there is a correction bias (DeepSeek-V3), else by its
    best (DeepSeek-V2). ``routed_scaling_factor`` is not in the weights: ``fused_experts_fp8``
    applies it.

    Args:
        x: [M, K], any floating type.
        router: weight [E, K], correction_bias [E] or None.
        config: top_k, scoring, norm_topk_prob, n_group, topk_group.

    Returns: topk_weights [M, top_k] fp32 and topk_ids [M, top_k] int32, best first.

    Raises: ArgumentError where a value of ``config`` is missing or does not fit.
    """
    top_k, score = _checked(config, router.weight.shape[0])
    scores = score(x.astype(np.float32) @ router.weight.T)
    choice = scores if router.correction_bias is None else scores + router.correction_bias
    if _groups(config) > 1:
        choice = _best_groups(choice, config, 1 if router.correction_bias is None else 2)
    ids = np.argsort(-choice, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(scores, ids, axis=1)
    if config.norm_topk_prob is not False:
        weights = weights / (weights.sum(axis=1, keepdims=True) + _TINY)
    return weights.astype(np.float32), ids.astype(np.int32)


def _softmax(logits: Array) -> Array:
    powers: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def _sigmoid(logits: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(100) is inf in fp32, and 1 / inf the right score
        return np.asarray(1 / (1 + np.exp(-logits)))


_SCORES: dict[str, Callable[[Array], Array]] = {"softmax": _softmax, "sigmoid": _sigmoid}


def _checked(config: MoeConfig, num_experts: int) -> tuple[int, Callable[[Array], Array]]:
    score = _SCORES.get(config.scoring or "")
    if score is None:
        raise ArgumentError(
            f"scoring: wanted softmax or sigmoid, got {config.scoring}; give the one that the "
            "model was trained with (cumoe run: --router)"
        )
    usable = num_experts
    if (groups := _groups(config)) > 1:
        chosen = config.topk_group
        if num_experts % groups or chosen is None or not 0 < chosen <= groups:
            raise ArgumentError(
                f"n_group, topk_group: wanted groups that divide {num_experts} experts and a "
                f"choice among them, got {groups} and {chosen}; correct config.json"
            )
        usable = num_experts // groups * chosen
    top_k = config.top_k
    if top_k is None or not 0 < top_k <= usable:
        raise ArgumentError(
            f"top_k: wanted 1 to {usable} experts per token, got {top_k}; give another "
            "(cumoe run: --top-k)"
        )
    return top_k, score


def _groups(config: MoeConfig) -> int:
    return config.n_group or 1


def _best_groups(choice: Array, config: MoeConfig, best: int) -> Array:
    """``choice`` with -inf for every expert outside a token's topk_group best groups."""
    tokens, groups = len(choice), _groups(config)
    grouped = choice.reshape(tokens, groups, choice.shape[1] // groups)
    worth = np.sort(grouped, axis=2)[:, :, -best:].sum(axis=2)
    kept = np.argsort(-worth, axis=1, kind="stable")[:, : config.topk_group]
    mask = np.zeros(worth.shape, bool)
    np.put_along_axis(mask, kept, True, axis=1)
    return np.where(mask[:, :, None], grouped, -np.inf).reshape(choice.shape)
