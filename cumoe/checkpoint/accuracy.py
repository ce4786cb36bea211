"""How far the experts' result is from the truth, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cumoe.checkpoint.calls import Case, apply
from cumoe.checkpoint.experts import Experts
from cumoe.checkpoint.safetensors import Array
from cumoe.plan import experts_tiny

REFERENCE_ROW, WGMMA_ROW, SHALLOW_WGMMA_ROW = 5e-3, 4e-2, 6e-2
"""Bounds on norm(out - ref) / norm(ref) of every token against the NumPy reference: of sums in
fp32, and of more slots on a GPU with wgmma, whose accumulator is short (docs/numerics.md)."""
FLOAT64_ROW, FLOAT64_ALL = 0.12, 0.06
"""Bounds against the float64 evaluation, of every token and of all together."""
SAMPLED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of the sampled tokens, each of which was evaluated without the rest of the batch."""

    sampled_tokens: int
    max_row_error: float
    """Worst token against the NumPy reference."""
    max_row_error_float64: float
    """Worst token against the float64 evaluation."""
    error_float64: float
    """All sampled tokens together against the float64 evaluation."""
    reference_bound: float = REFERENCE_ROW
    """On the first of the errors."""

    @property
    def failures(self) -> tuple[str, ...]:
        """A sentence for each bound that is not held; none where all is well."""
        gates = [
            ("worst token against the reference", self.max_row_error, self.reference_bound),
            ("worst token against float64", self.max_row_error_float64, FLOAT64_ROW),
        ]
        if self.sampled_tokens > 1:  # one token alone is held to the bound of a token
            gates.append(("all tokens against float64", self.error_float64, FLOAT64_ALL))
        return tuple(
            f"{what}: wanted an error below {bound:g}, got {error:.3g}"
            for what, error, bound in gates
            if not error < bound  # NaN fails too
        )


def reference_row(num_tokens: int, topk: int, K: int, N: int) -> float:
    """The bound for a call of this size on a GPU: the fewest tokens add up in fp32."""
    if experts_tiny.takes(num_tokens, topk, K, N):
        return REFERENCE_ROW
    return SHALLOW_WGMMA_ROW if K < 512 or N < 256 else WGMMA_ROW


def compare(
    out: Array,
    experts: Experts,
    case: Case,
    rng: np.random.Generator,
    bound: float = REFERENCE_ROW,
) -> Errors:
    """Errors of up to 16 rows of ``out`` [M, K], drawn at random."""
    rows = np.sort(rng.permutation(len(out))[:SAMPLED_TOKENS])
    got, (want, exact) = out[rows], _evaluate(experts, case.rows(rows))
    together = row_errors(got.reshape(1, -1), exact.reshape(1, -1))
    return Errors(
        sampled_tokens=len(rows),
        max_row_error=float(row_errors(got, want).max()),
        max_row_error_float64=float(row_errors(got, exact).max()),
        error_float64=float(together[0]),
        reference_bound=bound,
    )


def row_errors(got: Array, want: Array) -> Array:
    """norm(got - want) / norm(want) of each row, in float64; inf where only want is zero."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(all="ignore"):
        difference = np.linalg.norm(got - want, axis=1)
        size = np.linalg.norm(want, axis=1)
        return np.where(difference == 0, 0.0, difference / size)


def _evaluate(experts: Experts, case: Case) -> tuple[Array, Array]:
    """The NumPy reference and the float64 evaluation."""
    from cumoe import reference
    from cumoe.reference.exact import fused_experts_float64

    scale_format = case.config.scale_format
    want = apply(reference.fused_experts_fp8, experts, case, scale_format=scale_format)
    return want, apply(fused_experts_float64, experts, case)
