"""The demo checkpoint: what it is quantized to, and that it reads back."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest

from cumoe.checkpoint import load_experts, open_checkpoint
from cumoe.checkpoint.demo import block_quantize, demo_tensors, write_demo
from cumoe.errors import CheckpointError


def test_block_quantize_by_hand():
    weight = np.zeros((256, 128), np.float32)
    weight[0, 0], weight[1, 1], weight[127, 127] = 896, -896, 7
    codes, scale = block_quantize(weight)
    assert scale.tolist() == [[2.0], [1.0]]
    assert codes.dtype == ml_dtypes.float8_e4m3fn
    assert codes.view(np.uint8)[[0, 1], [0, 1]].tolist() == [0x7E, 0xFE]
    assert float(codes[127, 127]) == 3.5
    assert not codes[128:].view(np.uint8).any()


def test_block_quantize_keeps_each_block_to_half_a_step(rng):
    weight = rng.normal(size=(384, 256)).astype(np.float32) * np.float32(1e-3)
    weight[128:256] *= 1000
    codes, scale = block_quantize(weight)
    back = codes.astype(np.float32) * np.repeat(np.repeat(scale, 128, 0), 128, 1)
    step = np.maximum(np.abs(weight) * 2.0**-4, np.repeat(np.repeat(scale, 128, 0), 128, 1) / 1024)
    assert (np.abs(back - weight) <= step * (1 + 1e-6)).all()
    assert not (np.abs(np.roll(back, 1) - weight) <= step).all()


def test_the_demo_reads_back(tmp_path):
    wrote = demo_tensors(3)
    path = write_demo(tmp_path / "new" / "folder", seed=3)
    checkpoint = open_checkpoint(path)
    assert set(checkpoint) == set(wrote)
    assert all(checkpoint[n].tobytes() == wrote[n].tobytes() for n in wrote)
    config = load_experts(path, 0).config
    assert (config.num_experts, config.hidden_size, config.intermediate_size) == (8, 512, 256)
    assert (config.top_k, config.scoring, config.swiglu_limit) == (2, "sigmoid", 7.0)


def test_the_seed_decides(tmp_path):
    a, b, c = (write_demo(tmp_path / n, seed=s) for n, s in (("a", 0), ("b", 0), ("c", 1)))
    assert a.read_bytes() == b.read_bytes()
    assert a.read_bytes() != c.read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_another_checkpoint_is_not_overwritten(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(CheckpointError, match=rf"{name}: wanted a folder without a checkpoint"):
        write_demo(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "precious"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below"
    with pytest.raises(CheckpointError) as error:
        write_demo(folder)
    assert str(error.value) == (
        f"{folder}: wanted a folder that can be written, got: Not a directory; name another"
    )


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_both_files_have_the_mode_of_the_umask(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write_demo(tmp_path)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert modes == {"model.safetensors": mode, "config.json": mode}
