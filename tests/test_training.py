"""The training loop, its data and its documents."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import quintnet
from quintnet_compiler.simulation.timeline import Timeline
from quintnet_compiler.training.documents import read_yaml
from quintnet_compiler.training.run import learning_rate_factor, optimizer_of, run
from quintnet_compiler.training.validation import validate

from .models import MLP

ROWS = 50


def _data(rows: int = ROWS, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 16, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, :8].argmax(1)))


def _trainer(axes: dict[str, int], **options: Any) -> quintnet.Trainer:
    torch.manual_seed(0)
    data, sampler = _data(), quintnet.BatchSampler(ROWS, 8, seed=3)
    program = quintnet.compile(MLP().double(), quintnet.Mesh(**axes), data[:8], loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(data, batch_sampler=sampler)
    options = {"scheduler": scheduler, "max_grad_norm": 0.5, "log_every": 0, **options}
    return quintnet.Trainer(program, optimizer, loader, DataLoader(_data(13, 1), batch_size=5), **options)


def _weights(trainer: quintnet.Trainer) -> list[Tensor]:
    return [p.full_tensor() for p in trainer.program.parameters()]  # type: ignore[attr-defined]


def test_a_trainer_does_what_a_loop_by_hand_does() -> None:
    trainer = _trainer({"dp": 2}, epochs=2, metrics={"accuracy": quintnet.accuracy}, perplexity=True)
    trainer.program.step(_data()[:8])  # as a run that failed between its backward and its update: gradients are left
    history = trainer.fit()
    torch.manual_seed(0)
    model, data, losses = MLP().double(), _data(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = quintnet.BatchSampler(ROWS, 8, seed=3)
    for epoch in range(2):
        sampler.start_at(epoch * ROWS)
        for chosen in sampler:
            x, labels = data[chosen]
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + len(losses))
            loss = F.cross_entropy(model(x), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert history.step == len(losses) == 12
    torch.testing.assert_close(torch.tensor(history.losses), torch.tensor(losses))
    for one, other in zip(_weights(trainer), model.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach())
    x, labels = _data(13, 1)[:]
    expected = F.cross_entropy(model(x), labels)
    (_, (step, found)) = history.validations
    assert step == 12
    assert found["loss"] == pytest.approx(float(expected), rel=1e-9)
    assert found["perplexity"] == pytest.approx(math.exp(float(expected)), rel=1e-9)
    assert found["accuracy"] == pytest.approx(float((model(x).argmax(1) == labels).double().mean()))


@pytest.mark.sample(1)
@pytest.mark.parametrize("cut", [4, 6, 9])
def test_a_run_that_was_cut_off_goes_on_bit_by_bit(cut: int, tmp_path: Path) -> None:
    whole = _trainer({"dp": 2}, epochs=2)
    expected = whole.fit()
    options = {"checkpoint_folder": tmp_path, "save_every": 1, "epochs": 2}
    first = _trainer({"dp": 2}, max_steps=cut, **options).fit()
    second = _trainer({"dp": 2}, **options)
    found = second.fit()
    assert (found.resumed_from, found.step) == (cut, 12)
    assert first.losses + found.losses == expected.losses
    assert first.validations + found.validations == expected.validations  # also after the last step of an epoch
    assert all(torch.equal(a, b) for a, b in zip(_weights(whole), _weights(second), strict=True))
    again = _trainer({"dp": 2}, **options).fit()
    assert (again.resumed_from, again.losses) == (12, [])


class Seen(quintnet.Callback):
    """Notes what it is told, and at which step."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def on_start(self, trainer: quintnet.Trainer) -> None:
        self.said.append(("start", trainer.history.step))

    def on_step(self, trainer: quintnet.Trainer, loss: Tensor) -> None:
        assert loss is trainer.kept[-1]
        self.said.append(("step", trainer.history.step))

    def on_log(self, trainer: quintnet.Trainer, numbers: Mapping[str, float]) -> None:
        assert numbers["loss"] == float(trainer.kept[-1])
        self.said.append(("log", trainer.history.step))

    def on_validation(self, trainer: quintnet.Trainer, numbers: Mapping[str, float]) -> None:
        assert trainer.history.validations[-1] == (trainer.history.step, numbers)
        self.said.append(("validation", trainer.history.step))

    def on_save(self, trainer: quintnet.Trainer, saving: Future[Path | str]) -> None:
        assert saving.result().name == f"step-{trainer.history.step:08}"
        self.said.append(("save", trainer.history.step))

    def on_end(self, trainer: quintnet.Trainer) -> None:
        self.said.append(("end", trainer.history.step))


def test_callbacks_are_called_in_the_order_of_what_happens_and_time_is_kept_over_starts(tmp_path: Path) -> None:
    options = {"checkpoint_folder": tmp_path, "save_every": 4, "log_every": 3, "epochs": 2, "console": False}
    first, second = Seen(), Seen()
    _trainer({"dp": 1}, max_steps=5, callbacks=[first], **options).fit()
    assert first.said == [
        ("start", 0), ("step", 1), ("step", 2), ("step", 3), ("log", 3), ("step", 4), ("save", 4), ("step", 5),
        ("save", 5), ("end", 5),
    ]  # fmt: skip
    trainer = _trainer({"dp": 1}, callbacks=[second], **options)
    trainer.fit()
    assert second.said[:4] == [("start", 5), ("step", 6), ("log", 6), ("validation", 6)]
    assert second.said[-3:] == [("save", 12), ("validation", 12), ("end", 12)]
    found = quintnet.RunTime.read(tmp_path)
    assert [(one.first, one.step, one.end) for one in found.starts] == [(0, 5, "finished"), (5, 12, "finished")]
    shares = found.shares()
    assert sum(shares.values()) == pytest.approx(found.seconds, rel=0.02) and shares["lost"] == 0
    assert min(shares[kind] for kind in ("step", "data", "compile", "validation", "save", "restart")) > 0


def test_the_interval_between_saves_follows_what_they_take(tmp_path: Path) -> None:
    """Ten steps until it is known; a save takes longer than such a step, and failures come often."""
    options: dict[str, Any] = {"checkpoint_folder": tmp_path, "save_every": "auto", "epochs": 3, "console": False}
    with pytest.raises(quintnet.CompileError, match="mean_time_between_failures"):
        _trainer({"dp": 1}, **options)
    seen = Seen()
    trainer = _trainer({"dp": 1}, callbacks=[seen], mean_time_between_failures=1e-3, **options)
    trainer.fit()
    saves = [step for what, step in seen.said if what == "save"]
    assert saves[0] == 10 and saves[-1] == 18 and trainer.interval.steps >= 1


def test_numbers_reach_wandb(tmp_path: Path) -> None:
    """Its client writes a file, as it does without a network; here it must have the numbers' names."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    logger = quintnet.WandbLogger(project="p", id="abc", resume="allow", mode="offline", dir=str(tmp_path))
    logger.open()
    logger.write(3, "train", {"loss": 0.5})
    logger.write(3, "preempted", {})
    logger.write(4, "validation", {"accuracy": 0.25})
    logger.close()
    (file,) = tmp_path.glob("wandb/offline-*/run-abc.wandb")
    assert all(name in file.read_bytes() for name in (b"train/loss", b"validation/accuracy"))


def test_another_layout_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    expected = _trainer({"dp": 2}, epochs=2).fit()
    options = {"checkpoint_folder": tmp_path, "epochs": 2}
    first = _trainer({"dp": 4}, max_steps=4, **options).fit()
    found = _trainer({"tp": 2}, **options).fit()
    torch.testing.assert_close(torch.tensor(first.losses + found.losses), torch.tensor(expected.losses))


def test_no_sample_is_read_twice_and_none_is_left_out() -> None:
    sampler = quintnet.BatchSampler(64, 8, seed=1)
    first = [index for _, batch in zip(range(3), sampler, strict=False) for index in batch]
    sampler = quintnet.BatchSampler(64, 4, seed=1)  # smaller batches from here on
    sampler.start_at(24)
    assert len(sampler) == 10
    assert sorted(first + [index for batch in sampler for index in batch]) == list(range(64))
    whole = list(quintnet.BatchSampler(64, 8, seed=1))
    parts = [list(quintnet.BatchSampler(64, 8, seed=1, part=(index, 2))) for index in range(2)]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole
    sampler.start_at(64)
    assert list(sampler) != list(quintnet.BatchSampler(64, 4, seed=1))  # another pass, another order
    with pytest.raises(quintnet.InputError, match="batches of 9 out of 8"):
        quintnet.BatchSampler(8, 9)


@pytest.mark.slow
def test_a_loader_of_another_kind_is_read_again_up_to_where_it_was(tmp_path: Path) -> None:
    def trainer(**options: Any) -> quintnet.Trainer:
        made = _trainer({"dp": 1}, **options)
        made.train_loader = DataLoader(_data(), batch_size=8, drop_last=True)
        return made

    expected = trainer(epochs=2).fit()
    first = trainer(epochs=2, max_steps=8, checkpoint_folder=tmp_path).fit()
    assert first.losses + trainer(epochs=2, checkpoint_folder=tmp_path).fit().losses == expected.losses


@pytest.mark.slow
def test_it_stops_when_validation_gets_no_better(tmp_path: Path) -> None:
    options = {"patience": 2, "validate_every": 1, "checkpoint_folder": tmp_path / "saves", "console": False}
    trainer = _trainer({"dp": 1}, epochs=9, log_folder=tmp_path, scheduler=None, **options)
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    history = trainer.fit()
    again = _trainer({"dp": 1}, epochs=9, scheduler=None, **options).fit()
    assert (again.resumed_from, again.losses, again.stopped_early) == (3, [], True)
    assert history.stopped_early
    assert history.step == 3  # the first is the best, and two are not better
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["kind"]) for line in lines] == [(n, "validation") for n in (1, 2, 3)]


@pytest.mark.slow
def test_the_rate_is_reduced_on_a_plateau_of_the_validation(tmp_path: Path) -> None:
    """Beside a loop by hand, and after a run that was cut off between two validations."""

    def trainer(**options: Any) -> quintnet.Trainer:
        made = _trainer({"dp": 2}, scheduler=None, validate_every=2, epochs=2, console=False, **options)
        made.optimizer.param_groups[0]["lr"] = 0.5
        made.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(made.optimizer, patience=0, factor=0.1)
        return made

    torch.manual_seed(0)
    model, data, sampler = MLP().double(), _data(), quintnet.BatchSampler(ROWS, 8, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    x, labels = _data(13, 1)[:]
    losses: list[float] = []
    for epoch in range(2):
        sampler.start_at(epoch * ROWS)
        for chosen in sampler:
            loss = F.cross_entropy(model(data[chosen][0]), data[chosen][1])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if len(losses) % 2 == 0:
                scheduler.step(float(F.cross_entropy(model(x), labels).detach()))
    whole = trainer()
    assert whole.fit().losses == pytest.approx(losses, rel=1e-9)
    rates = [group["lr"] for made in (optimizer, whole.optimizer) for group in made.param_groups]
    assert rates[0] == rates[1] < 0.5
    folder = {"checkpoint_folder": tmp_path}
    begun = trainer(max_steps=5, **folder).fit().losses
    assert begun + trainer(**folder).fit().losses == pytest.approx(losses, rel=1e-9)


def test_what_a_trainer_cannot_do_is_known_when_it_is_made(tmp_path: Path) -> None:
    class Given:
        def step(self, metric: float) -> None:
            raise AssertionError

    made = _trainer({"dp": 2})
    given = (made.program, made.optimizer, made.train_loader)
    with pytest.raises(quintnet.RunError, match="take turns in this process"):
        quintnet.Trainer(*given, measure_step=3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(made.optimizer)
    with pytest.raises(quintnet.CompileError, match="there is no val_loader"):
        quintnet.Trainer(*given, scheduler=plateau)
    with pytest.raises(quintnet.CompileError, match=r"Given.step needs metric[\s\S]*in a callback"):
        quintnet.Trainer(*given, scheduler=Given())  # type: ignore[arg-type]
    odd = torch.optim.lr_scheduler.LambdaLR(made.optimizer, lambda step: 1.0)
    odd.hidden = iter([1, 2])  # type: ignore[attr-defined]
    with pytest.raises(quintnet.CheckpointError, match="hidden is a list_iterator, which a checkpoint cannot hold"):
        quintnet.Trainer(*given, scheduler=odd, checkpoint_folder=tmp_path)


def test_each_logged_step_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _trainer({"dp": 1}, max_steps=4, log_every=2, log_folder=tmp_path, measure_step=3).fit()
    assert Timeline.load(tmp_path / "timeline.json").ranks == 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert lines[0]["grad_norm"] > 0
    assert lines[0]["rows_per_second"] > 0
    told = capsys.readouterr().out.splitlines()
    assert [line[:12] for line in told[:2]] == ["step       2", "step       4"]
    assert "1 start, step 4: " in told[2] and {"compile", "step", "data"} <= {line.split()[0] for line in told[3:]}
    assert told[0].startswith("step       2   loss ")
    assert "memory" in told[0]


def test_a_model_with_a_loss_of_its_own_validates_any_number_of_rows() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLP().double()

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.inner(x), labels)

    torch.manual_seed(0)
    model, (x, labels) = Model(), _data(13)[:]
    program = quintnet.compile(model, quintnet.Mesh(dp=4), {"x": x[:8], "labels": labels[:8]})
    parts = [{"x": x[:5], "labels": labels[:5]}, {"x": x[5:], "labels": labels[5:]}]
    found = validate(program, parts, {})
    assert found["loss"] == pytest.approx(float(model(x, labels).detach()), rel=1e-12)


# -- documents

STRATEGIES = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "dp_tp": {"dp": 2, "tp": 2},
    "dp_pp": {"pp": 2, "dp": 2},
    "tp_pp": {"pp": 2, "tp": 2},
    "3d": {"pp": 2, "dp": 2, "tp": 2},
}


def _config(name: str, **more: Any) -> dict[str, Any]:
    axes = STRATEGIES[name]
    return {"strategy_name": name, "mesh_dim": [*axes.values()], "mesh_name": [*axes], **more}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"learning_rat": 0.1}, r"learning_rat: .* \(did you mean learning_rate\?\)"),
        ({"batch_size": 0}, "batch_size: Input should be greater"),
        ({"strategy_name": "dp", "mesh_dim": [2, 2], "mesh_name": ["dp", "tp"]}, "tp=2 is not among them"),
        ({"strategy_name": "3d", "mesh_dim": [2], "mesh_name": ["dp"]}, "no tp; no pp"),
        ({"mesh_dim": [2, 2], "mesh_name": ["dp"]}, "do not pair up"),
    ],
)
def test_documents_that_mean_nothing_are_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"model": "m:build", "batch_size": 8, **changes}))  # JSON is YAML
    with pytest.raises(quintnet.CompileError, match=text) as raised:
        quintnet.TrainConfig.read(path)
    assert raised.value.code == "QN207"


@pytest.mark.parametrize(
    ("optimizer", "options", "text"),
    [
        ("Optimizer", {}, "torch.optim has no optimizer Optimizer"),
        ("adamw", {"epsilon": 1e-8}, "AdamW has no option epsilon.*\n.*its options are lr, betas, eps"),
        ("AdamW", {"eps": "small"}, r"AdamW\(lr=.*eps='small'.*"),
        ("AdamW", {"betas": [2.0, 0.9]}, "Invalid beta parameter"),
        ("SGD", {"momentum": -1.0}, "Invalid momentum value"),
    ],
)
def test_optimizers_that_cannot_be_made_say_why(optimizer: str, options: dict[str, Any], text: str) -> None:
    config = quintnet.TrainConfig(model="m:b", batch_size=1, optimizer=optimizer, optimizer_args=options)
    with pytest.raises(quintnet.CompileError, match=text) as raised:
        optimizer_of(config, [torch.nn.Parameter(torch.zeros(2))])
    assert raised.value.code == "QN108"


def test_numbers_in_documents(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: m:b\nbatch_size: 8\noptimizer_args: {eps: 1e-8, betas: [.9, 95.e-2]}\nlearning_rate: 1E-3\n"
    )
    config = quintnet.TrainConfig.read(path)
    assert (config.optimizer_args, config.learning_rate) == ({"eps": 1e-8, "betas": [0.9, 0.95]}, 1e-3)
    assert isinstance(optimizer_of(config, [torch.nn.Parameter(torch.zeros(2))]), torch.optim.AdamW)
    bare = config.model_copy(update={"optimizer": "Rprop", "optimizer_args": {}})
    assert isinstance(optimizer_of(bare, [torch.nn.Parameter(torch.zeros(2))]), torch.optim.Rprop)
    assert read_yaml("[e5, 1e5x, 0x1e5, 1.5, -2e+3, '1e-8', 1e-8]") == ["e5", "1e5x", 0x1E5, 1.5, -2000.0, "1e-8", 1e-8]


@pytest.mark.slow
def test_checkpoints_of_other_hands(tmp_path: Path) -> None:
    """A Trainer does not know where the data stood in what program.save wrote; a scheduler may be added later."""
    first = _trainer({"dp": 1}, scheduler=None)
    first.program.save(tmp_path / "own", step=3, optimizer=first.optimizer)
    other = _trainer({"dp": 1}, scheduler=None, checkpoint_folder=tmp_path / "own")
    before = [x.clone() for x in _weights(other)]
    with pytest.raises(quintnet.CheckpointError, match="was not written by a Trainer") as raised:
        other.fit()
    assert raised.value.code == "QN602"
    assert all(torch.equal(a, b) for a, b in zip(before, _weights(other), strict=True))
    _trainer({"dp": 1}, scheduler=None, checkpoint_folder=tmp_path / "run", max_steps=2).fit()
    later = _trainer({"dp": 1}, checkpoint_folder=tmp_path / "run", max_steps=3)
    with pytest.warns(quintnet.CheckpointWarning, match="scheduler starts at its beginning"):
        assert later.fit().resumed_from == 2


def test_learning_rates() -> None:
    config = quintnet.TrainConfig(model="m:b", batch_size=1, warmup_steps=2, lr_schedule="linear")
    assert [learning_rate_factor(config, step, 6) for step in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = config.model_copy(update={"lr_schedule": "cosine"})
    assert learning_rate_factor(cosine, 4, 6) == pytest.approx(0.5)


def _trained(config: dict[str, Any]) -> quintnet.History:
    torch.set_num_threads(1)
    return run(quintnet.TrainConfig.make(config))


def _digits(name: str, tmp_path: Path, **more: Any) -> quintnet.History:
    example = Path(__file__).parents[1] / "examples" / "vit_digits.yaml"
    config = quintnet.TrainConfig.read(example, **_config(name), log_dir=None, device="cpu", **more).model_dump()
    config["model"] = str(example.with_suffix(".py")) + ":build"
    config["checkpoint_dir"] = str(tmp_path)
    [history, *_] = quintnet.launch(_trained, math.prod(config["mesh_dim"]), (config,), timeout=560)
    return history  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_document_trains_on_processes(tmp_path: Path) -> None:
    found = _digits("dp_tp", tmp_path, max_steps=12, val_interval=12)
    assert found.losses[-1] < found.losses[0]
    assert found.validations[0][1]["accuracy"] > 0.3
    assert sorted(os.listdir(tmp_path)) == ["step-00000011", "step-00000012"]  # after an epoch, and at the end


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_learns_digits(name: str, tmp_path: Path) -> None:
    found = _digits(name, tmp_path, num_epochs=15)
    assert found.validations[-1][1]["accuracy"] > 0.95
