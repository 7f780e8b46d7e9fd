"""Checks of a textbook's arguments: whether steps of a program are steps, and their numbers numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from ..core.errors import CompileError, describe_value, finite, whole_number
from .machine import Machine
from .steps import Collective, Compute, Hold, Receive, Release, Send, Wait

STEPS = (Compute, Send, Receive, Collective, Wait, Hold, Release)


def check_programs(programs: Any, machine: Any, title: Any) -> None:
    """Require a machine, and a program of steps for each of its ranks.

    Raises:
        CompileError: QN201 for what is no machine, no program for each of its ranks, or no step of it.
    """
    if not isinstance(machine, Machine):
        raise CompileError(
            "QN201", f"machine is {describe_value(machine)}", fix="pass textbook.Machine(2), for 2 ranks"
        )
    if not isinstance(title, str):
        raise CompileError("QN201", f"title is {describe_value(title)}", fix='give a text such as title="textbook"')
    if not _several(programs):
        raise CompileError(
            "QN201", f"programs is {describe_value(programs)}", fix="give a list of steps for every rank"
        )
    if len(programs) != machine.ranks:
        raise CompileError(
            "QN201", f"{len(programs)} programs for {machine.ranks} ranks", fix="give every rank a program"
        )
    for rank, steps in enumerate(programs):
        if not _several(steps):
            problem = f"the program of rank {rank} is {describe_value(steps)}"
            raise CompileError("QN201", problem, fix="give a list of steps for every rank")
        for step in steps:
            if not isinstance(step, STEPS):
                problem = f"a step of rank {rank} is {describe_value(step)}"
                raise CompileError("QN201", problem, fix=f"use {', '.join(kind.__name__ for kind in STEPS)}")
            for field in fields(step):
                _check(step, field.name, machine.ranks)


def _several(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_amount(value: Any, ranks: int) -> bool:
    number = finite(value)
    return number is not None and number >= 0


def _is_rank(value: Any, ranks: int) -> bool:
    number = whole_number(value)
    return number is not None and 0 <= number < ranks


def _are_ranks(value: Any, ranks: int) -> bool:
    if not isinstance(value, tuple) or not value:
        return False
    return all(_is_rank(rank, ranks) for rank in value) and len(set(map(whole_number, value))) == len(value)


# By kind of field: whether a value is one, for so many ranks; and a fix, for the last rank
_Requirement = tuple[Callable[[Any, int], bool], str]
_AMOUNT: _Requirement = _is_amount, "give a finite number, 0 or more"
_RANK: _Requirement = _is_rank, "name ranks by ints from 0 to {last}"
_TEXT: _Requirement = (lambda value, ranks: isinstance(value, str)), "give a text"
_FIELDS: Mapping[str, _Requirement] = MappingProxyType(
    {
        **dict.fromkeys(["flops", "seconds", "bytes"], _AMOUNT),
        **dict.fromkeys(["to", "source"], _RANK),
        "over": (_are_ranks, "give a tuple of ranks, from 0 to {last}, each once"),
        "microbatch": (lambda value, ranks: whole_number(value) is not None, "give an int"),
        "background": (lambda value, ranks: isinstance(value, bool), "give True or False"),
    }
)


def _check(step: Any, name: str, ranks: int) -> None:
    value = getattr(step, name)
    fits, fix = _FIELDS.get(name, _TEXT)
    if not fits(value, ranks):
        problem = f"{name} of a {type(step).__name__} is {describe_value(value)}"
        raise CompileError("QN201", problem, fix=fix.format(last=ranks - 1))
