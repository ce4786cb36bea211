"""The ops as torch's own: importing this module registers ``torch.ops.cumoe``.

They are the functions of `cumoe` under a schema, so that torch.compile, torch.export and fake
tensors know what a call reads, writes and makes:

    torch.ops.cumoe.per_token_group_quant_fp8(x, ...) -> (q, scale)
    torch.ops.cumoe.silu_and_mul_quant_fp8(gate_up, ...) -> (q, scale)
    torch.ops.cumoe.moe_align_block_size(topk_ids, block_size, num_experts, expert_map=None)
        -> (sorted_token_ids, expert_ids, num_tokens_post_padded)
    torch.ops.cumoe.fused_experts_fp8(
        x, w1, w2, topk_weights, topk_ids, w1_scale, w2_scale, ...) -> out

The overload ``out`` of each but the sort writes to all outputs of the caller and returns None: what
torch compiles may not return its arguments. ``fused_experts_fp8.workspace`` takes a workspace and
returns a new output. There is no gradient: a tensor that requires one is read as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch

from cumoe.arrays.check import require_same_device
from cumoe.arrays.exchange import torch_dtype_name, view
from cumoe.arrays.view import CPU, Device, Facts, facts
from cumoe.ops import _experts_inputs
from cumoe.ops import fused_experts_fp8 as experts
from cumoe.ops import moe_align_block_size as sort
from cumoe.ops import per_token_group_quant_fp8 as quantizer
from cumoe.ops import silu_and_mul_quant_fp8 as activation
from cumoe.plan.scales import ceil_to, scale_layout

__all__: list[str] = []

Arguments = Mapping[str, Any]
"""Of a call, by name, with those that it left out."""

_SCALES = 'str scale_format="fp32", str scale_layout="row"'
_FILTER = "Tensor? topk_ids=None, Tensor? expert_map=None, int? num_experts=None"
_QUANTIZER = f"int group_size=128, *, {_SCALES}"
_ACTIVATION = (
    "float? limit=None, *, "
    f"float alpha=1.0, float beta=0.0, int group_size=128, {_SCALES}, {_FILTER}"
)
_SORT = "Tensor topk_ids, int block_size, int num_experts, Tensor? expert_map=None"
_LAYER = (
    "Tensor x, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor w1_scale, "
    "Tensor w2_scale"
)
_EXPERTS = (
    "int[] block_shape=[128, 128], "
    'str scale_format="fp32", float? swiglu_limit=None, float swiglu_alpha=1.0, '
    "float swiglu_beta=0.0, int? num_experts=None, Tensor? expert_map=None, "
    "bool apply_router_weight_on_input=False, float routed_scaling_factor=1.0, "
    "int? max_workspace_bytes=None"
)
_OUTPUTS = "Tensor(a!) out, Tensor(b!) out_scale"
# What most calls give comes before the *, so by position or by name: torch takes 0.3 to 0.6 us for
# each argument that comes by name, or goes on to the function by name.


class _Op(NamedTuple):
    """A function of `cumoe`, and what it does with tensors that have no memory."""

    function: Callable[..., Any]
    """Of `cumoe`."""
    run: Callable[..., Any]
    """The same, with arguments as the dispatcher passes them: those before the * by position."""
    into: Callable[..., None] | None
    """The same, with outputs of the caller, if it takes any."""
    arrays: tuple[str, ...]
    """As the order of the facts that ``check`` takes."""
    scalars: Callable[..., Any]
    """From the other arguments, in the order of the function's signature."""
    check: Callable[..., Any]
    results: Callable[[Arguments], Any]
    """New tensors of the shapes, types and strides that the function returns."""

    def fake(self, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
        """Refuses what the function refuses without looking at addresses; makes its results.

        ``names`` are those of the arguments that come by position.
        """
        signature = inspect.signature(self.function)
        bound = signature.bind(**dict(zip(names, args, strict=False)), **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        for name in self.arrays:
            if given[name] is None and signature.parameters[name].default is not None:
                view(None, name)  # torch lets None pass for a tensor
        self._require(given)
        return self.results(given) if given.get("out") is None else None

    def _require(self, given: Arguments) -> None:
        plain = self.scalars(*(v for name, v in given.items() if name not in self.arrays))
        tensors = [given[name] for name in self.arrays]
        if not all(_is_known(t) for t in tensors if t is not None):
            return  # the call itself will tell
        require_same_device(zip(self.arrays, map(_facts, tensors), strict=True))
        on_cpu = [_facts(t, CPU) for t in tensors]  # where a check plans no kernel
        self.check(*on_cpu, (0,) * len(tensors), plain)


def _is_known(tensor: torch.Tensor) -> bool:
    return all(_hint(n) is not None for n in chain(tensor.shape, tensor.stride()))


def _hint(size: int | torch.SymInt) -> Any:
    """A size as it is in the call that is traced; None where that depends on data.

    Unlike a comparison of the symbol this guards nothing, so one trace serves every size.
    """
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _facts(tensor: torch.Tensor | None, where: Device | None = None) -> Facts | None:
    if tensor is None:
        return None
    where = where or Device(tensor.device.type, tensor.device.index or 0)
    shape, strides = (tuple(map(_hint, sizes)) for sizes in (tensor.shape, tensor.stride()))
    return facts(shape, strides, torch_dtype_name(tensor.dtype), where, "torch")


def _quantized(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    x = given["x"]
    return _codes_and_scales(x, x.shape[-1], given)


def _activated(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = given["gate_up"]
    return _codes_and_scales(gate_up, gate_up.shape[-1] // 2, given)


def _codes_and_scales(
    x: torch.Tensor, columns: int, given: Arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    *leading, _ = x.shape
    layout = scale_layout(prod(leading), columns, given["scale_layout"], given["scale_format"])
    dtype = {"fp32": torch.float32, "int32": torch.int32}[layout.dtype]
    return (
        x.new_empty((*leading, columns), dtype=torch.float8_e4m3fn),
        x.new_empty_strided(layout.shape, layout.strides, dtype=dtype),
    )


def _sorted(given: Arguments) -> tuple[torch.Tensor, ...]:
    ids, block_size, num_experts = given["topk_ids"], given["block_size"], given["num_experts"]
    slots = prod(ids.shape)
    # `padded_bound`, but min would choose, and guard, one of the two for the sizes of this trace.
    bound = torch.sym_min(slots + num_experts * (block_size - 1), slots * block_size)
    capacity = ceil_to(bound, block_size)
    sizes = capacity, capacity // block_size, 1
    return tuple(ids.new_empty((size,), dtype=torch.int32) for size in sizes)


def _combined(given: Arguments) -> torch.Tensor:
    x: torch.Tensor = given["x"]
    return x.new_empty(x.shape, dtype=torch.bfloat16)


def _quantize_into(x: Any, out: Any, out_scale: Any, *args: Any, **options: Any) -> None:
    quantizer.per_token_group_quant_fp8(x, *args, out=out, out_scale=out_scale, **options)


def _activate(gate_up: Any, limit: Any = None, **options: Any) -> Any:
    return activation.silu_and_mul_quant_fp8(gate_up, limit=limit, **options)


def _activate_into(
    gate_up: Any, out: Any, out_scale: Any, limit: Any = None, **options: Any
) -> None:
    activation.silu_and_mul_quant_fp8(gate_up, limit=limit, out=out, out_scale=out_scale, **options)


def _combine(
    x: Any, w1: Any, w2: Any, weights: Any, ids: Any, w1_scale: Any, w2_scale: Any,
    workspace: Any = None, **options: Any,
) -> Any:  # fmt: skip
    return experts.fused_experts_fp8(
        x, w1, w2, weights, ids, w1_scale=w1_scale, w2_scale=w2_scale, workspace=workspace,
        **options,
    )  # fmt: skip


def _combine_into(
    x: Any, w1: Any, w2: Any, weights: Any, ids: Any, w1_scale: Any, w2_scale: Any, out: Any,
    workspace: Any = None, **options: Any,
) -> None:  # fmt: skip
    experts.fused_experts_fp8(
        x, w1, w2, weights, ids, w1_scale=w1_scale, w2_scale=w2_scale, out=out,
        workspace=workspace, **options,
    )  # fmt: skip


_quantizer = _Op(
    quantizer.per_token_group_quant_fp8, quantizer.per_token_group_quant_fp8, _quantize_into,
    quantizer.ARRAYS, quantizer._scalars, quantizer._checked, _quantized,
)  # fmt: skip
_activation = _Op(
    activation.silu_and_mul_quant_fp8, _activate, _activate_into,
    activation.ARRAYS, activation._scalars, activation._checked, _activated,
)  # fmt: skip
_sort = _Op(
    sort.moe_align_block_size, sort.moe_align_block_size, None,
    ("topk_ids", "expert_map"), sort._scalars, sort._checked, _sorted,
)  # fmt: skip
_experts = _Op(
    experts.fused_experts_fp8, _combine, _combine_into,
    _experts_inputs.ARRAYS, _experts_inputs.scalars, experts._checked, _combined,
)  # fmt: skip

_library = torch.library.Library("cumoe", "DEF")
"""What is registered lasts as long as this object."""
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def _register(op: _Op, overload: str, arguments: str, returns: str) -> None:
    name = op.function.__name__ + overload
    schema = f"{name}({arguments}) -> {returns}"
    _library.define(schema, tags=_TAGS)
    # Every kind of tensor comes to the function, which tells those that it cannot take.
    _library.impl(name, op.into if returns == "()" else op.run, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    parsed = torch._C.parse_schema(schema).arguments
    fake = partial(op.fake, tuple(a.name for a in parsed if not a.kwarg_only))
    torch.library.register_fake(f"cumoe::{name}", fake, lib=_library)


_register(_quantizer, "", f"Tensor x, {_QUANTIZER}", "(Tensor, Tensor)")
_register(_quantizer, ".out", f"Tensor x, {_OUTPUTS}, {_QUANTIZER}", "()")
_register(_activation, "", f"Tensor gate_up, {_ACTIVATION}", "(Tensor, Tensor)")
_register(_activation, ".out", f"Tensor gate_up, {_OUTPUTS}, {_ACTIVATION}", "()")
_register(_sort, "", _SORT, "(Tensor, Tensor, Tensor)")
_register(_experts, "", f"{_LAYER}, *, {_EXPERTS}", "Tensor")
_register(_experts, ".workspace", f"{_LAYER}, Tensor(a!) workspace, *, {_EXPERTS}", "Tensor")
_register(
    _experts, ".out", f"{_LAYER}, Tensor(a!) out, Tensor(b!)? workspace=None, *, {_EXPERTS}", "()"
)
