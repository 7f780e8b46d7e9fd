"""Check of generated functions against the graph that they were cut from, node by node: nothing is lost, added, put
in another stage, or changed on the way to what ranks run. It knows by itself
what generated code may call for an operator."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import fx

from ...compat.torch import operator_name
from ...core.annotations import facts, leaf, shape, value
from ...core.sharding import I
from ...ir.distributed_program import DistributedProgram, Piece, StageProgram
from ...ir.program import DifferentiatedProgram
from ...ops.collectives import SIZED, share
from ...ops.rank_local import DRAWS, RANKED, microbatch
from ...schedules.check import verify_schedule
from ...schedules.schedule import Op
from .failure import check_failure
from .rewrites.overlap import check_pairs
from .rewrites.step_end import check_code_of_end
from .source import check_source_slices
from .tables import dtypes_of_gradient, spellings

_fail = partial(check_failure, "code check")
aten = torch.ops.aten


def check_code(program: DistributedProgram, stages: Iterable[StageProgram] | None = None) -> None:
    """Check ``stages`` (of all ranks, by default those that they share) and what goes with them.

    Raises:
        CompileError: QN209 with what differs; QN208 for the schedule.
    """
    for stage in dict.fromkeys(map(_ByIdentity, program.stages if stages is None else stages)):
        _Stage(program, stage.stage).check()
    _check_state(program)
    _check_transfers(program)
    check_batches(program)
    check_code_of_end(program)
    time = program.batches * math.prod(axis.size for axis in program.axes if axis.role == "time")
    if program.schedule.num_microbatches != time:
        raise _fail(f"{program.schedule.num_microbatches} microbatches are scheduled, and the batch has {time}")
    if program.source.gradients:
        verify_schedule(program.schedule, program.edges)


class _ByIdentity:
    """Stages that are shared are checked once."""

    def __init__(self, stage: StageProgram) -> None:
        self.stage = stage

    def __hash__(self) -> int:
        return id(self.stage)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.stage is other.stage


class _Stage:
    def __init__(self, program: DistributedProgram, stage: StageProgram) -> None:
        self.program, self.stage = program, stage
        self.source: DifferentiatedProgram = program.source
        self.nodes = {n.name: n for n in self.source.graph.nodes}
        self.gradients = sorted(name for name, index in self.source.gradients if index == stage.index)
        self.seen: set[fx.Node] = set()
        self.settled: list[str] = []

    def check(self) -> None:
        for label, piece in self.stage.pieces.items():
            self._piece(label, piece)
        for name, cut in self.stage.slices.items():
            node = self._node(name)
            made_of = node.args[0].name if isinstance(node.args[0], fx.Node) else ""
            if node.target is not microbatch or (cut.source, cut.dim, cut.parts) != (made_of, *node.args[2:4]):
                raise _fail(f"{name} is cut from the batch in another way", node)
            self.seen.add(node)
        mine = {n for n, index in self.source.stage.items() if index == self.stage.index and n.op == "call_function"}
        mine -= self.seen
        missing = [n for n in self.source.graph.nodes if n in mine]
        if missing:
            raise _fail(f"stage {self.stage.index} lacks {missing[0].name}", missing[0])
        if sorted(self.settled) != self.gradients:
            raise _fail(f"stage {self.stage.index} accumulates {self.settled} instead of its parameters' gradients")
        self._names()

    def _node(self, name: str) -> fx.Node:
        found: fx.Node | None = self.nodes.get(name)
        if found is None:
            raise _fail(f"stage {self.stage.index} has {name}, which is not in the graph")
        return found

    def _piece(self, label: str, piece: Piece) -> None:
        env: dict[fx.Node, fx.Node] = {}
        names = iter([*piece.static, *piece.dynamic])
        check_pairs(piece.module.graph.nodes)
        check_source_slices(piece.module.code.strip(), piece.module.graph)
        for position, node in enumerate(piece.module.graph.nodes):
            if node.op == "placeholder":
                if position:
                    env[node] = self._node(next(names))
            elif node.op == "output":
                returned = tuple(env[n].name for n in node.args[0])
                if returned != piece.outputs:
                    raise _fail(f"the {label} of stage {self.stage.index} returns {returned}, not {piece.outputs}")
            elif node.op == "call_method" and str(node.target).startswith("accumulate"):
                self._accumulate(node, env)
            else:
                env[node] = self._call(label, node, env)

    def _call(self, label: str, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
        source = self._node(node.name)
        targets, args, kwargs = _spelled(source)
        given = list(node.args)
        if node.op == "call_method":
            if not isinstance(given[-1], int) or not self.program.sites[given[-1]].startswith(str(targets[0])):
                raise _fail(f"{node.name} names another place in the model", source)
            given = given[1:-1]
        found = fx.map_arg((tuple(given), dict(node.kwargs)), lambda n: env[n])
        if node.target not in targets or repr(found) != repr((tuple(args), kwargs)):
            raise _fail(f"{node.name} is another call than in the graph", source)
        phase = {"once": "forward", "weight": "backward"}.get(label, label)
        if source in self.seen or facts(source).phase != phase:
            raise _fail(f"{node.name} runs in the {label} of stage {self.stage.index}", source)
        if self.source.stage.get(source, self.stage.index) != self.stage.index:
            raise _fail(f"{node.name} runs in stage {self.stage.index}", source)
        self.seen.add(source)
        return source

    def _accumulate(self, node: fx.Node, env: dict[fx.Node, fx.Node]) -> None:
        _, *given, place = node.args
        name = self.stage.gradients.get(str(place), "")
        gradient = self.source.gradients.get((name, self.stage.index))
        operands = [env[n] for n in given]  # type: ignore[index]
        whole = node.target == "accumulate" and operands == [gradient]
        product = gradient is not None and gradient.target is aten.mm.default and operands == list(gradient.args)
        if gradient is None or not (whole or (node.target == "accumulate_matmul" and product)):
            raise _fail(f"{operands[0].name} is accumulated as the gradient of {name!r}", operands[0])
        self.settled.append(name)
        self.seen.add(gradient)

    def _names(self) -> None:
        """What the interpreter looks up by name."""
        stage = self.stage
        for value_name, name in {**stage.state, **stage.gradients}.items():
            found = leaf(self._node(value_name))
            if found is None or found.name != name:
                raise _fail(f"{value_name} is not {name!r}")
        inputs = [n for n in self.source.graph.nodes if n.op == "placeholder" and _is_input(n)]
        for value_name, position in stage.inputs.items():
            if inputs.index(self._node(value_name)) != position:
                raise _fail(f"{value_name} is not input {position}")
        for position, value_name in stage.results.items():
            if self.source.outputs[position].name != value_name:
                raise _fail(f"{value_name} is not output {position}")
        returned = {n for t in self.program.transfers if t.source == stage.index for n in t.backward}
        known = {*stage.saved, *returned}
        for label in ("backward", "weight"):
            for name in stage.pieces[label].dynamic if label in stage.pieces else ():
                if name not in known:
                    raise _fail(f"{name} is not kept for the {label} of stage {stage.index}", self._node(name))
            known |= set(stage.backward.outputs)
        for name in {n for t in self.program.transfers if t.target == stage.index for n in t.backward}:
            if name not in stage.backward.outputs:
                raise _fail(f"{name} is not there when stage {stage.index} sends it", self._node(name))


def _is_input(node: fx.Node) -> bool:
    found = leaf(node)
    return found is not None and found.kind == "input"


def _spelled(node: fx.Node) -> tuple[tuple[Any, ...], list[Any], dict[str, Any]]:
    """How generated code may say what a node of the graph does."""
    target: Any = node.target
    if target is share:
        return (torch.div,), [node.args[0], node.args[2]], {}
    if target in RANKED:
        args = list(node.args)
        return (operator_name(target),), [*args[:2], *args[3:]] if target in SIZED else args, {}
    return spellings(target), list(node.args), dict(node.kwargs)


def _check_state(program: DistributedProgram) -> None:
    """Layouts of parameters decide which sums settle their gradients, so they must be those of the type check."""
    source, sharded = program.source, program.source.local.staged.sharded
    users: dict[str, set[int]] = defaultdict(set)
    for node in source.graph.nodes:
        found = leaf(node) if node.op == "placeholder" else None
        if found is not None:
            users[found.name] |= {source.stage[user] for user in node.users if user in source.stage}
    for name, index in source.gradients:
        users[name].add(index)
    for node, found in sharded.program.leaves.items():
        if found.kind == "input":
            continue
        spec = program.state.get(found.name)
        if spec is None or spec.sharding != sharded.produced(node) or spec.shape != shape(node):
            raise _fail(f"{found.name} is laid out in another way than its type says")
        held = sharded.gathered.get(node)
        if spec.accumulated != (held.sharding if held is not None and held.deferred else spec.sharding):
            raise _fail(f"the gradient of {found.name} is added up in another way than its type says")
        if spec.resident != (held.sharding if held is not None and held.once else spec.sharding):
            raise _fail(f"{found.name} is gathered at another time than its type says")
        stored = found.held or value(node).dtype
        summed = dtypes_of_gradient(sharded.program.precision, stored)
        if (spec.read, spec.summed, spec.reduced) != (value(node).dtype, *summed):
            raise _fail(f"{found.name} is read, or its gradient added up, in another dtype than its type says")
        expected = stored, found.trainable, found.kind
        if (spec.dtype, spec.trainable, spec.kind) != expected:
            raise _fail(f"{found.name} is another kind of tensor")
        here = users[found.name] or {0}
        if set(spec.stages) != here:
            raise _fail(f"{found.name} is used in stages {sorted(here)}, and shared between {list(spec.stages)}")
    inputs = [n for n, found in sharded.program.leaves.items() if found.kind == "input"]
    for node, known in zip(inputs, program.inputs, strict=True):
        rows = program.batches if sharded.program.leaves[node].batched else 1
        size = tuple(n * rows if d == 0 else n for d, n in enumerate(shape(node)))
        if known.sharding != sharded.produced(node) or known.shape != size or known.dtype != value(node).dtype:
            raise _fail(f"batch{known.path} is laid out in another way than its type says")


def _check_transfers(program: DistributedProgram) -> None:
    source = program.source
    nodes = {n.name: n for n in source.graph.nodes}
    for transfer in program.transfers:
        for names, home, user in (
            (transfer.forward, transfer.source, transfer.target),
            (transfer.backward, transfer.target, transfer.source),
        ):
            for name in names:
                node = nodes.get(name)
                if node is None or source.stage.get(node) != home:
                    raise _fail(f"stage {home} sends {name}, which it does not make", node)
                if not any(source.stage.get(u) == user for u in node.users):
                    raise _fail(f"stage {user} receives {name}, which it does not use", node)
                if program.values[name] != (shape(node), value(node).dtype):
                    raise _fail(f"{name} is sent as {program.values[name]}", node)


def check_batches(program: DistributedProgram) -> None:
    """Check what each batch of a step reads of all rows, and what it hands to the next. That the step is then that of
    the module called with one batch after the other is what ``verify`` proves.

    Raises:
        CompileError: QN209 with the value that is read, handed on, or drawn otherwise.
    """
    if program.batches == 1:
        return
    graph, made = program.source.graph, program.source.local.staged.sharded.program
    carried = {name: program.source.outputs[position].name for name, position in made.carried.items()}
    leaves = {node: found for node in graph.nodes if node.op == "placeholder" and (found := leaf(node)) is not None}
    for node, found in leaves.items():
        for user in node.users if found.kind == "input" and found.batched else ():
            if user.target is not microbatch or user.args[1:] != (program.batches, 0, 1):
                raise _fail(f"{user.name} reads the rows of all batches of {node.name}", user)
    names = {node.name: found.name for node, found in leaves.items() if found.name in carried}
    for spec in program.results[len(program.results) - len(carried) :]:
        if any(kind is not I for kind in spec.sharding):
            raise _fail(f"{spec.path} is not whole where the next batch reads it")
    for stage in program.stages:
        _check_carried(stage, names, carried)
    once = {n for n in program.source.once if n.op == "call_function"}
    for node in graph.nodes:
        if node in once and (node.target in DRAWS or any(n.name in names for n in node.all_input_nodes)):
            raise _fail(f"{node.name} is another one for each batch, and runs once", node)
    for row in program.schedule.actions:
        order: dict[int, int] = {}
        for action in row:
            if action.op is Op.FORWARD and order.setdefault(action.stage, 0) != action.microbatch:
                raise _fail(f"stage {action.stage} computes microbatch {action.microbatch} out of order")
            order[action.stage] = order.get(action.stage, 0) + (action.op is Op.FORWARD)


def _check_carried(stage: StageProgram, names: dict[str, str], carried: dict[str, str]) -> None:
    for label, piece in stage.pieces.items():
        for name in piece.static:
            if name in names:
                raise _fail(f"the {label} of stage {stage.index} reads {names[name]} as it was before the step")
    read = {name for piece in stage.pieces.values() for name in piece.dynamic if name in names}
    kept = {name for piece in (stage.backward, stage.weight) if piece for name in piece.dynamic if name in names}
    if not kept <= set(stage.saved):
        raise _fail(f"stage {stage.index} does not keep what its backward reads of {names[min(kept)]}")
    for name in read | stage.carried.keys():
        if stage.carried.get(name) != carried[names[name]]:
            raise _fail(f"{names[name]} becomes {stage.carried.get(name)} in stage {stage.index}")
