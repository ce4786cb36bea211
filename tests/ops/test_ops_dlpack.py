"""The ops on arrays of any framework, on the CPU: the reference's bytes in the caller's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import cumoe
from cumoe import ArgumentError, DTypeError
from tests.helpers import cases, jax_arrays
from tests.helpers.backends import BF16, E4M3, TorchBackend
from tests.helpers.calls import RIGHT_ARGUMENTS, random_arguments
from tests.helpers.compare import assert_bitwise_equal
from tests.helpers.jax_arrays import jax
from tests.helpers.lenders import OfTorch, Old, Wrapped

jnp = jax.numpy


def wrapped(cls: type[Wrapped]) -> Callable[[np.ndarray], Wrapped]:
    return lambda a: cls(TorchBackend("cpu").put(a))


PRODUCERS: dict[str, tuple[Callable[[np.ndarray], Any], type]] = {
    "jax": (jax_arrays.put, jax.Array),
    "wrapped": (wrapped(Wrapped), np.ndarray),
    "old": (wrapped(Old), np.ndarray),
    "of_torch": (wrapped(OfTorch), torch.Tensor),
}
"""How each makes its arrays of NumPy's, and what it gets back."""

every_producer = pytest.mark.parametrize("producer", PRODUCERS)
every_op = pytest.mark.parametrize("op", RIGHT_ARGUMENTS)


def call(op: str, put: Callable[[np.ndarray], Any], **more: Any) -> tuple[Any, ...]:
    moved = {k: put(v) if isinstance(v, np.ndarray) else v for k, v in random_arguments(op).items()}
    results = getattr(cumoe, op)(**moved, **more)
    return results if isinstance(results, tuple) else (results,)


def as_numpy(a: Any) -> np.ndarray:
    return TorchBackend("cpu").raw(a) if isinstance(a, torch.Tensor) else np.asarray(a)


NAMES = {"jax": lambda a: a.dtype.name, "of_torch": lambda a: str(a.dtype).removeprefix("torch.")}


@every_op
@every_producer
def test_results_are_the_callers_arrays_with_the_references_bytes(op, producer):
    put, kind = PRODUCERS[producer]
    results, expected = call(op, put), call(op, lambda a: a)
    assert len(results) == len(expected)
    for got, want in zip(results, expected, strict=True):
        assert isinstance(got, kind)
        assert NAMES.get(producer, lambda a: a.dtype.name)(got) == want.dtype.name
        raw = np.ascontiguousarray(as_numpy(got))
        assert_bitwise_equal(raw.view(np.uint8), np.ascontiguousarray(want).view(np.uint8))


def test_a_changed_input_changes_the_result():
    """What the comparison above would see."""
    x = cases.activations(np.random.default_rng(0), 4, 256)
    q, _ = cumoe.per_token_group_quant_fp8(jax_arrays.put(x))
    x[2, 7] = 100
    other, _ = cumoe.per_token_group_quant_fp8(jax_arrays.put(x))
    assert (as_numpy(q).view(np.uint8) != as_numpy(other).view(np.uint8)).any(axis=1).tolist() == [
        False, False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("cls", [Wrapped, Old, OfTorch])
def test_given_outputs_are_filled_and_returned(cls):
    x = cases.activations(np.random.default_rng(0), 5, 512)
    want_q, want_scale = cumoe.reference.silu_and_mul_quant_fp8(x, limit=2.0)
    out, out_scale = cases.poisoned_codes(5, 256), np.full((5, 2), cases.POISON_SCALE)
    lent = wrapped(cls)(x), wrapped(cls)(out), wrapped(cls)(out_scale)
    q, scale = cumoe.silu_and_mul_quant_fp8(lent[0], limit=2.0, out=lent[1], out_scale=lent[2])
    assert (q, scale) == lent[1:]
    assert_bitwise_equal(TorchBackend("cpu").codes(q.array), want_q.view(np.uint8))
    assert_bitwise_equal(scale.array.numpy(), want_scale)


def test_frameworks_may_be_mixed():
    """An output of NumPy for an input of JAX, and the other way round."""
    x = cases.activations(np.random.default_rng(0), 5, 256)
    want_q, want_scale = cumoe.reference.per_token_group_quant_fp8(x)
    out = cases.poisoned_codes(5, 256)
    q, scale = cumoe.per_token_group_quant_fp8(jax_arrays.put(x), out=out)
    assert q is out
    assert_bitwise_equal(out, want_q)
    assert isinstance(scale, jax.Array)
    assert_bitwise_equal(np.asarray(scale), want_scale)
    gpu_like = wrapped(Wrapped)(cases.poisoned_codes(5, 256))
    q, scale = cumoe.per_token_group_quant_fp8(x, out=gpu_like)
    assert q is gpu_like
    assert type(scale) is np.ndarray


def test_in_place():
    args = random_arguments("fused_experts_fp8")
    want = cumoe.reference.fused_experts_fp8(**args)
    moved = {name: wrapped(Wrapped)(a) for name, a in args.items()}
    assert cumoe.fused_experts_fp8(**moved, out=moved["x"]) is moved["x"]
    assert_bitwise_equal(TorchBackend("cpu").bf16(moved["x"].array), want)


@pytest.mark.parametrize(
    ("layout", "rows"), [("row", 5), ("column", 5), ("column", 1), ("tma", 8), ("packed", 8)]
)
def test_layouts_that_jax_can_hold(layout, rows):
    x = cases.activations(np.random.default_rng(0), rows, 512)
    options = {"scale_layout": layout, "scale_format": "ue8m0"}
    _, scale = cumoe.per_token_group_quant_fp8(jax_arrays.put(x), **options)
    _, want = cumoe.reference.per_token_group_quant_fp8(x, **options)
    assert_bitwise_equal(np.ascontiguousarray(np.asarray(scale)), np.ascontiguousarray(want))


def test_a_layout_that_jax_cannot_hold():
    x = jax_arrays.put(np.ones((5, 512), np.float32))
    with pytest.raises(ArgumentError, match=r"^result: .* got jaxlib.*; choose scale_layout 'row'"):
        cumoe.per_token_group_quant_fp8(x, scale_layout="tma")


OUTPUTS = {
    ("per_token_group_quant_fp8", "out"): ((4, 256), E4M3),
    ("per_token_group_quant_fp8", "out_scale"): ((4, 2), np.float32),
    ("silu_and_mul_quant_fp8", "out"): ((4, 256), E4M3),
    ("silu_and_mul_quant_fp8", "out_scale"): ((4, 2), np.float32),
    ("fused_experts_fp8", "out"): ((4, 256), BF16),
    ("fused_experts_fp8", "workspace"): ((1 << 20,), np.uint8),
}


@pytest.mark.parametrize(("op", "name"), OUTPUTS)
def test_an_immutable_output_is_refused(op, name):
    out = jax_arrays.put(np.zeros(*OUTPUTS[op, name]))
    with pytest.raises(
        ArgumentError, match=rf"^{name}: want a writeable array, .*JAX's are; leave it out"
    ):
        call(op, jax_arrays.put, **{name: out})
    assert not np.asarray(out).astype(np.float32).any()


@every_op
def test_a_traced_value_is_refused(op):
    args = random_arguments(op)
    name = next(iter(args))

    def traced(a):
        return getattr(cumoe, op)(**{**args, name: a})

    for transform in (jax.jit, jax.vmap, jax.grad):
        x = jnp.ones(args[name].shape, jnp.float32)
        with pytest.raises(
            DTypeError, match=rf"^{name}: .*Tracer, a traced value of JAX; call outside of jax.jit"
        ):
            transform(traced)(x)


def test_the_remedy_for_traced_values_works():
    x = cases.activations(np.random.default_rng(0), 5, 256)
    shapes = (
        jax.ShapeDtypeStruct((5, 256), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((5, 2), jnp.float32),
    )
    f = jax.jit(lambda a: jax.pure_callback(cumoe.per_token_group_quant_fp8, shapes, a))
    q, scale = f(jax_arrays.put(x))
    want_q, want_scale = cumoe.reference.per_token_group_quant_fp8(x)
    assert_bitwise_equal(np.asarray(q), want_q)
    assert_bitwise_equal(np.asarray(scale), want_scale)


def test_a_deleted_array_is_refused():
    x = jax_arrays.put(np.ones((4, 256), np.float32))
    x.delete()
    with pytest.raises(DTypeError, match=r"^x: want an array that lends .*ArrayImpl, whose"):
        cumoe.per_token_group_quant_fp8(x)


def test_results_of_jax_are_of_use_to_jax():
    """A result outlives what it came from, and computes on."""
    x = cases.activations(np.random.default_rng(0), 64, 256)
    q, scale = cumoe.per_token_group_quant_fp8(jax_arrays.put(x))
    groups = q.astype(jnp.float32).reshape(64, 2, 128)
    values = jax.jit(lambda q, s: q * s[..., None])(groups, scale)
    del q, scale
    error = np.abs(np.asarray(values).reshape(64, 256) - x.astype(np.float32))
    assert (error <= np.abs(x.astype(np.float32)) / 16 + 0.01).all()


def test_a_late_producer_is_waited_for():
    @jax.jit
    def slow(a):
        b = jax.lax.fori_loop(0, 200, lambda _, b: jnp.tanh(b @ b), jnp.ones((256, 256)))
        return a + 0 * b[0, 0]

    x = np.random.default_rng(0).standard_normal((16, 256), np.float32)
    q, scale = cumoe.per_token_group_quant_fp8(slow(jax_arrays.put(x)))
    want_q, want_scale = cumoe.reference.per_token_group_quant_fp8(x)
    assert_bitwise_equal(np.asarray(q), want_q)
    assert_bitwise_equal(np.asarray(scale), want_scale)


def test_types_of_jax():
    assert jnp.float8_e4m3fn.dtype == np.dtype(ml_dtypes.float8_e4m3fn)
    q, _ = cumoe.per_token_group_quant_fp8(jax_arrays.put(np.ones((1, 128), BF16)))
    assert q.dtype == jnp.float8_e4m3fn
    (out,) = call("fused_experts_fp8", jax_arrays.put)
    assert out.dtype == jnp.bfloat16
