"""Check of generated functions against the graph that they were cut from, node by node.

Nothing is lost, added, put in another stage, or changed on the way to what ranks run. What generated code may call for
an operator is written down in :mod:`.tables`, apart from the code generator.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from ..compat.torch import operator_name
from ..core.annotations import facts, leaf, shape, value
from ..core.sharding import I
from ..ir.distributed_program import DistributedProgram, Piece, StageProgram, StateSpec
from ..ir.program import DifferentiatedProgram, ShardedProgram
from ..ops.catalog import op_spec
from ..ops.op_spec import Product
from ..schedules.check import verify_schedule
from ..schedules.schedule import Op
from .failure import check_failure
from .rewrites.overlap import check_pairs
from .rewrites.step_end import check_code_of_end
from .source import check_source_slices
from .tables import dtypes_of_gradient, spellings

_fail = partial(check_failure, "code check")
aten = torch.ops.aten


def check_code(program: DistributedProgram, stages: Iterable[StageProgram] | None = None) -> None:
    """Check generated functions, layouts, transfers and the schedule.

    Args:
        program: what ranks run.
        stages: the stages to check; by default those that ranks share.

    Raises:
        CompileError: QN209 with what differs; QN208 for the schedule.
    """
    for stage in dict.fromkeys(map(_ByIdentity, program.stages if stages is None else stages)):
        _StageCheck(program, stage.stage).check_functions()
    _check_state(program)
    _check_transfers(program)
    check_batches(program)
    check_code_of_end(program)
    microbatches = program.batches * math.prod(axis.size for axis in program.axes if axis.role == "time")
    if program.schedule.num_microbatches != microbatches:
        raise _fail(f"{program.schedule.num_microbatches} microbatches are scheduled, and the batch has {microbatches}")
    if program.source.gradients:
        verify_schedule(program.schedule, program.edges)


class _ByIdentity:
    """A stage that is equal to itself alone: stages that ranks share are checked once."""

    def __init__(self, stage: StageProgram) -> None:
        self.stage = stage

    def __hash__(self) -> int:
        return id(self.stage)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.stage is other.stage


class _StageCheck:
    """A check of the functions of one stage.

    Attributes:
        seen: the nodes of the graph that generated functions compute.
        accumulated: the names of the parameters whose gradients they accumulate.
    """

    def __init__(self, program: DistributedProgram, stage: StageProgram) -> None:
        self.program, self.stage = program, stage
        self.source: DifferentiatedProgram = program.source
        self.nodes = {n.name: n for n in self.source.graph.nodes}
        self.seen: set[fx.Node] = set()
        self.accumulated: list[str] = []

    def check_functions(self) -> None:
        """Check each function, that no operator of the stage is missing, and the names that the interpreter reads."""
        for label, piece in self.stage.pieces.items():
            self._check_piece(label, piece)
        self._check_slices()
        for node in self.source.graph.nodes:
            in_stage = self.source.stage.get(node) == self.stage.index and node.op == "call_function"
            if in_stage and node not in self.seen:
                raise _fail(f"stage {self.stage.index} lacks {node.name}", node)
        parameters = sorted(name for name, index in self.source.gradients if index == self.stage.index)
        if sorted(self.accumulated) != parameters:
            raise _fail(f"stage {self.stage.index} accumulates gradients of {self.accumulated}, not of {parameters}")
        self._check_state_names()
        self._check_batch_names()
        self._check_saved_names()

    def _node(self, name: str) -> fx.Node:
        node: fx.Node | None = self.nodes.get(name)
        if node is None:
            raise _fail(f"stage {self.stage.index} has {name}, which is not in the graph")
        return node

    def _check_slices(self) -> None:
        for name, cut in self.stage.slices.items():
            node = self._node(name)
            source = node.args[0].name if isinstance(node.args[0], fx.Node) else ""
            if not op_spec(node).cuts_microbatch or (cut.source, cut.dim, cut.parts) != (source, *node.args[2:4]):
                raise _fail(f"{name} is another slice of the batch than in the graph", node)
            self.seen.add(node)

    def _check_piece(self, label: str, piece: Piece) -> None:
        graph_nodes: dict[fx.Node, fx.Node] = {}  # of nodes of the function
        names = iter([*piece.static, *piece.dynamic])
        check_pairs(piece.module.graph.nodes)
        check_source_slices(piece.module.code.strip(), piece.module.graph)
        for position, node in enumerate(piece.module.graph.nodes):
            if node.op == "placeholder":
                if position:
                    graph_nodes[node] = self._node(next(names))
            elif node.op == "output":
                returned = tuple(graph_nodes[n].name for n in node.args[0])
                if returned != piece.outputs:
                    raise _fail(f"the {label} of stage {self.stage.index} returns {returned}, not {piece.outputs}")
            elif node.op == "call_method" and str(node.target).startswith("accumulate"):
                self._check_accumulation(node, graph_nodes)
            else:
                graph_nodes[node] = self._check_call(label, node, graph_nodes)

    def _check_call(self, label: str, node: fx.Node, graph_nodes: dict[fx.Node, fx.Node]) -> fx.Node:
        """Check a call of a generated function, and return its node of the graph."""
        source = self._node(node.name)
        targets, args, kwargs = _spelled(source)
        arguments = list(node.args)
        if node.op == "call_method":
            site = arguments[-1]
            if not isinstance(site, int) or not self.program.sites[site].startswith(str(targets[0])):
                raise _fail(f"{node.name} names another place in the model", source)
            arguments = arguments[1:-1]
        mapped = fx.map_arg((tuple(arguments), dict(node.kwargs)), lambda n: graph_nodes[n])
        if node.target not in targets or repr(mapped) != repr((tuple(args), kwargs)):
            raise _fail(f"{node.name} is another call than in the graph", source)
        phase = {"once": "forward", "weight": "backward"}.get(label, label)
        if source in self.seen or facts(source).phase != phase:
            raise _fail(f"{node.name} runs in the {label} of stage {self.stage.index}", source)
        if self.source.stage.get(source, self.stage.index) != self.stage.index:
            raise _fail(f"{node.name} runs in stage {self.stage.index}", source)
        self.seen.add(source)
        return source

    def _check_accumulation(self, node: fx.Node, graph_nodes: dict[fx.Node, fx.Node]) -> None:
        _, *terms, place = node.args
        name = self.stage.gradients.get(str(place), "")
        gradient = self.source.gradients.get((name, self.stage.index))
        operands = [graph_nodes[n] for n in terms]  # type: ignore[index]
        if gradient is None or not _accumulates(node, operands, gradient):
            raise _fail(f"{operands[0].name} is accumulated as the gradient of {name!r}", operands[0])
        self.accumulated.append(name)
        self.seen.add(gradient)

    # -- what the interpreter looks up by name

    def _check_state_names(self) -> None:
        for value_name, name in {**self.stage.state, **self.stage.gradients}.items():
            node_leaf = leaf(self._node(value_name))
            if node_leaf is None or node_leaf.name != name:
                raise _fail(f"{value_name} is not {name!r}")

    def _check_batch_names(self) -> None:
        inputs = [n for n in self.source.graph.nodes if n.op == "placeholder" and _is_input(n)]
        for value_name, position in self.stage.inputs.items():
            if inputs.index(self._node(value_name)) != position:
                raise _fail(f"{value_name} is not input {position}")
        for position, value_name in self.stage.results.items():
            if self.source.outputs[position].name != value_name:
                raise _fail(f"{value_name} is not output {position}")

    def _check_saved_names(self) -> None:
        """Check that the backward has what it reads and what it sends."""
        stage = self.stage
        received = {n for t in self.program.transfers if t.source == stage.index for n in t.backward}
        available = {*stage.saved, *received}
        for label in ("backward", "weight"):
            for name in stage.pieces[label].dynamic if label in stage.pieces else ():
                if name not in available:
                    raise _fail(f"{name} is not saved for the {label} of stage {stage.index}", self._node(name))
            available |= set(stage.backward.outputs)
        for name in {n for t in self.program.transfers if t.target == stage.index for n in t.backward}:
            if name not in stage.backward.outputs:
                raise _fail(f"stage {stage.index} sends {name}, which its backward does not return", self._node(name))


def _accumulates(node: fx.Node, operands: Sequence[fx.Node], gradient: fx.Node) -> bool:
    """Return whether ``node`` accumulates the gradient, as a tensor or as the product that it is."""
    if op_spec(node).accumulates == "value":
        return list(operands) == [gradient]
    is_product = op_spec(gradient).product == Product() and list(operands) == list(gradient.args)
    return op_spec(node).accumulates == "product" and is_product


def _is_input(node: fx.Node) -> bool:
    node_leaf = leaf(node)
    return node_leaf is not None and node_leaf.kind == "input"


def _spelled(node: fx.Node) -> tuple[tuple[Any, ...], list[Any], dict[str, Any]]:
    """Return the functions that generated code may call for a node, and their arguments."""
    target: Any = node.target
    if op_spec(node).shares:
        return spellings(torch.ops.aten.div.Scalar), [node.args[0], node.args[2]], {}
    if op_spec(node).on_rank:
        args = list(node.args)
        return (operator_name(target),), [*args[:2], *args[3:]] if op_spec(node).takes_size else args, {}
    return spellings(target), list(node.args), dict(node.kwargs)


# -- layouts of parameters, buffers, and the batch


def _check_state(program: DistributedProgram) -> None:
    """Check layouts, which decide the sums that complete gradients: they must be those of the type check."""
    sharded = program.source.local.staged.sharded
    stages = _stages_of_state(program.source)
    for node, node_leaf in sharded.program.leaves.items():
        if node_leaf.kind == "input":
            continue
        spec = program.state.get(node_leaf.name)
        if spec is None or spec.sharding != sharded.produced(node) or spec.shape != shape(node):
            raise _fail(f"{node_leaf.name} is laid out in another way than its type says")
        _check_gathering(sharded, node, spec)
        _check_kind(sharded, node, spec)
        expected_stages = stages[node_leaf.name] or {0}
        if set(spec.stages) != expected_stages:
            raise _fail(
                f"{node_leaf.name} is used in stages {sorted(expected_stages)}, and shared between {list(spec.stages)}"
            )
    _check_inputs(program)


def _stages_of_state(source: DifferentiatedProgram) -> dict[str, set[int]]:
    """Return the stages that use each leaf, in their forward or for its gradient."""
    stages: dict[str, set[int]] = defaultdict(set)
    for node in source.graph.nodes:
        node_leaf = leaf(node) if node.op == "placeholder" else None
        if node_leaf is not None:
            stages[node_leaf.name] |= {source.stage[user] for user in node.users if user in source.stage}
    for name, index in source.gradients:
        stages[name].add(index)
    return stages


def _check_gathering(sharded: ShardedProgram, node: fx.Node, spec: StateSpec) -> None:
    """Check when a parameter is gathered, and its gradient scattered."""
    name, gathered = sharded.program.leaves[node].name, sharded.gathered.get(node)
    is_deferred = gathered is not None and gathered.deferred
    if spec.accumulated != (gathered.sharding if gathered is not None and is_deferred else spec.sharding):
        raise _fail(f"the gradient of {name} is added up in another way than its type says")
    if spec.resident != (gathered.sharding if gathered is not None and gathered.once else spec.sharding):
        raise _fail(f"{name} is gathered at another time than its type says")


def _check_kind(sharded: ShardedProgram, node: fx.Node, spec: StateSpec) -> None:
    """Check the dtypes of a parameter and its gradient, and what kind of tensor it is."""
    node_leaf = sharded.program.leaves[node]
    stored = node_leaf.held or value(node).dtype
    gradient_dtypes = dtypes_of_gradient(sharded.program.precision, stored)
    if (spec.read, spec.summed, spec.reduced) != (value(node).dtype, *gradient_dtypes):
        raise _fail(f"{node_leaf.name} is read, or its gradient added up, in another dtype than its type says")
    if (spec.dtype, spec.trainable, spec.kind) != (stored, node_leaf.trainable, node_leaf.kind):
        raise _fail(f"{node_leaf.name} is another kind of tensor")


def _check_inputs(program: DistributedProgram) -> None:
    sharded = program.source.local.staged.sharded
    leaves = sharded.program.leaves
    inputs = [node for node, node_leaf in leaves.items() if node_leaf.kind == "input"]
    for node, spec in zip(inputs, program.inputs, strict=True):
        batches = program.batches if leaves[node].batched else 1
        sizes = tuple(n * batches if dim == 0 else n for dim, n in enumerate(shape(node)))
        if spec.sharding != sharded.produced(node) or spec.shape != sizes or spec.dtype != value(node).dtype:
            raise _fail(f"batch{spec.path} is laid out in another way than its type says")


def _check_transfers(program: DistributedProgram) -> None:
    nodes = {n.name: n for n in program.source.graph.nodes}
    for transfer in program.transfers:
        for name in transfer.forward:
            _check_transfer(program, nodes, name, transfer.source, transfer.target)
        for name in transfer.backward:
            _check_transfer(program, nodes, name, transfer.target, transfer.source)


def _check_transfer(
    program: DistributedProgram, nodes: Mapping[str, fx.Node], name: str, sender: int, receiver: int
) -> None:
    node, stage = nodes.get(name), program.source.stage
    if node is None or stage.get(node) != sender:
        raise _fail(f"stage {sender} sends {name}, which it does not compute", node)
    if not any(stage.get(user) == receiver for user in node.users):
        raise _fail(f"stage {receiver} receives {name}, which it does not use", node)
    if program.values[name] != (shape(node), value(node).dtype):
        raise _fail(f"{name} is sent as {program.values[name]}", node)


# -- several batches of a step


def check_batches(program: DistributedProgram) -> None:
    """Check the rows that each batch of a step reads, and what it hands to the next batch.

    That the step is then that of the module called with one batch after the other is what ``verify`` proves.

    Raises:
        CompileError: QN209 with the value that is read, handed on, or drawn otherwise.
    """
    if program.batches == 1:
        return
    source, captured = program.source, program.source.local.staged.sharded.program
    carried = {name: source.outputs[position].name for name, position in captured.carried.items()}
    _check_batch_rows(program)
    for spec in program.results[len(program.results) - len(carried) :]:
        if any(kind is not I for kind in spec.sharding):
            raise _fail(f"{spec.path} is not whole where the next batch reads it")
    placeholders = {node.name: leaf(node) for node in source.graph.nodes if node.op == "placeholder"}
    names = {node: x.name for node, x in placeholders.items() if x is not None and x.name in carried}
    for stage in program.stages:
        _check_carried(stage, names, carried)
    _check_runs_per_batch(source, names)
    _check_order_of_batches(program)


def _check_batch_rows(program: DistributedProgram) -> None:
    """Check that each batch reads its rows alone."""
    for node in program.source.graph.nodes:
        node_leaf = leaf(node) if node.op == "placeholder" else None
        if node_leaf is None or node_leaf.kind != "input" or not node_leaf.batched:
            continue
        for user in node.users:
            if not op_spec(user).cuts_microbatch or user.args[1:] != (program.batches, 0, 1):
                raise _fail(f"{user.name} reads the rows of all batches of {node.name}", user)


def _check_runs_per_batch(source: DifferentiatedProgram, names: Mapping[str, str]) -> None:
    """Check that nothing that differs between batches runs once a step."""
    for node in source.graph.nodes:
        if node.op != "call_function" or node not in source.once:
            continue
        if op_spec(node).random or any(x.name in names for x in node.all_input_nodes):
            raise _fail(f"{node.name} differs between batches, and runs once", node)


def _check_order_of_batches(program: DistributedProgram) -> None:
    """Check that each stage computes one batch after the other."""
    for actions in program.schedule.actions:
        next_batch: dict[int, int] = defaultdict(int)
        for action in actions:
            if action.op is not Op.FORWARD:
                continue
            if action.microbatch != next_batch[action.stage]:
                raise _fail(f"stage {action.stage} computes microbatch {action.microbatch} out of order")
            next_batch[action.stage] += 1


def _check_carried(stage: StageProgram, names: Mapping[str, str], carried: Mapping[str, str]) -> None:
    """Check that a stage reads what the batch before it left, and hands on what it changed."""
    for label, piece in stage.pieces.items():
        for name in piece.static:
            if name in names:
                raise _fail(f"the {label} of stage {stage.index} reads {names[name]} as it was before the step")
    read = {name for piece in stage.pieces.values() for name in piece.dynamic if name in names}
    read_later = {name for piece in (stage.backward, stage.weight) if piece for name in piece.dynamic if name in names}
    if not read_later <= set(stage.saved):
        raise _fail(f"stage {stage.index} does not save what its backward reads of {names[min(read_later)]}")
    for name in read | stage.carried.keys():
        if stage.carried.get(name) != carried[names[name]]:
            raise _fail(f"{names[name]} becomes {stage.carried.get(name)} in stage {stage.index}")
