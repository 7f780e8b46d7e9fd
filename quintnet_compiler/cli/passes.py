"""``quintnet passes``."""

from __future__ import annotations

import difflib
import json as json_module
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ..core.progress import working
from .answer import Answer
from .inputs.options import DeviceOption, Json, MeshOption, Microbatches, PlanOption, ProgramOptions, Set, build_program

Step = tuple[str, str, str]  # name of a pass, text of the program without it, and with it


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
    """Show the compiler's passes in order, and the program before and after one of them.

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
    name = until or only
    asked = None if name is None else _pass_name(name)
    if target is None:
        if asked is not None:
            raise typer.BadParameter("needs a TARGET", param_hint="--until --only")
        return _all()
    program = build_program(target, ProgramOptions.from_arguments(mesh, plan, microbatches, settings), device)
    with working("compiling again"):
        steps = _steps(program.passes())
    if asked is None:
        return _overview(steps)
    step = _step(steps, asked)
    return _program_after(step) if until is not None else _change(step, diff)


def _step(steps: Sequence[Step], name: str) -> Step:
    step = next((step for step in steps if step[0] == name), None)
    if step is None:
        ran = ", ".join(name for name, _, _ in steps)
        raise typer.BadParameter(f"{name} did not run: the plan has no use for it; {ran} did", param_hint="PASS")
    return step


def _program_after(step: Step) -> Answer:
    name, _, text = step
    return Answer(text, json_module.dumps({"pass": name, "text": text}, indent=2))


def _change(step: Step, diff: bool) -> Answer:
    """Return the program before and after a pass; ``diff``: the lines that it changes."""
    name, old, new = step
    changed = "".join(f"{line}\n" for line in _difference(name, old, new))
    document = {"pass": name, "before": old, "after": new, "diff": changed}
    text = changed or f"{name} changes nothing" if diff else f"# before {name}\n{old}\n# after {name}\n{new}"
    return Answer(text, json_module.dumps(document, indent=2))


def _pass_name(name: str) -> str:
    """Return the name of a pass, whatever the case of ``name``."""
    from ..driver.pipeline import PIPELINE

    names = {spec.name.lower(): spec.name for spec in PIPELINE}
    if name.lower() in names:
        return names[name.lower()]
    near = difflib.get_close_matches(name.lower(), names, 1)
    guess = f"did you mean {names[near[0]]}?" if near else f"the passes are {', '.join(names.values())}"
    raise typer.BadParameter(f"there is no pass {name!r}; {guess}", param_hint="PASS")


def _all() -> Answer:
    from ..driver.pipeline import PIPELINE

    rows = [{"name": spec.name, "makes": spec.result, "decides": spec.decides} for spec in PIPELINE]
    lines = [f"{number:>2} {row['name']:<22} {row['decides']}" for number, row in enumerate(rows, 1)]
    return Answer("\n".join(lines), json_module.dumps({"passes": rows}, indent=2))


def _steps(programs: Sequence[tuple[str, Any]]) -> list[Step]:
    from ..ir.printer import program_text

    texts = [program_text(programs[0][1].captured), *(program_text(program) for _, program in programs)]
    return [(name, texts[i], texts[i + 1]) for i, (name, _) in enumerate(programs)]


def _overview(steps: Sequence[Step]) -> Answer:
    rows = []
    for name, old, new in steps:
        changed = [line[0] for line in _difference(name, old, new)[2:]]
        rows.append(
            {"name": name, "lines": new.count("\n"), "added": changed.count("+"), "removed": changed.count("-")}
        )
    lines = [f"{'pass':<22} {'lines':>6} {'added':>6} {'removed':>8}"]
    lines += [f"{row['name']:<22} {row['lines']:>6} {row['added']:>6} {row['removed']:>8}" for row in rows]
    return Answer("\n".join(lines), json_module.dumps({"passes": rows}, indent=2))


def _difference(name: str, old: str, new: str) -> list[str]:
    lines = old.splitlines(), new.splitlines()
    return list(difflib.unified_diff(*lines, f"before {name}", f"after {name}", lineterm=""))
