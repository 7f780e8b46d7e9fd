"""A small language model, whose classes do not divide, and losses of its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh
from quintnet_compiler.core.annotations import shape

aten = torch.ops.aten
CLASSES, WIDTH, ROWS, LENGTH, MANY = 63, 16, 8, 12, 1024
Loss = Callable[[Tensor, Tensor], Tensor]


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1))


def flat(logits: Tensor, labels: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **how)


def many(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(30 * torch.tanh(logits / 30), labels, ignore_index=3)


def regularized(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits.flatten(0, 1)
    return F.cross_entropy(rows, labels.flatten()) + 1e-2 * torch.logsumexp(rows, -1).pow(2).mean()


LOSSES: dict[str, Loss] = {
    "shifted": shifted,
    "capped": capped,
    "z-loss": regularized,
    "sum": lambda logits, labels: flat(logits, labels, reduction="sum"),
    "classes second": lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels),
    "smoothed": lambda logits, labels: flat(logits, labels, label_smoothing=0.1),
    "weighted": lambda logits, labels: flat(logits, labels, weight=torch.linspace(0.5, 1.5, CLASSES).double()),
    "soft labels": lambda logits, labels: F.cross_entropy(
        logits.flatten(0, 1), F.one_hot(labels.flatten(), CLASSES).double()
    ),
}


class Language(nn.Module):
    """Tied tables, and as many classes as do not divide."""

    def __init__(self, loss: Loss, tied: bool = True, classes: int = CLASSES) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(classes, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.loss = nn.Linear(WIDTH, classes, bias=not tied), loss
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.body(self.tokens(ids)).tanh()), labels)


def batch() -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(0)
    return {name: torch.randint(0, CLASSES, (ROWS, LENGTH), generator=dice) for name in ("ids", "labels")}


def compiled(
    loss: Loss, axes: dict[str, int], tied: bool = True, classes: int = CLASSES, **options: Any
) -> quintnet.CompiledProgram:
    torch.manual_seed(0)
    return quintnet.compile(Language(loss, tied, classes).double(), Mesh(**axes), batch(), **options)


def products(program: quintnet.CompiledProgram) -> list[int]:
    """The rows of each product with the table of classes, forward."""
    local = program._primary().program.source.local
    made = local.graph.find_nodes(op="call_function", target=aten.linear.default)
    return [shape(node)[0] for node in made if node in local.again]
