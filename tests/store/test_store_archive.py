"""A cache as one file: what goes in comes out, and nothing else ever does."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cumoe.errors import CacheFileError
from cumoe.plan.spec import kernel_spec
from cumoe.store import archive, disk, key, store

SPEC = kernel_spec("tiny", "sm_90a", A=5)
Members = dict[str, bytes]


def _publish(root: Path, number: int, schema: int = key.SCHEMA) -> Path:
    fields = (("schema", str(schema)), ("stem", "k"), ("constants", f"A={number}"))
    return disk.publish(root, key.digest(fields), bytes([number]) * 500, fields)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in range(3):
        _publish(tmp_path / "from", number)
    return tmp_path / "from"


@pytest.fixture
def file(root: Path, tmp_path: Path) -> Path:
    archive.export_to(tmp_path / "kernels.tar", [root])
    return tmp_path / "kernels.tar"


def _files(root: Path) -> dict[str, bytes]:
    paths = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def _members(file: Path) -> Members:
    with tarfile.open(file) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar.getmembers()}  # type: ignore[union-attr]


def _write(file: Path, members: Members) -> None:
    with tarfile.open(file, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def test_a_cache_arrives_whole(root: Path, file: Path, tmp_path: Path) -> None:
    done = archive.import_from(file, tmp_path / "to/deeper")
    assert _files(tmp_path / "to/deeper") == _files(root)
    assert done == archive.Imported(3, 0, sum(map(len, _files(root).values())))


def test_an_imported_kernel_is_a_hit(kernels: Path, cache: Path, tmp_path: Path) -> None:
    made = store.get(SPEC)
    archive.export_to(tmp_path / "f.tar", [cache])
    cache.rename(tmp_path / "aside")
    archive.import_from(tmp_path / "f.tar", cache)
    store.forget()
    assert store.get(SPEC) == made
    assert store.stats().compiled == 0


def test_what_is_there_is_kept(root: Path, file: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    mine = _publish(to, 1)
    manifest = mine.with_suffix(".json")
    manifest.write_text(manifest.read_text().replace('"created": "2', '"created": "1'))
    before = manifest.read_bytes()
    done = archive.import_from(file, to)
    assert (done.added, done.kept) == (2, 1)
    assert manifest.read_bytes() == before
    assert archive.import_from(file, to) == archive.Imported(0, 3, 0)


def test_what_is_damaged_there_is_mended(root: Path, file: Path, tmp_path: Path) -> None:
    os.truncate(_publish(tmp_path / "to", 1), 5)
    assert archive.import_from(file, tmp_path / "to").added == 3
    assert _files(tmp_path / "to") == _files(root)


def test_only_whole_entries_of_this_schema_go_in(root: Path, tmp_path: Path) -> None:
    damaged, other = _publish(root, 1), _publish(root, 9, schema=key.SCHEMA + 1)
    os.truncate(damaged, 5)
    done = archive.export_to(tmp_path / "f.tar", [root])
    assert done.kernels == 2
    assert set(done.left_out) == {damaged, other}
    assert done.size == (tmp_path / "f.tar").stat().st_size
    names = set(_members(tmp_path / "f.tar"))
    assert not {damaged.name, other.name} & names


def test_all_folders_go_in_and_each_kernel_once(root: Path, tmp_path: Path) -> None:
    _publish(tmp_path / "second", 1)
    _publish(tmp_path / "second", 7)
    roots = [root, tmp_path / "none", tmp_path / "second"]
    assert archive.export_to(tmp_path / "f.tar", roots).kernels == 4


def test_an_empty_cache_can_travel(tmp_path: Path) -> None:
    archive.export_to(tmp_path / "f.tar", [tmp_path / "none"])
    assert archive.import_from(tmp_path / "f.tar", tmp_path / "to") == archive.Imported(0, 0, 0)


def test_the_same_cache_gives_the_same_file(root: Path, file: Path, tmp_path: Path) -> None:
    archive.export_to(tmp_path / "again.tar", [root])
    assert (tmp_path / "again.tar").read_bytes() == file.read_bytes()


def test_a_failed_export_leaves_the_old_file(
    root: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive, "_add", full)
    with pytest.raises(CacheFileError, match=rf"^{re.escape(str(file))}: wanted .*No space left"):
        archive.export_to(file, [root])
    assert file.read_bytes() == before
    assert sorted(path.name for path in file.parent.iterdir()) == ["from", "kernels.tar"]


def _first(members: Members, suffix: str) -> str:
    return min(name for name in members if name.endswith(suffix) and name != "index.json")


def _rename(suffix: str, to: str) -> Callable[[Members], Members]:
    def rename(members: Members) -> Members:
        first = _first(members, suffix)
        return {to if name == first else name: data for name, data in members.items()}

    return rename


def _damage(members: Members) -> Members:
    name = _first(members, ".cubin")
    return members | {name: members[name][:-1] + b"?"}


def _index(**changes: object) -> Callable[[Members], Members]:
    def change(members: Members) -> Members:
        index = json.loads(members["index.json"]) | changes
        return members | {"index.json": json.dumps(index).encode()}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _rename(".cubin", "../../etc/passwd"),
            r"'\.\./\.\./etc/passwd': wanted plain files named",
        ),
        (_rename(".cubin", "/etc/passwd"), "'/etc/passwd': wanted plain files named"),
        (_rename(".json", f"a/{'0' * 64}.json"), "wanted plain files named"),
        (_rename(".json", f"{'0' * 64}.json"), r"wanted the members that index\.json names"),
        (_damage, r"\w{64}\.cubin: its SHA-256 differs from the manifest's"),
        (_index(schema=99), "wanted schema 1, it is of schema 99: another version of cumoe wrote"),
        (_index(keys=[]), r"wanted the members that index\.json names, it differs in \w{64}"),
        (_index(keys=["../x"]), r"wanted the members that index\.json names"),
        (lambda members: members | {"index.json": b"{"}, r"index\.json is not readable"),
        (lambda members: members | {"index.json": b"[]"}, r"index\.json is not readable"),
        (
            lambda members: {n: d for n, d in members.items() if n != "index.json"},
            r"wanted index\.json in it, which comes last: the file was cut off",
        ),
    ],
)
def test_what_is_not_as_exported_is_refused_before_anything_is_written(
    file: Path, tmp_path: Path, change: Callable[[Members], Members], message: str
) -> None:
    _write(file, change(_members(file)))
    with pytest.raises(CacheFileError, match=message) as caught:
        archive.import_from(file, tmp_path / "to")
    assert str(file) in str(caught.value)
    assert "cumoe cache export" in str(caught.value)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE]
)
def test_links_and_devices_are_refused(file: Path, tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(file, "a") as tar:
        member = tarfile.TarInfo(f"{'0' * 64}.cubin")
        member.type, member.linkname = kind, "/etc/passwd"
        tar.addfile(member)
    with pytest.raises(CacheFileError, match="wanted plain files"):
        archive.import_from(file, tmp_path / "to")


def test_a_member_that_comes_twice_is_refused(file: Path, tmp_path: Path) -> None:
    name = _first(_members(file), ".cubin")
    with tarfile.open(file, "a") as tar:
        member = tarfile.TarInfo(name)
        member.size = 4
        tar.addfile(member, io.BytesIO(b"evil"))
    with pytest.raises(CacheFileError, match="a name that comes twice"):
        archive.import_from(file, tmp_path / "to")


def test_a_file_cut_anywhere_is_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    end = len(whole.rstrip(b"\0"))
    for length in [*range(0, end, 97), end - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(CacheFileError):
            archive.import_from(file, tmp_path / "to")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("text", [b"", b"no tar", bytes(1024), bytes(20000)])
def test_what_is_no_archive_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "f").write_bytes(text)
    with pytest.raises(CacheFileError, match=r"f: wanted"):
        archive.import_from(tmp_path / "f", tmp_path / "to")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CacheFileError, match=r"none\.tar: wanted .* got: No such file .*; check"):
        archive.import_from(tmp_path / "none.tar", tmp_path / "to")
