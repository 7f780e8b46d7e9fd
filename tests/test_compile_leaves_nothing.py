"""Compile, the comparison with the module, and verify leave everything of a module as it was: the same objects."""

from __future__ import annotations

import collections
import contextlib
import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import CompileError, Mesh
from quintnet_compiler.equivalence.module_step import Owner, module_step
from quintnet_compiler.guards.python_objects import ObjectSnapshot, objects_kept

BATCH = (torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(4))


class Named(dict[str, Any]):
    """A dict with attributes, as configurations are."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Pair(NamedTuple):
    a: float
    b: list[float]


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


@dataclass
class Config:
    count: int = 0
    table: dict[str, int] = field(default_factory=dict)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


CONTAINERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [1.0, [2.0]],
    "dict": lambda: {"k": 1.0, "inner": {"a": [1]}},
    "tuple": lambda: (1.0, [2.0]),
    "named tuple": lambda: Pair(1.0, [2.0]),
    "deque": lambda: collections.deque([1.0, 2.0]),
    "ordered dict": lambda: collections.OrderedDict(k=1.0),
    "default dict": lambda: collections.defaultdict(list, k=[1.0]),
    "dict of a class": lambda: Named(k=1.0),
    "set": lambda: {1.0},
    "object": lambda: Config(1, {"a": 1}),
    "namespace": lambda: SimpleNamespace(k=[1.0]),
}


def _compiled(model: nn.Module, check: Any = "first", loss_fn: Any = F.cross_entropy) -> quintnet.CompiledProgram:
    return quintnet.compile(model, Mesh(dp=2), BATCH, loss_fn=loss_fn, check=check)


@pytest.mark.parametrize("check", ["first", "off"])
def test_every_attribute_is_the_same_object_after_compile(check: str) -> None:
    model = Plain()
    model.linear.add_module("part", nn.Identity())
    held = {name: make() for name, make in CONTAINERS.items()}
    for module in (model, model.linear.part):  # they share each one
        for name, value in held.items():
            setattr(module, name, value)
    inner = held["dict"]["inner"]
    _compiled(model, check).step(BATCH)
    for module in (model, model.linear.part):
        assert [name for name, value in held.items() if getattr(module, name) is not value] == []
    assert held["dict"]["inner"] is inner and held["list"] == [1.0, [2.0]]


def test_every_attribute_is_the_same_object_after_a_compile_that_fails() -> None:
    class Fails(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.sum())

    model = Fails()
    held = {name: make() for name, make in CONTAINERS.items()}
    for name, value in held.items():
        setattr(model, name, value)
    with pytest.raises(CompileError):
        _compiled(model)
    assert [name for name, value in held.items() if getattr(model, name) is not value] == []


TABLE: dict[str, int] = {}
COUNT = 0


class Notes(Plain):
    """Its first call takes a note at ``place``, which changes nothing of what it computes."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.config, self.slots, self.args, self.space = Config(), Slotted(), Namespace(count=0), SimpleNamespace()
        self.named = Named(count=0)
        self.ordered: collections.OrderedDict[str, int] = collections.OrderedDict()
        self.default: dict[str, int] = collections.defaultdict(int)
        self.deque, self.nested = collections.deque([0], maxlen=3), {"a": [{"b": [0]}]}
        self.hidden = [nn.Linear(1, 1)]
        self.shared = self.config
        counted = [0]
        self.act: Callable[[], None] = lambda: counted.__setitem__(0, 1)
        self.counted = lambda: counted[0]

    def forward(self, x: Tensor) -> Tensor:
        self._note()
        return super().forward(x)

    def _note(self) -> None:
        global COUNT
        match self.place:
            case "attribute":
                self.ready = True
            case "object":
                self.config.count = 1
            case "new attribute of an object":
                self.config.problem = "regression"  # type: ignore[attr-defined]
            case "dict of an object":
                self.config.table["a"] = 1
            case "slots":
                self.slots.count = 1
            case "namespace":
                self.args.count, self.space.k = 1, 1
            case "dict of a class":
                self.named["count"] = 1
            case "dicts":
                self.ordered["k"], self.default["k"] = 1, 1
            case "deque":
                self.deque.append(1)
            case "nested":
                self.nested["a"][0]["b"][0] = 1
            case "hidden module":
                self.hidden[0].eval()
            case "closure":
                self.act()
            case "global":
                COUNT = 1
            case "global dict":
                TABLE["k"] = 1
            case "class":
                type(self).seen = 1

    def notes(self) -> Any:
        """Everything that may have been noted."""
        config = self.config
        return repr((
            getattr(self, "ready", None), vars(config), self.slots.count, self.args, self.space, dict(self.named),
            self.ordered, dict(self.default), self.deque, self.nested, self.hidden[0].training, self.counted(), COUNT,
            TABLE, type(self).seen, self.shared is config,
        ))  # fmt: skip

    seen = 0


PLACES = (
    "attribute", "object", "new attribute of an object", "dict of an object", "slots", "namespace", "dict of a class",
    "dicts", "deque", "nested", "hidden module", "closure", "global", "global dict", "class",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_notes() -> Iterator[None]:
    def clear() -> None:
        global COUNT
        COUNT, Notes.seen = 0, 0
        TABLE.clear()

    clear()
    yield
    clear()


@pytest.mark.parametrize("place", PLACES)
def test_a_step_beside_the_program_leaves_no_note(place: str) -> None:
    model = Notes(place)
    before = model.notes()
    owner = Owner(model, F.cross_entropy, dict(model.named_parameters()), "loss", training=True)
    step = module_step(owner, BATCH, None)
    assert model.notes() == before
    assert step.changes.attributes, "what forward sets is said"
    model(BATCH[0])
    assert model.notes() != before, "plain PyTorch takes the note"


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", PLACES)
def test_compile_leaves_no_note(place: str) -> None:
    """Compiled or refused."""
    model = Notes(place)
    before = model.notes()
    with contextlib.suppress(CompileError):
        program = _compiled(model)
        assert model.notes() == before
        assert program.step(BATCH).isfinite()
    assert model.notes() == before


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["closure", "object", "partial"])
def test_a_loss_function_leaves_no_note(kind: str) -> None:
    log: dict[str, int] = {}

    class Loss:
        def __init__(self) -> None:
            self.log = log

        def __call__(self, z: Tensor, y: Tensor) -> Tensor:
            self.log["k"] = 1
            return F.cross_entropy(z, y)

    def noted(z: Tensor, y: Tensor, into: dict[str, int] | None = None) -> Tensor:
        (log if into is None else into)["k"] = 1
        return F.cross_entropy(z, y)

    losses: dict[str, Any] = {"closure": noted, "object": Loss(), "partial": functools.partial(noted, into=log)}
    model = Plain()
    owner = Owner(model, losses[kind], dict(model.named_parameters()), "loss", training=True)
    module_step(owner, BATCH, None)
    assert log == {}
    log["k"] = 1  # so that compiling does not refuse it
    program = _compiled(model, loss_fn=losses[kind])
    assert program.verify().ok
    assert log == {"k": 1}


def test_what_objects_reach_is_put_back() -> None:
    shared = {"a": 1}
    root = SimpleNamespace(x=[shared, Slotted()], y=(shared,), z=nn.Linear(1, 1))
    with objects_kept({"root": root}) as snapshot:
        shared["a"] = 2
        root.x.append(3)
        root.x[1].count = 5
        root.z.eval()
        del root.y
        root.new = 1
        labels = snapshot.restore()
    assert shared == {"a": 1} and len(root.x) == 2 and root.x[1].count == 0 and root.z.training
    assert root.y[0] is shared and not hasattr(root, "new")
    assert {"root.y", "root.new", "root.x", "root.z.training"} <= set(labels)
    assert ObjectSnapshot.of({"root": root}).restore() == []


class Guesses(nn.Module):
    """As models of transformers for sequence classification: forward sets an option that it finds unset."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.config = nn.Linear(4, 4), Config()
        self.config.problem = None  # type: ignore[attr-defined]

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.config.problem is None:  # type: ignore[attr-defined]
            self.config.problem = "single"  # type: ignore[attr-defined]
        return F.cross_entropy(self.linear(x), labels)


def _on_two_ranks() -> tuple[Any, list[float]]:
    model = Guesses()
    program = quintnet.compile(model, Mesh(dp=2), BATCH)
    problem = model.config.problem  # type: ignore[attr-defined]
    return problem, [float(program.step(BATCH).detach()), float(program.evaluate(BATCH))]


@pytest.mark.slow
def test_ranks_agree_after_one_of_them_has_compared() -> None:
    found = quintnet.launch(_on_two_ranks, 2, timeout=240, collective_timeout=60)
    expected = float(Guesses()(*BATCH).detach())
    assert [problem for problem, _ in found] == [None, None]
    assert all(loss == pytest.approx(expected) for _, losses in found for loss in losses)
