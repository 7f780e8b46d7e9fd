"""What a user gives to a textbook: whether a program's steps are steps, and their numbers numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ..core.errors import CompileError, finite, told, whole
from .machine import Machine
from .steps import Collective, Compute, Hold, Receive, Release, Send, Wait

STEPS = (Compute, Send, Receive, Collective, Wait, Hold, Release)


def check_programs(programs: Any, machine: Any, title: Any) -> None:
    """Raises: CompileError QN201 for what is no machine, no program for each of its ranks, or no step of it."""
    if not isinstance(machine, Machine):
        raise CompileError("QN201", f"machine is {told(machine)}", fix="pass textbook.Machine(2), for 2 ranks")
    if not isinstance(title, str):
        raise CompileError("QN201", f"title is {told(title)}", fix='give a text such as title="textbook"')
    if not _several(programs):
        raise CompileError("QN201", f"programs is {told(programs)}", fix="give a list of steps for every rank")
    if len(programs) != machine.ranks:
        raise CompileError(
            "QN201", f"{len(programs)} programs for {machine.ranks} ranks", fix="give every rank a program"
        )
    for rank, steps in enumerate(programs):
        if not _several(steps):
            problem = f"the program of rank {rank} is {told(steps)}"
            raise CompileError("QN201", problem, fix="give a list of steps for every rank")
        for step in steps:
            if not isinstance(step, STEPS):
                problem = f"a step of rank {rank} is {told(step)}"
                raise CompileError("QN201", problem, fix=f"use {', '.join(kind.__name__ for kind in STEPS)}")
            for field in fields(step):
                _check(step, field.name, machine.ranks)


def _several(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes))


def _check(step: Any, name: str, ranks: int) -> None:
    given = getattr(step, name)
    if name in ("flops", "seconds", "bytes"):
        number, fix = finite(given), "give a finite number, 0 or more"
        good = number is not None and number >= 0
    elif name in ("to", "source", "over"):
        found = given if name == "over" and isinstance(given, tuple) else (given,)
        numbers, fix = [whole(one) for one in found], f"name ranks by ints from 0 to {ranks - 1}"
        good = bool(found) and all(one is not None and 0 <= one < ranks for one in numbers)
        if name == "over":
            fix = f"give a tuple of ranks, from 0 to {ranks - 1}, each once"
            good = good and isinstance(given, tuple) and len(set(numbers)) == len(numbers)
    elif name == "microbatch":
        good, fix = whole(given) is not None, "give an int"
    elif name == "background":
        good, fix = isinstance(given, bool), "give True or False"
    else:
        good, fix = isinstance(given, str), "give a text"
    if not good:
        raise CompileError("QN201", f"{name} of a {type(step).__name__} is {told(given)}", fix=fix)
