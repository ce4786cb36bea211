"""A checkpoint: one safetensors file, or an index over several."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cumoe.checkpoint.safetensors import Array, SafetensorsFile, require_regular
from cumoe.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class Checkpoint:
    """Tensors by name over all shards: ``checkpoint[name]`` is a read-only view of mapped bytes.

    A shard is opened when the first of its tensors is asked for, so a layer can be read while other
    shards are still missing.
    """

    def __init__(self, path: Path, shard_of: dict[str, Path]) -> None:
        self.path = path
        self.folder = path.parent
        self._shard_of = shard_of
        self._open: dict[Path, SafetensorsFile] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def __len__(self) -> int:
        return len(self._shard_of)

    def __getitem__(self, name: str) -> Array:
        return self._file(name)[name]

    def where(self, name: str) -> str:
        """``file: tensor``, the beginning of a message about it."""
        return f"{self._shard_of.get(name, self.path)}: {name}"

    def _file(self, name: str) -> SafetensorsFile:
        shard = self._shard_of.get(name)
        if shard is None:
            raise CheckpointError(
                f"{self.path}: {name}: wanted this tensor, found {len(self)} others; "
                "check its name, and whether this is the whole checkpoint"
            )
        if shard not in self._open:
            self._open[shard] = self._open_shard(shard, name)
        return self._open[shard]

    def _open_shard(self, shard: Path, name: str) -> SafetensorsFile:
        if not shard.is_file():
            raise CheckpointError(
                f"{shard}: {name}: wanted the shard that {self.path.name} names for this tensor, "
                "found no such file; download it into the same folder"
            )
        return SafetensorsFile(shard)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a ``.safetensors`` file, a ``.safetensors.index.json``, or a folder holding either.

    Raises CheckpointError, naming file and tensor, for a file that is missing, damaged or
    truncated, here or when a tensor of its shard is first asked for.
    """
    path = Path(path)
    file = _choose(path) if path.is_dir() else path
    if file.suffix == ".json":
        return Checkpoint(file, _read_index(file))
    single = SafetensorsFile(file)
    return Checkpoint(file, dict.fromkeys(single.tensors, file))


def _choose(folder: Path) -> Path:
    for name in (_INDEX, _SINGLE):
        if (folder / name).is_file():
            return folder / name
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    raise CheckpointError(
        f"{folder}: wanted {_INDEX} or one .safetensors file, found {len(files)} .safetensors "
        "files; " + ("add the index or name one file" if files else "check the path")
    )


def _read_index(path: Path) -> dict[str, Path]:
    index = read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(
            f"{path}: weight_map: wanted an object from tensor to shard, found "
            f"{type(weight_map).__name__}; download the index again"
        )
    return {name: path.parent / _plain(path, name, file) for name, file in weight_map.items()}


def _plain(path: Path, name: str, file: Any) -> str:
    # A name with a folder in it could lead out of the checkpoint.
    if not isinstance(file, str) or file != Path(file).name:
        raise CheckpointError(
            f"{path}: {name}: wanted the name of a file in the same folder, found {file!r}; "
            "download the index again"
        )
    return file


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError if it is none."""
    try:
        require_regular(path)
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path}: wanted a JSON file that can be read, got: {error.strerror}; check the path"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: wanted JSON, found: {error}; download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: wanted a JSON object, found {type(value).__name__}; download it again"
        )
    return value
