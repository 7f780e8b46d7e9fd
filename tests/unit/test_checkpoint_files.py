"""checkpoint's files, part by part: pieces and their hashes, safetensors, files on a disk."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from quintnet_compiler.checkpoint import pieces
from quintnet_compiler.checkpoint.reading.block_reading import read_regions, regions
from quintnet_compiler.checkpoint.reading.open_files import Damaged, VanishedError
from quintnet_compiler.checkpoint.stores import disk_reading
from quintnet_compiler.checkpoint.stores.disk import created
from quintnet_compiler.checkpoint.stores.disk_reading import open_folder_to_read
from quintnet_compiler.checkpoint.tensor_file import BadHeader, blocks, buffers, read_header


class _Kept:
    """A file in memory."""

    bytes_at_once = 5

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    @property
    def size(self) -> int:
        return len(self.data)

    def write(self, piece: Sequence[memoryview]) -> None:
        self.data += b"".join(piece)

    def read_into(self, offset: int, into: memoryview) -> None:
        if offset + len(into) > self.size:
            raise OSError("it ends before")
        into[:] = self.data[offset : offset + len(into)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pieces", "tensor_file", "reading.block_reading"):
        monkeypatch.setattr(f"quintnet_compiler.checkpoint.{module}.PIECE", 8)


def test_a_file_is_hashed_piece_by_piece(small: None) -> None:
    given = [memoryview(x) for x in (b"", b"abc", b"defghijklmnopqrstu", b"v", b"wx")]
    assert [b"".join(piece) for piece in pieces.cut(given)] == [b"abcdefgh", b"ijklmnop", b"qrstuvwx"]
    file = _Kept()
    digest = pieces.write(file, given)
    assert file.data == b"abcdefghijklmnopqrstuvwx" and digest.size == 24
    assert digest.pieces == tuple(xxhash.xxh3_128_hexdigest(file.data[i : i + 8]) for i in (0, 8, 16))
    there = pieces.pieces_of("name", file, digest)
    with pieces.compared(there):
        pass
    file.data = file.data[:20] + b"?" + file.data[21:]
    with pieces.compared(there[:2]):
        pass
    with pytest.raises(Damaged, match="name is not what was written"), pieces.compared(there):
        raise OSError("what another thread found counts")
    assert pieces.write(_Kept(), []) == pieces.Digest(0, ())


@pytest.mark.parametrize("shares", range(1, 9))
def test_shares_are_runs_which_together_are_all(shares: int) -> None:
    parts = [pieces.Share(number, shares).share_of(range(5)) for number in range(shares)]
    assert [item for part in parts for item in part] == list(range(5))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_threads_share_all_items_and_an_error_is_raised() -> None:
    seen: list[int] = []
    pieces.shared(seen.extend, range(10))
    assert sorted(seen) == list(range(10))
    with pytest.raises(ZeroDivisionError):
        pieces.shared(lambda part: 1 // (3 not in part), range(10))


TENSORS = {
    "bytes": torch.arange(5, dtype=torch.uint8),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "columns": torch.arange(24.0).view(4, 6)[:, 1:4],
    "half": torch.arange(6, dtype=torch.bfloat16).view(1, 2, 3),
    "flags": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j], dtype=torch.complex64),
}


def _written(tensors: dict[str, Tensor]) -> _Kept:
    file = _Kept()
    pieces.write(file, buffers(tensors))
    return file


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    (tmp_path / "ours").write_bytes(_written(TENSORS).data)
    found = load_file(tmp_path / "ours")
    assert found.keys() == TENSORS.keys() and all(torch.equal(found[key], x) for key, x in TENSORS.items())
    save_file({key: x.contiguous() for key, x in TENSORS.items()}, tmp_path / "theirs", metadata={"a": "b"})
    with open_folder_to_read(tmp_path) as files:
        file = files.file("theirs")
        header = read_header(file)
        for key, x in TENSORS.items():
            assert header[key].shape == x.shape
            into = torch.zeros_like(x)
            rows = blocks(header[key], tuple(slice(0, n) for n in x.shape), into)
            read_regions(regions(_pieces(file), rows))
            assert torch.equal(into, x)


def _pieces(file: pieces.FileSource) -> list[pieces.FilePiece]:
    """Pieces of a file as it is."""
    data = bytearray(file.size)
    file.read_into(0, memoryview(data))
    hashes = [xxhash.xxh3_128_hexdigest(data[i : i + pieces.PIECE]) for i in range(0, len(data), pieces.PIECE)]
    return pieces.pieces_of("name", file, pieces.Digest(len(data), tuple(hashes)))


@pytest.mark.parametrize("box", [(slice(0, 6), slice(0, 5)), (slice(1, 4), slice(0, 5)), (slice(2, 6), slice(1, 3))])
def test_boxes_are_read_in_blocks(box: tuple[slice, ...], small: None) -> None:
    x = torch.arange(30, dtype=torch.int16).view(6, 5)
    file = _written({"x": x})
    [tensor] = read_header(file).values()
    for into in (torch.zeros_like(x)[box], torch.zeros(x[box].shape, dtype=x.dtype)):  # as part of another, and alone
        found = list(blocks(tensor, box, into))
        assert len(found) > 1
        read_regions(regions(_pieces(file), found))
        assert torch.equal(into, x[box])


def _headed(header: object, data: bytes = b"") -> _Kept:
    text = json.dumps(header).encode()
    return _Kept(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    "file",
    [
        _Kept(b""),
        _Kept(b"\xff" * 8 + b"{}"),
        _Kept((2).to_bytes(8, "little") + b"]]"),
        _headed([1]),
        _headed({"x": {"dtype": "F32", "shape": [1]}}),
        _headed({"x": {"dtype": "F7", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        _headed({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(8)),
        _headed({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, bytes(8)),
        _headed({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(4)),
        _headed(
            {key: {"dtype": "F32", "shape": [2], "data_offsets": [4 * i, 4 * i + 8]} for i, key in enumerate("xy")},
            bytes(12),
        ),
    ],
)
def test_headers_that_cannot_be_are_refused(file: _Kept) -> None:
    with pytest.raises(BadHeader):
        read_header(file)


def test_files_on_a_disk(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with created(path) as new:
        new.write([memoryview(b"ab"), memoryview(b"c")])
        new.write([memoryview(b"d")])
    with pytest.raises(FileExistsError), created(path):
        pass
    room = bytearray(3)
    with open_folder_to_read(tmp_path) as files:
        file = files.file("file")
        file.read_into(1, memoryview(room))
        assert (file.size, bytes(room)) == (4, b"bcd")
        with pytest.raises(VanishedError, match="file ends at byte 4"):
            file.read_into(2, memoryview(room))


@pytest.mark.parametrize("kept", [True, False])
def test_an_open_folder_is_read_whatever_happens_to_its_name(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are kept open are still there when they are removed; others have vanished then."""
    if not kept:
        monkeypatch.setattr(disk_reading, "MOST_KEPT", 0)
    path, room = tmp_path / "here", bytearray(1)
    path.mkdir()
    (path / "a").write_text("1")
    (path / "b").write_text("2")
    (path / "link").symlink_to(path / "a")
    (path / "folder").mkdir()
    with open_folder_to_read(path) as files:
        for name in ("link", "folder"):
            with pytest.raises(Damaged, match=f"{name} is not a plain file"):
                files.file(name)
        with pytest.raises(Damaged, match="c is missing"):
            files.file("c")
        path.rename(tmp_path / "there")
        assert files.replaced()
        path.mkdir()
        (path / "a").write_text("3")
        assert files.replaced()
        files.file("a").read_into(0, memoryview(room))
        assert room == b"1"
        files.require_unchanged()
        (tmp_path / "there" / "b").unlink()
        if kept:
            files.file("b").read_into(0, memoryview(room))
            assert room == b"2"
        else:
            with pytest.raises(VanishedError, match="b was removed"):
                files.file("b").read_into(0, memoryview(room))
        files.require_unchanged()
        os.utime(tmp_path / "there" / "a", ns=(1, 1))  # as if somebody had written it
        with pytest.raises(VanishedError, match="a has another size or version"):
            files.require_unchanged()
    with pytest.raises(VanishedError, match="nowhere is not there any more"), open_folder_to_read(tmp_path / "nowhere"):
        pass
