"""What people put around a step in others' loops, beside the same loop on one device: labels that do not count,
validation batches of unequal sizes, two metrics, the best checkpoint, early stopping, an average of parameters, and a
run that goes on in the middle of an epoch on another layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import quintnet

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from quintnet_compiler.loops.transformers_trainer import TrainerMixin  # noqa: E402

from .short_texts import WORDS, Texts, language_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("shared_captures")

ROWS = 4
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {}),
    "tp2": ({"tp": 2}, {}),
    "pp2": ({"pp": 2}, {"microbatches": 2}),
    "dp2 tp2 zero3": ({"dp": 2, "tp": 2}, {"zero": 3}),
}
RESUMED = [("dp2", "tp2"), ("tp2", "pp2"), ("pp2", "dp2 tp2 zero3"), ("dp2 tp2 zero3", "dp2")]
LOOP: Mapping[str, Any] = {
    "num_train_epochs": 6,
    "learning_rate": 2e-2,
    "logging_steps": 1,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "warmup_steps": 2,
    "gradient_checkpointing": False,
}
INSTALLED = {
    "transformers": True,
    "trl": find_spec("trl") is not None and find_spec("datasets") is not None,
}


# Times, and what TRL computes from outputs of training steps (docs/loops.md says that it is not logged).
NOT_COMPARED = ("time", "per_second", "flos", "train_loss", "entropy", "mean_token_accuracy", "num_tokens")


@dataclass
class Shown:
    """What a run has to show: its logs by step and name, the best parameters, and the averages of parameters."""

    logs: dict[tuple[int, str], float] = field(default_factory=dict)
    best: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    stopped: int = 0


class Average(transformers.TrainerCallback):  # type: ignore[misc]
    """Keeps an exponential average of the parameters, as torch's pages show it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.model.update_parameters(model)


def _metrics(predicted: Any) -> dict[str, float]:
    logits, labels = torch.tensor(predicted.predictions)[:, :-1], torch.tensor(predicted.label_ids)[:, 1:]
    counted = labels != -100
    among = (logits.topk(3, -1).indices == labels[..., None]).any(-1)
    return {
        "accuracy": float((logits.argmax(-1) == labels)[counted].float().mean()),
        "third": float(among[counted].float().mean()),
    }


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "<eos>", *(f"w{i}" for i in range(WORDS - 2))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def _sentences(rows: int, seed: int) -> Any:
    """Return sentences of different lengths."""
    import datasets

    generator = torch.Generator().manual_seed(seed)
    lengths = [6 + i % 7 for i in range(rows)]
    drawn = [torch.randint(WORDS - 2, (length,), generator=generator).tolist() for length in lengths]
    mixed = [[(i + j) % (WORDS - 2) if j % 3 else w for j, w in enumerate(row)] for i, row in enumerate(drawn)]
    return datasets.Dataset.from_list([{"text": " ".join(f"w{word}" for word in row)} for row in mixed])


def _trainer(kind: str, folder: str, layout: str | None, changes: Mapping[str, Any]) -> Any:
    axes, planned = ({}, {}) if layout is None else LAYOUTS[layout]
    mesh = None if layout is None else quintnet.Mesh(**axes)
    rows = ROWS if mesh is None else ROWS // mesh.data_ways
    options = {**LOOP, "per_device_train_batch_size": rows, "per_device_eval_batch_size": rows, **changes}
    more: dict[str, Any] = {} if mesh is None else {"mesh": mesh, "options": planned}
    if kind == "transformers":
        base: Any = transformers.Trainer
        arguments = transformers.TrainingArguments(folder, **options)
        more |= {"train_dataset": Texts(22, 0), "eval_dataset": Texts(10, 1)}
    else:
        import trl

        base = trl.SFTTrainer
        arguments = trl.SFTConfig(folder, **options)
        more |= {
            "train_dataset": _sentences(22, 0),
            "eval_dataset": _sentences(10, 1),
            "processing_class": _tokenizer(),
        }
    trainer_class = base if mesh is None else type("MeshTrainer", (TrainerMixin, base), {})
    average = Average()
    patience = [transformers.EarlyStoppingCallback(2)] if options["load_best_model_at_end"] else []
    trainer = trainer_class(
        language_model(), arguments, compute_metrics=_metrics, callbacks=[average, *patience], **more
    )
    return trainer, average


def _whole(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: getattr(x, "full_tensor", lambda x=x: x)().detach().clone() for name, x in tensors.items()}


def _run(kind: str, folder: str, layout: str | None = None, resume: str | None = None, **changes: Any) -> Shown:
    trainer, average = _trainer(kind, folder, layout, changes)
    trainer.train(resume_from_checkpoint=resume)
    logs = {
        (line["step"], name): x
        for line in trainer.state.log_history
        for name, x in line.items()
        if isinstance(x, float) and not name.endswith(NOT_COMPARED)
    }
    averages = dict(average.model.module.named_parameters())
    return Shown(logs, _whole(dict(trainer.model.named_parameters())), _whole(averages), trainer.state.global_step)


def _same(shown: Shown, known: Shown, first: int = 1) -> None:
    logs, known_logs = ({key: x for key, x in run.logs.items() if key[0] >= first} for run in (shown, known))
    assert logs.keys() == known_logs.keys()
    for key, value in known_logs.items():
        assert logs[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    assert shown.stopped == known.stopped
    for name, x in known.best.items():
        torch.testing.assert_close(shown.best[name], x, rtol=2e-3, atol=1e-4)
    if first == 1:
        for name, x in known.average.items():
            torch.testing.assert_close(shown.average[name], x, rtol=2e-3, atol=1e-4)


KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(not there, reason=f"needs {kind}")) for kind, there in INSTALLED.items()
]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_everything_around_a_step(kind: str, layout: str, accumulate: int, tmp_path: Path) -> None:
    changes = {"gradient_accumulation_steps": accumulate}
    known = _run(kind, str(tmp_path / "plain"), **changes)
    shown = _run(kind, str(tmp_path / "ours"), layout, **changes)
    _same(shown, known)
    evaluations = [step for step, name in known.logs if name == "eval_third"]
    assert evaluations == [step for step, name in known.logs if name == "eval_accuracy"] and len(evaluations) > 1


@pytest.mark.sample(1)
@pytest.mark.parametrize(("before", "after"), RESUMED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_in_an_epoch(kind: str, before: str, after: str, tmp_path: Path) -> None:
    changes = {
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 4,
        "save_total_limit": 4,
        "load_best_model_at_end": False,
    }
    known = _run(kind, str(tmp_path / "plain"), **changes)
    _run(kind, str(tmp_path / "ours"), before, **changes)
    resumed = _run(kind, str(tmp_path / "ours"), after, str(tmp_path / "ours" / "checkpoint-4"), **changes)
    _same(resumed, known, first=5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [pytest.param("transformers", marks=pytest.mark.slow), *KINDS[1:]])
def test_smoothed_labels(kind: str, layout: str, tmp_path: Path) -> None:
    """Of transformers' own Trainer, test_transformers_trainer.py has models and layouts, too."""
    changes = {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1, "num_train_epochs": 2}
    known = _run(kind, str(tmp_path / "plain"), **changes)
    _same(_run(kind, str(tmp_path / "ours"), layout, **changes), known)
