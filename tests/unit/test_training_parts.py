"""training, part by part: configurations, the order of samples, records, measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quintnet_compiler.core.errors import CompileError, InputError
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.training.batches import BatchSampler
from quintnet_compiler.training.config import TrainConfig, strategy_axes
from quintnet_compiler.training.documents import read_yaml
from quintnet_compiler.training.loggers import ConsoleLogger, JsonLogger
from quintnet_compiler.training.measures import accuracy, device_flops, memory_gib


def test_a_configuration_is_read_and_changed(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: a.b:c\nbatch_size: 8\nmesh_dim: [2, 2]\nmesh_name: [dp, tp]\nstrategy_name: dp_tp\n")
    found = TrainConfig.read(file, max_steps=3)
    assert (found.batch_size, found.max_steps, found.mesh_dim) == (8, 3, (2, 2))
    assert strategy_axes("3d") == ("dp", "tp", "pp") and strategy_axes("pp_dp") == ("pp", "dp")
    for wrong in ("4d", "dp_xp", "dp_dp", ""):
        with pytest.raises(ValueError, match="join axes"):
            strategy_axes(wrong)


def test_an_axis_takes_what_is_left_of_the_ranks() -> None:
    sizes = {"model": "a.b:c", "batch_size": 8, "mesh_name": ["dp", "tp"]}
    found = TrainConfig.make({**sizes, "mesh_dim": [-1, 2]})
    assert found.fixed_ranks is None and [found.mesh_of(n) for n in (2, 6)] == [Mesh(dp=1, tp=2), Mesh(dp=3, tp=2)]
    with pytest.raises(CompileError, match="with 3 ranks"):
        found.mesh_of(3)
    with pytest.raises(CompileError, match="QN201"):
        _ = found.mesh
    fixed = TrainConfig.make({**sizes, "mesh_dim": [2, 2]})
    assert fixed.fixed_ranks == 4 and fixed.mesh_of(1) == fixed.mesh == Mesh(dp=2, tp=2)
    for wrong, says in (([-1, -1], "one axis"), ([1, -1], "tp=-1 is not among them")):
        with pytest.raises(CompileError, match=says):
            TrainConfig.make({**sizes, "mesh_dim": wrong, "strategy_name": "dp"})


def test_a_plan_overrides_the_keys_that_it_shares_with_a_run() -> None:
    given = {"model": "a:b", "batch_size": 8, "grad_acc_steps": 2, "seed": 3}
    found = TrainConfig.make(given).decisions
    assert (found.seed, found.microbatches) == (3, 2)
    found = TrainConfig.make({**given, "plan": {"seed": 5, "microbatches": 4}}).decisions
    assert (found.seed, found.microbatches) == (5, 4)


def test_keys_that_are_not_known_are_refused_with_the_near_one(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"bath_size: .* \(did you mean batch_size\?\)"):
        TrainConfig.make({"model": "a:b", "batch_size": 1, "bath_size": 2})
    with pytest.raises(CompileError, match="batch_size"):
        TrainConfig.make({"model": "a:b", "batch_size": 0})
    (tmp_path / "list.yaml").write_text("[1]")
    with pytest.raises(CompileError, match="is not a mapping of keys to values"):
        TrainConfig.read(tmp_path / "list.yaml")


def test_batches_are_the_same_wherever_a_run_goes_on() -> None:
    whole = BatchSampler(10, 4, seed=3)
    batches = list(whole)
    assert len(batches) == len(whole) == 2 and len({i for batch in batches for i in batch}) == 8
    assert list(BatchSampler(10, 4, seed=3)) == batches and list(BatchSampler(10, 4, seed=4)) != batches
    later = BatchSampler(10, 4, seed=3)
    later.start_at(4)
    assert list(later) == batches[1:]
    assert later.after(8) == 10 and later.after(6) == 6  # 2 left are no batch; 4 are one
    later.start_at(10)
    assert later.epoch == 1 and list(later) != batches


def test_parts_of_batches_make_up_the_batch() -> None:
    whole = list(BatchSampler(8, 4, shuffle=False))
    assert whole == [[0, 1, 2, 3], [4, 5, 6, 7]]
    parts = [list(BatchSampler(8, 4, shuffle=False, part=(i, 2))) for i in range(2)]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole
    with pytest.raises(InputError, match="batches of 4 out of 8 samples, part 0 of 3"):
        BatchSampler(8, 4, part=(0, 3))


def test_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, kind, numbers in ((1, "train", {"loss": 0.5, "grad_norm": float("nan")}), (2, "validation", {})):
        logger = JsonLogger(tmp_path / "logs")  # a run that goes on appends
        logger.close()  # it had not begun
        logger.open()
        logger.write(step, kind, numbers)
        logger.close()
    lines = [json.loads(line) for line in (tmp_path / "logs/metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["kind"]) for line in lines] == [(1, "train"), (2, "validation")]
    assert lines[0]["loss"] == 0.5 and lines[0]["grad_norm"] == "nan"
    ConsoleLogger().write(3, "train", {"loss": 0.25, "tokens_per_second": 12345.6, "memory_gib": 1.5, "mfu": 0.5})
    assert capsys.readouterr().out == "step       3   loss 0.2500   tokens/s 12,346   memory 1.50 GiB   mfu 50.00%\n"


def test_measures() -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    assert accuracy(logits, torch.tensor([1, 1, -100])) == (1.0, 2.0)
    assert device_flops(torch.device("cpu"), torch.float32) is None
    assert 0.01 < memory_gib(torch.device("cpu")) < 1000


def test_a_number_with_an_exponent_is_one() -> None:
    assert read_yaml("[1e-8, +2E3, e5, 1e5x]") == [1e-8, 2000.0, "e5", "1e5x"]
