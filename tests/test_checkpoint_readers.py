"""Checkpoints that are read while others write, from disks that fail, and in other formats."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save_file
from torch import nn

import quintnet
from quintnet_compiler.api.compiled_program import CompiledProgram
from quintnet_compiler.checkpoint.formats.convert import convert
from quintnet_compiler.checkpoint.formats.format import Format
from quintnet_compiler.checkpoint.stores import disk_folder, disk_reading

Made = tuple[CompiledProgram, torch.optim.Optimizer]
WIDTH = 256
BATCH = (torch.randn(8, WIDTH), torch.randn(8, WIDTH))


def _made(mesh: quintnet.Mesh | None = None) -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    program = quintnet.compile(model, mesh or quintnet.Mesh(dp=1), BATCH, loss_fn=F.mse_loss, check="off")
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1, momentum=0.9)
    program.step(BATCH)
    optimizer.step()
    optimizer.zero_grad()
    return program, optimizer


@pytest.fixture(scope="module")
def writer() -> Made:
    return _made()


@pytest.fixture(scope="module")
def reader() -> Made:
    return _made()


@pytest.fixture
def url() -> Iterator[str]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield "memory://bucket/readers"
    MemoryFileSystem.store.clear()


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if hasattr(x, "to_local") else x  # type: ignore[no-any-return]


def _save(made: Made, place: Any, number: int, step: int, keep: int | None = None) -> None:
    """Save parameters and states that all are ``number``."""
    with torch.no_grad():
        for p in made[0].parameters():
            _local(p).fill_(float(number))
            _local(made[1].state[p]["momentum_buffer"]).fill_(float(number))
    made[0].save(place, step=step, optimizer=made[1], extra={"number": number}, keep=keep)


def _values(made: Made) -> set[float]:
    tensors = [x for p in made[0].parameters() for x in (p.detach(), made[1].state[p]["momentum_buffer"])]
    return {float(v) for x in tensors for v in _local(x).unique()}


def _require_whole_loads(reader: Made, place: Any, writes: Callable[[], bool], least: int) -> None:
    """Load until the writer has ended: each time all of one checkpoint, and never one before the last."""
    loads, last = 0, 0
    while writes() or loads < least:
        number = reader[0].load(place, optimizer=reader[1]).extra["number"]
        assert _values(reader) == {float(number)} and number >= last
        loads, last = loads + 1, number
    assert last > least


# -- beside a writer

WAYS: dict[str, tuple[bool, int | None]] = {
    "overwrites": (False, None),
    "keeps one": (True, 1),
    "keeps two": (True, 2),
    "keeps three": (True, 3),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("seconds", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_a_reader_beside_a_writer_gets_whole_checkpoints(
    way: str, seconds: int, writer: Made, reader: Made, tmp_path: Path
) -> None:
    grows, keep = WAYS[way]
    _save(writer, tmp_path, 1, 1 if grows else 0, keep)
    writer[0]._locks.release()
    child = os.fork()
    if child == 0:
        try:
            end, number = time.monotonic() + seconds, 1
            while time.monotonic() < end or number < 10:
                number += 1
                _save(writer, tmp_path, number, number if grows else 0, keep)
        finally:
            os._exit(0)
    _require_whole_loads(reader, tmp_path, lambda: os.waitpid(child, os.WNOHANG) == (0, 0), 3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["overwrites", "keeps one"])
def test_a_reader_beside_a_writer_of_a_store(way: str, writer: Made, reader: Made, url: str) -> None:
    grows, keep = WAYS[way]
    _save(writer, url, 1, 1 if grows else 0, keep)
    end = time.monotonic() + 2

    def write() -> None:
        number = 1
        while time.monotonic() < end or number < 10:
            number += 1
            _save(writer, url, number, number if grows else 0, keep)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        _require_whole_loads(reader, url, thread.is_alive, 3)
    finally:
        thread.join(60)


def _write_of_two_ranks(folder: str, seconds: float, grows: bool, keep: int | None) -> int:
    made = _made(quintnet.Mesh(tp=2))
    end, number = time.monotonic() + seconds, 0
    while True:
        more = torch.tensor([float(time.monotonic() < end or number < 10)])
        dist.broadcast(more, 0)
        if not more:
            return number
        number += 1
        _save(made, folder, number, number if grows else 0, keep)


def _read_of_two_ranks(folder: str, until: str) -> int:
    made = _made(quintnet.Mesh(tp=2))
    loads = 0
    while True:
        more = torch.tensor([float(not Path(until).exists() or loads < 3)])
        dist.broadcast(more, 0)
        if not more:
            return loads
        number = made[0].load(folder, optimizer=made[1]).extra["number"]
        numbers: list[Any] = [None, None]
        dist.all_gather_object(numbers, (number, _values(made)))
        assert numbers == [(number, {float(number)})] * 2
        loads += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "seconds"),
    [("overwrites", 3), ("keeps one", 3), *(pytest.param(way, 20, marks=pytest.mark.slow) for way in WAYS)],
)
def test_two_ranks_read_beside_two_that_write(way: str, seconds: int, writer: Made, tmp_path: Path) -> None:
    grows, keep = WAYS[way]
    folder, done = tmp_path / "run", tmp_path / "done"
    _save(writer, folder, 0, 0, keep)
    writer[0]._locks.release()
    results: list[Any] = []

    def write() -> None:
        try:
            results.append(quintnet.launch(_write_of_two_ranks, 2, (str(folder), seconds, grows, keep), timeout=240))
        except Exception as error:
            results.append(error)
        finally:
            done.touch()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        [loads, again] = quintnet.launch(_read_of_two_ranks, 2, (str(folder), str(done)), timeout=240)
    finally:
        thread.join(300)
    assert loads == again >= 3
    [[number, _]] = results
    assert number >= 10


# a save beside a load: its step and ``keep``, the number that is loaded without descriptors, and what is there then
SAVES: dict[str, tuple[int, int | None, int, list[str]]] = {
    "the same step": (1, None, 2, ["step-00000001"]),
    "a further step": (2, 1, 2, ["step-00000002"]),
    "an earlier step": (0, None, 1, ["abandoned-01", "step-00000000"]),
}


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("save", SAVES)
def test_what_is_replaced_between_the_check_and_the_read_is_not_mixed(
    save: str, kept: bool, writer: Made, reader: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With descriptors of its files, the checkpoint that was checked is loaded; without, the one that is there then."""
    if not kept:
        monkeypatch.setattr(disk_reading, "MOST_KEPT", 0)
    _save(writer, tmp_path, 1, 1)
    step, keep, without, there = SAVES[save]

    def replace(_: quintnet.Restored) -> None:
        monkeypatch.setattr(disk_reading, "MOST_KEPT", 4096)
        if next(replacements):
            _save(writer, tmp_path, 2, step, keep)

    replacements = iter([True, False, False])
    number = reader[0].load(tmp_path, optimizer=reader[1], accept=replace).extra["number"]
    assert number == (1 if kept else without) and _values(reader) == {float(number)}
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == there
    assert reader[0].load(tmp_path, optimizer=reader[1]).step == step and _values(reader) == {2.0}


def _move(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


@pytest.mark.parametrize("goes", [_move, shutil.rmtree])
@pytest.mark.parametrize("when", ["listed", "opened", "checked"])
def test_a_folder_that_goes_while_it_is_loaded(
    when: str, goes: Callable[[Path], Any], writer: Made, reader: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load what was open; refuse what was only listed, and change nothing."""
    _save(writer, tmp_path / "other", 7, 1)
    reader[0].load(tmp_path / "other", optimizer=reader[1])
    _save(writer, tmp_path / "run", 1, 1)
    calls = iter([lambda: goes(tmp_path / "run")])

    def first(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            next(calls, lambda: None)()
            return real(*arguments)

        return call

    if when == "listed":
        monkeypatch.setattr(disk_folder, "open_folder_to_read", first(disk_folder.open_folder_to_read))
    elif when == "opened":
        monkeypatch.setattr(os, "preadv", first(os.preadv))
    accept = first(lambda _: None) if when == "checked" else None
    if when == "listed":
        with pytest.raises(quintnet.CheckpointError, match=r"QN601(?s:.*)has no whole checkpoint"):
            reader[0].load(tmp_path / "run", optimizer=reader[1], accept=accept)
    else:
        assert reader[0].load(tmp_path / "run", optimizer=reader[1], accept=accept).step == 1
    assert next(calls, None) is None and not (tmp_path / "run").exists()
    assert _values(reader) == {7.0 if when == "listed" else 1.0}
    reader[0].evaluate(BATCH)


def test_a_folder_that_is_removed_with_files_that_were_not_open_leaves_a_program_that_does_not_run(
    writer: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if there were more files than may be open."""
    _save(writer, tmp_path / "run", 1, 1)
    made = _made()
    monkeypatch.setattr(disk_reading, "MOST_KEPT", 0)
    with pytest.raises(quintnet.CheckpointError, match=r"QN601(?s:.*)has no whole checkpoint"):
        made[0].load(tmp_path / "run", optimizer=made[1], accept=lambda _: shutil.rmtree(tmp_path / "run"))
    with pytest.raises(quintnet.QuintNetError, match="QN604"):
        made[0].step(BATCH)


def test_a_flipped_bit_of_the_second_read_is_found(
    writer: Made, reader: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(writer, tmp_path, 1, 1)
    flips = iter([True])
    real = disk_reading._OpenFolder._fill

    def flipped(self: Any, name: str, kept: int | None, offset: int, into: memoryview) -> None:
        real(self, name, kept, offset, into)
        if offset > 10_000 and next(flips, False):
            into[7] ^= 1

    def begin(_: quintnet.Restored) -> None:
        monkeypatch.setattr(disk_reading._OpenFolder, "_fill", flipped)

    assert reader[0].load(tmp_path, optimizer=reader[1], accept=begin).step == 1
    assert next(flips, "flipped") == "flipped" and _values(reader) == {1.0}


def test_what_accept_raises_leaves_all_as_it_was(writer: Made, reader: Made, tmp_path: Path) -> None:
    _save(writer, tmp_path, 1, 1)
    _save(writer, tmp_path / "other", 2, 2)
    reader[0].load(tmp_path / "other", optimizer=reader[1])

    def refuse(checkpoint: quintnet.Restored) -> None:
        assert checkpoint.extra == {"number": 1}
        raise quintnet.CheckpointError("QN602", "it is another run's", fix="none")

    with pytest.raises(quintnet.CheckpointError, match="it is another run's"):
        reader[0].load(tmp_path, optimizer=reader[1], accept=refuse)
    assert _values(reader) == {2.0}


def test_what_does_not_fit_counts_only_if_it_is_whole(reader: Made, writer: Made, tmp_path: Path) -> None:
    """A plan for loading is made while files are checked: that of a damaged checkpoint is nobody's error."""
    _save(writer, tmp_path, 1, 1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    other = quintnet.compile(model, quintnet.Mesh(dp=1), (torch.ones(2, 4), torch.ones(2, 3)), loss_fn=F.mse_loss)
    other.save(tmp_path, step=2)
    with pytest.raises(quintnet.CheckpointError, match="QN602"):
        reader[0].load(tmp_path, optimizer=reader[1])
    [path] = (tmp_path / "step-00000002").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.warns(quintnet.CheckpointWarning, match="its hash is another; trying the one before"):
        assert reader[0].load(tmp_path, optimizer=reader[1]).step == 1
    assert _values(reader) == {1.0}


def test_converting_beside_a_writer(writer: Made, tmp_path: Path) -> None:
    _save(writer, tmp_path / "run", 1, 1, 1)
    writer[0]._locks.release()
    child = os.fork()
    if child == 0:
        try:
            end, number = time.monotonic() + 2, 1
            while time.monotonic() < end:
                number += 1
                _save(writer, tmp_path / "run", number, number, 1)
        finally:
            os._exit(0)
    copies = 0
    while os.waitpid(child, os.WNOHANG) == (0, 0) or copies < 2:
        done = convert(tmp_path / "run", tmp_path / str(copies), Format.SAFETENSORS)
        tensors = load_file(tmp_path / str(copies) / "model.safetensors")
        assert {float(v) for x in tensors.values() for v in x.unique()} == {float(done.step)}
        copies += 1


# -- disks that fail


def _failing(number: int, code: int, times: int, path: str) -> Callable[..., Any]:
    """Read as ``os.preadv``, but from the ``number``-th read of such a file on, fail ``times`` times."""
    real, calls = os.preadv, iter(range(1_000_000))

    def preadv(descriptor: int, *arguments: Any) -> int:
        if path in os.readlink(f"/proc/self/fd/{descriptor}") and number <= next(calls) < number + times:
            raise OSError(code, os.strerror(code))
        return real(descriptor, *arguments)

    return preadv


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("number", range(8))
def test_an_error_that_is_gone_a_moment_later_does_no_harm(
    code: int, number: int, writer: Made, reader: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        _save(writer, tmp_path, step, step)
    monkeypatch.setattr(os, "preadv", _failing(number, code, 1, "step-00000002"))
    assert reader[0].load(tmp_path, optimizer=reader[1]).step == 2 and _values(reader) == {2.0}


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOMEM])
def test_an_error_that_lasts_is_no_damage(
    code: int, writer: Made, reader: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told as it is, no older checkpoint is taken for it, and no save removes or replaces what may be whole."""
    for step in (1, 2, 3):
        _save(writer, tmp_path, step, step)
    before = _values(reader)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", _failing(0, code, 1_000_000, "step-00000003"))
        with pytest.raises(quintnet.CheckpointError, match=f"step-00000003.*{os.strerror(code)}") as raised:
            reader[0].load(tmp_path, optimizer=reader[1])
        assert raised.value.code == "QN601" and "damaged" not in str(raised.value) and _values(reader) == before
        assert reader[0].load(tmp_path, step=2, optimizer=reader[1]).step == 2  # as the error says
        _save(writer, tmp_path, 4, 4, keep=2)
        _save(writer, tmp_path, 5, 5, keep=2)
        with pytest.raises(quintnet.CheckpointError, match="step-00000003 is not replaced: it may be whole"):
            _save(writer, tmp_path, 3, 3)
    assert reader[0].load(tmp_path, step=3).step == 3
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-{n:08}" for n in (3, 4, 5)]


def test_a_disk_that_fails_after_the_check_leaves_a_program_that_does_not_run(
    writer: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(writer, tmp_path, 1, 1)
    made = _made()

    def begin(_: quintnet.Restored) -> None:
        monkeypatch.setattr(os, "preadv", _failing(1, errno.EIO, 1_000_000, "rank-00000"))

    with pytest.raises(quintnet.CheckpointError, match="Input/output error"):
        made[0].load(tmp_path, optimizer=made[1], accept=begin)
    with pytest.raises(quintnet.QuintNetError, match="QN604"):
        made[0].step(BATCH)
    monkeypatch.undo()
    made[0].load(tmp_path, optimizer=made[1])
    assert _values(made) == {1.0}
    made[0].step(BATCH)


def test_a_folder_that_cannot_be_listed_is_not_empty(
    writer: Made, reader: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(writer, tmp_path, 1, 1)
    real = os.scandir

    def scandir(path: Any) -> Any:
        if path == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(quintnet.CheckpointError, match=r"cannot be read: .*Input/output error") as raised:
        reader[0].load(tmp_path)
    assert raised.value.code == "QN601"


# -- many files, few descriptors


def _sealed(checkpoint: Path, change: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
    """Write a manifest that fits the files; ``change`` it before it is sealed."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["files"] = {}
    for path in sorted(checkpoint.iterdir()):
        data, piece = path.read_bytes(), manifest["piece"]
        if path.name != "manifest.json":
            hashes = [xxhash.xxh3_128_hexdigest(data[i : i + piece]) for i in range(0, len(data), piece)]
            manifest["files"][path.name] = [len(data), hashes]
    change(manifest)
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def _split(checkpoint: Path, files: int) -> None:
    """Give each tensor a file of its own, as many ranks would, and add files to ``files``."""
    index = json.loads((checkpoint / "index.json").read_text())
    tensors = load_file(checkpoint / "rank-00000.safetensors")
    (checkpoint / "rank-00000.safetensors").unlink()
    for number, entry in enumerate(index.values()):
        for box in entry["boxes"]:
            name = f"rank-{number:05}.safetensors"
            save_file({"0": tensors[box[3]]}, checkpoint / name)
            box[2:] = [name, "0"]
    for number in range(len(index), files):
        save_file({"0": torch.zeros(1)}, checkpoint / f"rank-{number:05}.safetensors")
    (checkpoint / "index.json").write_text(json.dumps(index))
    _sealed(checkpoint)


@pytest.mark.parametrize(("files", "room"), [(60, 20), pytest.param(1100, 200, marks=pytest.mark.slow)])
def test_more_files_than_may_be_open(files: int, room: int, writer: Made, reader: Made, tmp_path: Path) -> None:
    _save(writer, tmp_path, 1, 1)
    _split(tmp_path / "step-00000001", files)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + room, hard))
        assert reader[0].load(tmp_path, optimizer=reader[1]).step == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert _values(reader) == {1.0}


def test_no_descriptor_left_is_no_damage(
    writer: Made, reader: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(writer, tmp_path, 1, 1)
    real = os.open

    def open_file(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).startswith("rank-"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", open_file)
    with pytest.raises(quintnet.CheckpointError, match=r"Too many open files.*rank-00000"):
        reader[0].load(tmp_path, optimizer=reader[1])


# -- other formats


@pytest.mark.parametrize("version", [1, 3])
def test_another_version_is_named_and_not_passed_over(version: int, writer: Made, reader: Made, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _save(writer, tmp_path, step, step)
    _sealed(tmp_path / "step-00000003", lambda manifest: manifest.update(version=version))
    with pytest.raises(quintnet.CheckpointError, match=f"has version {version}, and this program reads 2") as raised:
        reader[0].load(tmp_path)
    assert raised.value.code == "QN601" and "damage" not in str(raised.value)
    assert reader[0].load(tmp_path, step=2).step == 2
    writer[0].save(tmp_path, step=4, keep=1)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]


def test_a_flipped_bit_in_the_version_is_damage(writer: Made, reader: Made, tmp_path: Path) -> None:
    for step in (1, 2):
        _save(writer, tmp_path, step, step)
    manifest = tmp_path / "step-00000002/manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 3'))
    with pytest.warns(quintnet.CheckpointWarning, match="its version was changed"):
        assert reader[0].load(tmp_path).step == 1


def test_a_store_that_fails_is_no_damage(writer: Made, reader: Made, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        _save(writer, url, step, step)
    real = MemoryFileSystem.cat_file

    def cat_file(self: Any, path: str, **options: Any) -> bytes:
        if "data/step-00000002" in path:
            raise PermissionError(errno.EACCES, "Access Denied", path)
        return real(self, path, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    with pytest.raises(quintnet.CheckpointError, match="Access Denied") as raised:
        reader[0].load(url)
    assert raised.value.code == "QN601"
    assert reader[0].load(url, step=1).step == 1
    writer[0].save(url, step=3, keep=1)
    monkeypatch.undo()
    assert reader[0].load(url, step=2).step == 2
    assert fsspec.filesystem("memory").exists(f"{url}/step-00000002.json")
