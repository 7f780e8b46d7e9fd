"""Where a run's time went, when it saves, and who is told: with a clock and a trainer that are made up."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.cost_models.checkpoint_interval import daly_interval
from quintnet_compiler.training.callbacks import Callback
from quintnet_compiler.training.loggers import Logger, TensorBoardLogger, WandbLogger
from quintnet_compiler.training.save_interval import FIRST_STEPS, SaveInterval
from quintnet_compiler.training.time_report import RunStart, RunTime, Stopwatch


def _start(began: float, until: float, first: int, step: int, spent: dict[str, float], **more: Any) -> RunStart:
    return RunStart(began=began, until=until, first=first, step=step, spent=spent, **more)


def test_time_of_three_starts_adds_up_and_what_was_done_again_is_lost() -> None:
    run = RunTime(starts=[
        # killed in step 8, 20 s after the checkpoint of step 6; the next one found that of step 6 damaged
        _start(0, 100, 0, 8, {"compile": 30, "step": 64, "other": 6},
               marks=[(3, {"compile": 30, "step": 24}), (6, {"compile": 30, "step": 48, "other": 2})]),
        _start(130, 200, 3, 7, {"restart": 10, "step": 60}, marks=[(7, {"restart": 10, "step": 60})], end="preempted"),
        _start(220, 300, 7, 10, {"restart": 5, "step": 75}, end="finished"),
    ])  # fmt: skip
    shares = run.shares()
    assert sum(shares.values()) == run.seconds == 300
    assert shares["lost"] == 100 - 54 and shares["step"] == 24 + 60 + 75 and shares["compile"] == 30
    assert shares["restart"] == 10 + 5 + 30 + 20
    assert run.goodput == pytest.approx(159 / 300)
    assert "300" not in str(run) and "5.0 min, 3 starts, step 10: 53.0% steps that are kept" in str(run)
    assert json.loads(run.to_json())["lost"] == 46


def test_a_run_that_goes_back_before_an_earlier_start_loses_that_too() -> None:
    run = RunTime(starts=[
        _start(0, 10, 0, 4, {"step": 10}, marks=[(2, {"step": 5}), (4, {"step": 10})]),
        _start(10, 20, 4, 8, {"step": 10}, marks=[(8, {"step": 10})]),
        _start(20, 30, 2, 6, {"step": 10}),
    ])  # fmt: skip
    assert run.shares()["step"] == 5 + 0 + 10 and run.shares()["lost"] == 15


def test_a_stopwatch_counts_compiling_apart_and_is_kept_over_starts(tmp_path: Path) -> None:
    now, compiled = [100.0], [7.0]
    watch = Stopwatch(tmp_path, lambda: compiled[0], clock=lambda: now[0])
    watch.begin(0)
    with watch.on("step"):
        now[0] += 5
        compiled[0] += 3
    watch.step(1)
    assert not RunTime.read(tmp_path).starts  # not so soon
    with watch.on("data"):
        now[0] += 4
    watch.step(2)  # 9 s later
    watch.note_save(2)
    (start,) = RunTime.read(tmp_path).starts
    assert {"compile": 10.0, "step": 2.0, "data": 4.0}.items() <= start.spent.items()
    assert (start.step, start.end, [step for step, _ in start.marks]) == (2, "", [2])
    watch.end("preempted")
    again = Stopwatch(tmp_path, lambda: 0.0)
    again.begin(2)
    again.end("finished")
    assert [one.end for one in RunTime.read(tmp_path).starts] == ["preempted", "finished"]
    assert [*tmp_path.iterdir()] == [tmp_path / "time.json"]
    (tmp_path / "time.json").write_text('{"starts": 3}')
    with pytest.raises(CompileError, match=r"QN207.*\n.*time\.json"):
        RunTime.read(tmp_path)
    Stopwatch(tmp_path, lambda: 0.0).end("finished")
    assert len(RunTime.read(tmp_path).starts) == 1 and (tmp_path / "time.json.damaged").read_text() == '{"starts": 3}'
    assert "there is no time.json" in str(RunTime.read(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b'{"version": 1, "starts": [{"beg',
        b'{"version": 99, "starts": "x"}',
        b"\xff\x00\xfe",
        b"[" * 200_000,
        b"[1,2]",
    ],
    ids=["empty", "torn", "of another version", "binary", "deep", "a list"],
)
def test_a_stopwatch_sets_a_damaged_file_aside(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "time.json").write_bytes(text)
    with pytest.raises(CompileError, match="QN207"):
        RunTime.read(tmp_path)
    Stopwatch(tmp_path, lambda: 0.0).write()
    assert (tmp_path / "time.json.damaged").read_bytes() == text
    assert len(RunTime.read(tmp_path).starts) == 1


def test_steps_between_saves_by_what_steps_and_saves_take_on_the_slowest_rank() -> None:
    now = [0.0]
    interval = SaveInterval("auto", 5 * 3600.0, lambda text: (text, json.dumps([2.0, 30.0, 0.0])), lambda: now[0])
    interval.begin(100)
    due = [interval.due(100 + step, 1.5) for step in range(1, FIRST_STEPS + 1)]
    assert due == [False] * (FIRST_STEPS - 1) + [True]
    saving: Future[Path] = Future()
    interval.note_save(110, 20.0, saving)
    assert interval.steps == round(daly_interval(30.0, 5 * 3600.0) / 2.0)
    assert not interval.due(110 + interval.steps - 1, 2.0) and interval.due(110 + interval.steps, 2.0)
    now[0] = 4000.0
    saving.set_result(Path())
    interval.note_save(1000, 20.0, Future())
    assert interval.steps == 4020 / 2  # another save cannot begin before this one is written


def test_other_intervals() -> None:
    fixed = SaveInterval(4, None, lambda text: (text,))
    assert [fixed.due(step, 1.0) for step in (3, 4, 8)] == [False, True, True]
    assert not SaveInterval(None, None, lambda text: (text,)).due(4, 1.0)
    for every, mean in (("auto", None), ("auto", -1.0), (0, None), ("often", None)):
        with pytest.raises(CompileError, match="QN108"):
            SaveInterval(cast(Any, every), mean, lambda text: (text,))


class Kept(Logger):
    def __init__(self) -> None:
        self.said: list[Any] = []

    def open(self) -> None:
        self.said.append("open")

    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        self.said.append((step, kind, dict(numbers)))

    def close(self) -> None:
        self.said.append("close")


@pytest.mark.parametrize("first", [True, False])
def test_loggers_write_on_one_rank(first: bool) -> None:
    history = SimpleNamespace(step=4, resumed_from=4)
    trainer = cast(Any, SimpleNamespace(program=SimpleNamespace(first=first), history=history))
    logger = Kept()
    assert isinstance(logger, Callback)
    logger.on_start(trainer)
    logger.on_step(trainer, cast(Any, None))
    logger.on_log(trainer, {"loss": 1.0})
    logger.on_validation(trainer, {"loss": 2.0})
    logger.on_save(trainer, Future())
    logger.on_preempt(trainer)
    logger.on_end(trainer)
    expected = [(4, "resumed", {}), (4, "train", {"loss": 1.0}), (4, "validation", {"loss": 2.0}), (4, "preempted", {})]
    assert logger.said == (["open", *expected, "close"] if first else [])


def test_numbers_reach_tensorboard(tmp_path: Path) -> None:
    """Read back from the files that torch's own SummaryWriter has written."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard")
    logger = TensorBoardLogger(tmp_path)
    logger.open()
    logger.write(3, "train", {"loss": 0.5, "lr": 0.25})
    logger.write(4, "resumed", {})
    logger.close()
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert found.Tags()["scalars"] == ["train/loss", "train/lr"]
    assert [(one.step, one.value) for one in found.Scalars("train/loss")] == [(3, 0.5)]


def test_calls_of_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in of the same interface: it shows which calls are made, not that W&B takes them."""
    said: list[Any] = []
    run = SimpleNamespace(log=lambda numbers, step: said.append((numbers, step)), finish=lambda: said.append("finish"))

    def init(**options: str) -> Any:
        said.append(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", cast(Any, SimpleNamespace(init=init)))
    logger = WandbLogger(project="p", id="a", resume="allow")
    logger.open()
    logger.write(3, "train", {"loss": 0.5})
    logger.write(3, "preempted", {})
    logger.close()
    assert said == [{"project": "p", "id": "a", "resume": "allow"}, ({"train/loss": 0.5}, 3), "finish"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(CompileError, match="wandb cannot be imported"):
        WandbLogger().open()
