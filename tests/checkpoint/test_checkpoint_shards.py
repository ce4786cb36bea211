"""Checkpoints of several files, and folders."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cumoe.checkpoint.shards import open_checkpoint
from cumoe.errors import CheckpointError

A, B = "part-1.safetensors", "part-2.safetensors"


def write_sharded(folder: Path, weight_map: object = None) -> Path:
    save_file({"x": np.arange(6.0).reshape(2, 3), "y": np.ones(2)}, folder / A)
    save_file({"z": np.full(4, 7, np.int32)}, folder / B)
    default = {"x": A, "y": A, "z": B}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": default if weight_map is None else weight_map}))
    return path


@pytest.mark.parametrize("whole_folder", [True, False])
def test_tensors_come_from_their_shards(tmp_path, whole_folder):
    index = write_sharded(tmp_path)
    checkpoint = open_checkpoint(tmp_path if whole_folder else str(index))
    assert sorted(checkpoint) == ["x", "y", "z"]
    assert "z" in checkpoint
    assert "w" not in checkpoint
    assert checkpoint["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert checkpoint["z"].tolist() == [7, 7, 7, 7]
    assert checkpoint["z"].dtype == np.int32
    assert checkpoint.folder == tmp_path


def test_a_missing_shard_stops_only_its_own_tensors(tmp_path):
    checkpoint = open_checkpoint(write_sharded(tmp_path))
    (tmp_path / B).unlink()
    assert checkpoint["y"].tolist() == [1, 1]
    with pytest.raises(
        CheckpointError, match=r"part-2\.safetensors: z: wanted the shard that .*index"
    ):
        checkpoint["z"]


def test_a_tensor_that_its_shard_lacks(tmp_path):
    checkpoint = open_checkpoint(write_sharded(tmp_path, {"x": B, "z": B}))
    with pytest.raises(CheckpointError, match=r"part-2\.safetensors: x: wanted this tensor"):
        checkpoint["x"]


def test_a_tensor_that_the_index_lacks(tmp_path):
    checkpoint = open_checkpoint(write_sharded(tmp_path))
    with pytest.raises(CheckpointError, match=r"index\.json: w: wanted this tensor, found 3"):
        checkpoint["w"]


@pytest.mark.parametrize("name", ["../part-1.safetensors", "/etc/passwd", "a/b", 7])
def test_a_shard_outside_the_folder_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match=r"index\.json: x: wanted the name of a file"):
        open_checkpoint(write_sharded(tmp_path, {"x": name}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"metadata": {}}', r"weight_map: wanted an object .* found NoneType"),
        ("[1]", "wanted a JSON object, found list"),
        ("{", "wanted JSON, found"),
    ],
)
def test_a_damaged_index(tmp_path, text, message):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: " + message):
        open_checkpoint(path)


def test_a_missing_index(tmp_path):
    with pytest.raises(CheckpointError, match=r"no\.json: wanted a JSON file .* No such file"):
        open_checkpoint(tmp_path / "no.json")


def test_a_folder_with_one_file_needs_no_index(tmp_path):
    save_file({"x": np.ones(1)}, tmp_path / "odd-name.safetensors")
    assert list(open_checkpoint(tmp_path)) == ["x"]


@pytest.mark.parametrize(
    ("files", "message"),
    [((), "found 0 .* check the path"), ((A, B), "found 2 .* name one file")],
)
def test_a_folder_that_names_no_checkpoint(tmp_path, files, message):
    for file in files:
        save_file({"x": np.ones(1)}, tmp_path / file)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pipe.safetensors", "pipe.json"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name}: wanted .* got: it is no regular file; "):
        open_checkpoint(tmp_path / name)
