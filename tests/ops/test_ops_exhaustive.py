"""Every bf16 gate, every pair of mantissas in a division: the shortcuts change no byte."""

from __future__ import annotations

import importlib
import itertools

import numpy as np
import pytest

import cumoe
from bench.sweep import forced
from cumoe import _settings, reference
from cumoe.plan import silu_and_mul_quant_fp8 as planning
from tests.helpers.backends import BF16, CupyBackend
from tests.helpers.compare import assert_bitwise_equal

pytestmark = pytest.mark.gpu

# The package has the function under the module's name.
activation = importlib.import_module("cumoe.ops.silu_and_mul_quant_fp8")


def all_finite_bf16() -> np.ndarray:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(BF16)
    return bits[np.isfinite(bits.astype(np.float32))]


def gate_up(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """[R, 256]: each row of 128 gates with its 128 ups."""
    padded = -len(gate) % 128
    halves = [np.pad(a, (0, padded)).reshape(-1, 128) for a in (gate, up)]
    return np.ascontiguousarray(np.concatenate(halves, axis=1))


def misaligned(backend: CupyBackend, a: np.ndarray):
    """The same rows, each an element past a 16-byte boundary."""
    wide = np.zeros((a.shape[0], a.shape[1] + 8), a.dtype)
    wide[:, 1 : a.shape[1] + 1] = a
    return backend.put(wide)[:, 1 : a.shape[1] + 1]


@pytest.mark.parametrize("limit", [None, 10.0, 9.9])
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_every_gate_and_every_up(limit, scale_format, rng):
    backend, values = CupyBackend(), all_finite_bf16()
    others = rng.standard_normal(len(values)).astype(np.float32).astype(BF16)
    ones = np.ones(len(values), np.float32).astype(BF16)
    for gate, up in ((values, ones), (values, others), (others, values), (values, values[::-1])):
        x = gate_up(gate, up)
        want = reference.silu_and_mul_quant_fp8(x, limit=limit, scale_format=scale_format)
        got = cumoe.silu_and_mul_quant_fp8(backend.put(x), limit=limit, scale_format=scale_format)
        wrong = backend.codes(got[0]) != want[0].view(np.uint8)
        assert wrong.mean() <= 1e-4
        assert (backend.raw(got[1]) != want[1]).mean() <= 1e-2


def test_shortcuts_change_no_byte():
    """A scale for each value; a limit that bf16 does not hold takes the plain formula."""
    backend, values = CupyBackend(), all_finite_bf16()
    small = values[np.abs(values.astype(np.float32)) < 1e30]
    x = np.zeros((len(small), 256), np.float32)
    x[:, 0], x[:, 128] = small.astype(np.float32), 1.0
    x = x.astype(BF16)
    fast = cumoe.silu_and_mul_quant_fp8(backend.put(x))
    slow = cumoe.silu_and_mul_quant_fp8(backend.put(x), limit=3.3e38)
    assert_bitwise_equal(backend.codes(fast[0]), backend.codes(slow[0]))
    assert_bitwise_equal(backend.raw(fast[1]), backend.raw(slow[1]))


@pytest.mark.parametrize(("dtype", "bits"), [(BF16, 7), (np.dtype(np.float16), 10)])
def test_quotients_of_all_mantissas(dtype, bits):
    """Group (a, e): the largest value has mantissa a, the others all mantissas at 2^-e of it."""
    backend = CupyBackend()
    mantissas = 1 + np.arange(1 << bits) / (1 << bits)
    step = 127
    for e in range(0, 13):
        others = (mantissas * 2.0**-e)[
            np.arange(-(-len(mantissas) // step) * step) % len(mantissas)
        ]
        groups = [
            np.concatenate([[a * 2.0], others[i : i + step]])
            for a, i in itertools.product(mantissas, range(0, len(others), step))
        ]
        x = np.array(groups, np.float32).astype(dtype)
        got = cumoe.per_token_group_quant_fp8(backend.put(x))
        want = reference.per_token_group_quant_fp8(x)
        assert_bitwise_equal(backend.codes(got[0]), want[0].view(np.uint8))
        assert_bitwise_equal(backend.raw(got[1]), want[1])


def test_misaligned_rows_give_the_same_bytes(rng):
    backend = CupyBackend()
    x = rng.standard_normal((300, 1024)).astype(np.float32).astype(BF16)
    plain = cumoe.silu_and_mul_quant_fp8(backend.put(x), limit=1.0)
    shifted = cumoe.silu_and_mul_quant_fp8(misaligned(backend, x), limit=1.0)
    assert_bitwise_equal(backend.codes(plain[0]), backend.codes(shifted[0]))
    assert_bitwise_equal(backend.raw(plain[1]), backend.raw(shifted[1]))


@pytest.mark.parametrize("rows", [1, 3, 7, 8, 128, 1024, 2049])
@pytest.mark.parametrize("H", [128, 384, 512, 2048, 7168])
@pytest.mark.parametrize("filtering", [None, "ids", "map"])
def test_strategies_agree(rows, H, filtering, rng):
    """All strategies, whichever the plan would choose, give the same bytes."""
    backend = CupyBackend()
    x = (rng.standard_normal((rows, 2 * H)) * 4).astype(np.float32).astype(BF16)
    options = {"limit": 10.0, "scale_format": "ue8m0"}
    if filtering:
        options["topk_ids"] = backend.put(rng.integers(-1, 9, rows).astype(np.int32))
        options["num_experts"] = 8
    if filtering == "map":
        table = np.array([0, -1, 1, -1, 2, 3, -1, 9], np.int32)
        options["expert_map"] = backend.put(table)
    results = []
    for strategy in {*planning.UNFILTERED, *planning.FILTERED}:
        out = backend.put(np.full((rows, H), 0xAA, np.uint8))
        scale = backend.put(np.full((rows, H // 128), 123.0, np.float32))
        with forced(strategy):
            cumoe.silu_and_mul_quant_fp8(backend.put(x), out=out, out_scale=scale, **options)
        results.append((backend.raw(out), backend.raw(scale)))
    for codes, scales in results[1:]:
        assert_bitwise_equal(codes, results[0][0])
        assert_bitwise_equal(scales, results[0][1])


@pytest.mark.parametrize("rows", [1, 7, 300, 3000])
@pytest.mark.parametrize("layout", [("fp32", "row"), ("ue8m0", "packed"), ("fp32", "tma")])
@pytest.mark.parametrize("filtered", [False, True])
def test_two_steps_give_the_bytes_of_one(rows, layout, filtered, rng, monkeypatch):
    backend = CupyBackend()
    x = (rng.standard_normal((rows, 2048)) * 4).astype(np.float32).astype(BF16)
    options = {"limit": 9.9, "alpha": 1.7, "scale_format": layout[0], "scale_layout": layout[1]}
    if filtered:
        options["topk_ids"] = backend.put(rng.integers(-1, 3, rows).astype(np.int64))
    one = run_poisoned(backend, x, options)
    monkeypatch.setenv("CUMOE_FUSED_ACT_QUANT", "0")
    for memo in (_settings.settings, activation._checked):
        memo.cache_clear()
    two = run_poisoned(backend, x, options)
    monkeypatch.undo()
    for memo in (_settings.settings, activation._checked):
        memo.cache_clear()
    assert_bitwise_equal(one[0], two[0])
    assert_bitwise_equal(one[1], two[1])


def run_poisoned(backend: CupyBackend, x: np.ndarray, options: dict):
    """Codes and scales on top of poison, whose rows that are skipped keep it."""
    _, like = cumoe.silu_and_mul_quant_fp8(backend.put(x), **options)
    out = backend.put(np.full((x.shape[0], x.shape[1] // 2), 0xAA, np.uint8))
    like.data.memset(0x42, like.nbytes)
    cumoe.silu_and_mul_quant_fp8(backend.put(x), out=out, out_scale=like, **options)
    return backend.raw(out), backend.raw(like)


def test_offsets_beyond_2_31_elements(rng):
    """The last row of 4.3 GB of gate and up is the row computed alone."""
    import torch

    rows, H = 61_682, 17_408
    x = torch.empty(rows, 2 * H, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    x[-3:] = torch.from_numpy(rng.standard_normal((3, 2 * H))).to(x)
    q, scale = cumoe.silu_and_mul_quant_fp8(x, limit=10.0)
    alone_q, alone_scale = cumoe.silu_and_mul_quant_fp8(x[-1:], limit=10.0)
    assert torch.equal(q[-1:].view(torch.uint8), alone_q.view(torch.uint8))
    assert torch.equal(scale[-1:], alone_scale)
    wide = x.view(-1, 4096)
    wide[-1] = torch.from_numpy(rng.standard_normal(4096)).to(x)
    q, scale = cumoe.per_token_group_quant_fp8(wide)
    alone_q, alone_scale = cumoe.per_token_group_quant_fp8(wide[-1:])
    assert torch.equal(q[-1:].view(torch.uint8), alone_q.view(torch.uint8))
    assert torch.equal(scale[-1:], alone_scale)
