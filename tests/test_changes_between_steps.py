"""What changes between two steps is seen by the next one, whoever holds it, as in plain PyTorch; or it is refused."""

from __future__ import annotations

import ctypes
import enum
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.driver import variants

from .changes_between_steps import CHANGES, HOLDERS, Net, config

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2 tp2": {"dp": 2, "tp": 2},
}
PLACES = ("forward", "loss")


def _run(holder: str, change: str, place: str, mesh: quintnet.Mesh | None) -> list[float]:
    """Losses before the change, and twice after it; of a program, if there is a mesh."""
    torch.manual_seed(0)
    hold, kind = HOLDERS[holder], CHANGES[change]
    held = hold.make(kind.make())
    model = Net(held, hold.get, kind.read, inside=place == "forward")
    batch = (torch.randn(8, 6), torch.randint(0, 4, (8,)))

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, labels)
        return loss * kind.read(hold.get(held)) if place == "loss" else loss

    if mesh is None:
        step = lambda: loss_fn(model(batch[0]), batch[1])  # noqa: E731
    else:
        program = quintnet.compile(model, mesh, batch, loss_fn=loss_fn, check="off")
        step = lambda: program.step(batch)  # noqa: E731
    losses = [float(step().detach())]
    hold.put(held, kind.change(hold.get(held)))
    return [*losses, float(step().detach()), float(step().detach())]


def _drawn(count: int) -> list[tuple[str, str, str, str]]:
    draw = random.Random(0)
    places = [(holder, change, place) for holder in HOLDERS for change in CHANGES for place in PLACES]
    return [(*drawn, draw.choice(list(LAYOUTS))) for drawn in draw.sample(places, count)]


def _is_followed(holder: str, change: str, place: str, layout: str) -> None:
    plain = _run(holder, change, place, None)
    try:
        losses = _run(holder, change, place, quintnet.Mesh(**LAYOUTS[layout]))
    except quintnet.QuintNetError as refused:
        assert refused.code in ("QN110", "QN112")  # a refusal is right, where it says what it is about
        return
    assert losses == pytest.approx(plain, abs=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("held", "get", "message"),
    [
        ([itertools.count(1)], lambda h: next(h[0]), "the state of .*, a count"),
        (random.Random(0), lambda h: h.random(), "the state of 'held', a Random"),
        (ctypes.pointer(ctypes.c_double(1.5)), lambda h: h[0], "'held', a pointer"),
    ],
    ids=["an iterator in a list", "a generator of random numbers", "a pointer"],
)
def test_what_gives_another_value_each_time_is_refused(held: Any, get: Callable[[Any], float], message: str) -> None:
    batch = (torch.randn(8, 6), torch.randint(0, 4, (8,)))
    program = quintnet.compile(Net(held, get, float, inside=True), quintnet.Mesh(dp=2), loss_fn=F.cross_entropy)
    with pytest.raises(quintnet.CompileError, match=message):
        program.step(batch)


def test_what_a_hook_or_a_partial_loss_reads_may_change() -> None:
    held, batch = {"k": 1.5}, (torch.randn(8, 6), torch.randint(0, 4, (8,)))
    model, loss_fn = (
        Net(None, lambda h: 1.0, float, inside=True),
        functools.partial(F.cross_entropy, label_smoothing=0.0),
    )
    model.linear.register_forward_hook(lambda module, inputs, outputs: outputs * held["k"])
    program = quintnet.compile(model, quintnet.Mesh(tp=2), batch, loss_fn=loss_fn, check="off")
    for change in (lambda: None, lambda: held.update(k=2.5), lambda: loss_fn.keywords.update(label_smoothing=0.3)):
        change()
        expected = float(loss_fn(model(batch[0]).detach(), batch[1]))
        assert float(program.step(batch)) == pytest.approx(expected, abs=1e-5)


def test_an_iterator_that_forward_reads_is_refused() -> None:
    model = Net(itertools.count(1), next, float, inside=True)
    batch = (torch.randn(8, 6), torch.randint(0, 4, (8,)))
    with pytest.raises(quintnet.CompileError, match="reads 'held', a count"):
        quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy)


def _traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that has one entry more for each trace from now on."""
    traces: list[int] = []
    capture = variants.capture
    monkeypatch.setattr(variants, "capture", lambda *a, **k: (traces.append(1), capture(*a, **k))[1])
    return traces


@pytest.mark.slow
def test_a_value_that_is_read_beside_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[str, Any] = {"k": 1.5, "log": []}
    batch = (torch.randn(8, 6), torch.randint(0, 4, (8,)))
    model = Net(held, lambda h: h["k"], float, inside=True)
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy)
    traces, counts = _traces(monkeypatch), list[int]()
    for step in range(8):
        if step < 4:
            held["k"] += 1
        else:
            held["log"].append(step)
        expected = F.cross_entropy(model(batch[0]).detach(), batch[1])
        assert float(program.step(batch)) == pytest.approx(float(expected), abs=1e-6)
        counts.append(len(traces))
    assert counts == [2, 3, 4, 5, 6, 6, 6, 6]  # the first one ends where it reads what changed


@pytest.mark.sample(2)
@pytest.mark.parametrize("grow", ["log", "counter", "new keys"])
def test_what_forward_does_not_read_leads_to_few_traces(grow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[str, Any] = {"k": 1.5, "log": [], "n": 0}
    model = Net(held, lambda h: h["k"], float, inside=True)
    batch = (torch.randn(8, 6), torch.randint(0, 4, (8,)))
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy)
    traces = _traces(monkeypatch)
    for step in range(8):
        changes: dict[str, Callable[[], Any]] = {
            "log": lambda: held["log"].append(step),  # noqa: B023
            "counter": lambda: held.update(n=step),  # noqa: B023
            "new keys": lambda: held.update({f"step {step}": step}),  # noqa: B023
        }
        changes[grow]()
        program.step(batch)
    assert len(traces) == 1  # it shows that nothing new is read
    held["k"] = 2.5
    expected = F.cross_entropy(model(batch[0]).detach(), batch[1])
    assert float(program.step(batch)) == pytest.approx(float(expected), abs=1e-6)


class Kind(enum.Enum):
    FIRST = 1
    SECOND = 2
    THIRD = 3


def _by_identity(held: list[Any]) -> float:
    return 2.5 if held[0] is Kind.THIRD else 1.5


def _log_that_matters_later(held: dict[str, Any]) -> float:
    return 2.5 if held["k"] > 2 and len(held["log"]) > 3 else 1.5


@pytest.mark.parametrize(
    ("held", "get", "changes"),
    [
        (
            [Kind.FIRST, nn.Identity()],
            _by_identity,
            [lambda h, x=x: h.__setitem__(0, x) for x in (Kind.SECOND, Kind.THIRD)],
        ),
        (
            {"k": 1, "log": []},
            _log_that_matters_later,
            [lambda h: h["log"].append(1), lambda h: h["log"].append(1), lambda h: h.update(k=3)]
            + 3 * [lambda h: h["log"].append(1)],
        ),
    ],
    ids=["a member of an enumeration", "a log"],
)
def test_what_was_not_read_and_is_read_later(held: Any, get: Callable[[Any], float], changes: list[Any]) -> None:
    model = Net(held, get, float, inside=True)
    batch = (torch.randn(8, 6), torch.randint(0, 4, (8,)))
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy)
    for change in changes:
        change(held)
        expected = float(F.cross_entropy(model(batch[0]).detach(), batch[1]))
        assert float(program.step(batch)) == pytest.approx(expected, abs=1e-5)


def _counts_in_a_class(held: Any) -> float:
    Counted.n += 1
    return 1.5 + Counted.n


def _counts_in_a_module(held: Any) -> float:
    config.n += 1  # type: ignore[attr-defined]
    return 1.5 + config.n  # type: ignore[attr-defined,no-any-return]


class Counted:
    n = 0


@pytest.mark.parametrize("get", [_counts_in_a_class, _counts_in_a_module])
def test_what_forward_counts_in_a_class_or_a_module_is_refused(get: Callable[[Any], float]) -> None:
    Counted.n, config.n = 0, 0  # type: ignore[attr-defined]
    batch = (torch.randn(8, 6), torch.randint(0, 4, (8,)))
    program = quintnet.compile(Net(1, get, float, inside=True), quintnet.Mesh(dp=2), loss_fn=F.cross_entropy)
    with pytest.raises(quintnet.CompileError, match="QN110") as refused:
        program.step(batch)
    assert ".n' (from 0 to 1)" in str(refused.value) and Counted.n == config.n == 0


@pytest.mark.sample(40)
@pytest.mark.parametrize("drawn", _drawn(40), ids=", ".join)
def test_a_change_between_steps(drawn: tuple[str, str, str, str]) -> None:
    _is_followed(*drawn)


@pytest.mark.slow
@pytest.mark.parametrize("drawn", _drawn(540)[40:], ids=", ".join)
def test_many_changes_between_steps(drawn: tuple[str, str, str, str]) -> None:
    _is_followed(*drawn)


BY_LIBRARIES = (
    *("members of a class", "members of a derived class", "members of an object", "fields of a dataclass"),
    *("a changed dataclass", "a copy", "static lookup", "attrgetter made in forward", "getattr by another name", "dir"),
)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2"])
@pytest.mark.parametrize("place", PLACES)
def test_what_functions_of_python_look_up(place: str, layout: str) -> None:
    for holder in BY_LIBRARIES:
        plain = _run(holder, "number", place, None)
        assert _run(holder, "number", place, quintnet.Mesh(**LAYOUTS[layout])) == pytest.approx(plain, abs=1e-5), holder
