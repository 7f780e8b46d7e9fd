"""checkpoint, part by part: names in a folder, its lock, how a checkpoint gets its name, documents, values."""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor

from quintnet_compiler.checkpoint import commit, documents, lock, manifest, pieces, values
from quintnet_compiler.checkpoint.reading.open_files import Damaged
from quintnet_compiler.checkpoint.stores import disk_lock
from quintnet_compiler.checkpoint.stores.disk_folder import DiskFiles, DiskFolder
from quintnet_compiler.core.errors import CheckpointError
from quintnet_compiler.core.files import open_plain
from quintnet_compiler.training.resume.last_run import goes_on


def _written(path: Path, step: int, *, keep: int | None = None) -> Path:
    folder = DiskFolder(path)
    made = commit.place_to_write(folder, step)
    files = {"data": manifest.write_text(made, "data", str(step))}
    return Path(commit.commit(folder, made, step, files, keep).path)


def test_names_of_a_folder(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path)
    assert DiskFolder(tmp_path / "nothing").named() == []
    for name in ("step-00000002", "step-123456789", ".step-00000003.0123abcd.old", ".step-00000003.0123abcd.tmp",
                 "step-7", "abandoned-02", "abandoned-10", "step-00000009.bak"):  # fmt: skip
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000004").write_text("a file")
    assert [entry.step for entry in folder.named()] == [123456789, 2]
    assert [entry.files.name[-4:] for entry in folder.leftovers()] == [".tmp", ".old"]
    assert [one.path.name for one in folder.abandoned()] == ["abandoned-10", "abandoned-02"]
    folder.set_aside(folder.named()[-1:])
    assert (tmp_path / "abandoned-11" / "step-00000002").is_dir()


def test_a_whole_checkpoint_without_a_name_gets_it_from_the_next_writer(tmp_path: Path) -> None:
    first = _written(tmp_path, 1)
    first.rename(tmp_path / ".step-00000001.0123abcd.old")
    (tmp_path / ".step-00000002.0123abcd.tmp").mkdir()
    assert [entry.step for entry in manifest.available(DiskFolder(tmp_path))] == [1]
    _written(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_checkpoint_is_there_when_it_is_whole(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path)
    for step in (1, 2, 3):
        assert [entry.step for entry in manifest.available(folder)] == sorted(range(1, step), reverse=True)[:2]
        _written(tmp_path, step, keep=2)
    newest, _ = manifest.available(folder)
    path = Path(newest.files.path)

    def check() -> None:
        with newest.files.open() as files, manifest.files_checked(manifest.read_manifest(files, 3)):
            pass

    check()
    (path / "data").write_text("4")
    with pytest.raises(Damaged, match="data is not what was written"):
        check()
    (path / "b").write_text("")
    with pytest.raises(Damaged, match="b does not belong to this checkpoint"):
        check()
    found = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**found, "step": 4}))
    with pytest.raises(Damaged, match="its own SHA-256 does not match"):
        check()


def test_only_whole_ones_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _written(tmp_path, step)
    (tmp_path / "step-00000003" / "data").write_text("damaged")
    _written(tmp_path, 4, keep=2)
    assert [entry.step for entry in DiskFolder(tmp_path).named()] == [4, 2]


def test_a_lock_is_told_from_that_of_an_ended_process(tmp_path: Path) -> None:
    locks = lock.FolderLocks()
    locks.take(DiskFolder(tmp_path))
    locks.take(DiskFolder(tmp_path))
    holder = lock.Holder.read(tmp_path / lock.NAME)
    assert holder == lock.Holder.here() and not holder.ended()
    assert lock.Holder(holder.host, holder.process, holder.started + 1).ended()
    assert not lock.Holder("elsewhere", 1, 1).ended()
    (tmp_path / lock.NAME).unlink()
    locks.take(DiskFolder(tmp_path))  # the folder has none any more: taken again
    assert (tmp_path / lock.NAME).exists()
    (tmp_path / lock.NAME).write_text("[")
    assert lock.Holder.read(tmp_path / lock.NAME) is None


@pytest.mark.parametrize("text", [b"[", b"[" * 4000, b"{}", b'{"host": 1, "process": Infinity, "started": 1}', b"\xff"])
def test_a_lock_that_says_nothing_names_nobody(text: bytes) -> None:
    assert lock.Holder.from_document(text) is None


def test_a_lock_is_found_where_it_was_put(tmp_path: Path) -> None:
    first = disk_lock.FolderLock(tmp_path)
    (tmp_path / lock.NAME).rename(tmp_path / "moved")
    assert not first.in_place()
    second = disk_lock.FolderLock(tmp_path)
    assert second.in_place()
    second.release()
    assert not second.in_place()
    first.release()


def test_only_plain_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    os.close(open_plain(tmp_path / "file"))
    for name, code in {"link": errno.ELOOP, "pipe": errno.EINVAL, "": errno.EINVAL, "none": errno.ENOENT}.items():
        with pytest.raises(OSError) as raised:
            open_plain(tmp_path / name)
        assert raised.value.errno == code


def test_a_run_begins_anew_only_where_none_was(tmp_path: Path) -> None:
    assert not goes_on(tmp_path) and not goes_on(tmp_path / "none")
    _written(tmp_path, 1)
    assert goes_on(tmp_path)
    DiskFolder(tmp_path).set_aside(DiskFolder(tmp_path).named())
    with pytest.raises(CheckpointError, match="abandoned-01 with step 1"):
        goes_on(tmp_path)


def test_a_mark_counts_when_its_checkpoint_is_there(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path)
    for step in (1, 3):
        _written(tmp_path, step)
    made = folder.new(2)
    digest = manifest.write_manifest(made, 2, {"data": manifest.write_text(made, "data", "2")})
    folder.write_mark(json.dumps({"step": 2, "sha256": digest}))
    assert [entry.step for entry in manifest.of_this_run(folder, folder.named())] == [3, 1]
    folder.publish(made, 2)
    assert [entry.step for entry in manifest.available(folder)] == [2, 1]
    commit.place_to_write(folder, 4)
    assert not folder.read_mark() and [entry.step for entry in DiskFolder(tmp_path / "abandoned-01").named()] == [3]


def test_boxes_cover_a_tensor_exactly(tmp_path: Path) -> None:
    def read(shape: list[int], *boxes: tuple[list[int], list[int]], key: str = "") -> dict[str, documents.IndexEntry]:
        stored = [[at, sizes, "file", key or str(number)] for number, (at, sizes) in enumerate(boxes)]
        entry = {"dtype": "F32", "shape": shape, "boxes": stored}
        text = json.dumps({"x": entry}).encode()
        (tmp_path / documents.INDEX).write_bytes(text)
        digest = pieces.Digest(len(text), (xxhash.xxh3_128_hexdigest(text),))
        with DiskFiles(tmp_path).open() as files:
            written = manifest.WrittenFiles(files, {documents.INDEX: digest, "file": digest})
            return documents.read_index(written)

    assert read([], ([], []))["x"].boxes[0].file == "file"
    assert read([0, 3])["x"].boxes == ()
    read([4, 4], ([0, 0], [2, 2]), ([0, 2], [4, 2]), ([2, 0], [2, 2]))
    for wrong in (
        [([0, 0], [4, 2]), ([0, 1], [4, 2])],
        [([0, 0], [2, 4]), ([1, 0], [2, 4])],
        [([0, 0], [4, 5])],
        [([0], [16])],
        [([0, 0], [4, 3])],
    ):
        with pytest.raises(Damaged, match="do not cover"):
            read([4, 4], *wrong)
    with pytest.raises(Damaged, match="do not cover"):
        read([], ([], []), ([], []))
    with pytest.raises(Damaged, match="another box is 0 of file, too"):
        read([4], ([0], [2]), ([2], [2]), key="0")


def test_values_keep_their_kinds() -> None:
    kept: dict[str, Tensor] = {}
    given: dict[str, Any] = {"a/b": [1, (2.5, None), {"x:y": torch.ones(2)}], "q": deque([True], 4), "d": {3: "text"}}
    found = {}
    for key, value in given.items():
        made = json.loads(json.dumps(values.encoded(value, values.path_of(key), key, kept.__setitem__)))
        found[key] = values.decoded(made, kept.__getitem__)
    assert list(kept) == ["a%2Fb:2:x%3Ay"]
    assert found["q"] == given["q"] and found["q"].maxlen == 4 and found["d"] == given["d"]
    assert found["a/b"][:2] == [1, (2.5, None)] and found["a/b"][2]["x:y"] is kept["a%2Fb:2:x%3Ay"]
    with pytest.raises(CheckpointError, match="it is a object, which a checkpoint cannot hold"):
        values.encoded(object(), "it", "it", kept.__setitem__)
