"""DifferentiatedProgram -> DifferentiatedProgram: values that the backward recomputes instead of saving them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from ...core.annotations import annotate, copied_from, facts, is_getitem, leaf, memory_of, origin, value
from ...ir.program import DifferentiatedProgram
from ...ir.repeated_blocks import block_of
from ...ops.casts import parameter_of
from ...ops.catalog import op_spec, spec_of
from .recompute_budget import Budget, within_budget
from .recompute_cut import cheap_values, fused_values

Blocks = Literal["none", "fused", "selective", "full", "auto"]


@dataclass(frozen=True)
class Recompute:
    """Save the inputs of each repeated block (``layers.3``), and recompute its inside in the backward.

    Before: %h = linear(%x, %w);  ...;  %g = gelu_backward(%gy, %h)
    After:  %h = linear(%x, %w);  ...;  %h_1 = linear(%x, %w);  %g = gelu_backward(%gy, %h_1)
    Ensures: no value inside a block is saved, except the plans of mixtures (small, and the host waits for them). A copy
    stands right before its first use, and equals the original bit by bit in generated Python: communication is
    repeated, and random masks depend on nothing but their place (Chen et al. 2016). Compiled kernels may add up a
    reduction in another order. A value that only the backward reads moves there.

    Always recomputed: the nodes that the program names (``again``, parts of losses), and weights that are computed from
    integers, which take several times as much memory.

    Attributes:
        blocks: ``"full"``: recompute all of a block; ``"selective"``: values that cost no more than passes over memory;
            ``"fused"``: values that cost next to nothing where pointwise operators are fused with their users (as in
            TorchInductor), also those of no block, such as losses'; ``"auto"``: as much as the ``budget`` requires;
            ``"none"``.
        reshard_after_forward: whether values that each microbatch gathers are gathered again: parameters (which are
            saved whole otherwise), and activations, of which ranks then save slices (Korthikanti et al. 2022).
        budget: the memory that saved values may take.

    Raises:
        CompileError: QN213 if the budget is too small.
    """

    blocks: Blocks = "full"
    reshard_after_forward: bool = True
    budget: Budget | None = None

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        inside = self._candidates(program)
        parameters, gathered = _gathered(program)
        again = program.again | dequantised(program) | (gathered if self.reshard_after_forward else set())
        if self.blocks == "selective":
            inside = cheap_values(program, inside)
        elif self.blocks == "fused":
            inside = fused_values(program, inside)
        inside -= parameters | again
        if self.budget is not None:
            inside = within_budget(program, inside, again, self.budget)
        copied = inside | again
        return _Copying(program, copied).copy_nodes() if copied else program

    def _candidates(self, program: DifferentiatedProgram) -> set[fx.Node]:
        """Return forward nodes that may be recomputed with their block."""
        if self.blocks == "none":
            return set()
        nodes = {node for node in _repeatable(program) if _stays_in_block(program, node)}
        return nodes if self.blocks == "fused" else {node for node in nodes if block_of(node) is not None}


class _Copying:
    """A copy of a program whose backward recomputes ``inside``.

    Attributes:
        new: the copy of each node.
        again: the copy in the backward of each node that is recomputed.
        backward_only: nodes that only the backward reads: they run there, once.
    """

    def __init__(self, program: DifferentiatedProgram, inside: set[fx.Node]) -> None:
        self.program, self.inside, self.graph = program, inside, fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.again: dict[fx.Node, fx.Node] = {}
        self.stage: dict[fx.Node, int] = {}
        self.backward_only: set[fx.Node] = set()
        for node in reversed(program.graph.nodes):
            if node in inside and all(_is_backward(user) or user in self.backward_only for user in node.users):
                self.backward_only.add(node)

    def copy_nodes(self) -> DifferentiatedProgram:
        for node in self.program.graph.nodes:
            if node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], lambda n: self.new[n]))
                continue
            if node.op == "call_function" and facts(node).phase == "backward":
                for source in node.all_input_nodes:
                    self._copy(source)
            if node not in self.backward_only:
                self.new[node] = self._emit(node, again=_is_backward(node))
        self.graph.lint()
        moved = self.program.moved(self.graph, self.new, self.stage)
        copies = {copy: self.new[n] for n, copy in self.again.items() if n not in self.backward_only}
        return replace(moved, copies=copies)

    def _copy(self, node: fx.Node) -> None:
        """Recompute ``node``, and what it needs."""
        todo, inside = [node], self.inside
        while todo:  # not by recursion: chains are long
            last = todo[-1]
            missing = [n for n in last.all_input_nodes if n in inside and n not in self.again]
            if last not in inside or last in self.again:
                todo.pop()
            elif missing:
                todo += missing
            else:
                self.again[last] = self._emit(last, again=True)
                annotate(self.again[last], replace(facts(last), phase="backward"))
                if last in self.backward_only:
                    self.new[last] = self.again[last]
                todo.pop()

    def _emit(self, node: fx.Node, *, again: bool) -> fx.Node:
        copy = self.graph.node_copy(node, lambda n: self.again[n] if again and n in self.again else self.new[n])
        if node in self.program.stage:
            self.stage[copy] = self.program.stage[node]
        return copy


def _repeatable(program: DifferentiatedProgram) -> Iterator[fx.Node]:
    """Yield forward nodes that may be recomputed for each microbatch."""
    for node in program.graph.nodes:
        forward = node.op == "call_function" and not _is_backward(node)
        if not forward or op_spec(node).cuts_microbatch or node in program.once:
            continue
        if not spec_of(origin(node)[0].target).save:
            yield node


def _stays_in_block(program: DifferentiatedProgram, node: fx.Node) -> bool:
    """Return whether only its own block, or what is in no block as itself, reads a node in the forward."""
    block, stage = block_of(node), program.stage.get(node)
    if stage is None or node in program.outputs:
        return False
    users = [user for user in node.users if user.op == "call_function" and not _is_backward(user)]
    return all(block_of(user) == block and program.stage.get(user) == stage for user in users)


def _gathered(program: DifferentiatedProgram) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the forward nodes that gather in each microbatch, for users of the same stage.

    The first set has gathers of parameters, with views and casts of their results; the second set also has gathers of
    other values, with views of these.
    """
    parameters, gathered = set[fx.Node](), set[fx.Node]()
    for node in program.graph.nodes:
        if node in program.once or not _is_forward_in_stage(program, node):
            continue
        sources = node.all_input_nodes
        gathers = op_spec(node).gathers or not gathered.isdisjoint(sources)
        if gathers and all(source in parameters or parameter_of(source) is not None for source in sources):
            parameters.add(node)
            gathered.add(node)
        elif op_spec(node).gathers or (gathers and _is_view(node)):
            gathered.add(node)
    return parameters, gathered


def _is_forward_in_stage(program: DifferentiatedProgram, node: fx.Node) -> bool:
    """Return whether a node is computed in the forward, from other nodes, and only its own stage reads it."""
    if node.op != "call_function" or _is_backward(node) or not node.all_input_nodes or node in program.outputs:
        return False
    users = [user for user in node.users if user.op != "output"]
    return all(program.stage.get(user) == program.stage.get(node) for user in users)


def dequantised(program: DifferentiatedProgram) -> set[fx.Node]:
    """Return forward nodes that are computed from parameters alone, at least one of which is quantised (bytes)."""
    from_parameters, from_bytes = set[fx.Node](), set[fx.Node]()
    for node in program.graph.nodes:
        if node.op != "output" and _is_parameter(node):
            from_parameters.add(node)
            if value(node).dtype in (torch.int8, torch.uint8):
                from_bytes.add(node)
        elif _is_forward_in_stage(program, node) and from_parameters.issuperset(node.all_input_nodes):
            from_parameters.add(node)
            if not from_bytes.isdisjoint(node.all_input_nodes):
                from_bytes.add(node)
    return {node for node in from_bytes if node.op == "call_function" and node not in program.once}


def _is_view(node: fx.Node) -> bool:
    return memory_of(node) is not node and not is_getitem(node)


def _is_parameter(node: fx.Node) -> bool:
    """Return whether a value is a parameter, or the copy of a parameter that operators read."""
    source = leaf(copied_from(node) or node)
    return source is not None and source.kind == "parameter"


def _is_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and facts(node).phase == "backward"
