"""``quintnet passes``."""

from __future__ import annotations

import difflib
import json as json_module
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ..core.progress import working
from ..driver.pipeline import PIPELINE
from ..ir.printer import program_text
from .answer import Answer
from .inputs.options import DeviceOption, Json, MeshOption, Microbatches, PlanOption, ProgramOptions, Set, compiled

Step = tuple[str, str, str]  # a pass, the program before it, and after it


def passes(
    target: Annotated[
        str | None, typer.Argument(metavar="[TARGET]", help="a target as of other verbs; without it, all passes")
    ] = None,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    microbatches: Microbatches = None,
    settings: Set = None,
    device: DeviceOption = None,
    until: Annotated[str | None, typer.Option(metavar="PASS", help="print the program after this pass")] = None,
    only: Annotated[str | None, typer.Option(metavar="PASS", help="print the program before and after it")] = None,
    diff: Annotated[bool, typer.Option("--diff", help="with --only: the lines that the pass changes")] = False,
    json: Json = False,
) -> Answer:
    """The compiler's passes in order, and the program before and after one of them.

    With a target alone: the passes that ran, and how many lines of the program each changed.

    Exit code: 0, 2 usage, 4 the model or the layout is not supported.

    Example: quintnet passes

    Example: quintnet passes mymodel:build --mesh tp=2 --until ChooseSharding

    Example: quintnet passes mymodel:build --mesh tp=2 --only InsertCommunication --diff
    """
    if until is not None and only is not None:
        raise typer.BadParameter("give one of them", param_hint="--until --only")
    if diff and only is None:
        raise typer.BadParameter("needs --only PASS", param_hint="--diff")
    asked = _known(until or only)
    if target is None:
        if asked is not None:
            raise typer.BadParameter("needs a TARGET", param_hint="--until --only")
        return _all()
    program = compiled(target, ProgramOptions.of(mesh, plan, microbatches, settings), device)
    with working("compiling again"):
        steps = _steps(program.passes())
    if asked is None:
        return _overview(steps)
    found = next((step for step in steps if step[0] == asked), None)
    if found is None:
        ran = ", ".join(name for name, _, _ in steps)
        raise typer.BadParameter(f"{asked} did not run: the plan has no use for it; {ran} did", param_hint="PASS")
    name, before, after = found
    if until is not None:
        return Answer(after, json_module.dumps({"pass": name, "text": after}, indent=2))
    changed = "".join(f"{line}\n" for line in _difference(name, before, after))
    document = {"pass": name, "before": before, "after": after, "diff": changed}
    text = changed or f"{name} changes nothing" if diff else f"# before {name}\n{before}\n# after {name}\n{after}"
    return Answer(text, json_module.dumps(document, indent=2))


def _known(name: str | None) -> str | None:
    """A pass by its name, whatever the case."""
    names = {spec.name.lower(): spec.name for spec in PIPELINE}
    if name is None or name.lower() in names:
        return names[name.lower()] if name is not None else None
    near = difflib.get_close_matches(name.lower(), names, 1)
    guess = f"did you mean {names[near[0]]}?" if near else f"the passes are {', '.join(names.values())}"
    raise typer.BadParameter(f"there is no pass {name!r}; {guess}", param_hint="PASS")


def _all() -> Answer:
    rows = [{"name": spec.name, "makes": spec.result, "decides": spec.decides} for spec in PIPELINE]
    lines = [f"{number:>2} {row['name']:<22} {row['decides']}" for number, row in enumerate(rows, 1)]
    return Answer("\n".join(lines), json_module.dumps({"passes": rows}, indent=2))


def _steps(programs: Sequence[tuple[str, Any]]) -> list[Step]:
    texts = [program_text(programs[0][1].captured), *(program_text(program) for _, program in programs)]
    return [(name, texts[i], texts[i + 1]) for i, (name, _) in enumerate(programs)]


def _overview(steps: Sequence[Step]) -> Answer:
    rows = []
    for name, before, after in steps:
        changed = [line[0] for line in _difference(name, before, after)[2:]]
        rows.append(
            {"name": name, "lines": after.count("\n"), "added": changed.count("+"), "removed": changed.count("-")}
        )
    lines = [f"{'pass':<22} {'lines':>6} {'added':>6} {'removed':>8}"]
    lines += [f"{row['name']:<22} {row['lines']:>6} {row['added']:>6} {row['removed']:>8}" for row in rows]
    return Answer("\n".join(lines), json_module.dumps({"passes": rows}, indent=2))


def _difference(name: str, before: str, after: str) -> list[str]:
    old, new = before.splitlines(), after.splitlines()
    return list(difflib.unified_diff(old, new, f"before {name}", f"after {name}", lineterm=""))
