"""Folders of checkpoints: which of them are kept, who may write, and what is left when a writer is killed anywhere."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import quintnet
from quintnet_compiler.api.compiled_program import CompiledProgram
from quintnet_compiler.checkpoint import commit
from quintnet_compiler.checkpoint.lock import NAME

Made = tuple[CompiledProgram, torch.optim.Optimizer]
BATCH = (torch.randn(8, 6), torch.randn(8, 3))


def _made() -> Made:
    torch.manual_seed(0)
    program = quintnet.compile(nn.Linear(6, 3), quintnet.Mesh(dp=1), BATCH, loss_fn=F.mse_loss)
    return program, torch.optim.SGD(program.parameters(), lr=0.1, momentum=0.9)


def _train(made: Made) -> None:
    made[0].step(BATCH)
    made[1].step()


@pytest.fixture(scope="module")
def made() -> Made:
    found = _made()
    _train(found)
    return found


def _there(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != NAME)


def _steps(*steps: int) -> list[str]:
    return [f"step-{step:08}" for step in steps]


# -- which are kept


def test_a_run_that_went_back_sets_later_steps_aside(made: Made, tmp_path: Path) -> None:
    program, optimizer = made
    for step in range(1, 8):
        program.save(tmp_path, step=step, optimizer=optimizer, keep=5)
    assert _there(tmp_path) == _steps(3, 4, 5, 6, 7)
    program.load(tmp_path, step=3, optimizer=optimizer)
    assert program.save(tmp_path, step=4, optimizer=optimizer, keep=2) == tmp_path / "step-00000004"
    assert _there(tmp_path) == ["abandoned-01", *_steps(3, 4)]
    assert _there(tmp_path / "abandoned-01") == _steps(5, 6, 7)
    assert program.load(tmp_path).step == 4
    assert program.load(tmp_path / "abandoned-01").step == 7
    program.save(tmp_path, step=6, keep=2)
    assert _there(tmp_path / "abandoned-01") == _steps(7)
    program.save(tmp_path, step=7, keep=2)  # as far as the other run
    assert _there(tmp_path) == _steps(6, 7)


def test_damaged_checkpoints_do_not_count(made: Made, tmp_path: Path) -> None:
    program, optimizer = made
    for step in (30, 40, 50):
        program.save(tmp_path, step=step, optimizer=optimizer, keep=5)
    for step in (40, 50):
        (tmp_path / f"step-{step:08}" / "rank-00000.safetensors").write_bytes(b"")
    with pytest.warns(quintnet.CheckpointWarning):
        assert program.load(tmp_path).step == 30
    program.save(tmp_path, step=60, keep=3)
    assert _there(tmp_path) == _steps(30, 40, 50, 60)  # too few whole ones to remove any
    program.save(tmp_path, step=61, keep=3)
    assert _there(tmp_path) == _steps(30, 60, 61)


@pytest.mark.parametrize("name", ["step-" + "\uff12" * 8, "step-000000009", "step-00000009\n", "step-9"])
def test_other_names_are_not_checkpoints(name: str, made: Made, tmp_path: Path) -> None:
    shutil.copytree(made[0].save(tmp_path, step=1), tmp_path / name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made[0].load(tmp_path).step == 1
    made[0].save(tmp_path, step=2, keep=1)
    assert _there(tmp_path) == sorted(["step-00000002", name])


@pytest.mark.parametrize("removes", ["an old one", "the one before of the step"])
def test_what_cannot_be_removed_is_told(
    removes: str, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made[0].save(tmp_path, step=1)
    unlink = os.unlink

    def fail(path: Any, *args: Any, **options: Any) -> None:
        if path == "state.json":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        unlink(path, *args, **options)

    monkeypatch.setattr(os, "unlink", fail)
    step = 2 if removes == "an old one" else 1
    with pytest.warns(quintnet.CheckpointWarning, match="cannot be removed: .*Operation not permitted: 'state.json'"):
        made[0].save(tmp_path, step=step, keep=1)
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made[0].load(tmp_path).step == step
        made[0].save(tmp_path, step=3, keep=1)
    assert _there(tmp_path) == _steps(3)


def test_a_folder_with_damaged_checkpoints_alone_names_them(made: Made, tmp_path: Path) -> None:
    for step in (1, 2):
        os.truncate(Path(made[0].save(tmp_path, step=step)) / "state.json", 0)
    first = "step-00000002: state.json has 0 bytes.*trying the one before"
    with pytest.warns(quintnet.CheckpointWarning, match=first), pytest.raises(quintnet.CheckpointError) as raised:
        made[0].load(tmp_path)
    text = str(raised.value)
    assert raised.value.code == "QN601" and "step-00000002: state.json has" in text and "given to save" not in text
    assert "step-00000001: state.json has 0 bytes" in text and "restore what is missing or was changed" in text


@pytest.mark.parametrize("wrong", [{"keep": -1}, {"keep": 0}, {"step": -1}, {"step": 1.5}, {"step": True}])
def test_numbers_that_cannot_be_are_refused(wrong: dict[str, Any], made: Made, tmp_path: Path) -> None:
    for save in (made[0].save, made[0].save_async):
        with pytest.raises(quintnet.CheckpointError, match="give an int that is at least") as raised:
            save(tmp_path / "new", **{"step": 1, **wrong})
        assert raised.value.code == "QN603"
    assert not (tmp_path / "new").exists()
    if "keep" in wrong:
        with pytest.raises(quintnet.CheckpointError, match="keep is"):
            quintnet.Trainer(*made, [], **wrong)


def test_files_of_file_managers_and_linked_folders_do_no_harm(made: Made, tmp_path: Path) -> None:
    first = made[0].save(tmp_path / "one", step=1)
    (first / ".DS_Store").write_bytes(b"x")
    (first / ".nfs0001").write_bytes(b"x")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / first.name).symlink_to(first)
    assert made[0].load(tmp_path / "one").step == made[0].load(tmp_path / "two").step == 1
    made[0].save(tmp_path / "two", step=2, keep=1)
    assert _there(tmp_path / "two") == _steps(2) and made[0].load(tmp_path / "one").step == 1
    with pytest.raises(quintnet.CheckpointError, match="has no checkpoint of step 9") as raised:
        made[0].load(tmp_path / "two", step=9)
    assert "load one that is there: 2" in str(raised.value)


# -- who may write


def test_save_waits_for_the_save_in_the_background(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    real = commit.commit

    def slow(folder: Any, made: Any, step: int, *rest: Any) -> Any:
        order.append(("starts", step))
        found = real(folder, made, step, *rest)
        order.append(("ends", step))
        return found

    monkeypatch.setattr("quintnet_compiler.checkpoint.storage.commit", slow)
    later = made[0].save_async(tmp_path, step=1)
    made[0].save(tmp_path, step=2)
    assert later.result(60).name == "step-00000001"
    assert order == [("starts", 1), ("ends", 1), ("starts", 2), ("ends", 2)]
    assert _there(tmp_path) == _steps(1, 2)


def _forked(work: Callable[[], None]) -> int:
    """Run ``work`` in a fork of this process; its exit status."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
    return os.waitpid(child, 0)[1]


def test_another_process_is_refused_while_the_writer_lives(made: Made, tmp_path: Path) -> None:
    ready, leave = os.pipe(), os.pipe()

    child = os.fork()
    if child == 0:
        made[0].save(tmp_path, step=1)
        os.write(ready[1], b"x")
        os.read(leave[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        writer = re.escape(f"process {child} on {socket.gethostname()} writes its checkpoints")
        with pytest.raises(quintnet.CheckpointError, match=writer) as raised:
            made[0].save(tmp_path, step=2)
        assert raised.value.code == "QN603" and "a folder of its own" in str(raised.value)
        assert _there(tmp_path) == _steps(1)
    finally:
        os.write(leave[1], b"x")
        os.waitpid(child, 0)
    other = _made()[0]
    made[0].save(tmp_path, step=2)
    other.save(tmp_path, step=3)  # of the same process
    assert _there(tmp_path) == _steps(1, 2, 3)


# -- kills

_EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "shutil.rmtree", "ctypes.dlsym")


def _killed_at(number: int) -> None:
    """End this process before its ``number``-th event on a file."""
    left = itertools.count(number, -1)

    def hook(event: str, _: tuple[Any, ...]) -> None:
        if event in _EVENTS and next(left) <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _overwrite(made: Made, folder: Path) -> None:
    made[0].save(folder, step=5, optimizer=made[1], keep=1)


def _advance(made: Made, folder: Path) -> None:
    made[0].save(folder, step=6, optimizer=made[1], keep=1)


def _go_back(made: Made, folder: Path) -> None:
    made[0].save(folder, step=4, optimizer=made[1], keep=1)


def _in_two_renames(made: Made, folder: Path) -> None:
    """On a file system that cannot exchange names."""
    ctypes.CDLL = lambda *_, **__: object()  # type: ignore[misc, assignment]
    _overwrite(made, folder)


KILLED = [_overwrite, _advance, _go_back, _in_two_renames]


def _weight(made: Made) -> Tensor:
    weight: Tensor = next(iter(made[0].parameters())).full_tensor()  # type: ignore[attr-defined]
    return weight.clone()


@pytest.mark.sample(1)
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["every fifth", "every event"])
@pytest.mark.parametrize("save", KILLED)
def test_a_save_killed_anywhere_leaves_a_whole_checkpoint(
    save: Callable[[Made, Path], None], stride: int, tmp_path: Path
) -> None:
    first = _made()
    _train(first)
    for number in range(0, 400, stride):
        folder = tmp_path / str(number)
        first[0].save(folder, step=5, optimizer=first[1])
        before = _weight(first)
        _train(first)
        after = _weight(first)

        first[0]._locks.release()  # a fork is another process

        def work(folder: Path = folder, number: int = number) -> None:
            _killed_at(number)
            save(first, folder)

        status = _forked(work)
        found = first[0].load(folder, optimizer=first[1])
        assert found.step in (4, 5, 6)
        assert (found.step == 4) == (folder / "step-00000004").exists()  # later ones are of the run that was left
        assert torch.equal(_weight(first), before) or torch.equal(_weight(first), after)
        first[0].save(folder, step=7, optimizer=first[1], keep=1)
        assert not [name for name in _there(folder) if name.startswith(".")]
        if status == 0:
            assert number > 10
            return
        assert os.WTERMSIG(status) == signal.SIGKILL, number
    raise AssertionError("the save never ended")


def _fill(made: Made, value: int) -> None:
    with torch.no_grad():
        for p in made[0].parameters():
            p.fill_(value)


@pytest.mark.slow
@pytest.mark.parametrize("overwriting", [False, True])
def test_two_hundred_kills_at_random_times(overwriting: bool, tmp_path: Path) -> None:
    """A process saves without pause, each time other values, and is killed: at least its last save is there."""
    made, chance, last = _made(), random.Random(0), 0
    for _ in range(100):
        done, written = os.pipe()
        child = os.fork()
        if child == 0:
            for number in itertools.count(last + 1):
                _fill(made, number)
                step = 0 if overwriting else number
                made[0].save(tmp_path, step=step, optimizer=made[1], extra={"number": number}, keep=1)
                os.write(written, number.to_bytes(4, "little"))
        os.close(written)
        said = os.read(done, 4)  # it saves
        time.sleep(chance.random() * 0.1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(done, 4):
            said = more
        os.close(done)
        found = made[0].load(tmp_path, optimizer=made[1])
        assert found.extra["number"] >= int.from_bytes(said, "little") > last
        last = found.extra["number"]
        assert (_weight(made) == last).all()


# -- what a hostile index says


def _rewritten(checkpoint: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change a document, and make a manifest that fits."""
    document = json.loads((checkpoint / name).read_text())
    change(document)
    (checkpoint / name).write_text(json.dumps(document))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["sha256"]
    data = (checkpoint / name).read_bytes()
    manifest["files"][name] = [len(data), [xxhash.xxh3_128_hexdigest(data)]]
    own = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "sha256": own}))


WEIGHT = "model/weight"


def _twice(document: Any) -> None:
    """Let JSON say two things of one name."""
    document["extra"] = {_Name("a"): 1, _Name("a"): 2}


class _Name(str):
    """A text that equals no other, so that a dict has it twice."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = str.__hash__


def _set(*path: Any) -> Callable[[Any], None]:
    *to, last, value = path

    def change(document: Any) -> None:
        for key in to:
            document = document[key]
        document[last] = value

    return change


def _copied(name: str, to: str) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        document[to] = document[name]

    return change


HOSTILE = {
    "a file elsewhere": ("index.json", _set(WEIGHT, "boxes", 0, 2, "../../secret"), "is not a file of this checkpoint"),
    "a hole": ("index.json", _set(WEIGHT, "boxes", 0, 1, [2, 6]), "do not cover"),
    "no boxes": ("index.json", _set(WEIGHT, "boxes", []), "do not cover"),
    "beyond": ("index.json", _set(WEIGHT, "boxes", 0, 0, [1, 0]), "do not cover"),
    "overlapping": ("index.json", _set(WEIGHT, "shape", [6, 6]), "do not cover"),
    "another tensor's key": ("index.json", _set(WEIGHT, "boxes", 0, 3, "9"), "does not have a tensor 9"),
    "another dtype": ("index.json", _set(WEIGHT, "dtype", "F64"), "does not have a tensor"),
    "no dtype": ("index.json", _set(WEIGHT, "dtype", "F7"), "there is no dtype F7"),
    "a shape of text": ("index.json", _set(WEIGHT, "shape", ["a", 6]), "shape.0"),
    "a random state of text": ("state.json", _set("run", "rng", "none"), "run.rng"),
    "a seed of text": ("state.json", _set("run", "rng", "seed", "1"), "run.rng.seed"),
    "a loss scale of text": ("state.json", _set("run", "loss_scale", ["1", 2]), "run.loss_scale"),
    "options that are not there": ("state.json", _set("optimizer", "of", "weight", 7), "options that it does not have"),
    "another step": ("state.json", _set("step", 2), "has step 2, and its folder 1"),
    "a negative seed": ("state.json", _set("run", "rng", "seed", -1), "run.rng.seed"),
    "a seed beyond 63 bits": ("state.json", _set("run", "rng", "seed", 10**400), "run.rng.seed"),
    "a negative step of masks": ("state.json", _set("run", "rng", "step", -5), "run.rng.step"),
    "a step of masks beyond 63 bits": ("state.json", _set("run", "rng", "step", 10**400), "run.rng.step"),
    "no loss scale": ("state.json", _set("run", "loss_scale", [0, 1]), "run.loss_scale"),
    "a loss scale that is no number": ("state.json", _set("run", "loss_scale", [float("nan"), 1]), "run.loss_scale"),
    "an endless loss scale": ("state.json", _set("run", "loss_scale", [float("inf"), 1]), "run.loss_scale"),
    "a negative loss scale": ("state.json", _set("run", "loss_scale", [-65536.0, 1]), "run.loss_scale"),
    "a negative count of good steps": ("state.json", _set("run", "loss_scale", [2.0, -1]), "run.loss_scale"),
    "no parameters": ("state.json", _set("optimizer", "options", 0, "params", []), "options.params is no option"),
    "a rate of text": ("state.json", _set("optimizer", "options", 0, "lr", "0.1"), "options.lr is '0.1'"),
    "a rate that is no number": (
        "state.json",
        _set("optimizer", "options", 0, "lr", float("nan")),
        "options.lr is not",
    ),
    "a negative rate": ("state.json", _set("optimizer", "options", 0, "lr", -1.0), "Invalid learning rate"),
    "a rate of 401 digits": ("state.json", _set("optimizer", "options", 0, "lr", 10**400), "a number of 401 digits"),
    "no rate": ("state.json", _set("optimizer", "options", 0, {}), "options.lr is missing"),
    "a momentum that is a list": ("state.json", _set("optimizer", "options", 0, "momentum", [0.9]), "options.momentum"),
    "a yes of text": ("state.json", _set("optimizer", "options", 0, "nesterov", "yes"), "options.nesterov is 'yes'"),
    "a tensor that is not there": (
        "state.json",
        _set("optimizer", "values", "weight", {"x": {"tensor": "y"}}),
        "KeyError",
    ),
    "a queue of -1": ("state.json", _set("optimizer", "values", "weight", {"x": {"deque": [-1, []]}}), "ValueError"),
    "no options": ("state.json", _set("optimizer", "options", None), "optimizer.options"),
    "a name that is there twice": ("state.json", _twice, "a is there twice"),
    "a step that is a yes": ("state.json", _set("step", True), "state.json is not a checkpoint's: step"),
    "a step of text": ("state.json", _set("step", "1"), "state.json is not a checkpoint's: step"),
    "a place that is a fraction": ("index.json", _set(WEIGHT, "boxes", 0, 0, [0.0, 0]), "boxes.0.0.0"),
    "a shape that is a yes": ("index.json", _set("model/bias", "shape", [True]), "shape.0"),
    "an endless rate": ("state.json", _set("optimizer", "options", 0, "lr", float("inf")), "options.lr is inf"),
    "an endless decay": ("state.json", _set("optimizer", "options", 0, "weight_decay", 1e999), "weight_decay is inf"),
    "a kernel of text": ("state.json", _set("optimizer", "options", 0, "foreach", "yes"), "options.foreach is 'yes'"),
    "a kernel that is a number": ("state.json", _set("optimizer", "options", 0, "fused", 1), "options.fused is 1"),
    "a range of a file that is named twice": ("index.json", _copied(WEIGHT, "model/more"), "another box is"),
    "a tensor of no parameter": (
        "index.json",
        _set("model/more", {"dtype": "F32", "shape": [0], "boxes": []}),
        "more is not in the model",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_documents_are_checked_before_anything_changes(case: str, made: Made, tmp_path: Path) -> None:
    program, optimizer = made
    name, change, text = HOSTILE[case]
    saved = program.save(tmp_path / "run", step=1, optimizer=optimizer)
    (tmp_path / "secret").write_bytes((saved / "rank-00000.safetensors").read_bytes())
    if case == "overlapping":  # two boxes, one above the other, of which both have a row
        file = load_file(saved / "rank-00000.safetensors")
        _rewritten(saved, name, lambda d: d[WEIGHT].update(boxes=[d[WEIGHT]["boxes"][0], d[WEIGHT]["boxes"][0]]))
        save_file(file, tmp_path / "unused.safetensors")
    _rewritten(saved, name, change)
    before, state = _weight(made), program.get_rng_state()
    options = {key: x for key, x in optimizer.param_groups[0].items() if key != "params"}
    with pytest.raises(quintnet.CheckpointError, match=text) as raised:
        program.load(tmp_path / "run", step=1, optimizer=optimizer)
    assert raised.value.code in ("QN601", "QN602")
    assert torch.equal(before, _weight(made)) and program.get_rng_state() == state
    assert {key: x for key, x in optimizer.param_groups[0].items() if key != "params"} == options


# -- what the program does not have


def _larger() -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3))
    program = quintnet.compile(model, quintnet.Mesh(dp=1), BATCH, loss_fn=F.mse_loss)
    return program, torch.optim.SGD(program.parameters(), lr=0.1, momentum=0.9)


def test_a_checkpoint_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    large = _larger()
    large[0].save(tmp_path, step=1)
    small = quintnet.compile(nn.Sequential(nn.Linear(6, 3)), quintnet.Mesh(dp=1), BATCH, loss_fn=F.mse_loss)
    before = next(small.parameters()).detach().clone()
    with pytest.raises(quintnet.CheckpointError, match=r"QN602.*\n.*\n *1.bias is not in the model\n *1.weight is not"):
        small.load(tmp_path)
    assert torch.equal(before, next(small.parameters()))


def test_an_optimizer_of_fewer_parameters_is_refused(tmp_path: Path) -> None:
    large, other = _larger(), _larger()
    _train(large)
    large[0].save(tmp_path, step=1, optimizer=large[1])
    fewer = torch.optim.SGD(list(other[0].parameters())[:2], lr=0.1, momentum=0.9)
    with pytest.raises(quintnet.CheckpointError, match=r"QN602.*\n.*has 1.bias, 1.weight, and this one does not"):
        other[0].load(tmp_path, optimizer=fewer)
    assert other[0].load(tmp_path).step == 1


def test_a_state_without_a_part_that_the_optimizer_keeps_is_refused(made: Made, tmp_path: Path) -> None:
    program = made[0]
    optimizer = torch.optim.Adam(program.parameters(), lr=0.1)
    _train((program, optimizer))
    optimizer.param_groups[0]["amsgrad"] = True
    program.save(tmp_path, step=1, optimizer=optimizer)
    text = r"QN602.*\n.*max_exp_avg_sq of weight is missing in the checkpoint, and Adam keeps it"
    with pytest.raises(quintnet.CheckpointError, match=text):
        program.load(tmp_path, optimizer=torch.optim.Adam(program.parameters(), lr=0.1))


# -- an optimizer's state


class _Keeping(torch.optim.SGD):
    """Keeps all kinds of values."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["a/b"] = torch.full_like(p, 2.0)
                state["50%:x"] = torch.tensor(3, dtype=torch.int64)
                state["history"] = [torch.full_like(p, 4.0), torch.tensor(0.5), (1, None, True)]
                state["nested"] = {"x": {7: torch.full_like(p, 5.0)}, "inf": float("inf")}
                state["empty"] = []


def test_every_key_and_kind_of_value_is_kept(tmp_path: Path) -> None:
    one, other = _made()[0], _made()[0]
    optimizers = [_Keeping(program.parameters(), lr=0.1) for program in (one, other)]
    _train((one, optimizers[0]))
    one.save(tmp_path, step=1, optimizer=optimizers[0])
    other.load(tmp_path, optimizer=optimizers[1])
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        kept, found = optimizers[0].state[p], optimizers[1].state[q]
        assert kept.keys() == found.keys()
        for key in ("a/b", "50%:x"):
            assert torch.equal(kept[key], found[key]) and kept[key].dtype == found[key].dtype
        assert torch.equal(found["history"][0], torch.full_like(q, 4.0))
        assert isinstance(found["history"][1], Tensor) and found["history"][1] == 0.5
        assert found["history"][2] == (1, None, True)
        assert torch.equal(found["nested"]["x"][7], torch.full_like(q, 5.0)) and found["nested"]["inf"] == float("inf")
        assert found["empty"] == []
    optimizers[0].state[next(iter(one.parameters()))]["odd"] = {1: object()}
    with pytest.raises(quintnet.CheckpointError, match="odd of weight: 1 is a object, which a checkpoint cannot hold"):
        one.save(tmp_path, step=2, optimizer=optimizers[0])
