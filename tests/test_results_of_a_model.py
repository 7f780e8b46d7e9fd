"""What models return: losses of one element, and tensors among numbers, text and None."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

from .each_layout import LAYOUTS, train_as_plain

torch.set_num_threads(1)
X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 3, 2, 4, 1, 1, 0, 4])


class Kind(enum.Enum):
    SOME = 1


@dataclasses.dataclass
class Result:
    logits: Tensor
    name: str
    count: int | None = None


class Net(nn.Module):
    """``result``: what is returned beside the loss."""

    def __init__(self, result: str) -> None:
        super().__init__()
        self.first, self.last, self.result = nn.Linear(6, 8), nn.Linear(8, 5), result

    def forward(self, x: Tensor, y: Tensor) -> Any:
        z = self.last(torch.tanh(self.first(x)))
        loss = F.cross_entropy(z, y)
        more = {"name": "net", "none": None, "list": [z, 1, (2.5, True)], "kind": Kind.SOME, "z": {"rows": x.shape[0]}}
        return {
            "named": {"loss": loss, **more},
            "object": {"loss": loss, "result": Result(z, "net", 3)},
            "one": loss.reshape(1),
            "one by one": loss.reshape(1, 1),
            "logits, loss": (z, loss),
            "loss, logits": (loss, z),
            "two losses": (z, loss, loss * 2),
            "each": F.cross_entropy(z, y, reduction="none"),
            "text": "text",
        }[self.result]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("result", ["one", "one by one"])
def test_losses_of_one_element_train_as_plain(result: str, layout: str) -> None:
    train_as_plain(Net(result).double(), layout, [(X, Y)] * 2)


def test_a_loss_function_whose_result_has_one_element() -> None:
    model = nn.Linear(6, 5).double()
    train_as_plain(model, "dp2", [(X, Y)] * 2, lambda z, y: F.cross_entropy(z, y).unsqueeze(0))


def test_a_loss_of_each_row_is_refused_also_of_one_row() -> None:
    for rows in (8, 1):
        with pytest.raises(quintnet.QuintNetError, match=r"(?s)QN103.*shape.*\.mean\(\) or \.sum\(\)"):
            quintnet.compile(Net("each").double(), Mesh(dp=1), (X[:rows], Y[:rows]))


def _same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, Tensor):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-9, atol=1e-9)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            _same(ours[key], theirs[key])
    elif isinstance(ours, (list, tuple)):
        for mine, other in zip(ours, theirs, strict=True):
            _same(mine, other)
    elif dataclasses.is_dataclass(ours):
        _same(vars(ours), vars(theirs))
    else:
        assert ours == theirs


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("result", ["named", "object"])
def test_outputs_are_those_of_the_module(result: str, layout: str) -> None:
    model = Net(result).double()
    sizes, options = LAYOUTS[layout]
    program = quintnet.compile(model, Mesh(**sizes), (X, Y), **options)
    for rows in (8, 4):
        _same(program(X[:rows], Y[:rows]), model(X[:rows], Y[:rows]))
    assert abs(program.evaluate((X, Y)) - model(X, Y)["loss"]) < 1e-9


@pytest.mark.sample(1)
@pytest.mark.parametrize(("result", "at"), [("logits, loss", 1), ("loss, logits", 0), ("two losses", 1)])
def test_a_tuple_says_which_element_may_be_the_loss_and_how_to_take_it(result: str, at: int) -> None:
    fix = rf"register_forward_hook\(lambda module, inputs, outputs: outputs\[{at}\]\), before"
    with pytest.raises(quintnet.QuintNetError, match=rf"(?s)QN103.*a tuple of .*if element {at} is the loss.*{fix}"):
        quintnet.compile(Net(result).double(), Mesh(dp=2), (X, Y))
    model = Net(result).double()
    model.register_forward_hook(lambda module, inputs, outputs: outputs[at])
    train_as_plain(model, "dp2", [(X, Y)] * 2)


def test_what_is_no_tensor_and_no_data_is_refused() -> None:
    class Returns(nn.Module):
        def __init__(self, extra: Any) -> None:
            super().__init__()
            self.linear, self.extra = nn.Linear(6, 5), extra

        def forward(self, x: Tensor) -> Any:
            return {"z": self.linear(x), "extra": self.extra(x)}

    cases = {
        "an object of the class object": lambda x: object(),
        "a number that it computes": lambda x: 2 * x.shape[0],
    }
    for text, extra in cases.items():
        with pytest.raises(quintnet.QuintNetError, match=f"(?s)QN101.*{text}"):
            quintnet.compile(Returns(extra).double(), Mesh(dp=2), (X,), training=False)
