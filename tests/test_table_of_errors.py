"""Each row of the table fails with its line, a true cause and a fix that works, or does what the module does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

from . import table_of_errors
from .frontier import refused, trains_equally
from .table_of_coupled_rows import COUPLED_ROWS
from .table_of_errors import Net, Program, X, Y, custom, double, plain
from .table_of_followed import FOLLOWED

REFUSED = {**table_of_errors.REFUSED, **COUPLED_ROWS}


def _works(program: Program) -> None:
    options = dict(program.options)
    trains_equally(program.build, program.batch, program.loss_fn, program.meshes, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_says_where_and_why(name: str) -> None:
    row = REFUSED[name]
    program, options = row.program, dict(row.program.options)
    texts = refused(
        program.build,
        program.batch,
        row.code,
        cause=f"(?s){row.cause}",
        loss_fn=program.loss_fn,
        meshes=program.meshes,
        **options,
    )
    for text in texts.values():
        place = "".join(re.findall(r"^  at: (.*)$", text, re.M))
        assert row.line in place if row.line else not place, text
        assert re.search(r"table_of_\w+\.py:", place) or row.line in ("", "part"), text
        fix = text.partition("\n  fix: ")[2]
        assert row.fix in fix, text


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_row_offers_works(name: str) -> None:
    for program in REFUSED[name].fixed:
        _works(program)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FOLLOWED)
def test_what_was_refused_is_followed(name: str) -> None:
    _works(FOLLOWED[name])


def test_a_loss_of_one_element() -> None:
    model = Net(plain).double()
    for loss_fn in (lambda z, y: F.cross_entropy(z, y)[None], lambda z, y: F.cross_entropy(z, y).reshape(1, 1)):
        program = quintnet.compile(model, quintnet.Mesh(dp=2), (X, Y), loss_fn=loss_fn)
        loss = program.step((X, Y))
        assert loss.shape == ()
        assert torch.allclose(loss, F.cross_entropy(model(X), Y), rtol=1e-9)


class Distilled(nn.Module):
    """A loss with a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(4, 4).requires_grad_(False))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y) + F.mse_loss(z, self.teacher(torch.ones_like(z)))


def _scaled(m: Any, x: Tensor) -> Tensor:
    return plain(m, x * m.scale)


CHANGED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a buffer of another shape": (lambda model, loss: setattr(model, "scale", torch.ones(1).double()), "scale is"),
    "another part of a loss": (
        lambda model, loss: setattr(loss, "teacher", nn.Linear(4, 4).double().requires_grad_(False)),
        "no parameter for loss_fn.teacher.weight, which was not there when it was compiled",
    ),
    "other weights of a part of a loss": (
        lambda model, loss: loss.teacher.__setitem__(0, nn.Linear(4, 4).double().requires_grad_(False)),
        "no parameter for loss_fn.teacher.0.weight, which is another object now",
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CHANGED)
def test_what_is_compiled_again_after_a_change(name: str) -> None:
    change, cause = CHANGED[name]
    model, loss = Net(_scaled, scale=lambda: torch.ones(6)).double(), Distilled().double()
    program = quintnet.compile(model, quintnet.Mesh(dp=2), (X, Y), loss_fn=loss)
    program.step((X, Y))
    change(model, loss)
    with pytest.raises(quintnet.QuintNetError, match=f"(?s)QN112.*{cause}.*fix: compile the (changed )?module again"):
        program.step((X, Y))
    again = quintnet.compile(model, quintnet.Mesh(dp=2), (X, Y), loss_fn=loss)
    assert torch.allclose(again.step((X, Y)), loss(model(X), Y), rtol=1e-9)


@pytest.mark.sample(2)
@pytest.mark.parametrize("operator", [double, torch.ops.table_of_errors.double, "table_of_errors::double"])
def test_a_rule_by_any_name_of_an_operator(operator: Any) -> None:
    rule = quintnet.rule(operator, "b t0d1 -> b t1d1", whole="t0d1 t1d1")
    trains_equally(lambda: Net(custom), (X, Y), F.cross_entropy, {"dp2": {"dp": 2}}, microbatches=2, rules=[rule])


def test_a_budget_of_memory_names_one_that_is_enough() -> None:
    def compiled(gib: float) -> Any:
        mesh, plan = quintnet.Mesh(dp=2), {"activation_memory_budget": gib}
        options: dict[str, Any] = {"recompute": "auto", "plan": plan}
        return quintnet.compile(Net(plain).double(), mesh, (X, Y), loss_fn=F.cross_entropy, **options)

    with pytest.raises(quintnet.CompileError, match="QN213") as error:
        compiled(1e-12)
    program = compiled(float(error.value.fix.split()[1]))
    assert torch.allclose(program.step((X, Y)), F.cross_entropy(Net(plain).double()(X), Y), rtol=1e-9)


def test_another_order_of_stages() -> None:
    def turned(m: Any, x: Tensor) -> Tensor:
        first, last = (m.a, m.b) if m.training else (m.b, m.a)
        return m.o(m.q(last(first(x).tanh()).tanh()).tanh())  # type: ignore[no-any-return]

    def compiled(**axes: int) -> Any:
        model = Net(turned, a=lambda: nn.Linear(6, 6), b=lambda: nn.Linear(6, 6)).double()
        plan = {"stages": ["b"]} if "pp" in axes else {}
        return quintnet.compile(model, quintnet.Mesh(**axes), (X, Y), loss_fn=F.cross_entropy, plan=plan), model

    program, model = compiled(pp=2)
    program.step((X, Y))
    with pytest.raises(quintnet.CompileError, match=r"(?s)QN206.*test_table_of_errors.py.*fix: compile without pp"):
        program.evaluate((X, Y))
    program, model = compiled(tp=2)
    assert torch.allclose(program.evaluate((X, Y)), F.cross_entropy(model.eval()(X), Y), rtol=1e-9)
