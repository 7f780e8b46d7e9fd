"""Batches that hold dataclasses, mappings and sequences of other classes, and registered containers."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh
from quintnet_compiler.compat.torch import pytree

from .each_layout import LAYOUTS, train_as_plain

torch.set_num_threads(1)
X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
BIAS, Y = X[:, :5].sin(), torch.tensor([0, 3, 2, 4, 1, 1, 0, 4])


@dataclasses.dataclass
class Plain:
    x: Tensor
    bias: Tensor | None = None
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    bias: Tensor | None = None
    scale: float = 1.0


@dataclasses.dataclass(slots=True)
class Slots:
    x: Tensor
    bias: Tensor | None = None
    scale: float = 1.0


@dataclasses.dataclass
class Derived(Plain):
    """With an attribute that is no field."""

    def __post_init__(self) -> None:
        self.double = self.scale * 2
        self.scale = self.double / 2


@dataclasses.dataclass
class Registered(Plain):
    pass


torch.export.register_dataclass(Registered)


class Tuple(NamedTuple):
    x: Tensor
    bias: Tensor | None = None
    scale: float = 1.0


class Container:
    def __init__(self, x: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> None:
        self.x, self.bias, self.scale = x, bias, scale


class Unknown(Container):
    pass


pytree.register_pytree_node(
    Container, lambda c: ([c.x, c.bias], c.scale), lambda parts, scale: Container(*parts, scale)
)


class Attributes(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__


class Row(list):  # type: ignore[type-arg]
    pass


class Counted(dict):  # type: ignore[type-arg]
    """A mapping that its own class does not make again."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, given: Any) -> Tensor:
        if isinstance(given, list):
            x, bias, scale = given
        elif isinstance(given, (collections.abc.Mapping)):
            x, bias, scale = given["x"], given["bias"], given["scale"]
        else:
            x, bias, scale = given.x, given.bias, given.scale
        logits: Tensor = self.last(torch.tanh(self.first(x))) * scale
        return logits if bias is None else logits + bias


def _encoded(content: dict[str, Any]) -> Any:
    return pytest.importorskip("transformers").BatchEncoding(content)


MAKERS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (Plain, Frozen, Slots, Derived, Registered, Tuple, Container)},
    "user dict": lambda *values: collections.UserDict(zip(("x", "bias", "scale"), values, strict=True)),
    "ordered dict": lambda *values: collections.OrderedDict(zip(("x", "bias", "scale"), values, strict=True)),
    "attributes": lambda *values: Attributes(zip(("x", "bias", "scale"), values, strict=True)),
    "encoding": lambda *values: _encoded(dict(zip(("x", "bias", "scale"), values, strict=True))),
    "list": lambda *values: list(values),
    "own list": lambda *values: Row(values),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MAKERS)
def test_containers_train_as_plain(kind: str, layout: str) -> None:
    make = MAKERS[kind]
    batches = [(make(X, BIAS, 2.0), Y), (make(X, BIAS, 2.0), Y), (make(X, None, 0.5), Y)]
    train_as_plain(Net().double(), layout, batches, F.cross_entropy)


def test_outputs_of_a_container_and_the_proof_of_a_program() -> None:
    model = Net().double()
    program = quintnet.compile(model, Mesh(dp=2), (Plain(X, BIAS), Y), loss_fn=F.cross_entropy)
    assert torch.allclose(program(Plain(X, BIAS)), model(Plain(X, BIAS)).detach())
    assert program.verify().ok


def test_a_container_inside_of_others() -> None:
    class Nested(Net):
        def forward(self, given: Any) -> Tensor:
            return super().forward(given["parts"][0])

    batch = ({"parts": [Plain(X, BIAS, 2.0)]}, Y)
    train_as_plain(Nested().double(), "dp2", [batch] * 2, F.cross_entropy)


@pytest.mark.parametrize("alone", [Plain(X), Registered(X), Container(X)], ids=lambda x: type(x).__name__)
def test_a_container_alone_is_an_argument_in_a_tuple(alone: Any) -> None:
    class Loss(Net):
        def forward(self, given: Any) -> Tensor:
            return super().forward(given).square().mean()

    name = type(alone).__name__
    with pytest.raises(quintnet.QuintNetError, match=rf"(?s)QN102.*\({name}\(\.\.\.\),\)"):
        quintnet.compile(Loss().double(), Mesh(dp=2), alone)
    train_as_plain(Loss().double(), "dp2", [(alone,)] * 2)


def test_what_cannot_be_taken_apart_is_named() -> None:
    with pytest.raises(quintnet.QuintNetError, match=r"(?s)QN102.*of the class Unknown, of whose.*make it a dataclass"):
        quintnet.compile(Net().double(), Mesh(dp=2), (Unknown(X), Y), loss_fn=F.cross_entropy)
    with pytest.raises(
        quintnet.QuintNetError, match=r"(?s)QN102.*holds a Counted, which Counted\(its content\).*a dict"
    ):
        quintnet.compile(Net().double(), Mesh(dp=2), (Counted(x=X, bias=None, scale=1.0), Y), loss_fn=F.cross_entropy)
