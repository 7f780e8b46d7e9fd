"""A log that cannot be written does not end a run: one warning names it."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quintnet
from quintnet_compiler.training.loggers import JsonLogger, Logger, WandbLogger
from quintnet_compiler.training.run_page import watch
from quintnet_compiler.training.time_report import RunTime

STEPS = 4


def _trainer(**options: Any) -> quintnet.Trainer:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8 * STEPS, 4), torch.arange(8 * STEPS) % 2)
    loader = DataLoader(data, batch_sampler=quintnet.BatchSampler(len(data), 8, seed=0))
    program = quintnet.compile(
        nn.Linear(4, 2), quintnet.Mesh(dp=1), next(iter(loader)), loss_fn=F.cross_entropy, check="off"
    )
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    return quintnet.Trainer(program, optimizer, loader, log_every=1, **{"console": False, **options})


def _told(run: Callable[[], object]) -> list[str]:
    """What :class:`quintnet.LogWarning` said."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in found if issubclass(warning.category, quintnet.LogWarning)]


def _fits(**options: Any) -> list[str]:
    def fit() -> None:
        assert _trainer(**options).fit().step == STEPS

    return _told(fit)


def test_a_log_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """And so does a restart."""
    (tmp_path / "file").write_text("")
    folder, saves = tmp_path / "file" / "logs", tmp_path / "saves"
    for _ in range(2):
        told = _told(lambda: _trainer(log_folder=folder, measure_step=2, checkpoint_folder=saves).fit())
        assert sorted(text.partition(" cannot be written")[0] for text in told)[:2] == [
            str(folder / "metrics.jsonl"), str(folder / "time.json"),
        ]  # fmt: skip
        assert len(told) == len({*told}) <= 3


def test_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    """Lines that were written whole can all be read."""
    logger = JsonLogger(tmp_path)
    logger.open()
    logger.write(1, "train", {"loss": 1.0})
    assert logger.file is not None
    real = logger.file

    class Half:
        def write(self, data: bytes) -> int:
            return real.write(data[:5])

        def close(self) -> None:
            real.close()

    logger.file = Half()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space") as caught:
        logger.write(2, "train", {"loss": 2.0})
    assert caught.value.errno == errno.ENOSPC
    logger.write(3, "train", {"loss": 3.0})
    logger.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(lines[i])["step"] for i in (0, 2)] == [1, 3] and len(lines) == 3


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "broken"), ValueError("closed"), OSError("full")])
def test_a_console_that_is_gone(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, _: str, /) -> int:
            raise error

    monkeypatch.setattr(sys, "stdout", Gone())
    told = _fits(console=True)
    assert len(told) == 1 and told[0].startswith("the console cannot be written")


@pytest.mark.slow
@pytest.mark.parametrize("console", ["its reader has gone", "a full disk"])
def test_the_exit_code_of_a_run_whose_console_is_gone(console: str, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text("from tests.test_logs_that_fail import _trainer\n_trainer(console=True).fit()\n")
    read, write = os.pipe()
    os.close(read)
    if console == "a full disk":
        os.close(write)
        write = os.open("/dev/full", os.O_WRONLY)
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py")], stdout=write, stderr=subprocess.PIPE, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": root}, check=False,
    )  # fmt: skip
    os.close(write)
    assert done.returncode == 0 and "the console cannot be written" in done.stderr


def test_a_library_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        def log(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("no network")

        finish = log

    module = types.ModuleType("wandb")
    module.init = lambda **_: Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    assert [text.partition(":")[0] for text in _fits(callbacks=[WandbLogger()])] == [
        "WandbLogger cannot be written (RuntimeError"
    ]
    module.init = Run().log  # type: ignore[attr-defined]
    assert len(_fits(callbacks=[WandbLogger()])) == 1


def test_errors_of_other_callbacks_end_the_run() -> None:
    class Mine(quintnet.Callback):
        def on_step(self, *_: Any) -> None:
            raise RuntimeError("mine")

    class Missing(Logger):
        def open(self) -> None:
            raise quintnet.CompileError("QN108", "no library")

    with pytest.raises(RuntimeError, match="mine"):
        _trainer(callbacks=[Mine()]).fit()
    with pytest.raises(quintnet.CompileError, match="no library"):
        _trainer(callbacks=[Missing()]).fit()


def test_watch_tries_again(tmp_path: Path) -> None:
    """The page's folder is made while it watches."""
    _trainer(log_folder=tmp_path).fit()
    assert RunTime.read(tmp_path).starts[-1].end == "finished"
    time = (tmp_path / "time.json").read_text()
    (tmp_path / "time.json").write_text(time.replace("finished", ""))
    page, looks = tmp_path / "pages" / "page.html", list[float]()

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            page.parent.mkdir()
            (tmp_path / "time.json").write_text(time)

    told = _told(lambda: watch(tmp_path, page, 1.0, sleep=sleep))
    assert len(told) == 1 and str(page) in told[0] and page.is_file() and len(looks) == 3
    with pytest.raises(OSError):
        watch(tmp_path, tmp_path / "none" / "page.html", 1.0, once=True)
