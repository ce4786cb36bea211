"""The ways in which an op is called whose host time `bench.host` measures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import cumoe

SILU, QUANT, EXPERTS = "silu_and_mul_quant_fp8", "per_token_group_quant_fp8", "fused_experts_fp8"
M, E, TOPK, K, N = 1, 16, 8, 6144, 256
"""A rank of GLM-5.3 TP8 with 16 of its experts."""
LIMIT = 10.0
SIZES = {SILU: f"{M * TOPK} x {N}", QUANT: f"{M} x {K}", EXPERTS: f"M={M}, K={K}, N={N}"}
BARS = {  # outputs given, allocating, lent by DLPack; us
    SILU: (8.0, 22.0, 40.0), QUANT: (8.0, 22.0, 40.0), EXPERTS: (40.0, 55.0, None),
}  # fmt: skip
TORCH_OPS_BAR = 3.0
GIVEN, ALLOCATING = "torch, outputs given", "torch, allocating"


class Form(NamedTuple):
    """One way to call an op."""

    name: str
    call: Callable[[], Any]
    bar_us: float | None
    outputs: tuple[Any, ...] = ()
    """Given, so that they hold the result."""
    over: str | None = None
    """The form whose time is taken off before the bar is held against it."""

    def bytes(self) -> bytes:
        """Of the result of one call."""
        made = self.call()
        results = self.outputs or (made if isinstance(made, tuple) else (made,))
        return b"".join(map(_bytes, results))


class Light:
    """A producer of little cost: it knows that its work is on the stream already."""

    def __init__(self, tensor: Any) -> None:
        self._tensor, self._device = tensor, tensor.__dlpack_device__()
        self._stream = -1 if tensor.is_cuda else None

    def __dlpack_device__(self) -> Any:
        return self._device

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        return self._tensor.__dlpack__(stream=self._stream, max_version=max_version)


def all_forms(device: str) -> Iterator[tuple[str, list[Form]]]:
    """Each op with its forms; CuPy's and JAX's where they have the device."""
    import torch

    torch.manual_seed(0)
    for op, arrays in _arrays(device).items():
        options = {"limit": LIMIT} if op == SILU else {}
        yield op, [*_of_torch(op, arrays, options), *_of_others(op, arrays, options, device)]


def _arrays(device: str) -> dict[str, dict[str, Any]]:
    """The arrays that each op must have, by name, as torch tensors."""
    import torch

    def codes(*shape: int) -> Any:
        return torch.randn(shape, device=device).to(torch.float8_e4m3fn)

    def scales(*shape: int) -> Any:
        return torch.rand(shape, device=device) / 16

    x = torch.randn(M, K, device=device).bfloat16()
    weights, ids = torch.rand(M, E, device=device).softmax(-1).topk(TOPK)
    layer = {
        "x": x, "w1": codes(E, 2 * N, K), "w2": codes(E, K, N), "topk_weights": weights,
        "topk_ids": ids.int(), "w1_scale": scales(E, 2 * N // 128, K // 128),
        "w2_scale": scales(E, K // 128, N // 128),
    }  # fmt: skip
    gate_up = torch.randn(M * TOPK, 2 * N, device=device).bfloat16()
    return {SILU: {"gate_up": gate_up}, QUANT: {"x": x}, EXPERTS: layer}


def _of_torch(op: str, arrays: dict[str, Any], options: dict[str, Any]) -> Iterator[Form]:
    import torch

    import cumoe.torch_ops  # registers them

    given, allocating, _ = BARS[op]
    function, packet = getattr(cumoe, op), getattr(torch.ops.cumoe, op)
    outputs = _outputs(op, function(**arrays, **options))
    results = tuple(v for name, v in outputs.items() if name != "workspace")
    named = _by_position(op, arrays)
    into = partial(packet.out, *arrays.values(), *outputs.values(), **options)
    yield Form(GIVEN, partial(function, *named[0], **named[1], **outputs, **options), given,
               results)  # fmt: skip
    yield Form(ALLOCATING, partial(function, *named[0], **named[1], **options), allocating)
    yield Form("torch.ops .out", into, TORCH_OPS_BAR, results, GIVEN)
    new = partial(packet.default, *arrays.values(), **options)
    yield Form("torch.ops", new, TORCH_OPS_BAR, over=ALLOCATING)
    if op == SILU:
        routed = options | _filter(arrays["gate_up"].device)
        filtered = partial(function, *named[0], **outputs, **routed)
        yield Form("torch, filtered, outputs given", filtered, given, results)
        yield Form(
            "torch, filtered, allocating", partial(function, *named[0], **routed), allocating
        )


def _of_others(
    op: str, arrays: dict[str, Any], options: dict[str, Any], device: str
) -> Iterator[Form]:
    """CuPy, a producer of little cost, and JAX, which takes no outputs."""
    given, allocating, lent = BARS[op]
    outputs = _outputs(op, getattr(cumoe, op)(**arrays, **options))
    kinds: list[tuple[str, Callable[[Any], Any], float | None, float | None]] = [
        ("DLPack", Light, lent, lent)
    ]
    if device == "cuda":
        kinds.insert(0, ("CuPy", _cupy, given, allocating))
    for name, put, bar, bar_allocating in kinds:
        call = _call(op, {k: put(v) for k, v in arrays.items()}, options)
        moved = {k: put(v) for k, v in outputs.items()}
        results = tuple(v for k, v in outputs.items() if k != "workspace")
        yield Form(f"{name}, outputs given", partial(call, **moved), bar, results)
        yield Form(f"{name}, allocating", call, bar_allocating)
    if (to_jax := _jax(device)) is not None:
        call = _call(op, {k: to_jax(v) for k, v in arrays.items()}, options)
        yield Form("JAX, allocating", call, lent)


def _call(op: str, arrays: dict[str, Any], options: dict[str, Any]) -> partial[Any]:
    args, kwargs = _by_position(op, arrays)
    return partial(getattr(cumoe, op), *args, **kwargs, **options)


def _by_position(op: str, arrays: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """As a caller writes it: scales of weights by name."""
    plain = [v for name, v in arrays.items() if not name.endswith("_scale")]
    return plain, {name: v for name, v in arrays.items() if name.endswith("_scale")}


def _outputs(op: str, results: Any) -> dict[str, Any]:
    """Outputs of the caller, as the op made them, in the order of torch.ops."""
    import torch

    if op != EXPERTS:
        return {"out": results[0].view(torch.uint8), "out_scale": results[1]}
    workspace = torch.empty(1 << 25, dtype=torch.uint8, device=results.device)
    return {"out": results, "workspace": workspace}


def _filter(device: Any) -> dict[str, Any]:
    """Ids and a map by which every row is local, so that each is written."""
    import torch

    ids = torch.arange(M * TOPK, dtype=torch.int32, device=device).view(M, TOPK)
    return {"topk_ids": ids, "expert_map": torch.arange(E, dtype=torch.int32, device=device)}


def _cupy(tensor: Any) -> Any:
    """The same memory; CuPy has no e4m3 and no bf16."""
    import cupy
    import torch

    bits = {torch.float8_e4m3fn: torch.uint8, torch.bfloat16: torch.int16}
    array = cupy.from_dlpack(tensor.view(bits.get(tensor.dtype, tensor.dtype)))
    return array.view("uint16") if tensor.dtype == torch.bfloat16 else array


@cache
def _jax(device: str) -> Callable[[Any], Any] | None:
    """What makes JAX arrays; None where JAX is absent or does not have the device."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax

        jax.devices(device)
    except (ImportError, RuntimeError) as error:
        print(f"jax: absent ({error})")
        return None
    to_jax: Callable[[Any], Any] = jax.dlpack.from_dlpack
    return to_jax


def _bytes(array: Any) -> bytes:
    """An array of any framework, on the host."""
    import numpy as np
    import torch

    if isinstance(array, torch.Tensor):
        return bytes(array.contiguous().view(torch.uint8).cpu().numpy())
    if hasattr(array, "get"):  # CuPy's
        array = array.get()
    return np.asarray(array).tobytes()
