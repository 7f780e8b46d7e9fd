"""Any ZeRO stage with any recomputing, any schedule, any precision and any optimizer, on any mesh: the unsplit model's
losses, gradients and weights, step after step. Cases are drawn from the whole product."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, cycle, islice
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

import quintnet
from quintnet import CompileError, Mesh
from quintnet_compiler.equivalence.verify import LIMITS, SLACK

from .models import CASES, EXPERTS, build, reference, worst_error

pytestmark = pytest.mark.usefixtures("shared_captures")

torch.set_num_threads(1)
ROWS, STEPS = 8, 3
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}  # of sums in another order; a lost term would be about 1
Tensors = dict[str, Tensor]

# an epsilon near the gradients' own size: AdamW divides by them, and a smaller one would show rounding alone
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-3, weight_decay=0.1),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-3, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=3e-2, momentum=0.9, weight_decay=0.01),
}
STAGES: dict[str, tuple[int, ...]] = {"gpipe": (1, 2, 3), "1f1b": (1,), "interleaved": (2, 3), "zb-h1": (1,)}
STAGES |= {"zb-v": (2,), "dualpipe-v": (2,), "synthesized": (1, 2)}
PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.float32}


@dataclass(frozen=True)
class Point:
    """One of the product: what to compile and how to train it."""

    model: str
    axes: dict[str, int]
    precision: str
    optimizer: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        mesh = "-".join(f"{axis}{size}" for axis, size in self.axes.items())
        options = " ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.model} {mesh} {self.precision} {self.optimizer} {options}"

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision]

    @property
    def pairs(self) -> set[tuple[object, object]]:
        """Every two decisions that meet here."""
        decided: list[object] = [("model", self.model), self.precision, self.optimizer]
        decided += [(key, str(value)) for key, value in (*self.axes.items(), *self.options.items())]
        return set(combinations(sorted(decided, key=str), 2))


def drawn(dice: random.Random, precision: str) -> Point:
    """Any legal point."""
    while True:
        sizes = {"pp": (1, 2, 2, 3), "dp": (1, 2, 2, 4), "ep": (1, 1, 2), "cp": (1, 1, 2), "tp": (1, 2, 2, 4)}
        axes = {axis: size for axis, some in sizes.items() if (size := dice.choice(some)) > 1}
        if not 2 <= prod(axes.values()) <= 8:
            continue
        name = dice.choice(["mlp", "gpt", "vit", "encoder", "cnn", "mixture"])
        if "cp" in axes:
            name = "gpt"
        options: dict[str, Any] = {
            "microbatches": dice.choice([n for n in (1, 2, 4) if n * axes.get("dp", 1) * axes.get("ep", 1) <= ROWS]),
            "recompute": dice.choice(["none", "selective", "full", "auto"]),
            "loss_chunks": dice.choice([1, 1, 3]),
            "offload": dice.choice([(), ("activations",)]),
        }
        if "pp" in axes:
            options["schedule"] = dice.choice(sorted(STAGES))
            options["virtual_stages"] = dice.choice(STAGES[options["schedule"]])
            if axes["pp"] * options["virtual_stages"] > 6:
                continue
        data = [axis for axis in ("dp", "ep", "cp") if axis in axes]
        if data:
            options["zero"] = dice.randrange(4)
            if options["zero"]:
                some = [axis for axis in data if dice.random() < 0.7] or data[:1]
                options["zero_axes"] = tuple(some)
                options["reshard_after_forward"] = dice.random() < 0.7
        if name == "mixture" and data:
            options["experts"] = tuple(axis for axis in ("dp", "ep") if axis in axes and dice.random() < 0.7)
            if prod(axes[axis] for axis in options["experts"]) > EXPERTS:
                continue
        if "tp" in axes:
            options["sequence_parallel"] = dice.random() < 0.6
            options["async_tp"] = dice.random() < 0.4
        if "cp" in axes:
            options["context"] = dice.choice(["all_gather", "ulysses", "ring"])
        if precision == "bf16":
            options |= {"precision": "bf16", "sum_dtype": dice.choice(["value", "float32"])}
        return Point(name, axes, precision, dice.choice(sorted(OPTIMIZERS)), options)


def points(count: int) -> Iterator[Point]:
    """The same at every call: of several that are drawn, each time the one in which most decisions meet first."""
    dice, met = random.Random(0), set[tuple[object, object]]()
    for precision in islice(cycle(PRECISIONS), count):
        found = max((drawn(dice, precision) for _ in range(20)), key=lambda point: len(point.pairs - met))
        met |= found.pairs
        yield found


def _batch(name: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in CASES[name].batch(ROWS))


@dataclass(frozen=True)
class Trained:
    """What some steps gave: each step's loss and gradients, and the weights in the end."""

    losses: list[float]
    gradients: list[Tensors]
    weights: Tensors


@cache
def unsplit(name: str, dtype: torch.dtype, optimizer: str) -> Trained:
    """The module itself."""
    model, batch = build(name).to(dtype), _batch(name, dtype)
    made = OPTIMIZERS[optimizer](model.parameters())
    losses, gradients = [], []
    for _ in range(STEPS):
        loss, found = reference(model, batch, CASES[name].loss_fn)
        losses.append(float(loss))
        gradients.append(found)
        made.step()
    return Trained(losses, gradients, {n: p.detach().clone() for n, p in model.named_parameters()})


def compiled(point: Point) -> quintnet.CompiledProgram:
    """A budget of saved bytes is one that can just be kept."""

    def once(**more: Any) -> quintnet.CompiledProgram:
        model, batch = build(point.model).to(point.dtype), _batch(point.model, point.dtype)
        loss_fn = CASES[point.model].loss_fn
        return quintnet.compile(model, Mesh(**point.axes), batch, loss_fn=loss_fn, **point.options, **more)

    if point.options.get("recompute") != "auto":
        return once()
    with pytest.raises(CompileError) as least:
        once(plan={"activation_memory_budget": 1e-9})
    assert least.value.code == "QN213"
    return once(plan={"activation_memory_budget": float(str(least.value.fix).split()[1])})


def trained(point: Point) -> Trained:
    """By every rank, in this process, with an optimizer that knows nothing of layouts."""
    program, batch = compiled(point), _batch(point.model, point.dtype)
    made = OPTIMIZERS[point.optimizer](program.parameters())
    losses, gradients = [], []
    for _ in range(STEPS):
        losses.append(float(program.step(batch)))
        gradients.append({n: p.grad.full_tensor().clone() for n, p in program.named_parameters() if p.grad is not None})  # type: ignore[attr-defined]
        made.step()
        program.zero_grad()
    return Trained(losses, gradients, {n: p.detach().full_tensor().clone() for n, p in program.named_parameters()})  # type: ignore[attr-defined]


@cache
def one_rank(name: str, optimizer: str, passes: int) -> Trained:
    """In 16 bits, in so many microbatches: the gradient of each is rounded."""
    return trained(Point(name, {}, "bf16", optimizer, {"precision": "bf16", "microbatches": passes}))


def _distance(found: Tensors, exact: Tensors) -> float:
    assert found.keys() == exact.keys()
    return float(torch.stack([(found[n].double() - x).square().sum() for n, x in exact.items()]).sum().sqrt())


def deviation(point: Point, found: Trained) -> float:
    """How far the worst loss, gradient or weight is from the unsplit model's, as a share of what is allowed.

    In 16 bits, all the model's elements together may be half as far again from those of the module in float64 as those
    of one rank that takes as many rows at once in the same precision: it rounds as often, in another order. Gradients
    after the first step are of other weights already, which makes more of that: twice as far, as for ``verify``.
    """
    assert {g.dtype for step in found.gradients for g in step.values()} == {point.dtype}
    if point.precision != "bf16":
        expected, limit = unsplit(point.model, point.dtype, point.optimizer), EXACT[point.dtype]
        errors = [abs(a - b) / abs(b) for a, b in zip(found.losses, expected.losses, strict=True)]
        errors += [worst_error(a, b)[0] for a, b in zip(found.gradients, expected.gradients, strict=True)]
        return max(*errors, worst_error(found.weights, expected.weights)[0]) / limit
    exact = unsplit(point.model, torch.float64, point.optimizer)
    passes = prod(point.axes.get(axis, 1) for axis in ("dp", "ep")) * point.options["microbatches"]
    own = one_rank(point.model, point.optimizer, passes)
    pairs = zip(found.gradients, own.gradients, exact.gradients, strict=True)
    assert max(abs(a - b) / abs(b) for a, b in zip(found.losses, exact.losses, strict=True)) < LIMITS[torch.bfloat16]
    first, *later = [_distance(a, c) / _distance(b, c) for a, b, c in pairs]
    weights = _distance(found.weights, exact.weights) / _distance(own.weights, exact.weights)
    return max(first / 1.5, weights / 1.5, *(ratio / SLACK for ratio in later))


ALL = list(points(216))


@pytest.mark.sample(5)
@pytest.mark.parametrize("point", [*ALL[:16], *(pytest.param(p, marks=pytest.mark.slow) for p in ALL[16:])], ids=str)
def test_trains_as_the_unsplit_model(point: Point) -> None:
    found = deviation(point, trained(point))
    print(f"deviation {found:.3g} of what is allowed: {point}")
    assert found < 1


def _each(numbers: Sequence[int]) -> list[Trained]:
    torch.set_num_threads(1)
    return [trained(ALL[number]) for number in numbers]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "count"), [(2, 3), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((4, 12), (8, 12)))]
)
def test_processes_train_as_the_unsplit_model(ranks: int, count: int) -> None:
    """Where each rank's optimizer has the slices that are its own."""
    numbers = [n for n, point in enumerate(ALL) if prod(point.axes.values()) == ranks][-count:]
    assert len(numbers) == count
    for number, *found in zip(numbers, *quintnet.launch(_each, ranks, (numbers,), timeout=540), strict=True):
        point, first = ALL[number], found[0]
        assert len({tuple(one.losses) for one in found}) == 1  # the same bits on every rank
        joined = [{n: g for one in found for n, g in one.gradients[step].items()} for step in range(STEPS)]
        weights = {n: w for one in found for n, w in one.weights.items()}
        share = deviation(point, Trained(first.losses, joined, weights))
        print(f"deviation {share:.3g} of what is allowed: {point}")
        assert share < 1
