"""A further program of a module whose parameters are parts on each rank already: it takes them where they are."""

from __future__ import annotations

from functools import partial

from ..core.mesh import Mesh
from ..ir.distributed_program import DistributedProgram, StateSpec
from ..ir.program import Captured
from ..runtime.backends.split_parameters import Home, refuse_other
from .compiler import Compiled, Runner, follow_program
from .pipeline import Request
from .task import Task

PLACES = ("stages", "virtual_stages", "zero", "zero_axes", "experts")  # fields of a plan that place parameters


def join_program(captured: Captured, task: Task, size: int, home: Home) -> Compiled:
    """Compile ``task`` on the placement of the program that split its module.

    The first program's plan decides where parameters live, and the task's plan all else.

    Raises:
        RunError: QN113 if the placement cannot serve this program.
        CompileError: see :func:`follow_program`.
    """
    primary: Compiled = home.primary
    if _split(task.mesh) != _split(primary.program.mesh):
        refuse_other(f"the module's parameters are split over {primary.program.mesh!r}, and this is {task.mesh!r}")
    _require_same_names(captured, home)
    placement = {name: getattr(primary.plan, name) for name in PLACES}
    plan = task.plan.changed({**placement, "parameters": primary.plan.parameters})
    request = Request(task.mesh, plan, size, task.device, task.rules, fused=task.fused)
    runner, again = Runner(), partial(follow_program, captured, request, primary, training=task.training)
    program = again(runner)
    _require_same_places(program, home)
    return Compiled(program, plan, runner.seconds, primary.stages, primary.unsplit, primary.wide, again)


def _require_same_names(captured: Captured, home: Home) -> None:
    """Raise QN113 unless the first program has every parameter, under the same name."""
    first = {id(x): name for name, x in home.slots.tensors.items()}
    for name, x in captured.tensors.items():
        if first.get(id(x), name) != name:
            refuse_other(
                f"the parameter {name} of this module was split by a program of another one, where it is "
                f"{first[id(x)]}",
                "give the shared part the same name in both modules",
            )
    state = home.primary.program.state
    for name, x in captured.tensors.items():
        if x.requires_grad and (name not in state or state[name].kind != "parameter"):
            refuse_other(f"this program trains {name}, which the first one of this module does not have")


def _require_same_places(program: DistributedProgram, home: Home) -> None:
    """Raise QN113 unless the program has parameters where the first one has them."""
    primary = home.primary.program
    for name, spec in program.state.items():
        if name.startswith("loss_fn.") and spec.kind in ("parameter", "buffer") and name not in home.slots.names:
            refuse_other(f"{name} is no part of the module, nor of a module that was given as loss_fn")
        if spec.kind == "parameter" and _place(spec, program) != _place(primary.state[name], primary):
            refuse_other(f"this program needs {name} in another place than the first one of this module has it")


def _split(mesh: Mesh) -> list[tuple[str, int]]:
    return [(name, size) for name, size in mesh.axes if size > 1]


def _place(spec: StateSpec, program: DistributedProgram) -> object:
    """Return where a parameter lives, and in what memory."""
    kinds = [spec.sharding, spec.resident if spec.in_place else spec.sharding]
    axes = [axis.name if axis.role != "time" else "" for axis in program.axes]
    types = [{axis: kind for axis, kind in zip(axes, sharding, strict=True) if axis} for sharding in kinds]
    return types, spec.shape, spec.dtype, {program.schedule.placement[stage] for stage in spec.stages}
