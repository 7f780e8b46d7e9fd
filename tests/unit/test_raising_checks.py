"""Conditions on values that decide only whether an error is raised: which pass, and which do not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quintnet_compiler.capture.raising_checks import checks_pass


class Asked(Exception):
    """The value of a tensor was asked for."""


def _raises(bad: Tensor) -> str:
    if bad:
        raise ValueError(f"{bad!r} is {'bad' if bad is not None else 'good'}")
    return "went on"


def _asserts(good: Tensor) -> str:
    assert good, "not good"
    return "went on"


def _elif(bad: Tensor) -> str:
    if isinstance(bad, float):
        return "a number"
    elif torch.any(bad):
        raise ValueError("bad")
    return "went on"


def _negated(good: Tensor) -> str:
    if not good.all():
        raise ValueError("bad")
    return "went on"


def _either(bad: Tensor) -> str:
    if bad.all() or bad.any():
        raise ValueError("bad")
    return "went on"


def _in_a_loop(bad: Tensor) -> str:
    for _ in range(2):
        if bad:
            raise ValueError("bad")
    return "went on"


def _called(bad: Tensor) -> str:
    return _raises(bad)


def _branches(x: Tensor) -> str:
    return "one" if x else "other"


def _warns(bad: Tensor) -> str:
    if bad:
        print("bad")
    return "went on"


def _handled(bad: Tensor) -> str:
    try:
        if bad:
            raise ValueError("bad")
    except ValueError:
        return "handled"
    return "went on"


def _handled_outside(bad: Tensor) -> str:
    try:
        return _raises(bad)
    except ValueError:
        return "handled"


def _suppressed(bad: Tensor) -> str:
    with contextlib.suppress(ValueError):
        return _raises(bad)
    return "suppressed"


class _Steps:
    """Iterates until a tensor says so, in either of Python's ways."""

    def __init__(self, done: Tensor) -> None:
        self.done = done

    def __iter__(self) -> _Steps:
        return self

    def __next__(self) -> int:
        if self.done:
            raise StopIteration
        return 1


class _Indexed(_Steps):
    __iter__ = None  # type: ignore[assignment]

    def __getitem__(self, index: int) -> int:
        if self.done:
            raise IndexError
        return 1


def _iterates(done: Tensor) -> str:
    return f"{sum(1 for _ in _Steps(done))} steps"


def _indexes(done: Tensor) -> str:
    return f"{_Indexed(done)[0]}"


def _is_missing(done: Tensor) -> str:
    def found() -> str:
        if done:
            raise AttributeError("there is none")
        return "there is one"

    return found()


def _kept(good: Tensor) -> str:
    bad = not good
    if bad:
        raise ValueError("bad")
    return "went on"


def _both_ways(bad: Tensor) -> str:
    if bad:
        raise ValueError("bad")
    raise KeyError("bad too")


def _outcome(function: Callable[[Tensor], str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What ``function`` makes of a tensor that has no value."""

    def asked(x: Tensor) -> bool:
        raise Asked

    monkeypatch.setattr(Tensor, "__bool__", asked)
    with checks_pass(lambda x: False, own=()):
        try:
            return function(torch.tensor([True]))
        except Asked:
            return Asked


@pytest.mark.parametrize("function", [_raises, _asserts, _elif, _negated, _either, _in_a_loop, _called])
def test_a_check_passes(function: Callable[[Tensor], str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _outcome(function, monkeypatch) == "went on"


@pytest.mark.parametrize(
    "function",
    [_branches, _warns, _handled, _handled_outside, _suppressed, _kept, _both_ways, _iterates, _indexes, _is_missing],
)
def test_what_decides_more_is_asked_for(function: Callable[[Tensor], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch, a handler, a value that is kept: no guess is made."""
    assert _outcome(function, monkeypatch) is Asked


def test_a_tensor_with_values_is_checked() -> None:
    with checks_pass(lambda x: True, own=()), pytest.raises(ValueError, match="is bad"):
        _raises(torch.tensor(True))
    assert _raises(torch.tensor(False)) == "went on"
