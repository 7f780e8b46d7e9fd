"""A run that goes on after an interruption, on another layout, reads what a loop of plain PyTorch reads."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, get_worker_info

import quintnet
from quintnet_compiler.checkpoint.values import from_json

from .resumed_loops import (
    BATCH,
    LOADERS,
    ROWS,
    Counting,
    DrawnLate,
    OwnRows,
    Rows,
    Stream,
    arranged,
    joined_losses,
    net,
    plain_losses,
    seed,
)

EPOCHS = 3
CHANGES = [({"dp": 2}, {"tp": 2}, 8), ({"pp": 2}, {"dp": 2, "tp": 2}, 12), ({"tp": 2}, {"dp": 1}, 4)]
OPTIONS: dict[str, Any] = {"zero": 3}


class Arranged:
    """A loader whose batches are put as the module takes them; it passes on what the loader has."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        return map(arranged, self.loader)


def _program(axes: dict[str, int]) -> quintnet.CompiledProgram:
    batch = arranged(torch.utils.data.default_collate([Rows()[i] for i in range(BATCH)]))
    options = OPTIONS if axes.get("dp", 1) > 1 and "tp" in axes else {}
    return quintnet.compile(net(), quintnet.Mesh(**axes), batch, loss_fn=F.mse_loss, check="off", **options)


def _fit(axes: dict[str, int], loader: Any, folder: Path, steps: int | None, number: int) -> quintnet.History:
    """One start of a script."""
    program = _program(axes)
    seed(number)
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    options: dict[str, Any] = {"epochs": EPOCHS, "max_steps": steps, "checkpoint_folder": folder, "console": False}
    return quintnet.Trainer(program, optimizer, Arranged(loader()), save_every=1, **options).fit()


def _own_loop(axes: dict[str, int], loader: Any, folder: Path, steps: int | None, number: int) -> list[float]:
    """The same by hand."""
    program = _program(axes)
    seed(number)
    optimizer, losses = torch.optim.AdamW(program.parameters(), lr=1e-2), []
    data, step = quintnet.ResumableLoader(Arranged(loader()), program), 0
    if any(folder.iterdir()):
        found = program.load(folder, optimizer=optimizer)
        data.load_state_dict(found.extra["data"])
        step = found.step
    while data.epoch < EPOCHS:
        for batch in data:
            losses.append(float(program.step(batch)))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            program.save(folder, step=step, optimizer=optimizer, extra={"data": data.state_dict()}, keep=1)
            if step == steps:
                return losses
    return losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", LOADERS)
def test_what_is_read_after_an_interruption_is_what_plain_pytorch_reads(kind: str, tmp_path: Path) -> None:
    """In the first epoch, in the second, and at the end of the second; starts seed in different ways."""
    model, loader = net(), LOADERS[kind]
    seed(1)
    expected = plain_losses(loader(), EPOCHS, model)
    first, second, more = CHANGES[list(LOADERS).index(kind) % len(CHANGES)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", quintnet.CheckpointWarning)
        losses = _fit(first, loader, tmp_path, 3, 1).losses
        losses += _fit(second, loader, tmp_path, more, 2).losses
        losses += _fit(first, loader, tmp_path, None, 3).losses
    assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["shuffle", "noise of its own", "stateful"])
def test_the_same_in_a_loop_by_hand(kind: str, tmp_path: Path) -> None:
    model, loader = net(), LOADERS[kind]
    seed(1)
    expected = plain_losses(loader(), EPOCHS, model)
    losses = _own_loop({"dp": 2}, loader, tmp_path, 5, 1) + _own_loop({"pp": 2}, loader, tmp_path, None, 2)
    assert losses == pytest.approx(expected, rel=1e-9)


def test_an_order_that_cannot_be_restored_is_told(tmp_path: Path) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Rows(), BATCH, sampler=Counting())

    _fit({"dp": 1}, loader, tmp_path, 8, 1)
    with pytest.warns(quintnet.CheckpointWarning, match="are not those that the run had read: rows may come twice"):
        _fit({"dp": 1}, loader, tmp_path, 9, 1)


class GoesOn:
    """Four batches of a stream that does not end are an epoch."""

    def __init__(self) -> None:
        self.loader, self.batches = DataLoader(Rows(), BATCH, shuffle=True), self._stream()

    def __iter__(self) -> Iterator[Any]:
        return islice(self.batches, 4)

    def _stream(self) -> Iterator[Any]:
        while True:
            yield from self.loader


def _indices(data: quintnet.ResumableLoader) -> list[int]:
    return [int(index) for batch in data for index in batch[2]]


@pytest.mark.parametrize("loader", [GoesOn, lambda: DataLoader(Rows(), BATCH, sampler=Counting())])
def test_an_order_that_depends_on_epochs_before_goes_on_or_is_told_between_two_epochs(loader: Any) -> None:
    """Read the run's last epoch again, and compare it."""
    program = _program({"dp": 1})
    seed(1)
    data, states, read = quintnet.ResumableLoader(loader(), program), [], []
    for _ in range(3):
        read.append(_indices(data))
        states.append(data.state_dict())
    data = quintnet.ResumableLoader(loader(), program)
    data.load_state_dict(states[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", quintnet.CheckpointWarning)
        assert [_indices(data), _indices(data)] == read[1:]
    data = quintnet.ResumableLoader(loader(), program)
    data.load_state_dict(states[1])
    with pytest.warns(quintnet.CheckpointWarning, match="are not those that the run had read: rows may come twice"):
        _indices(data)


def test_data_that_ends_before_where_the_run_stood_and_batches_that_end_elsewhere_are_refused(tmp_path: Path) -> None:
    _fit({"dp": 1}, lambda: DataLoader(Rows(), BATCH), tmp_path, 3, 1)
    with pytest.raises(quintnet.CheckpointError, match="had read 12 rows of epoch 0, and the loader has 16 rows"):
        _fit({"dp": 1}, lambda: DataLoader(Rows(), 8), tmp_path, None, 1)
    short = [b for b, _ in zip(DataLoader(Rows(), BATCH), range(2), strict=False)]
    with pytest.raises(quintnet.CheckpointError, match="and the loader has 8 rows in its first 2 batches"):
        _fit({"dp": 1}, lambda: short, tmp_path, None, 1)


def test_batches_of_another_size_that_end_where_the_run_stood_go_on_with_the_rows_that_are_left(tmp_path: Path) -> None:
    read: list[int] = []

    class Noting(DataLoader[Any]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                read.extend(batch[2].tolist())
                yield batch

    _fit({"dp": 1}, lambda: Noting(Rows(), BATCH, shuffle=True), tmp_path, 4, 1)
    first = list(read)
    read.clear()
    with pytest.warns(quintnet.CheckpointWarning, match="other sizes now, and could not be compared"):
        _fit({"dp": 2}, lambda: Noting(Rows(), 8, shuffle=True), tmp_path, 5, 2)
    assert read[:16] == first  # they are read once more, and not trained on
    assert sorted(read) == list(range(ROWS))


def test_a_checkpoint_of_an_earlier_version_goes_on_at_its_batch(tmp_path: Path) -> None:
    program = _program({"dp": 1})
    data = quintnet.ResumableLoader(Arranged(DataLoader(Rows(), BATCH)), program)
    data.load_state_dict({"seen": 8, "epoch": 0, "in_epoch": 2})
    assert [batch[1].tolist() for batch in data] == [list(range(i, i + 4)) for i in range(8, ROWS, 4)]
    data = quintnet.ResumableLoader(Arranged(DataLoader(Rows(), BATCH, shuffle=True)), program)
    data.load_state_dict({"seen": 8, "epoch": 0, "in_epoch": 2})
    with pytest.warns(quintnet.CheckpointWarning, match="no states of random generators: rows may come twice"):
        next(iter(data))


def test_an_iteration_that_was_left_goes_on() -> None:
    data = quintnet.ResumableLoader(DataLoader(Rows(), BATCH, shuffle=True), _program({"dp": 1}))
    read: list[Tensor] = []
    for batch in data:
        read += batch[2]
        if len(read) == 8:
            break
    for batch in data:
        read += batch[2]
    assert sorted(map(int, read)) == list(range(ROWS))
    assert data.epoch == 1


def test_the_stateful_loader_of_torchdata(tmp_path: Path) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def loader(**options: Any) -> Any:
        return loaders.StatefulDataLoader(Rows(), BATCH, shuffle=True, **options)

    for workers in (0, 2):
        model, folder = net(), tmp_path / str(workers)
        seed(1)
        expected = plain_losses(loader(num_workers=workers), EPOCHS, model)
        losses = _fit({"dp": 2}, lambda n=workers: loader(num_workers=n), folder, 4, 1).losses
        losses += _fit({"tp": 2}, lambda n=workers: loader(num_workers=n), folder, 12, 2).losses
        losses += _fit({"pp": 2}, lambda n=workers: loader(num_workers=n), folder, None, 3).losses
        assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("stop", [2, 6])
@pytest.mark.parametrize("kind", ["shuffle", "sampler", "batch sampler", "stream"])
def test_the_stateful_loader_of_torchdata_with_parts_that_have_no_state(kind: str, stop: int) -> None:
    """It goes on inside an epoch, twice, and between two; rows have noise from the generator that orders them."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    rows = Rows(lambda: float(torch.rand(())))
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "shuffle": lambda: {"dataset": rows, "batch_size": BATCH, "shuffle": True},
        "sampler": lambda: {"dataset": rows, "batch_size": BATCH, "sampler": DrawnLate()},
        "batch sampler": lambda: {"dataset": rows, "batch_sampler": BatchSampler(RandomSampler(rows), BATCH, False)},
        "stream": lambda: {"dataset": Stream(own=False), "batch_size": BATCH},
    }
    program = _program({"dp": 1})

    def read(data: quintnet.ResumableLoader, most: int) -> list[Tensor]:
        batches: list[Tensor] = []
        while data.epoch < 2 and len(batches) < most:
            for batch in data:
                batches.append(batch[0])
                if len(batches) == most < ROWS // BATCH:
                    break
        return batches

    def loader(number: int) -> quintnet.ResumableLoader:
        seed(number)
        return quintnet.ResumableLoader(loaders.StatefulDataLoader(**parts[kind]()), program)

    expected = read(loader(1), 12)
    data = loader(1)
    batches = read(data, stop)
    for number in (2, 3):
        state, data = data.state_dict(), loader(number)
        data.load_state_dict(state)
        batches += read(data, 1 if number == 2 and stop == 2 else 12)
    torch.testing.assert_close(torch.stack(batches), torch.stack(expected), rtol=0, atol=0)


def _shards(folder: Path) -> Any:
    """Return rows of two files in a tar, in an order that a buffer draws, as a pipeline of WebDataset."""
    webdataset = pytest.importorskip("webdataset")
    paths = [str(folder / f"rows-{shard}.tar") for shard in range(2)]
    for shard, path in enumerate(paths):
        with webdataset.TarWriter(path) as file:
            for x, y, index in list(Rows())[shard::2]:
                file.write({"__key__": str(index), "x.pth": x, "y.pth": y, "index.cls": index})
    pipeline = webdataset.WebDataset(paths, shardshuffle=2, seed=3).shuffle(8, rng=random.Random(5)).decode()
    return pipeline.to_tuple("x.pth", "y.pth", "index.cls")


def _table(folder: Path) -> Any:
    """Return rows of a stream of Hugging Face's datasets, in an order that a buffer draws."""
    datasets = pytest.importorskip("datasets")
    columns = {name: [row[at].tolist() for row in Rows()] for at, name in enumerate(("x", "y"))}
    table = datasets.Dataset.from_dict({**columns, "index": list(range(ROWS))})
    return table.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=8)


def _of_table(rows: list[dict[str, Any]]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([row[name] for row in rows]).to(dtype) for name, dtype in TABLE.items())


TABLE = {"x": torch.float64, "y": torch.float64, "index": torch.long}
STREAMS: dict[str, Callable[[Path], DataLoader[Any]]] = {
    "webdataset": lambda folder: DataLoader(_shards(folder), BATCH),
    "datasets": lambda folder: DataLoader(_table(folder), BATCH, collate_fn=_of_table),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_streams_of_libraries(kind: str, tmp_path: Path) -> None:
    """What is read is what an uninterrupted run reads."""

    def fit(name: str, axes: dict[str, int], steps: int | None, number: int) -> list[float]:
        loader = STREAMS[kind](tmp_path)
        (tmp_path / name).mkdir(exist_ok=True)
        return _fit(axes, lambda: loader, tmp_path / name, steps, number).losses

    with warnings.catch_warnings():
        warnings.simplefilter("error", quintnet.CheckpointWarning)
        expected = fit("whole", {"dp": 2}, None, 1)
        losses = fit("parts", {"dp": 2}, 4, 1) + fit("parts", {"tp": 2}, 8, 2) + fit("parts", {"pp": 2}, None, 3)
    assert losses == pytest.approx(expected, rel=1e-9)


# -- each data rank reads rows of its own


def _local(kind: str, folder: str, steps: int | None, number: int) -> list[float]:
    """A start of a script on each rank, whose generators have other seeds on other ranks."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    program = _program({"dp": ranks})
    seed(number + program.data_rank)
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    loader = Arranged(OwnRows(kind, program.data_rank, program.data_ranks).loader())
    options: dict[str, Any] = {"epochs": EPOCHS, "max_steps": steps, "checkpoint_folder": folder, "console": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error", quintnet.CheckpointWarning)
        trainer = quintnet.Trainer(program, optimizer, loader, batch_is_local=ranks > 1, **options)
        return trainer.fit().losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["distributed", "stream", "noise"])
def test_data_ranks_that_read_their_own_rows_go_on_with_them(kind: str, tmp_path: Path) -> None:
    losses = quintnet.launch(_local, 2, (kind, str(tmp_path), 4, 1), timeout=120)[0]
    losses += quintnet.launch(_local, 2, (kind, str(tmp_path), None, 5), timeout=120)[0]
    assert losses == pytest.approx(joined_losses(kind, EPOCHS), rel=1e-9)


@pytest.mark.slow
def test_on_another_number_of_data_ranks_a_distributed_sampler_goes_on_and_a_stream_is_refused(tmp_path: Path) -> None:
    losses = quintnet.launch(_local, 2, ("distributed", str(tmp_path / "sampler"), 4, 1), timeout=120)[0]
    losses += _local("distributed", str(tmp_path / "sampler"), None, 1)
    assert losses == pytest.approx(joined_losses("distributed", EPOCHS), rel=1e-9)
    quintnet.launch(_local, 2, ("stream", str(tmp_path / "stream"), 4, 1), timeout=120)
    with pytest.raises(quintnet.CheckpointError, match="each of 2 data ranks read rows of its own"):
        _local("stream", str(tmp_path / "stream"), None, 1)


def _same_rows(local: bool) -> list[str]:
    program = _program({"dp": 2})
    batch = arranged(
        torch.utils.data.default_collate([Rows()[i + 4 * program.data_rank * (not local)] for i in range(4)])
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        program.step(batch, batch_is_local=True)
    return [str(warning.message) for warning in told if warning.category is quintnet.CheckWarning]


@pytest.mark.slow
def test_data_ranks_that_all_read_the_same_rows_are_told() -> None:
    for told in quintnet.launch(_same_rows, 2, (True,), timeout=120):
        assert len(told) == 1
        assert "all data ranks have the same rows" in told[0]
    assert quintnet.launch(_same_rows, 2, (False,), timeout=120) == [[], []]


# -- what a Trainer says before it computes


def _fit_alone(folder: Path) -> None:
    _fit({"dp": 1}, lambda: DataLoader(Rows(), BATCH), folder, 2, 1)


def test_a_run_that_goes_on_is_told_at_once_that_another_process_writes_there(tmp_path: Path) -> None:
    quintnet.launch(_fit_alone, 1, (tmp_path,), timeout=60)
    code = "import json, os, socket, sys, fcntl; f = open(sys.argv[1], 'r+'); fcntl.flock(f, 2); f.truncate(0)\n"
    code += "start = int(open('/proc/self/stat').read().rpartition(')')[2].split()[19])\n"
    code += "json.dump({'host': socket.gethostname(), 'process': os.getpid(), 'started': start}, f); f.flush()\n"
    code += "print('locked', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / ".writer")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == b"locked\n"
        trained: list[int] = []

        class Noting(quintnet.Callback):
            def on_step(self, trainer: quintnet.Trainer, loss: Tensor) -> None:
                trained.append(trainer.history.step)

        program = _program({"dp": 1})
        optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
        loader = Arranged(DataLoader(Rows(), BATCH))
        trainer = quintnet.Trainer(program, optimizer, loader, checkpoint_folder=tmp_path, callbacks=[Noting()])
        try:
            with pytest.raises(quintnet.CheckpointError, match=f"process {other.pid} on .* writes its checkpoints"):
                trainer.fit()
        finally:
            other.stdin.close()
        assert trained == []


def test_a_scheduler_that_waits_for_a_plateau_is_stepped_with_the_loss_of_validations(tmp_path: Path) -> None:
    program = _program({"dp": 2})
    optimizer = torch.optim.SGD(program.parameters(), lr=0.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, eps=0)
    optimizer.param_groups[0]["lr"] = 1e-30  # nothing gets better
    loader = Arranged(DataLoader(Rows(), BATCH))
    with pytest.raises(
        quintnet.CompileError, match="is stepped with the loss of each validation, and there is no val_loader"
    ):
        quintnet.Trainer(program, optimizer, loader, scheduler=scheduler)
    options: dict[str, Any] = {"epochs": 3, "checkpoint_folder": tmp_path, "console": False}
    quintnet.Trainer(program, optimizer, loader, loader, scheduler=scheduler, **options).fit()
    assert optimizer.param_groups[0]["lr"] == 1e-30 * 0.5**2
    state = program.load(tmp_path).extra["trainer"]["scheduler"]
    assert from_json(state["state"])["num_bad_epochs"] == scheduler.state_dict()["num_bad_epochs"]


class KillsItsWorker(Rows):
    """Rows whose last one ends the worker that reads it, as a killer of processes out of memory does, once."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def __getitem__(self, i: int) -> Any:
        if i == ROWS - 1 and get_worker_info() is not None and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


def test_a_worker_of_a_loader_that_is_killed_ends_the_run_which_goes_on_from_its_last_step(tmp_path: Path) -> None:
    def loader() -> Any:
        return DataLoader(KillsItsWorker(tmp_path / "mark"), BATCH, num_workers=1, prefetch_factor=1)

    expected = plain_losses(DataLoader(Rows(), BATCH), EPOCHS, net())
    with pytest.raises(RuntimeError, match=r"DataLoader worker.*(killed by signal|exited unexpectedly)"):
        _fit({"dp": 1}, loader, tmp_path / "run", None, 1)
    losses = _fit({"dp": 1}, loader, tmp_path / "run", None, 2).losses
    assert 0 < len(losses) < len(expected)
    assert losses == pytest.approx(expected[-len(losses) :], rel=1e-9)


def test_a_step_that_cannot_be_measured_is_refused_before_the_first(tmp_path: Path) -> None:
    program = _program({"dp": 2})
    with pytest.raises(quintnet.RunError, match="the 2 ranks of Mesh"):
        quintnet.Trainer(program, torch.optim.SGD(program.parameters(), lr=0.1), [], measure_step=3)
