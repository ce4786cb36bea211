"""SwiGLU and quantization on every backend: hand-made rows, clamp, rounding, rows anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumoe
from tests.helpers import cases
from tests.helpers.backends import NumpyBackend
from tests.helpers.calls import activate_by_reference, activate_on
from tests.helpers.compare import assert_activations_close, assert_bitwise_equal
from tests.helpers.layouts import embedded, strides_of
from tests.helpers.tolerances import SILU_CODE_SHARE

BF16 = cases.BF16
SCALES = [
    ("fp32", "row"), ("fp32", "column"), ("fp32", "tma"),
    ("ue8m0", "row"), ("ue8m0", "column"), ("ue8m0", "tma"), ("ue8m0", "packed"),
]  # fmt: skip
CONSTANTS = {
    "plain": {},
    "clamp": {"limit": 1.5},
    "oai": {"limit": 7.0, "alpha": 1.702, "beta": 1.0},
    "no_clamp_scaled": {"alpha": 0.5, "beta": -2.0},
}
ODD_R = (1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129)


def check(backend: NumpyBackend, x: np.ndarray, **options: Any) -> None:
    """As the reference, but for the roundings that two ``exp`` may turn."""
    got, want = activate_on(backend, x, **options), activate_by_reference(x, **options)
    assert_activations_close(got, want, SILU_CODE_SHARE)


def assert_same(got, want, rows=slice(None)) -> None:
    """Codes and scales of these rows, byte for byte."""
    for a, b in zip(got, want, strict=True):
        assert_bitwise_equal(np.ascontiguousarray(a[rows]), np.ascontiguousarray(b[rows]))


def gate_up(gate, up, size: int = 128) -> np.ndarray:
    """[1, 2 * size] bf16: the values at the front of each half, the rest 0."""
    x = np.zeros((2, size), np.float32)
    x[0, : len(gate)], x[1, : len(up)] = gate, up
    return x.reshape(1, -1).astype(BF16)


def decoded(got: tuple[np.ndarray, np.ndarray]) -> float:
    """The first activation, from its code and its scale."""
    return float(got[0].view(cases.E4M3)[0, 0].astype(np.float32) * got[1][0, 0])


BY_HAND = {
    "clamp": ([-20, -12, 2, 20], [20, -20, 20, -20], {"limit": 10}, 0.22321428, "8002 6A FE"),
    "clamp_ue8m0": ([-20, -12, 2, 20], [20, -20, 20, -20], {"limit": 10, "scale_format": "ue8m0"},
                    0.25, "8002 69 FC"),
    "two_roundings": ([0.515625], [5.4375], {"scale_format": "ue8m0"}, 2.0**-8, "7E"),
    "gate_is_the_first_half": ([1], [4], {}, 2.921875 / 448, "7E"),
    "up_is_the_second_half": ([4], [1], {}, 3.921875 / 448, "7E"),
    "up_of_zero": ([5], [0], {}, 1e-10 / 448, "00"),
    "gate_of_zero": ([0], [5], {}, 1e-10 / 448, "00"),
    "far_negative": ([-100, 1], [5, 4], {}, 2.921875 / 448, "80 7E"),
    "far_negative_alone": ([-88, 100], [1, 0.01], {}, 1 / 448, "80 7E"),
    "minus_infinity": ([-np.inf, 1], [5, 4], {}, 2.921875 / 448, "80 7E"),
    "minus_infinity_clamped": ([-np.inf, 1], [-5, 4], {"limit": 10}, 2.921875 / 448, "00 7E"),
    "clamped_infinity": ([np.inf], [np.inf], {"limit": 10}, 100 / 448, "7E"),
    "limit_between_bf16_values": ([20], [20], {"limit": 9.9}, 98.0 / 448, "7E"),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_by_hand(backend, case):
    gate, up, options, want, codes = BY_HAND[case]
    q, scale = activate_on(backend, gate_up(gate, up), **options)
    np.testing.assert_allclose(scale, [[want]], rtol=2.0**-22)
    want_codes = bytes.fromhex(codes)
    assert q[0, : len(want_codes)].tobytes() == want_codes
    assert not q[0, len(want_codes) :].any()


@pytest.mark.parametrize(
    ("limit", "want"), [(None, -73.5), (np.inf, -73.5), (1e39, -73.5), (10, -70.0), (10.0, -70.0)]
)
def test_limit_or_none(backend, limit, want):
    """A limit beyond the largest float32 is none, like infinity."""
    assert decoded(activate_on(backend, gate_up([7], [-10.5]), limit=limit)) == want


@pytest.mark.parametrize("alpha_beta", [(1.0, 0.0), (1.702, 1.0)])
def test_clamp_is_never_skipped(backend, alpha_beta):
    """gate from above only, up on both sides, whatever else is asked for."""
    alpha, beta = alpha_beta
    clamped = gate_up([10, -30, 3, 3, 10], [3, 3, 10, -10, 10])
    wild = gate_up([40, -30, 3, 3, 99], [3, 3, 40, -40, 99])
    options = {"alpha": alpha, "beta": beta}
    want = activate_on(backend, clamped, **options)
    assert_same(activate_on(backend, wild, limit=10, **options), want)
    assert (activate_on(backend, wild, **options)[1] != want[1]).all()


@pytest.mark.parametrize("shape", [(1, 128), (7, 640), (129, 1024), (301, 1024)])
@pytest.mark.parametrize(("scale_format", "scale_layout"), SCALES)
@pytest.mark.parametrize("constants", ["plain", "clamp"])
def test_close_to_the_reference(backend, rng, constants, scale_format, scale_layout, shape):
    x = cases.activations(rng, shape[0], 2 * shape[1])
    options = {"scale_format": scale_format, "scale_layout": scale_layout}
    check(backend, x, **CONSTANTS[constants], **options)


@pytest.mark.parametrize("constants", CONSTANTS)
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_constants(backend, rng, constants, scale_format):
    x = (3 * cases.activations(rng, 600, 1024).astype(np.float32)).astype(BF16)
    for rows in (512, 600):
        check(backend, x[:rows], scale_format=scale_format, **CONSTANTS[constants])


@pytest.mark.parametrize("constants", CONSTANTS)
def test_every_gate_there_is(backend, rng, constants):
    """All 65,536 bf16 gates, NaN and infinities among them, in order and not, with six ups each."""
    ordered = np.arange(1 << 16, dtype=np.uint16)
    shuffled = np.random.default_rng(1).permutation(ordered)
    gate = np.concatenate([ordered, shuffled] * 3).view(BF16).reshape(-1, 512)
    ups = np.array([1, -0.3, 0.77, -0.0, 1e-3, 30], np.float32).astype(BF16)
    up = np.repeat(ups, len(gate) // 6)[:, None]
    x = np.hstack([gate, np.broadcast_to(up, gate.shape)])
    check(backend, x, **CONSTANTS[constants])
    for first in range(0, len(x), 256):
        check(backend, x[first : first + 256], **CONSTANTS[constants])


@pytest.mark.parametrize("constants", CONSTANTS)
def test_any_bits(backend, rng, constants):
    bits = rng.integers(0, 1 << 16, (600, 1024), np.uint16)
    bits[300:] = (bits[300:] & 0x80FF) | rng.integers(110, 135, (300, 1024), np.uint16) << 7
    for some in (slice(None), slice(0, 512)):
        check(backend, bits[some].view(BF16), **CONSTANTS[constants])


@pytest.mark.parametrize("half", ["gate", "up"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan])
@pytest.mark.parametrize("limit", [None, 10.0])
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("rows", [2, 1200])
def test_nan_stays_nan_and_in_its_place(backend, rng, rows, half, bad, limit, scale_format):
    x = cases.activations(rng, rows, 512)
    x[1, [3, 259]] = 0  # both halves of the activation that becomes NaN
    clean_q, clean_scale = activate_on(backend, x, limit=limit, scale_format=scale_format)
    x[1, [3, 259]] = (bad, 1) if half == "gate" else (1, bad)
    q, scale = activate_on(backend, x, limit=limit, scale_format=scale_format)
    assert q[1, 3] == 0x7F
    clean_q[1, 3] = 0x7F
    assert_bitwise_equal(q, clean_q)
    assert_bitwise_equal(scale, clean_scale)


@pytest.mark.parametrize(
    ("gate", "up", "scale", "codes"),
    [
        ([3e38, 1, -1], [3e38, 1, 1], np.inf, [0x7F, 0x00, 0x80]),
        ([np.inf, 2], [1, 1], np.inf, [0x7F, 0x00]),
        ([np.inf, 2], [0, 1], None, [0x7F, 0x7E]),
        ([1, 2], [-np.inf, 1], np.inf, [0x7F, 0x00]),
    ],
    ids=["overflow", "gate", "inf_times_zero", "up"],
)
def test_infinities_without_a_limit(backend, gate, up, scale, codes):
    q, got = activate_on(backend, gate_up(gate, up))
    assert q[0, : len(codes)].tolist() == codes
    assert not q[0, len(codes) :].any()
    assert np.isfinite(got[0, 0]) if scale is None else got[0, 0] == scale


def test_finite_gates_give_no_nan(backend):
    """silu(-88) and beyond is a small negative number or -0, never -inf / inf."""
    gate = -np.linspace(80, 3.3e38, 1280).astype(BF16).reshape(5, 256)
    q, scale = activate_on(backend, np.hstack([gate, np.ones_like(gate)]))
    assert np.isfinite(scale).all()
    assert ((q & 0x7F) != 0x7F).all()


@pytest.mark.parametrize("rows", [2047, 2048, 2049])
@pytest.mark.parametrize("filtered", [False, True])
def test_rows_do_not_depend_on_their_number(backend, filtered, rows):
    """H = 512 and 2048 rows make a million activations, where a strategy may change."""
    rng = np.random.default_rng(17)
    x = cases.activations(rng, 2049, 1024)[:rows]
    ids = rng.integers(-1, 4, (rows, 1)).astype(np.int32)
    ids[-1] = 0
    options = {"num_experts": 4, "limit": 2.0} if filtered else {"limit": 2.0}
    some = [0, 1, 511, 1023, 1024, rows - 2, rows - 1]
    q, scale = activate_on(backend, x, **options, **({"topk_ids": ids} if filtered else {}))
    for r in some:
        alone = {"topk_ids": ids[r : r + 1]} if filtered else {}
        assert_same(
            (q[r : r + 1], scale[r : r + 1]), activate_on(backend, x[[r]], **options, **alone)
        )
    want_q, want_scale = activate_by_reference(x, limit=2.0)
    keep = (ids[:, 0] >= 0) | (not filtered)
    assert_activations_close(
        (q[keep], scale[keep]), (want_q[keep], want_scale[keep]), SILU_CODE_SHARE
    )
    assert (q[~keep] == cases.POISON_CODE).all()
    assert (scale[~keep] == cases.POISON_SCALE).all()


@pytest.mark.parametrize(("scale_format", "scale_layout"), [("fp32", "row"), ("ue8m0", "packed")])
def test_odd_numbers_of_rows(backend, rng, scale_format, scale_layout):
    options = {"scale_format": scale_format, "scale_layout": scale_layout, "limit": 2.0}
    x = cases.activations(rng, max(ODD_R), 2 * 640)
    everything = activate_on(backend, x, **options)
    for rows in ODD_R:
        got = activate_on(backend, x[:rows], **options)
        assert_same(got, [a[:rows] for a in everything])


@pytest.mark.parametrize(("scale_format", "scale_layout"), SCALES)
def test_each_scale_lies_where_its_layout_says(backend, scale_format, scale_layout):
    """silu(32) = 32 and up = 14 * 2^(r + 2g): activations of 448 * 2^(r + 2g)."""
    want = np.exp2(np.arange(3)[:, None] + 2 * np.arange(5)).astype(np.float32)
    up = np.repeat(14 * want, 128, axis=1)
    x = np.hstack([np.full_like(up, 32), up]).astype(BF16)
    q, scale = cumoe.silu_and_mul_quant_fp8(
        backend.put(x), scale_format=scale_format, scale_layout=scale_layout
    )
    assert (backend.codes(q) == 0x7E).all()
    strides = {"row": (5, 1), "column": (1, 3), "tma": (1, 4), "packed": (1, 4)}[scale_layout]
    assert strides_of(scale) == strides
    raw = np.ascontiguousarray(backend.raw(scale))
    if scale_layout == "packed":
        raw = np.exp2(raw.view(np.uint8)[:, :5].astype(np.float32) - 127)
    assert_bitwise_equal(raw, want)


@pytest.mark.parametrize("offset", [0, 1, 3, 7, 8])
@pytest.mark.parametrize("gap", [0, 1, 8, 127])
@pytest.mark.parametrize("rows", [5, 1100])
def test_rows_may_lie_anywhere(backend, rng, rows, gap, offset):
    x = cases.activations(rng, rows, 512)
    placed = embedded(backend, x, offset=offset, gap=gap)
    target = embedded(backend, cases.poisoned_codes(rows, 256), offset=offset)
    scales = embedded(backend, np.full((rows, 2), cases.POISON_SCALE), offset=offset)
    q, scale = cumoe.silu_and_mul_quant_fp8(
        placed.view, limit=1.0, out=target.view, out_scale=scales.view
    )
    assert_same((backend.codes(q), backend.raw(scale)), activate_on(backend, x, limit=1.0))
    for island in (placed, target, scales):
        assert (island.guard(backend) == 0xFF).all()


def test_gate_up_is_not_written(backend, rng):
    x = cases.activations(rng, 5, 512)
    placed = backend.put(x.copy())
    cumoe.silu_and_mul_quant_fp8(placed, limit=1.0)
    assert_bitwise_equal(backend.bf16(placed), x)


@pytest.mark.parametrize("scale_layout", ["row", "tma"])
def test_leading_dimensions_flatten_to_rows(backend, rng, scale_layout):
    x = cases.activations(rng, 2, 3, 512)
    ids = backend.put(np.array([[0, 1, 2], [1, 2, 0]], np.int32))
    q, scale = cumoe.silu_and_mul_quant_fp8(backend.put(x), topk_ids=ids, scale_layout=scale_layout)
    flat_q, flat_scale = activate_on(backend, x.reshape(6, 512), scale_layout=scale_layout)
    assert_bitwise_equal(backend.codes(q), flat_q.reshape(2, 3, 256))
    assert_bitwise_equal(backend.raw(scale), flat_scale)


@pytest.mark.parametrize(("scale_format", "scale_layout"), SCALES)
def test_no_rows(backend, scale_format, scale_layout):
    q, scale = cumoe.silu_and_mul_quant_fp8(
        backend.put(np.zeros((0, 2 * 1024), BF16)),
        topk_ids=backend.put(np.zeros((0, 8), np.int32)),
        scale_format=scale_format,
        scale_layout=scale_layout,
    )
    assert (tuple(q.shape), tuple(scale.shape)) == (
        (0, 1024), (0, 2 if scale_layout == "packed" else 8),
    )  # fmt: skip


def test_results_have_the_frameworks_own_types(backend, rng):
    x = backend.put(cases.activations(rng, 2, 256))
    q, scale = cumoe.silu_and_mul_quant_fp8(x)
    fp8 = {"numpy": "float8_e4m3fn", "cupy": "uint8"}.get(backend.name, "torch.float8_e4m3fn")
    assert str(q.dtype) == fp8
    assert str(scale.dtype).removeprefix("torch.") == "float32"
    assert type(q) is type(scale) is type(x)
    assert getattr(q, "device", "cpu") == getattr(x, "device", "cpu")
