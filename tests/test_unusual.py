"""A model in a style of its own: nested outputs, parameters used twice, functional attention, convolutions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

torch.set_num_threads(1)


def attend(x: Tensor, weights: dict[str, Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """Attention as a function, with a learned distance bias and its own softmax."""
    b, t, c = x.shape
    q, k, v = (torch.einsum("btc,dc->btd", x, weights[name]).view(b, t, heads, -1) for name in "qkv")
    scores = torch.einsum("bthd,bshd->bhts", q, k) / (c // heads) ** 0.5
    distance = (torch.arange(t)[:, None] - torch.arange(t)[None, :]).abs().clamp(max=3)
    scores = scores + weights["bias"][:, distance]
    spread = torch.exp(scores - scores.amax(-1, keepdim=True).detach())
    spread = spread / spread.sum(-1, keepdim=True)
    return torch.einsum("bhts,bshd->bthd", spread, v).reshape(b, t, c), spread


class Peculiar(nn.Module):
    """Patches by convolution, the same weights for every layer, an embedding that is also a head and a bias."""

    def __init__(self, width: int = 16, heads: int = 4, depth: int = 3, classes: int = 8) -> None:
        super().__init__()
        first = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
        self.stem = nn.Sequential(first, nn.SiLU(), nn.Conv2d(8, width, 2, 2))
        self.kit = nn.ParameterDict({name: torch.randn(width, width) * 0.2 for name in "qkv"})
        self.kit["bias"] = torch.randn(heads, 4)
        self.prototypes = nn.Parameter(torch.randn(classes, width) * 0.3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.gate = nn.Parameter(torch.zeros(depth, width))
        self.heads, self.depth = heads, depth

    def forward(self, images: Tensor, labels: Tensor, *, deep: bool = True) -> dict[str, object]:
        x = self.stem(images).flatten(2).transpose(1, 2)
        x = x + F.embedding(labels * 0 + torch.arange(labels.shape[-1]) % 8, self.prototypes).mean(1, keepdim=True)
        states: list[Tensor] = []
        for layer in range(self.depth):
            y, spread = attend(F.layer_norm(x, x.shape[-1:]) * (1 + self.gate[layer]), dict(self.kit), self.heads)
            x = x + self.scale * F.glu(torch.cat([y, y.flip(-1) * self.scale], -1))
            states.append(x)
        pooled = torch.stack(states if deep else states[-1:]).mean(0).amax(1)
        logits = pooled @ self.prototypes.t()
        one = F.cross_entropy(logits, labels[:, 0])
        two = F.multi_margin_loss(logits, labels[:, 1], reduction="none").mean()
        penalty = 1e-3 * self.prototypes.square().sum() + 1e-3 * torch.logsumexp(logits, -1).square().mean()
        return {"loss": one + 0.1 * two + penalty, "aux": {"logits": logits, "maps": (spread, [states[0]])}}


def _batch() -> dict[str, object]:
    images, labels = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(0, 8, (8, 4))
    return {"images": images, "labels": labels, "deep": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [{"dp": 4}, {"tp": 4}, {"cp": 2}, {"pp": 3}, {"pp": 2, "dp": 2, "tp": 2}, {"dp": 2, "cp": 2, "tp": 2}],
    ids=str,
)
def test_a_peculiar_model(axes: dict[str, int]) -> None:
    options = {"microbatches": 2} if "pp" in axes or "dp" in axes else {}
    program = quintnet.compile(Peculiar().double(), quintnet.Mesh(**axes), _batch(), **options)  # type: ignore[arg-type]
    report = program.verify()
    assert report.ok and not report.notes, str(report)


@pytest.mark.slow
def test_flags_of_a_batch_are_part_of_the_program() -> None:
    model = Peculiar().double()
    program, batch = quintnet.compile(model, quintnet.Mesh(dp=2), _batch()), {**_batch(), "deep": False}
    assert float(program.evaluate(batch)) == pytest.approx(float(model(**batch)["loss"].detach()), abs=1e-12)


class Summed(nn.Module):
    """Two parameters that have one gradient: both are settled, and neither changes the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.first, self.second = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * (self.first + self.second)).square().mean()


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_parameters_that_share_a_gradient(axes: dict[str, int]) -> None:
    program = quintnet.compile(Summed(), quintnet.Mesh(**axes), (torch.randn(8, 8),), microbatches=2)
    assert program.verify().ok


class Steps(nn.Module):
    """A recurrence that writes each of 16 positions: the check of a derivative uses operands of fewer positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).transpose(1, 2).clone()
        for t in range(9, 13):
            h[..., t] = h[..., t - 1].clone() * 0.5 + h[..., t].clone().sin()
        return self.last(h.transpose(1, 2)).square().mean()


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}], ids=str)
def test_writes_into_positions_by_number(axes: dict[str, int]) -> None:
    x = torch.randn(64, 16, 32, dtype=torch.float64)
    report = quintnet.compile(Steps().double(), quintnet.Mesh(**axes), (x,)).verify()
    assert report.ok and report.worst.error < 1e-12, str(report)
