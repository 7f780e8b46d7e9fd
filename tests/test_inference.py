"""Forward-only programs: on every layout, the outputs of the model in evaluation mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

from .models import CASES, Block, build

pytestmark = pytest.mark.usefixtures("shared_captures")
torch.set_num_threads(1)


class Statistics(nn.Module):
    """What differs between training and evaluation: BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.block, self.drop, self.head = Block(8, 2, causal=False), nn.Dropout(0.5), nn.Linear(8, 4)
        self.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
        self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        return self.head(self.drop(self.block(x)).mean(dim=1))


def _model(name: str) -> tuple[nn.Module, Any]:
    """A model, and what it takes."""
    if name == "statistics":
        torch.manual_seed(0)
        model = Statistics().double()
        return model, (torch.randn(8, 3, 4, 4, dtype=torch.float64),)
    batch = CASES[name].batch(8)
    model = build(name)
    if name.startswith("hf"):
        return model, {"input_ids": batch[0] if isinstance(batch, tuple) else batch["input_ids"]}
    return model, batch[:-1] if CASES[name].loss_fn else batch


def _outputs(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [x for x in found.to_tuple() if isinstance(x, Tensor)]


LAYOUTS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("statistics", {"dp": 2, "tp": 2}, {}),
    ("vit", {"dp": 2, "pp": 2}, {"zero": 3, "microbatches": 2}),
    ("hf_llama_double", {"cp": 2, "tp": 2}, {"context": "ring"}),
    ("hf_gpt2_double", {"pp": 2}, {"microbatches": 4, "schedule": "zb-v", "virtual_stages": 2}),
    ("mixture", {"ep": 2, "dp": 2}, {}),
]
MORE: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("statistics", {"pp": 2}, {"microbatches": 4}),
    ("vit", {"pp": 2, "tp": 2}, {"microbatches": 2}),
    ("vit", {"dp": 2}, {"zero": 3}),
    ("encoder", {"tp": 2}, {"sequence_parallel": False}),
    ("gpt", {"cp": 2, "dp": 2}, {}),
    ("hf_llama_double", {"pp": 2, "dp": 2}, {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 2}),
    ("cnn", {"pp": 3}, {"microbatches": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
    ids=str,
)
def test_outputs_are_the_models_own(name: str, axes: dict[str, int], options: dict[str, Any]) -> None:
    model, inputs = _model(name)
    with torch.no_grad():
        model.eval()
        expected = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    program = quintnet.compile(model, quintnet.Mesh(**axes), inputs, training=False, **options)
    found = program(**inputs) if isinstance(inputs, dict) else program(*inputs)
    for a, b in zip(_outputs(found), _outputs(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    for rank in program.ranks:
        for stage in rank.stages:
            assert not stage.saved and not stage.backward.outputs and not stage.gradients
            assert "accumulate" not in "".join(piece.code for piece in stage.pieces.values())
    assert all(p.grad is None for p in program.parameters())
    assert all(p.requires_grad for p in model.parameters())  # the model itself is as before


class Scaled(nn.Module):
    """Has constants of its own in either mode, which export gives the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0]) if self.training else torch.tensor([10.0, 20.0, 30.0, 40.0])
        return self.linear(x) * scale


@pytest.mark.slow
def test_evaluation_has_constants_of_its_own() -> None:
    torch.manual_seed(0)
    model, x, y = Scaled(), torch.randn(4, 4), torch.randn(4, 4)
    program = quintnet.compile(model, quintnet.Mesh(dp=2), (x, y), loss_fn=F.mse_loss)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(program.evaluate((x, y)), F.mse_loss(model(x), y))
        torch.testing.assert_close(program(x), model(x))
        model.train()
        torch.testing.assert_close(program.step((x, y)), F.mse_loss(model(x), y))
    assert program.verify().ok


@pytest.mark.slow
def test_other_numbers_of_rows_and_the_loss_follow() -> None:
    case, model = CASES["vit"], build("vit")
    images, labels = case.batch(12)
    program = quintnet.compile(
        model, quintnet.Mesh(pp=2, tp=2), (images[:8],), loss_fn=case.loss_fn, training=False, microbatches=4
    )
    with torch.no_grad():
        logits = model.eval()(images)
    torch.testing.assert_close(program(images), logits, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(program(images[:3]), logits[:3], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(program.evaluate((images, labels)), F.cross_entropy(logits, labels))


def test_a_lazy_program_is_compiled_by_what_comes_first() -> None:
    case, model = CASES["mlp"], build("mlp")
    x, labels = case.batch(4)
    with torch.no_grad():
        logits = model(x)
    program = quintnet.compile(model, quintnet.Mesh(dp=2), loss_fn=case.loss_fn, training=False)
    torch.testing.assert_close(program.evaluate((x, labels)), F.cross_entropy(logits, labels))
    torch.testing.assert_close(program(x), logits, rtol=1e-9, atol=1e-11)


def test_what_only_training_has_is_refused() -> None:
    case, model = CASES["mlp"], build("mlp")
    program = quintnet.compile(model, quintnet.Mesh(dp=2), case.batch(4)[:1], loss_fn=case.loss_fn, training=False)
    for call in (lambda: program.step(case.batch(4)), lambda: program.verify(case.batch(4))):
        with pytest.raises(quintnet.CompileError, match="QN107"):
            call()


def test_one_value_may_be_returned_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            made = self.inner(x)
            return made, x, made

    model, x = Twice(), torch.randn(8, 4)
    for mesh in (quintnet.Mesh(dp=2), quintnet.Mesh(tp=2)):
        found = quintnet.compile(model, mesh, (x,), training=False)(x)
        for ours, theirs in zip(found, model(x), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)
