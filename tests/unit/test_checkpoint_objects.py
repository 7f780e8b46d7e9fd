"""Checkpoints in object stores: the same as in folders, where nothing can be renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.nn.functional as F
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from torch import Tensor, nn

import quintnet
from quintnet_compiler.api.compiled_program import CompiledProgram
from quintnet_compiler.checkpoint.folder import CheckpointFolder, abandoned_name, name_of
from quintnet_compiler.checkpoint.lock import FolderLocks, Holder
from quintnet_compiler.checkpoint.reading.open_files import VanishedError
from quintnet_compiler.checkpoint.stores import object_lock
from quintnet_compiler.checkpoint.stores.object_folder import ObjectFolder
from quintnet_compiler.checkpoint.stores.places import folder_at

BATCH = (torch.randn(8, 6), torch.randn(8, 3))
Made = tuple[CompiledProgram, torch.optim.Optimizer]


def make() -> Made:
    torch.manual_seed(0)
    program = quintnet.compile(nn.Linear(6, 3), quintnet.Mesh(dp=1), BATCH, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1, momentum=0.9)
    program.step(BATCH)
    optimizer.step()
    return program, optimizer


@pytest.fixture(scope="module")
def made() -> Made:
    return make()


@pytest.fixture
def url() -> Iterator[str]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield "memory://bucket/run"
    MemoryFileSystem.store.clear()


def _fill(made: Made, value: float) -> None:
    with torch.no_grad():
        for p in made[0].parameters():
            p.fill_(value)


def _weight(made: Made) -> Tensor:
    weight: Tensor = next(iter(made[0].parameters())).full_tensor()  # type: ignore[attr-defined]
    return weight.clone()


def _steps(url: str) -> list[int]:
    return [entry.step for entry in folder_at(url).named()]


def _is_held(locks: FolderLocks, folder: CheckpointFolder) -> bool:
    lock = locks.held[str(folder.path)].lock
    return lock is not None and lock.in_place()


def _unnamed(url: str) -> list[str]:
    """Prefixes with files that no checkpoint has."""
    store, root = fsspec.url_to_fs(url, use_listings_cache=False)
    files = {key[len(root) :].split("/")[2] for key in store.find(root) if key[len(root) :].startswith("/data/")}
    names = [key for key in store.find(root) if key.rpartition("/")[2].startswith("step-") and key.endswith(".json")]
    return sorted(files - {json.loads(store.cat_file(key))["files"] for key in names})


def life_of_a_run(made: Made, url: str) -> None:
    program, optimizer = made
    for step in (1, 2, 3, 4):
        _fill(made, step)
        found = program.save(url, step=step, optimizer=optimizer, extra={"at": step}, keep=3)
    assert _steps(url) == [4, 3, 2] and str(found).rpartition("/")[2].startswith(name_of(4))
    _fill(made, 9)
    program.save_async(url, step=4, optimizer=optimizer, extra={"at": 9}, keep=3).result()  # in its place
    _fill(made, 0)
    assert program.load(url, optimizer=optimizer).extra == {"at": 9} and (_weight(made) == 9).all()
    assert program.load(url, step=2, optimizer=optimizer).step == 2 and (_weight(made) == 2).all()
    program.save(url, step=3, optimizer=optimizer, keep=2)  # the run went back
    assert _steps(url) == [3, 2] and program.load(f"{url}/{abandoned_name(1)}").step == 4
    program.save(url, step=5, keep=2)
    assert _steps(url) == [5, 3] and not folder_at(f"{url}/abandoned-01").named()
    assert _unnamed(url) == []


def test_a_run_in_memory(made: Made, url: str) -> None:
    life_of_a_run(made, url)
    with pytest.raises(quintnet.CheckpointError, match="has no whole checkpoint"):
        made[0].load("memory://bucket/nothing")
    with pytest.raises(quintnet.CheckpointError, match="QN603"):
        made[0].save("nosuchstore://bucket/run", step=1)


def test_a_file_url_is_a_folder(made: Made, tmp_path: Path) -> None:
    assert made[0].save(tmp_path.as_uri(), step=1) == tmp_path / "step-00000001"


def test_what_a_damaged_name_may_be_of_stays(made: Made, url: str) -> None:
    made[0].save(url, step=1)
    store, root = fsspec.url_to_fs(url)
    name = store.cat_file(f"{root}/step-00000001.json")
    store.pipe_file(f"{root}/step-00000001.json", b"{")
    made[0].save(url, step=2)
    store.pipe_file(f"{root}/step-00000001.json", name)
    assert made[0].load(url, step=1).step == 1


def test_damage_is_found(made: Made, url: str) -> None:
    for step in (1, 2):
        made[0].save(url, step=step, keep=2)
    store, root = fsspec.url_to_fs(url)
    [shard] = [key for key in store.find(f"{root}/data") if "step-00000002" in key and key.endswith("safetensors")]
    data = bytearray(store.cat_file(shard))
    data[-1] ^= 1
    store.pipe_file(shard, bytes(data))
    with pytest.warns(quintnet.CheckpointWarning, match="its hash is another"):
        assert made[0].load(url).step == 1
    store.pipe_file(f"{root}/step-00000001.json", b'{"files": "../../elsewhere"}')
    with pytest.raises(quintnet.CheckpointError, match="is missing"):
        made[0].load(url, step=1)


class _Killed(BaseException):
    pass


def _killed_at(number: int, monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """From its ``number``-th change on, the store hears nothing more from this process."""
    left = [number]

    def dying(real: Callable[..., Any], *, reads: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not (reads and args[2:3] != ("wb",)):
                left[0] -= 1
                if left[0] < 0:
                    raise _Killed
            return real(*args, **kwargs)

        return call

    for name in ("pipe_file", "rm_file", "rm", "_rm"):
        if hasattr(kind, name):
            monkeypatch.setattr(kind, name, dying(getattr(kind, name)))
    monkeypatch.setattr(kind, "open", dying(kind.open, reads=True))  # type: ignore[attr-defined]


@pytest.mark.sample(1)
@pytest.mark.parametrize("step", [4, 5, 6])  # goes back, replaces, goes on
def test_a_save_killed_anywhere_leaves_a_whole_checkpoint(
    step: int, made: Made, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        place = f"{url}/{step}/{number}"
        _fill(made, 1)
        made[0].save(place, step=5, optimizer=made[1])
        _fill(made, 2)
        ended = False
        with monkeypatch.context() as patch:
            _killed_at(number, patch, MemoryFileSystem)
            try:
                made[0].save(place, step=step, optimizer=made[1], keep=1)
                ended = True
            except (quintnet.CheckpointError, _Killed):
                pass
        found = made[0].load(place, optimizer=made[1])
        assert (_weight(made) == (2 if ended else _weight(made)[0, 0])).all() and found.step in (5, step)
        assert step != 4 or (found.step == 4) == (4 in _steps(place))  # later ones are of the run that was left
        made[0].save(place, step=7, optimizer=made[1], keep=1)
        assert _unnamed(place) == [] and _steps(place) == [7]
        if ended:
            assert number > 5
            return
    raise AssertionError("the save never ended")


def test_the_same_on_another_store(tmp_path: Path, made: Made) -> None:
    folder = ObjectFolder(LocalFileSystem(auto_mkdir=True), str(tmp_path / "run"))
    lock = folder.lock()
    assert lock.in_place() and json.loads((tmp_path / "run" / ".writer").read_text())["process"] == os.getpid()
    lock.release()
    assert not lock.in_place() and not (tmp_path / "run" / ".writer").exists()
    first = folder.new(1)
    with pytest.raises(ZeroDivisionError), first.create("a"):
        raise ZeroDivisionError
    with first.create("b") as file:
        file.write([memoryview(b"text")])
    with folder.publish(first, 1).open() as files:
        assert files.file("b").size == 4
        with pytest.raises(VanishedError, match="ends at byte 4"):
            files.file("b").read_into(2, memoryview(bytearray(3)))


def test_a_writer_that_lives_is_not_replaced_and_one_that_died_is(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BEAT": 0.05, "PATIENCE": 60, "LOOK": 0.02}.items():
        monkeypatch.setattr(object_lock, name, seconds)
    folder, locks = folder_at(url), FolderLocks()
    locks.take(folder)
    locks.take(folder)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Holder, "here", classmethod(lambda cls: Holder("elsewhere", 7, 7)))
        with pytest.raises(quintnet.CheckpointError, match=f"process {os.getpid()} on .* holds .writer"):
            folder.lock()
        assert _is_held(locks, folder)
        monkeypatch.setattr(object_lock.WriterObject, "write", lambda *_: None)  # this process stands still
        monkeypatch.setattr(object_lock, "PATIENCE", 0.3)
        other = folder.lock()
        monkeypatch.undo()
    monkeypatch.setattr(object_lock, "LOOK", 0.02)
    assert other.in_place() and not _is_held(locks, folder)
    store, root = fsspec.url_to_fs(url)
    document = {"host": "elsewhere", "process": 7, "started": 7, "token": "x"}
    beats = iter(range(100))
    real = object_lock.WriterObject.create

    def create(self: object_lock.WriterObject) -> bool:  # the other one goes on
        store.pipe_file(f"{root}/.writer", json.dumps({**document, "beat": next(beats)}).encode())
        return real(self)

    monkeypatch.setattr(object_lock.WriterObject, "create", create)
    with pytest.raises(quintnet.CheckpointError, match="process 7 on elsewhere writes its checkpoints there"):
        locks.take(folder)
