"""The loss of validation data is that of all of it as one batch, whatever it is cut into."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.training.validation import validate

pytestmark = pytest.mark.usefixtures("shared_captures")

LAYOUTS: list[dict[str, Any]] = [{"dp": 2}, {"tp": 2}, {"pp": 2, "microbatches": 2}, {"dp": 2, "tp": 2, "zero": 3}]
CLASSES, WIDTH = 5, 8
WEIGHTS = torch.rand(CLASSES, dtype=torch.float64) + 0.5


class Classifier(nn.Module):
    """Logits, and what ``extra`` says."""

    def __init__(self, extra: str = "") -> None:
        super().__init__()
        self.inner, self.head, self.extra = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), extra
        self.table = nn.Parameter(torch.randn(6, CLASSES))

    def forward(self, x: Tensor, temperature: Tensor | None = None) -> Any:
        logits = self.head(torch.tanh(self.inner(x))) * 3
        if temperature is not None:
            logits = logits * temperature
        if self.extra == "number":
            return logits, logits.square().mean()
        return (logits, F.normalize(self.table, dim=-1)) if self.extra == "table" else logits


class LossModule(nn.Module):
    """A loss with parameters, and dropout, which is off in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.dropout = nn.Linear(CLASSES, CLASSES), nn.Dropout(0.5)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.dropout(logits)), labels)


def _rows(count: int, seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (count, *shape), generator=generator)
    return x, labels


def _ignored(labels: Tensor) -> Tensor:
    """Of the first rows, more labels are left out."""
    ignored = labels.clone()
    ignored[: 1 + len(labels) // 3] = -100
    return ignored


def _masked(logits: Tensor, labels: Tensor, least: float = 1.0) -> Tensor:
    counted = (labels != -100).to(logits.dtype)
    each = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    return (each * counted).sum() / counted.sum().clamp(min=least)


Loss = Callable[[Any, Any], Tensor]
LOSSES: dict[str, Loss] = {
    "ignored labels": lambda z, y: F.cross_entropy(z, _ignored_of(y)),
    "weights of classes": lambda z, y: F.cross_entropy(z, _ignored_of(y), weight=WEIGHTS, label_smoothing=0.1),
    "a sum": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "a sum divided by the rows": lambda z, y: F.cross_entropy(z, y, reduction="sum") / y.shape[0],
    "a sum divided by labels": _masked,
    "a sum divided by labels, by hand": lambda z, y: _masked(z, _ignored_of(y)),
    "probabilities": lambda z, y: F.cross_entropy(z, F.one_hot(y, CLASSES).to(z.dtype) * 0.9 + 0.02),
    "elements": lambda z, y: F.mse_loss(z, F.one_hot(y, CLASSES).to(z.dtype)),
    "a root": lambda z, y: F.mse_loss(z, F.one_hot(y, CLASSES).to(z.dtype)).sqrt(),
    "two means": lambda z, y: F.cross_entropy(z, _ignored_of(y)) + 0.1 * z.square().mean(),
    "products of means": lambda z, y: F.cross_entropy(z, y) + (z.softmax(-1).mean(0) * z.square().mean(0)).sum(),
    "balance of experts": lambda z, y: F.cross_entropy(z, y) + _balance(z),
    "divergences": lambda z, y: F.kl_div(z.log_softmax(-1), F.one_hot(y, CLASSES) * 0.9 + 0.02, reduction="batchmean"),
}


def _balance(logits: Tensor) -> Tensor:
    """As losses of routers are: a product of counts and means over all rows."""
    counts = torch.histc(logits.argmax(-1).to(logits.dtype), bins=CLASSES, min=0, max=CLASSES - 1)
    return CLASSES * (counts / logits.shape[0] * logits.softmax(-1).mean(0)).sum()


def _ignored_of(labels: Tensor) -> Tensor:
    return torch.where(labels < 2, -100, labels)


def _batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    return [_rows(size, index) for index, size in enumerate(sizes)]


def _joined(batches: list[Any]) -> Any:
    return tuple(torch.cat(column) for column in zip(*batches, strict=True))


def _compiled(model: nn.Module, batch: Any, layout: dict[str, Any], loss_fn: Any = None) -> quintnet.CompiledProgram:
    axes = {name: size for name, size in layout.items() if name in ("dp", "tp", "pp")}
    options = {name: x for name, x in layout.items() if name not in axes}
    return quintnet.compile(model, quintnet.Mesh(**axes), batch, loss_fn=loss_fn, **options)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_that_of_one_batch(name: str) -> None:
    torch.manual_seed(0)
    model, batches = Classifier().double(), _batches(8, 5, 2)
    x, labels = _joined(batches)
    expected = LOSSES[name](model(x), labels).detach()
    program = _compiled(model, batches[0], {"dp": 2}, LOSSES[name])
    assert float(program.evaluate_together(batches)) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["weights of classes", "two means", "a sum divided by labels, by hand"])
def test_the_loss_on_layouts(name: str, layout: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, batches = Classifier().double(), _batches(8, 5, 3)
    x, labels = _joined(batches)
    expected = float(LOSSES[name](model(x), labels).detach())
    program = _compiled(model, batches[0], layout, LOSSES[name])
    assert float(program.evaluate_together(batches)) == pytest.approx(expected, rel=1e-9)


def _trainer(
    program: quintnet.CompiledProgram, batches: list[Any], validation: list[Any] | None = None, **options: Any
) -> quintnet.Trainer:
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    return quintnet.Trainer(program, optimizer, batches, validation or batches, console=False, **options)


class Shifted(nn.Module):
    """A causal model that shifts its labels itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids).cumsum(1) * 3)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_causal_model_that_shifts_its_labels(layout: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, batches = Shifted().double(), []
    for rows, length in ((4, 2), (4, 12), (3, 7)):
        ids = torch.randint(11, (rows, length))
        batches.append({"input_ids": ids, "labels": torch.where(ids == 3, -100, ids)})
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    losses = [float(model(**batch)["loss"].detach()) for batch in batches]
    expected = sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)
    right = sum(
        float((model(**batch)["logits"][:, :-1].argmax(-1) == batch["labels"][:, 1:]).sum()) for batch in batches
    )

    def accuracy(outputs: Any, labels: Tensor) -> tuple[float, float]:
        return quintnet.accuracy(outputs["logits"][:, :-1], labels[:, 1:])

    program = _compiled(model, batches[0], layout)
    found = _trainer(program, batches, perplexity=True, metrics={"accuracy": accuracy}).validate()
    assert found["loss"] == pytest.approx(expected, rel=1e-9)
    assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-9)
    assert found["accuracy"] == pytest.approx(right / sum(counts), rel=1e-9)
    with pytest.raises(quintnet.CompileError, match=r"accuracy compares logits[\s\S]*outputs.logits"):
        _trainer(program, batches, metrics={"accuracy": quintnet.accuracy}).validate()


def _with_dict(labels: Tensor) -> dict[str, Tensor]:
    return {"a": labels, "b": 4 - labels}


CASES: dict[str, tuple[Callable[[], Any], Callable[[Tensor, Tensor], Any], Callable[[], Any]]] = {
    "a table among outputs": (
        lambda: Classifier("table"),
        lambda x, y: (x, y),
        lambda: lambda o, y: F.cross_entropy(o[0], y) + (o[1] @ o[1].T).square().sum(),
    ),
    "a number among outputs": (
        lambda: Classifier("number"),
        lambda x, y: (x, y),
        lambda: lambda o, y: F.cross_entropy(o[0], y) + 0.1 * o[1],
    ),
    "a number among inputs": (
        Classifier,
        lambda x, y: (x, torch.tensor(0.5, dtype=torch.float64), y),
        lambda: F.cross_entropy,
    ),
    "a tuple of labels": (
        Classifier,
        lambda x, y: (x, (y, torch.tensor(0.3, dtype=torch.float64), WEIGHTS)),
        lambda: lambda z, y: F.cross_entropy(z, y[0], weight=y[2]) * y[1],
    ),
    "a dict of labels": (
        Classifier,
        lambda x, y: (x, _with_dict(y)),
        lambda: lambda z, y: F.cross_entropy(z, _ignored_of(y["a"])) + F.cross_entropy(z, y["b"], reduction="mean"),
    ),
    "a module": (Classifier, lambda x, y: (x, y), lambda: LossModule().double()),
    "a closure with a trained head": (
        Classifier,
        lambda x, y: (x, y),
        lambda: (lambda head: lambda z, y: F.cross_entropy(head(z), y))(nn.Linear(CLASSES, CLASSES).double()),
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_losses_after_training(name: str) -> None:
    """Validation has the trained values, and evaluation mode; batches of any number of rows."""
    build, batch_of, loss_of = CASES[name]
    torch.manual_seed(0)
    model, loss_fn = build().double(), loss_of()
    rows = _batches(8, 5, 2)
    batches = [batch_of(*pair) for pair in rows]
    program = _compiled(model, batches[0], {"dp": 2}, loss_fn)
    history = _trainer(program, batches[:1] * 2, batches).fit()
    *inputs, labels = batch_of(*_joined(rows))
    if isinstance(loss_fn, nn.Module):
        loss_fn.eval()
    expected = float(loss_fn(model.eval()(*inputs), labels).detach())
    assert history.validations[-1][1]["loss"] == pytest.approx(expected, rel=1e-9)


def _validated(layout: dict[str, Any], name: str) -> tuple[float, float]:
    build, batch_of, loss_of = CASES[name]
    torch.manual_seed(0)
    batches = [batch_of(*pair) for pair in _batches(8, 8)]
    program = _compiled(build().double(), batches[0], layout, loss_of())
    history = _trainer(program, batches[:1] * 3, batches).fit()
    losses = [float(program.evaluate(batch)) for batch in batches]
    return history.validations[-1][1]["loss"], sum(losses) / 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "layout"),
    [("a closure with a trained head", {"dp": 2}), ("a module", {"pp": 2, "microbatches": 2})],
)
def test_processes_validate_with_trained_values(name: str, layout: dict[str, Any]) -> None:
    here = _validated(layout, name)
    there = quintnet.launch(_validated, 2, (layout, name), timeout=300)
    assert here[0] == pytest.approx(here[1], rel=1e-9)
    for rank in there:
        assert rank == pytest.approx(here, rel=1e-9)


REFUSED: dict[str, tuple[Loss, str]] = {
    "the largest": (lambda z, y: F.cross_entropy(z, y, reduction="none").max(), "takes max of all rows"),
    "rows divided by a sum of rows": (
        lambda z, y: (F.cross_entropy(z, y, reduction="none") * (y / y.sum())).sum(),
        "multiplied by",
    ),
    "rows divided by their number": (
        lambda z, y: (F.cross_entropy(z, y, reduction="none") / y.shape[0]).sum(),
        "which is of all rows",
    ),
    "a number of rows that is fixed": (lambda z, y: F.cross_entropy(z, y, reduction="sum") / len(y), "as len.x. does"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_put_together_is_refused_before_training(name: str) -> None:
    loss_fn, text = REFUSED[name]
    torch.manual_seed(0)
    model, batches = Classifier().double(), _batches(8, 8, 4)
    program = _compiled(model, batches[0], {"dp": 2}, loss_fn)
    trainer = _trainer(program, batches)
    with pytest.raises(quintnet.CompileError, match=text) as raised:
        trainer.fit()
    assert raised.value.code == "QN108" and trainer.history.step == 0
    weighted = _trainer(program, batches, loss_weight=lambda batch: len(batch[1]))
    losses = [float(loss_fn(model(x), y).detach()) for x, y in batches]
    expected = (8 * losses[0] + 8 * losses[1] + 4 * losses[2]) / 20
    assert weighted.validate()["loss"] == pytest.approx(expected, rel=1e-9)


def test_what_belongs_to_no_row_must_not_change() -> None:
    batches = [(x, (y, torch.tensor(scale))) for scale, (x, y) in zip((1.0, 2.0), _batches(4, 4), strict=True)]
    program = _compiled(Classifier().double(), batches[0], {"dp": 2}, lambda z, y: F.cross_entropy(z, y[0]) * y[1])
    with pytest.raises(quintnet.InputError, match=r"belongs to no row[\s\S]*loss_weight"):
        program.evaluate_together(batches)


def test_metrics_are_computed_or_refused() -> None:
    class Own(Shifted):
        def forward(self, input_ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
            return super().forward(input_ids, targets)

    ids = torch.randint(11, (4, 6))
    batch = {"input_ids": ids, "targets": ids}
    trainer = _trainer(_compiled(Own().double(), batch, {"dp": 2}), [batch], metrics={"a": quintnet.accuracy})
    with pytest.raises(quintnet.CompileError, match="metrics compare outputs with 'labels'"):
        trainer.fit()
    assert trainer.history.step == 0
    with pytest.raises(quintnet.InputError, match="no batches"):
        validate(trainer.program, [], {})


def test_metrics_with_weights_below_one() -> None:
    torch.manual_seed(0)
    model, batches = Classifier().double(), _batches(8, 3)

    def weighted(outputs: Tensor, labels: Tensor) -> tuple[float, float]:
        weights = WEIGHTS[labels] / 100
        return float((weights * (outputs.argmax(-1) == labels)).sum()), float(weights.sum())

    program = _compiled(model, batches[0], {"dp": 2}, F.cross_entropy)
    x, labels = _joined(batches)
    total, count = weighted(model(x), labels)
    found = validate(program, batches, {"weighted": weighted, "accuracy": quintnet.accuracy})
    assert found["weighted"] == pytest.approx(total / count, rel=1e-9)
    assert found["accuracy"] == pytest.approx(float((model(x).argmax(-1) == labels).double().mean()))


def _sequences(loss: Loss) -> tuple[quintnet.CompiledProgram, tuple[Tensor, Tensor], float]:
    torch.manual_seed(0)
    model, batch = Classifier().double(), _rows(4, 0, 5)
    expected = float(loss(model(batch[0]), batch[1]).detach())
    return _compiled(model, batch, {"dp": 2}, loss), batch, expected


def test_buckets_are_told_what_pads_labels() -> None:
    def per_token(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=-100)

    program, batch, expected = _sequences(per_token)
    for values, text in ((None, "is a sequence, and what pads it"), ({0: 0}, "whether 1"), ({0: 0, 1: 0}, "the loss")):
        trainer = _trainer(program, [batch], buckets=8, bucket_values=values)
        with pytest.raises(quintnet.CompileError, match=text):
            trainer.fit()
        assert trainer.history.step == 0
    trainer = _trainer(program, [batch], buckets=8, bucket_values={0: 0, 1: -100})
    assert trainer.fit().losses == pytest.approx([expected], rel=1e-9)


def test_buckets_of_a_model_that_reads_what_is_padded_are_refused() -> None:
    program, batch, _ = _sequences(lambda z, y: F.cross_entropy(z.mean(1), y[:, 0]))
    with pytest.raises(quintnet.CompileError, match="does not leave out what is padded"):
        _trainer(program, [batch], buckets=8, bucket_values={0: 0, 1: -100}).fit()
