"""Every kernel that a layer can reach, whatever the number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

from cumoe.errors import ArgumentError
from cumoe.plan import fused_experts_fp8 as fused
from cumoe.plan import moe_align_block_size as align
from cumoe.plan import per_token_group_quant_fp8 as quantize
from cumoe.plan import silu_and_mul_quant_fp8 as activate
from cumoe.plan.device import ARCHITECTURES, H200, DeviceInfo
from cumoe.plan.scales import SCALE_FORMATS
from cumoe.plan.spec import KernelSpec, Step

# Most dynamic shared memory of a CTA (CUDA programming guide, technical specifications per compute
# capability). It is all that a KernelSpec takes from a GPU besides its architecture.
_SMEM_OPTIN_BYTES = {
    "sm_89": 101_376,
    "sm_90a": 232_448,
    "sm_100a": 232_448,
    "sm_103a": 232_448,
    "sm_120a": 101_376,
    "sm_121a": 101_376,
}
_MANY_TOKENS = 1 << 20
"""Of a call that runs in parts: too many for the kernels of small calls, as some weights are."""
_BOOL = (False, True)
_IDS = ("int32", "int64")
_FLOATS = ("fp32", "bf16", "fp16")


class Layer(NamedTuple):
    """The routed experts of one layer, as one rank holds them."""

    K: int
    N: int
    num_experts: int
    num_local_experts: int
    topk: int
    scale_formats: tuple[str, ...] = ("fp32",)
    """Of the activations' scales."""
    limit: float | None = None
    """swiglu_limit: how it is compiled depends on the value, but not every value has its own."""
    scaled: bool = False
    """Whether swiglu_alpha or swiglu_beta differ from 1 and 0."""


def device_of(arch: str) -> DeviceInfo:
    """A GPU of this architecture, for choosing its kernels where none is present."""
    smem = _SMEM_OPTIN_BYTES.get(arch)
    if smem is None:
        known = ", ".join(ARCHITECTURES.values())
        raise ArgumentError(f"arch: want one of {known}, got {arch!r}")
    return DeviceInfo(arch, H200.num_sms, smem)


def layer_specs(
    device: DeviceInfo,
    *,
    K: int,
    N: int,
    num_experts: int,
    num_local_experts: int | None = None,
    topk: int,
    scale_format: str = "fp32",
    clamp: bool = False,
    scaled: bool = False,
    ids: str = "int32",
    weight: str = "fp32",
    weight_on_input: bool = False,
) -> tuple[KernelSpec, ...]:
    """The kernels of `fused_experts_fp8` called in one way on this layer, sorted by name.

    A layer with fewer local experts than experts is called with an expert_map.
    """
    local = num_experts if num_local_experts is None else num_local_experts
    problem = fused.Problem(
        1, K, N, num_experts, local, topk, ids, weight, local != num_experts, scale_format,
        clamp, scaled, weight_on_input, x_aligned=True, out_aligned=True,
    )  # fmt: skip
    return specs_of(_over_tokens([problem], device))


def serving_steps(device: DeviceInfo, layer: Layer) -> tuple[Step, ...]:
    """One launch of each kernel that a serving engine's calls of `fused_experts_fp8` reach.

    That is int32 ids, fp32 router weights, rows aligned to 16 bytes, with and without an
    expert_map. The steps' grids are those of some call.
    """
    return _distinct(_over_tokens(_fused_problems(layer, everything=False), device))


def all_steps(device: DeviceInfo, layer: Layer) -> tuple[Step, ...]:
    """One launch of each kernel that any legal call reaches: of the layer, or of an op alone.

    The public ops are called with K columns and with N, and the expert sort with all experts.
    """
    fused_steps = _over_tokens(_fused_problems(layer, everything=True), device)
    return _distinct([*fused_steps, *_op_steps(device, layer)])


def specs_of(steps: Iterable[Step]) -> tuple[KernelSpec, ...]:
    """The kernels of launches, each once, sorted by name."""
    return tuple(sorted({step.kernel for step in steps}, key=lambda spec: spec.text))


def steps_in(plan: Any) -> Iterator[Step]:
    """The launches in a plan, which is a tuple of launches, sizes and other plans."""
    if isinstance(plan, Step):
        yield plan
    elif isinstance(plan, tuple):
        for part in plan:
            yield from steps_in(part)


def _distinct(steps: Iterable[Step]) -> tuple[Step, ...]:
    """One launch for each entry of each kernel and size of its shared memory, in a fixed order."""
    found = {(s.kernel.text, s.entry, s.launch.smem_bytes): s for s in steps}
    return tuple(found[key] for key in sorted(found))


def _over_tokens(problems: Iterable[fused.Problem], device: DeviceInfo) -> Iterator[Step]:
    for problem in problems:
        for tokens in fused.representative_token_counts(problem):
            some = problem._replace(M=tokens)
            yield from steps_in(fused.plan(some, device))
            yield from steps_in(fused.plan(some._replace(whole_M=_MANY_TOKENS), device))


def _fused_problems(layer: Layer, *, everything: bool) -> Iterator[fused.Problem]:
    options: dict[str, Iterable[Any]] = {
        "has_map": _BOOL,
        "scale_format": layer.scale_formats,
        "clamp": (activate.clamp_kind(layer.limit),),
        "scaled": (layer.scaled,),
    }
    if everything:
        options |= {
            "scale_format": SCALE_FORMATS,
            "clamp": activate.CLAMPS,
            "scaled": _BOOL,
            "ids": _IDS,
            "weight": _FLOATS,
            "weight_on_input": _BOOL if layer.topk == 1 else (False,),
            "x_aligned": _BOOL,
            "out_aligned": _BOOL,
        }
    plain = fused.Problem(
        1, layer.K, layer.N, layer.num_experts, layer.num_local_experts, layer.topk, "int32",
        "fp32", has_map=False, scale_format="fp32", clamp=False, scaled=False,
        weight_on_input=False, x_aligned=True, out_aligned=True,
    )  # fmt: skip
    choices = [*_choices(options)]
    if everything:  # weights that no tensor map holds: their kernels do not depend on the rest
        choices += _choices({
            **options, "weight": ("fp32",), "weight_on_input": (False,), "x_aligned": (True,),
            "out_aligned": (True,), "weights_mappable": (False,),
        })  # fmt: skip
    for choice in choices:
        problem = plain._replace(**choice)
        # Without a map, ids are those of the local experts.
        yield problem if problem.has_map else problem._replace(num_experts=layer.num_local_experts)


def _op_steps(device: DeviceInfo, layer: Layer) -> Iterator[Step]:
    scales = [("fp32", False), ("ue8m0", False), ("ue8m0", True)]  # format, packed
    for columns, x_type, (scale_format, packed), aligned in product(
        {layer.K, layer.N}, _FLOATS, scales, _BOOL
    ):
        for rows in quantize.representative_rows(columns):
            problem = quantize.Problem(rows, columns, x_type, scale_format, packed, aligned)
            yield quantize.plan(problem, device.arch)
    filters = [(None, False), *product(_IDS, _BOOL)]  # ids, has_map
    rows_of = activate.representative_rows(layer.N)
    for (scale_format, packed), clamp, scaled, (ids, has_map), aligned, rows, step in product(
        scales, activate.CLAMPS, _BOOL, filters, _BOOL, rows_of, activate.STEPS
    ):
        case = activate.Problem(
            rows, layer.N, scale_format, packed, clamp, scaled, ids, has_map, aligned, step,
            layer.num_experts if has_map else 0,
        )  # fmt: skip
        yield activate.plan(case, device).step
    experts = layer.num_experts
    for ids, has_map, slots in product(_IDS, _BOOL, align.representative_slot_counts()):
        sort = align.Problem(slots, 16, experts, experts, ids, has_map)
        yield from align.plan(sort, device).steps


def _choices(options: dict[str, Iterable[Any]]) -> Iterator[dict[str, Any]]:
    for values in product(*options.values()):
        yield dict(zip(options, values, strict=True))
