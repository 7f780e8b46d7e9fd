"""``quintnet explain``."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer

from ..core.error_help import ErrorHelp, error_help, error_page
from .answer import Answer
from .inputs.options import DeviceOption, Json, MeshOption, Microbatches, PlanOption, ProgramOptions, Set, build_program


def explain(
    what: Annotated[str, typer.Argument(metavar="TARGET | QN203", help="a target as of other verbs, or an error's id")],
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="a module, an operator or a parameter")] = None,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    microbatches: Microbatches = None,
    settings: Set = None,
    device: DeviceOption = None,
    why_not: Annotated[
        str | None, typer.Option(help='another way: column, row, replicated, or types by axis: {"tp": "S(0)"}')
    ] = None,
    json: Json = False,
) -> Answer:
    """What a program does with a module, an operator or a parameter and what that costs; or what an error means
    (``errors``: all of them, as docs/errors.md has them).

    Exit code: 0, 2 usage, 4 the model or the layout is not supported, or has nothing of this name.

    Example: quintnet explain QN203

    Example: quintnet explain mymodel:build layers.3.up_proj --mesh tp=2 --why-not row
    """
    if name is None:
        return _error(what)
    program = build_program(what, ProgramOptions.from_arguments(mesh, plan, microbatches, settings), device)
    return Answer.from_report(program.explain(name, why_not=_way(why_not)))


def _error(code: str) -> Answer:
    if code == "errors":
        return Answer.from_report(error_page())
    entry = error_help(code)
    if isinstance(entry, ErrorHelp):
        return Answer.from_report(entry)
    guess = f"; did you mean {', '.join(entry)}?" if entry else ""
    missing = "a target needs the NAME of a module, an operator or a parameter" if ":" in code else "no such error"
    raise typer.BadParameter(f"{code!r}: {missing}{guess}", param_hint="TARGET | QN203")


def _way(text: str | None) -> str | dict[str, str] | None:
    if text is None or not text.startswith("{"):
        return text
    try:
        types = json_module.loads(text)
    except ValueError:
        types = None
    if not isinstance(types, dict) or not all(isinstance(kind, str) for kind in types.values()):
        raise typer.BadParameter(f'{text!r} is not like {{"tp": "S(0)"}}', param_hint="--why-not")
    return types
