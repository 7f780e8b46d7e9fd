"""Which rank holds which part of any tensor of a program: state, gradients, and what operators make."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from ..core.annotations import facts, leaf, needs_grad, origin, shape
from ..core.errors import CompileError
from ..core.sharding import AxisType, Sharding, gradient
from ..ir.distributed_program import DistributedProgram, StateSpec
from ..ir.program import ShardedProgram
from ..runtime.state.whole_optimizer import WholeOptimizer
from .tensor_picture import TensorPart, TensorPicture, picture, picture_of_dtensor

GRADIENT = ".grad"


def picture_of(program: DistributedProgram, name: str) -> TensorPicture:
    """Return the parts of a parameter or buffer, an operator's result, a module's last result, or an input.

    With ``.grad``, those of the gradient of one of them.

    Raises:
        CompileError: QN204 for a name that the program does not have, or a gradient that is not computed.
    """
    for stem, back in ((name, False), (name.removesuffix(GRADIENT), True)):
        if stem in program.state and back == (stem != name):
            return _of_gradient(program, program.state[stem]) if back else picture_of_state(program, stem)
    for stem, back in ((name, False), (name.removesuffix(GRADIENT), True)):
        node = _node(program, stem)
        if node is not None and back == (stem != name):
            return _of_value(program, stem, node, back=back)
    sharded = program.source.local.staged.sharded
    names = [*program.state, *_modules(sharded), *(n.name for n in sharded.program.graph.nodes)]
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.3)
    fix = f"did you mean {', '.join(close)}?" if close else "see program.named_parameters()"
    raise CompileError("QN204", f"nothing is called {name!r}", fix=fix)


def picture_of_state(program: DistributedProgram, name: str) -> TensorPicture:
    """Who holds what of a parameter or buffer between steps."""
    spec = program.state[name]
    return picture(name, spec.shape, program.mesh, _over_ranks(program, spec.sharding), _ranks(program, spec.stages))


def picture_of_parameter_state(
    program: DistributedProgram, parameter: str, key: str, x: object, owner: int | None, *, whole: bool
) -> TensorPicture:
    """Return the parts of the number or tensor ``x`` that an optimizer keeps for a parameter under ``key``.

    ``whole``: the optimizer has whole parameters, on the rank that is the ``owner``.
    """
    spec, name = program.state[parameter], f"{parameter}.{key}"
    if isinstance(x, Tensor) and (parts := picture_of_dtensor(x, name)) is not None:
        return parts
    size = tuple(x.shape) if isinstance(x, Tensor) else ()
    ranks = _ranks(program, spec.stages)
    if whole and owner is not None:
        return TensorPicture(name, size, {}, (TensorPart(_all(size), (owner,)),), "on the rank that updates it")
    if size == spec.shape and not whole:
        note = "all ranks are in this process; with a process for each, it is cut as the parameter"
        return picture(name, size, program.mesh, _over_ranks(program, spec.sharding), ranks, note=note)
    return TensorPicture(name, size, {}, (TensorPart(_all(size), tuple(ranks)),))


def optimizer_state(
    program: DistributedProgram, parameters: Mapping[str, nn.Parameter], name: str, optimizer: torch.optim.Optimizer
) -> TensorPicture:
    """Who holds what of ``PARAMETER.KEY`` of an optimizer's state.

    Raises:
        CompileError: QN204 for a parameter that this rank does not have, or a key that its state does not have.
    """
    parameter, _, key = name.rpartition(".")
    p = parameters.get(parameter)
    if p is None:
        close = difflib.get_close_matches(parameter, list(parameters), n=3, cutoff=0.3)
        raise CompileError(
            "QN204", f"this rank has no parameter {parameter!r}, whose state {name!r} would be",
            fix=f"write PARAMETER.KEY, such as {(close or [*parameters, 'weight'])[0]}.exp_avg",
        )  # fmt: skip
    state = optimizer.state.get(p, {})
    whole = isinstance(optimizer, WholeOptimizer)
    if key not in state:
        has = f"it has {', '.join(state)}" if state else "it has none, before its first step or on another rank"
        raise CompileError("QN204", f"the optimizer has no {key!r} for {parameter}", fix=has)
    owner = optimizer.owner(p) if isinstance(optimizer, WholeOptimizer) else None
    return picture_of_parameter_state(program, parameter, key, state[key], owner, whole=whole)


def _all(size: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(((0, n),) for n in size)


def _of_gradient(program: DistributedProgram, spec: StateSpec) -> TensorPicture:
    if not spec.trainable:
        raise CompileError("QN204", f"{spec.name} is not trained, and has no gradient", fix=f"ask for {spec.name}")
    kinds = _over_ranks(program, tuple(gradient(kind) for kind in spec.accumulated))
    sums = ", ".join(f"{axis}: {kind}" for axis, kind in kinds.items())
    note = f"after a step; while its microbatches add it up: {sums}" if sums else ""
    ranks = _ranks(program, spec.stages)
    return picture(
        f"{spec.name}{GRADIENT}", spec.shape, program.mesh, _over_ranks(program, spec.sharding), ranks, note=note
    )


def _of_value(program: DistributedProgram, name: str, node: fx.Node, *, back: bool) -> TensorPicture:
    staged = program.source.local.staged
    source, index = origin(node)
    if back and not needs_grad(node):
        raise CompileError("QN204", f"no gradient goes through {name}", fix=f"ask for {name}")
    kinds = staged.sharded.produced(source, index)
    kinds = tuple(gradient(kind) for kind in kinds) if back else kinds
    stage = staged.stage.get(source)
    ranks = range(program.mesh.size) if stage is None else _ranks(program, (stage,))
    times = {axis.name: axis.size for axis in program.axes if axis.role == "time"}
    types = {axis.name: kind for axis, kind in zip(staged.sharded.axes, kinds, strict=True)}
    count = max(times.values(), default=1)
    note = f"of all {count} microbatches, one after the other" if count > 1 else ""
    shown = name if name == node.name else f"{name} ({node.name})"
    return picture(shown + (GRADIENT if back else ""), shape(node), program.mesh, types, ranks, times=times, note=note)


def _node(program: DistributedProgram, name: str) -> fx.Node | None:
    """Return the operator or input of this name, or the last operator of the module of this name."""
    sharded = program.source.local.staged.sharded
    last: fx.Node | None = None
    node: fx.Node
    for node in sharded.program.graph.nodes:
        if node.op == "output" or not isinstance(facts(node).value, Tensor):
            continue
        state = leaf(node)
        if node.name == name or (state is not None and state.name == name):
            return node
        if node.op == "call_function" and f"{facts(node).where.module}.".startswith(f"{name}."):
            last = node
    return last


def _modules(sharded: ShardedProgram) -> list[str]:
    modules = (facts(node).where.module for node in sharded.program.graph.nodes if node.op == "call_function")
    return list(dict.fromkeys(filter(None, modules)))


def _over_ranks(program: DistributedProgram, sharding: Sharding) -> dict[str, AxisType]:
    pairs = zip(program.axes, sharding, strict=True)
    return {axis.name: kind for axis, kind in pairs if axis.role != "time"}


def _ranks(program: DistributedProgram, stages: Sequence[int]) -> list[int]:
    places = {program.schedule.placement[stage] for stage in stages}
    return [r for r in range(program.mesh.size) if program.mesh.coordinate(r).get("pp", 0) in places]
