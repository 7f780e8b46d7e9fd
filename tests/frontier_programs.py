"""Random modules that mix what lies between a module and its program, with random layouts.

A seed makes a few pieces, each a module from [rows, 4, 8] to the same shape, most of them with something that a trace
of one call does not show: modes, hooks, derivatives of the author's own, state that forward changes, attributes that
change between steps. Whatever they are, training equals the plain module, or is refused.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .frontier import Case, Verdict, compare

ROWS, LENGTH, WIDTH, CLASSES = 8, 4, 8, 5
MESHES: tuple[Mapping[str, int], ...] = (
    {"dp": 1}, {"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"tp": 2, "pp": 2}, {"dp": 4},
)  # fmt: skip


# -- derivatives of the author's own


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -ctx.factor * gradients[0], None


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0].clamp(-1e-3, 1e-3) * (x.abs() < 2)


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 0.5 * gradients[0] * x.cos() - 2 * gradients[1] * x.sin()


# -- pieces


class Piece(nn.Module):
    """[rows, LENGTH, WIDTH] to the same."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def before(self, step: int) -> None:
        """What the author does in front of a step."""


class Plain(Piece):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(x))


class Wide(Piece):
    def __init__(self, dice: random.Random) -> None:
        super().__init__(dice)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act = dice.choice([F.gelu, F.silu, torch.relu, torch.sigmoid])

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.down(self.act(self.up(x)))


class Tied(Piece):
    def __init__(self, dice: random.Random) -> None:
        super().__init__(dice)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.lin.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.lin(x)))


class Normed(Piece):
    """Norms and convolutions whose gradients arrive transposed, expanded or in slices."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(dice)
        self.norm = nn.GroupNorm(dice.choice([1, 2, 4]), WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1)
        self.layer = nn.LayerNorm(WIDTH)
        self.way = dice.randrange(5)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        if self.way == 0:
            return self.lin(self.norm(self.conv(y)).transpose(1, 2))
        if self.way == 1:
            return x + self.norm(self.conv(y)).mean(2).unsqueeze(1).expand(-1, LENGTH, -1)
        if self.way == 2:
            return torch.cat([self.norm(y)[:, ::2], self.conv(y)[:, 1::2]], 1).transpose(1, 2)
        if self.way == 3:
            return self.lin(self.layer(self.norm(self.conv(y)).permute(0, 2, 1)).flip(1))
        z = self.conv(y.unsqueeze(-1).contiguous(memory_format=torch.channels_last).squeeze(-1))
        return self.norm(F.relu(z)).permute(0, 2, 1)


class Views(Piece):
    def __init__(self, dice: random.Random) -> None:
        super().__init__(dice)
        self.way = dice.randrange(5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        if self.way == 0:
            return y.roll(1, 1) * x.select(1, 0).unsqueeze(1).expand_as(y)
        if self.way == 1:
            return torch.stack(y.unbind(1)[::-1], 1)
        if self.way == 2:
            return y.view(y.shape[0], LENGTH, 2, WIDTH // 2).transpose(2, 3).reshape(y.shape)
        if self.way == 3:
            first, second = y.chunk(2, -1)
            return torch.cat([second.sigmoid() * first, first], -1)
        return y.reshape_as(x).view_as(x)


class Checkpointed(Piece):
    def __init__(self, dice: random.Random) -> None:
        super().__init__(dice)
        self.reentrant = dice.random() < 0.5

    def _inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) * x

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self._inner, x, use_reentrant=self.reentrant)
        return found


class Detached(Piece):
    def __init__(self, dice: random.Random) -> None:
        super().__init__(dice)
        self.way = dice.randrange(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        if self.way == 0:
            return y + (y.round() - y).detach()
        if self.way == 1:
            with torch.no_grad():
                scale = y.abs().amax(-1, keepdim=True) + 1
            return y / scale
        return y * x.detach().sigmoid()


class Dropped(Piece):
    def __init__(self, dice: random.Random) -> None:
        super().__init__(dice)
        self.drop = nn.Dropout(0.4)
        self.way = dice.randrange(5)
        if self.way == 1:
            self.drop.eval()

    def before(self, step: int) -> None:
        if self.way == 2:
            self.drop.p = 0.4 + 0.1 * step
        if self.way == 3:
            self.drop.train(step != 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.lin(x))
        return F.dropout(y, 0.3, self.training) if self.way == 4 else y


class Teacher(Piece):
    def __init__(self, dice: random.Random) -> None:
        super().__init__(dice)
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh())
        self.teacher.requires_grad_(False)
        if dice.random() < 0.7:
            self.teacher.eval()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return self.lin(x) - target


class EvalNormed(Piece):
    """A frozen BatchNorm."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(dice)
        self.norm = nn.BatchNorm1d(WIDTH).eval()
        self.norm.running_mean.copy_(torch.linspace(-1, 1, WIDTH))  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Thawed(Piece):
    def __init__(self, dice: random.Random) -> None:
        super().__init__(dice)
        self.first = dice.random() < 0.5
        self.lin.requires_grad_(self.first)

    def before(self, step: int) -> None:
        if step == 1:
            self.lin.weight.requires_grad_(not self.first)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lin(x).sin()


class Own(Piece):
    def __init__(self, dice: random.Random) -> None:
        super().__init__(dice)
        self.way = dice.randrange(5)

    def _apply_own(self, y: Tensor) -> Tensor:
        if self.way == 0:
            return _Round.apply(y)  # type: ignore[no-any-return]
        if self.way == 1:
            return _Reverse.apply(y, 0.5)  # type: ignore[no-any-return]
        if self.way == 2:
            return _Clip.apply(y)  # type: ignore[no-any-return]
        a, b = _Pair.apply(y)
        return a * b if self.way == 3 else a

    def forward(self, x: Tensor) -> Tensor:
        return self._apply_own(self.lin(x)) + x


class OwnCheckpointed(Own):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(lambda z: self._apply_own(self.lin(z)), x, use_reentrant=False)
        return found


def _halved(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


class Hooked(Piece):
    def __init__(self, dice: random.Random) -> None:
        super().__init__(dice)
        self.way = dice.randrange(8)
        if self.way == 2:
            self.lin.weight.register_hook(lambda g: g * 0.5)
        if self.way == 3:
            self.lin.weight.register_post_accumulate_grad_hook(_halved)
        if self.way == 4:
            self.lin.register_forward_hook(lambda module, given, out: out * 2)
        if self.way == 5:
            self.lin.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
        if self.way == 6:
            self.lin.register_full_backward_hook(lambda module, into, out: (into[0] * 3,))
        if self.way == 7:
            self.lin.register_full_backward_pre_hook(lambda module, out: (out[0] * 3,))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        if self.way == 0 and y.requires_grad:
            y.register_hook(lambda g: g * 3)
        if self.way == 1 and y.requires_grad:
            y.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        return y.tanh()


class InPlace(Piece):
    def __init__(self, dice: random.Random) -> None:
        super().__init__(dice)
        self.way = dice.randrange(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        if self.way == 0:
            y.mul_(0.5).add_(x)
        elif self.way == 1:
            y[:, 0] *= 2
        elif self.way == 2:
            y = F.relu(y, inplace=True)
        elif self.way == 3:
            out = torch.zeros_like(y)
            for t in range(LENGTH):
                out[:, t] = y[:, t].tanh()
            y = out
        elif self.way == 4:
            y.transpose(1, 2)[:, 1:].sigmoid_()
        else:
            y = y.clone()
            y.masked_fill_(x > 1, 0.0)
        return y


class Stateful(Piece):
    def __init__(self, dice: random.Random) -> None:
        super().__init__(dice)
        self.register_buffer("ema", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.way = dice.randrange(6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.way == 4:
                self.lin.weight.clamp_(-0.2, 0.2)
            elif self.way == 5:
                self.lin.weight.copy_(F.normalize(self.lin.weight, dim=1))
        y = self.lin(x)
        if self.way == 0:
            self.ema = 0.9 * self.ema + 0.1 * y.detach().mean((0, 1))
        elif self.way == 1:
            with torch.no_grad():
                self.ema.mul_(0.9).add_(0.1 * y.mean((0, 1)))
        elif self.way == 2:
            self.count += 1
        elif self.way == 3:
            self.count = self.count + 1
        return y - self.ema + 0.01 * self.count


class Pythonic(Piece):
    def __init__(self, dice: random.Random) -> None:
        super().__init__(dice)
        self.way = dice.randrange(7)
        self.beta, self.calls, self.seen, self.options = 0.5, 0, [1.0], {"scale": 1.0}

    def before(self, step: int) -> None:
        if self.way == 0:
            self.beta = 0.5 + step
        if self.way == 1:
            self.options["scale"] = 1.0 + step
        if self.way == 6:
            self.train(step != 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        if self.way == 2:
            self.calls += 1
            y = y * self.calls
        if self.way == 3:
            self.seen.append(1.0)
            y = y + len(self.seen)
        if self.way == 4 and random.random() < 0.5:
            y = y * 2
        if self.way == 5:
            y = y * (1 + random.random())
        if self.way == 6:
            y = y * (2 if self.training else 1)
        return y * self.beta * self.options["scale"]


HARMLESS: tuple[type[Piece], ...] = (Plain, Wide, Tied, Normed, Views, Detached)
FEATURES: tuple[type[Piece], ...] = (
    Normed, Views, Checkpointed, Detached, Dropped, Teacher, EvalNormed, Thawed, Own, OwnCheckpointed, Hooked, InPlace,
    Stateful, Pythonic,
)  # fmt: skip


# -- whole modules, and what they are trained for


class Mixed(nn.Module):
    """``head``: how the module ends: ``"logits"`` [rows, CLASSES] for a loss function, or ``"loss"``."""

    def __init__(self, pieces: list[Piece], image: bool, head: str, whole_eval: bool, changes_batch: bool) -> None:
        super().__init__()
        self.pieces, self.image, self.head, self.changes_batch = nn.ModuleList(pieces), image, head, changes_batch
        if image:
            self.stem: nn.Module = nn.Conv2d(3, WIDTH, 3, padding=1)
            self.norm = nn.GroupNorm(2, WIDTH)
        else:
            self.stem = nn.Linear(6, WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)
        if whole_eval:
            self.eval()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.changes_batch:
            x /= 2
        h = self.stem(x)
        if self.image:
            h = F.silu(self.norm(h)).flatten(2).transpose(1, 2)[:, :LENGTH]
        for piece in self.pieces:
            h = piece(h)
        logits = self.out(h.mean(1))
        if self.head == "logits":
            return logits
        return F.cross_entropy(logits, labels) + 0.1 * h.square().mean()

    def before(self, step: int) -> None:
        for piece in self.pieces:
            piece.before(step)


class Extra(nn.Module):
    """A loss with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.factor = nn.Linear(CLASSES, CLASSES), 0.5

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(logits), labels)

    def bound(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.factor * self(logits, labels)


def of(extra: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = extra(logits, labels)
    return loss


def second_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits - F.one_hot(labels, CLASSES)).square().mean()


@dataclass(frozen=True)
class Generated:
    """A case, the mesh that it is tried on, and what it is made of."""

    seed: int
    case: Case
    axes: Mapping[str, int]
    words: str

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.words} on {dict(self.axes)} with {dict(self.case.options)}"


def generate(seed: int) -> Generated:
    """The same module, layout and options for the same seed, on every machine."""
    dice = random.Random(f"frontier {seed}")
    kinds = [dice.choice(FEATURES) for _ in range(dice.choice([1, 1, 2]))]
    kinds += [dice.choice(HARMLESS) for _ in range(dice.choice([1, 2]))]
    dice.shuffle(kinds)
    number, image = dice.random(), dice.random() < 0.3
    whole_eval, changes_batch = dice.random() < 0.1, dice.random() < 0.05
    loss = dice.choice(["inside", "function", "function", "module", "partial", "closure", "bound"])

    def build() -> Any:
        own = random.Random(number)
        head = "loss" if loss == "inside" else "logits"
        model = Mixed([kind(own) for kind in kinds], image, head, whole_eval, changes_batch)
        extra = Extra()
        made: dict[str, tuple[Callable[..., Tensor] | None, Mapping[str, nn.Module]]] = {
            "inside": (None, {}),
            "function": (F.cross_entropy, {}),
            "module": (extra, {}),
            "partial": (functools.partial(of, extra), {"extra": extra}),
            "closure": (
                lambda logits, labels: extra(logits, labels) + extra.head.weight.square().sum(),
                {"extra": extra},
            ),
            "bound": (extra.bound, {"extra": extra}),
        }
        return model, *made[loss]

    others = (second_loss,) if loss == "function" and dice.random() < 0.25 else ()
    evaluates = dice.random() < 0.25
    axes = dice.choice(MESHES)
    options: dict[str, Any] = {}
    if dice.random() < 0.3:
        options["microbatches"] = 2
    if axes.get("dp", 1) > 1 and dice.random() < 0.3:
        options["zero"] = dice.choice([1, 2, 3])
    if dice.random() < 0.2:
        options["recompute"] = dice.choice(["selective", "full"])
    if "tp" in axes and dice.random() < 0.3:
        options["sequence_parallel"] = True
    shape = (3, 4, 4) if image else (LENGTH, 6)
    words = f"{', '.join(_described(kind, piece) for kind, piece in _names(kinds, number))}; loss {loss}"
    words += f"{', image' * image}{', eval' * whole_eval}{', changes its batch' * changes_batch}"
    words += f"{', two programs' * len(others)}{', evaluates' * evaluates}"

    def batch(step: int) -> Any:
        source = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(ROWS, *shape, generator=source)
        return x, torch.randint(CLASSES, (ROWS,), generator=source)

    case = Case(build, batch, None, Mixed.before, {}, options, others, evaluates)  # type: ignore[arg-type]
    return Generated(seed, case, axes, words)


def _names(kinds: list[type[Piece]], number: float) -> list[tuple[type[Piece], Piece]]:
    own = random.Random(number)
    with torch.random.fork_rng(devices=[]):
        return [(kind, kind(own)) for kind in kinds]


def _described(kind: type[Piece], piece: Piece) -> str:
    way = getattr(piece, "way", None)
    return kind.__name__ if way is None else f"{kind.__name__} {way}"


def judged(seed: int) -> tuple[Generated, Verdict]:
    """What the seed makes, and whether it trains as the plain module does."""
    made = generate(seed)
    return made, compare(made.case, made.axes)


def wrong(verdict: Verdict) -> bool:
    """Whether this is neither equal nor refused for a reason (a failed check of the compiler is none)."""
    return verdict.kind not in ("equal", "refused") or verdict.code == "QN209"
