"""transformers' Trainer with a compiled program, beside the plain Trainer on one device."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quintnet

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from quintnet_compiler.loops.transformers_trainer import TrainerMixin  # noqa: E402

from .short_texts import LENGTH, Texts, gpt2, language_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("shared_captures")

SAME = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
LOOP: Mapping[str, Any] = {
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_steps": 2,
    "eval_strategy": "epoch",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "gradient_accumulation_steps": 2,
    "warmup_steps": 2,
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 0.5,
}


class MeshTrainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc]
    pass


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]).mean())}


Logs = dict[tuple[int, str], float]


def logs_of(trainer: Any) -> Logs:
    return {(line["step"], key): x for line in trainer.state.log_history for key, x in line.items() if key in SAME}


def train(folder: str, rows: int, mesh: quintnet.Mesh | None = None, resume: str | None = None, **changes: Any) -> Logs:
    """``rows``: of a batch of one device, or of one data rank."""
    options = {**LOOP, "per_device_train_batch_size": rows, "per_device_eval_batch_size": rows, **changes}
    arguments = transformers.TrainingArguments(output_dir=folder, **options)
    given = {"train_dataset": Texts(22), "eval_dataset": Texts(10), "compute_metrics": accuracy}
    kind: Any = transformers.Trainer if mesh is None else MeshTrainer
    trainer = kind(language_model(), arguments, **given, **({} if mesh is None else {"mesh": mesh}))
    trainer.train(resume_from_checkpoint=resume)
    return logs_of(trainer)


def assert_same(found: Logs, known: Logs, first: int = 1) -> None:
    """``first``: of the steps to compare; logs of a run that was resumed begin with those of the checkpoint."""
    found, known = ({key: x for key, x in logs.items() if key[0] >= first} for logs in (found, known))
    assert found.keys() == known.keys()
    assert list(found.values()) == pytest.approx(list(known.values()), rel=2e-5, abs=1e-7)


@pytest.mark.slow
def test_a_run_is_that_of_one_device_and_resumes_on_another_layout(tmp_path: Path) -> None:
    known = train(str(tmp_path / "plain"), 4)
    assert_same(train(str(tmp_path / "ours"), 2, quintnet.Mesh(dp=2)), known)
    saved = tmp_path / "ours" / "checkpoint-4"
    assert {"config.json", "model.safetensors", "quintnet", "scheduler.pt", "trainer_state.json", "rng_state.pth"} <= {
        file.name for file in saved.iterdir()
    }
    weights = transformers.AutoModelForCausalLM.from_pretrained(saved)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain" / "checkpoint-4")
    for (name, p), q in zip(weights.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=name)
    assert_same(train(str(tmp_path / "ours"), 4, quintnet.Mesh(tp=2), str(saved)), known, first=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"max_steps": 3, "gradient_accumulation_steps": 1, "optim": "sgd"},
        {"load_best_model_at_end": True, "save_strategy": "epoch", "save_total_limit": 1},
        {"max_grad_norm": 0.0, "dataloader_drop_last": True},
        {"save_only_model": True, "gradient_checkpointing": True},
    ],
)
@pytest.mark.parametrize("axis", ["dp", "tp", "pp"])
def test_further_arguments(axis: str, changes: dict[str, Any], tmp_path: Path) -> None:
    known = train(str(tmp_path / "plain"), 4, **changes)
    mesh = quintnet.Mesh(**{axis: 2})
    assert_same(train(str(tmp_path / "ours"), 2 if axis == "dp" else 4, mesh, **changes), known)


@pytest.mark.slow
def test_a_loss_that_is_not_counted_by_tokens_is_averaged_over_batches(tmp_path: Path) -> None:
    """A model whose forward takes no counts: gradients of accumulated batches are divided by their number."""

    class Regression(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(LENGTH, 1)

        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            out = self.layer(input_ids / 32)
            return {"loss": ((out - labels[:, :1] / 32) ** 2).mean(), "logits": out}

    found = []
    for kind, given in ((transformers.Trainer, {}), (MeshTrainer, {"mesh": quintnet.Mesh(tp=2)})):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / kind.__name__), **{**LOOP, "eval_strategy": "no", "save_strategy": "no"}
        )
        trainer = kind(Regression(), arguments, train_dataset=Texts(22), **given)
        trainer.train()
        found.append(logs_of(trainer))
    assert_same(found[1], found[0])


@pytest.mark.parametrize(
    ("changes", "given", "named"),
    [
        ({"fsdp": "full_shard"}, {}, "fsdp"),
        ({"torch_compile": True, "predict_with_generate": True}, {}, "torch_compile.*\n.*predict_with_generate"),
        ({}, {"compute_loss_func": lambda *_: None}, "compute_loss_func"),
        ({"optim": "galore_adamw_layerwise"}, {}, "layerwise"),
        ({}, {"options": {"offload": ("optimizer",)}}, "makes its own optimizer"),
    ],
)
def test_arguments_that_cannot_be_followed(
    changes: dict[str, Any], given: dict[str, Any], named: str, tmp_path: Path
) -> None:
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    for name, value in changes.items():
        setattr(arguments, name, value)
    with pytest.raises(quintnet.CompileError, match=f"QN108[\\s\\S]*{named}"):
        MeshTrainer(language_model(), arguments, mesh=quintnet.Mesh(dp=2), **given)

    class Own(MeshTrainer):
        def compute_loss(self, *_: Any, **__: Any) -> None: ...

    plain = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(quintnet.CompileError, match=r"QN108[\s\S]*Own.compute_loss"):
        Own(language_model(), plain, mesh=quintnet.Mesh(dp=2))


@pytest.mark.parametrize("name", ["compute_loss", "compute_loss_func", "label_smoother", "model"])
def test_what_is_set_later_is_refused(name: str, tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer: Any = MeshTrainer(
        language_model(), arguments, mesh=quintnet.Mesh(dp=2), train_dataset=Texts(4), eval_dataset=Texts(4)
    )
    setattr(trainer, name, language_model() if name == "model" else lambda *_, **__: torch.zeros(()))
    for call in (trainer.train, trainer.evaluate):
        with pytest.raises(quintnet.CompileError, match=rf"QN108[\s\S]*  {name} of the Trainer was set after"):
            call()


class Drawing:
    """A collator that draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        drawn = torch.rand(batch["input_ids"].shape, generator=self.generator) < 0.2
        return {**batch, "input_ids": torch.where(drawn, 1, batch["input_ids"])}


class Prepared:
    """A part of a Trainer that changes each batch."""

    def _prepare_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        prepared: dict[str, Tensor] = super()._prepare_inputs(inputs)  # type: ignore[misc]
        return {**prepared, "input_ids": prepared["input_ids"].flip(1)}


def test_each_batch_is_read_once_and_prepared(tmp_path: Path) -> None:
    logs = []
    for base, given in ((transformers.Trainer, {}), (MeshTrainer, {"mesh": quintnet.Mesh(tp=2)})):
        kind: Any = type("PreparingTrainer", (Prepared, base), {})
        changes = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 1}
        arguments = transformers.TrainingArguments(str(tmp_path), **{**LOOP, "save_strategy": "no", **changes})
        data = {"train_dataset": Texts(32), "eval_dataset": Texts(8), "data_collator": Drawing()}
        trainer = kind(language_model(), arguments, **data, **given)
        trainer.train()
        logs.append(logs_of(trainer))
    assert_same(logs[1], logs[0])


@pytest.mark.slow
def test_a_plain_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    train(str(tmp_path), 4, max_steps=2, eval_strategy="no", gradient_accumulation_steps=1)
    with pytest.raises(quintnet.CheckpointError, match=r"QN602[\s\S]*from_pretrained"):
        train(str(tmp_path), 4, quintnet.Mesh(tp=2), str(tmp_path / "checkpoint-2"))
    with pytest.raises(quintnet.CheckpointError, match=r"there is no folder .*checkpoint-9"):
        train(str(tmp_path), 4, quintnet.Mesh(tp=2), str(tmp_path / "checkpoint-9"))


REPLACED = {
    "_clip_grad_norm", "_get_grad_norm", "_load_best_model", "_load_from_checkpoint", "_load_optimizer_and_scheduler",
    "_move_model_to_device", "_save", "_save_checkpoint", "_save_optimizer_and_scheduler", "_save_rng_state",
    "_wrap_model",
}  # fmt: skip


def test_what_is_replaced_is_a_method_of_the_trainer() -> None:
    """In the version that is installed: a method of another name would not be called."""
    own = {name for name in vars(TrainerMixin) if name.startswith("_") and hasattr(transformers.Trainer, name)}
    assert own - {name for name in own if name.startswith("__")} == REPLACED


def _run(folder: str, mesh: quintnet.Mesh, rows: int, resume: str | None = None) -> list[tuple[int, str, float]]:
    return [(*key, x) for key, x in train(folder, rows, mesh, resume).items()]


def as_logs(found: Sequence[tuple[int, str, float]]) -> Logs:
    return {(step, key): x for step, key, x in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "rows"), [(quintnet.Mesh(dp=2), 2), (quintnet.Mesh(tp=2), 4), (quintnet.Mesh(pp=2), 4)]
)
def test_two_processes(mesh: quintnet.Mesh, rows: int, tmp_path: Path) -> None:
    known = train(str(tmp_path / "plain"), 4)
    folder = str(tmp_path / "ours")
    for found in quintnet.launch(_run, 2, args=(folder, mesh, rows), timeout=300):
        assert_same(as_logs(found), known)
    state = json.loads((tmp_path / "ours" / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["global_step"] == 6 and state["is_world_process_zero"]
    again = quintnet.launch(_run, 2, args=(folder, mesh, rows, f"{folder}/checkpoint-4"), timeout=300)
    assert_same(as_logs(again[0]), known, first=5)


class Learnable(Texts):
    """Each evaluation is better than the one before."""

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        ids = (torch.arange(LENGTH) + row) % 29
        return {"input_ids": ids, "labels": ids}


def _best(folder: str, mesh: quintnet.Mesh | None, slow: bool = False) -> tuple[str, list[float], float]:
    """Which checkpoint was best, the evaluations, and the sum of a parameter at the end. ``slow``: rank 0 is."""
    if slow and torch.distributed.get_rank() == 0:
        plain = Path.mkdir

        def late(self: Path, *args: Any, **kwargs: Any) -> None:
            if self.name.startswith("checkpoint-"):
                time.sleep(1)  # others would look for the folder meanwhile
            plain(self, *args, **kwargs)

        Path.mkdir = late  # type: ignore[method-assign]
    options = {**LOOP, "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    options |= {"save_total_limit": 1, "warmup_steps": 0, "learning_rate": 5e-3, "gradient_accumulation_steps": 1}
    rows = 4 if mesh is None else 4 // mesh.data_ways
    arguments = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=rows, per_device_eval_batch_size=rows, **options
    )
    kind: Any = transformers.Trainer if mesh is None else MeshTrainer
    trainer = kind(
        language_model(), arguments, train_dataset=Learnable(16), eval_dataset=Learnable(8),
        compute_metrics=accuracy, callbacks=[transformers.EarlyStoppingCallback(2)],
        **({} if mesh is None else {"mesh": mesh}),
    )  # fmt: skip
    trainer.train()
    weight: Any = trainer.model.state_dict()["model.embed_tokens.weight"]
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    return Path(trainer.state.best_model_checkpoint).name, losses, float(whole.double().sum())


def _numbers(predicted: Any) -> dict[str, float]:
    return {"mean": float(predicted.predictions.mean()), "accuracy": accuracy(predicted)["accuracy"]}


def _logs_and_evaluation(folder: str, model: Any, mesh: quintnet.Mesh | None, **changes: Any) -> Logs:
    """Those of a run, and of an evaluation that computes no metrics."""
    rows = 4 if mesh is None else 4 // mesh.data_ways
    options = {**LOOP, "save_strategy": "no", "max_steps": 4, "per_device_train_batch_size": rows, **changes}
    arguments = transformers.TrainingArguments(folder, **options, per_device_eval_batch_size=rows)
    kind: Any = transformers.Trainer if mesh is None else MeshTrainer
    given = {"train_dataset": Texts(22), "eval_dataset": Texts(10, 1), "compute_metrics": _numbers}
    trainer = kind(model, arguments, **given, **({} if mesh is None else {"mesh": mesh}))
    trainer.train()
    trainer.compute_metrics = None
    alone = {(-1, "eval_loss"): trainer.evaluate()["eval_loss"]}
    means = {
        (line["step"], "eval_mean"): line["eval_mean"] for line in trainer.state.log_history if "eval_mean" in line
    }
    return {**logs_of(trainer), **means, **alone}


class Tagger(torch.nn.Module):
    """A model that shifts no labels, and takes no count of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = transformers.PretrainedConfig()
        self.embed, self.head = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embed(input_ids)))
        if labels is None:
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


MODELS = {"llama": language_model, "gpt2": gpt2, "tagger": Tagger}


@pytest.mark.sample(1)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_losses_of_labels(
    model: str, layout: dict[str, int], accumulate: int, smoothing: float, tmp_path: Path
) -> None:
    """With smoothed labels, and without; also of a model whose labels a Trainer counts in another way than its loss."""
    changes = {"gradient_accumulation_steps": accumulate, "label_smoothing_factor": smoothing}
    make = MODELS[model]
    known = _logs_and_evaluation(str(tmp_path), make().double(), None, **changes)
    assert len({step for step, name in known if name == "loss"}) == 4 and (-1, "eval_loss") in known
    ours = _logs_and_evaluation(str(tmp_path), make().double(), quintnet.Mesh(**layout), **changes)
    assert ours.keys() == known.keys()
    for key, value in known.items():  # the Trainer's sums are in float32
        assert ours[key] == pytest.approx(value, rel=1e-6, abs=1e-7), key


def test_an_evaluation_divides_by_what_the_trainer_counts(tmp_path: Path) -> None:
    """Of GPT-2 that is more labels than the loss is a sum of."""
    changes: dict[str, Any] = {"max_steps": 1, "gradient_accumulation_steps": 1}
    known = _logs_and_evaluation(str(tmp_path), gpt2(), None, **changes)
    assert_same(_logs_and_evaluation(str(tmp_path), gpt2(), quintnet.Mesh(tp=2), **changes), known, first=-1)


Found = tuple[Sequence[tuple[int, str, float]], tuple[str, list[float], float]]


@pytest.fixture(scope="module")
def in_processes(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """Return what each of two ranks has of a run with smoothed labels, and of one that loads its best model.

    Both are in one start: each rank imports transformers, which takes longer than either run.
    """
    folder = tmp_path_factory.mktemp("processes")
    return quintnet.launch(_smoothed_and_best, 2, args=(str(folder),), timeout=300)


def _smoothed_and_best(folder: str) -> Found:
    logs = _logs_and_evaluation(f"{folder}/smoothed", language_model(), quintnet.Mesh(pp=2), **SMOOTHED)
    return [(*key, x) for key, x in logs.items()], _best(f"{folder}/best", quintnet.Mesh(dp=2), True)


SMOOTHED = {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.2}


@pytest.mark.slow
def test_smoothed_labels_in_processes(in_processes: list[Found], tmp_path: Path) -> None:
    known = _logs_and_evaluation(str(tmp_path), language_model(), None, **SMOOTHED)
    for ours, _ in in_processes:
        assert_same(as_logs(ours), known, first=-1)


def test_all_ranks_load_the_best_model(in_processes: list[Found], tmp_path: Path) -> None:
    """It is the last one, and rank 0 writes it slowly."""
    name, losses, weight = _best(str(tmp_path), None)
    for _, rank in in_processes:
        assert rank[0] == name == "checkpoint-8"
        assert rank[1] == pytest.approx(losses, rel=2e-5) and rank[2] == pytest.approx(weight, rel=1e-4)


@pytest.mark.slow
def test_a_model_may_smooth_its_own_loss(tmp_path: Path) -> None:
    """``loss_function`` of the model, instead of the Trainer's argument."""

    def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        pairs = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
        return torch.nn.functional.cross_entropy(*pairs, label_smoothing=0.1)

    model = language_model()
    model.loss_function = smoothed
    changes: dict[str, Any] = {"gradient_accumulation_steps": 1}
    ours = _logs_and_evaluation(str(tmp_path), model, quintnet.Mesh(tp=2), **changes)
    assert_same(
        ours, _logs_and_evaluation(str(tmp_path), language_model(), None, **changes, label_smoothing_factor=0.1)
    )
