"""DifferentiatedProgram -> DifferentiatedProgram: values that the backward makes again instead of keeping."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from ...core.annotations import annotate, copied_from, facts, is_getitem, leaf, memory_of, origin, value
from ...ir.program import DifferentiatedProgram
from ...ir.repeated_blocks import block_of
from ...ops.catalog import facts_of
from ...ops.collectives import all_gather
from ...ops.rank_local import microbatch
from ...ops.scaled_products import parameter_of
from .recompute_budget import Budget, within_budget
from .recompute_cut import cheap_values, fused_values

Blocks = Literal["none", "fused", "selective", "full", "auto"]


@dataclass(frozen=True)
class Recompute:
    """Keep the inputs of each repeated block (``layers.3``), and compute what is inside again in the backward.

    Before: %h = linear(%x, %w);  ...;  %g = gelu_backward(%gy, %h)
    After:  %h = linear(%x, %w);  ...;  %h_1 = linear(%x, %w);  %g = gelu_backward(%gy, %h_1)
    Ensures: no value inside a block is saved, but the plans of mixtures (small, and the host waits for them); a copy
    stands right before its first use (so does, instead of a copy, what the backward alone reads), and equals the
    original bit by bit: communication is repeated, and random masks
    depend on nothing but their place (Chen et al. 2016).

    ``blocks``: ``"full"`` for all that, ``"selective"`` for values that take no more than passes over memory,
    ``"auto"`` for what makes the rest fit a ``budget``, ``"fused"`` for what costs next to nothing where pointwise
    operators are fused with those that read them (as TorchInductor does), or ``"none"``.
    Always computed again: what the program says (``again``, parts of losses), and weights that are computed from
    integers, which take several times as much memory.
    ``reshard_after_forward``: whether what each microbatch
    gathers is gathered again, too, wherever it is used: parameters (if not, they are kept), and values, of which ranks
    then keep their slices (Korthikanti et al. 2022).

    Raises:
        CompileError: QN213 if the budget is too small.
    """

    blocks: Blocks = "full"
    reshard_after_forward: bool = True
    budget: Budget | None = None

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        inside = set[fx.Node]() if self.blocks == "none" else _in_blocks(program)
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
        return _Copying(program, copied).run() if copied else program


class _Copying:
    def __init__(self, program: DifferentiatedProgram, inside: set[fx.Node]) -> None:
        self.program, self.inside, self.graph = program, inside, fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.again: dict[fx.Node, fx.Node] = {}
        self.stage: dict[fx.Node, int] = {}
        self.later: set[fx.Node] = set()  # what the backward alone reads, and makes once
        for node in reversed(program.graph.nodes):
            if node in inside and all(_backward(user) or user in self.later for user in node.users):
                self.later.add(node)

    def run(self) -> DifferentiatedProgram:
        for node in self.program.graph.nodes:
            if node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], lambda n: self.new[n]))
                continue
            if node.op == "call_function" and facts(node).phase == "backward":
                for source in node.all_input_nodes:
                    self._copy(source)
            if node not in self.later:
                self.new[node] = self._emit(node, again=_backward(node))
        self.graph.lint()
        made = self.program.moved(self.graph, self.new, self.stage)
        copies = {copy: self.new[n] for n, copy in self.again.items() if n not in self.later}
        return replace(made, copies=copies)

    def _copy(self, node: fx.Node) -> None:
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
                if last in self.later:
                    self.new[last] = self.again[last]
                todo.pop()

    def _emit(self, node: fx.Node, *, again: bool) -> fx.Node:
        made = self.graph.node_copy(node, lambda n: self.again[n] if again and n in self.again else self.new[n])
        if node in self.program.stage:
            self.stage[made] = self.program.stage[node]
        return made


def _in_blocks(program: DifferentiatedProgram) -> set[fx.Node]:
    """Forward nodes that are read in their own block only."""
    found = set()
    for node in program.graph.nodes:
        if node.op != "call_function" or _backward(node) or node.target is microbatch or node in program.once:
            continue
        if facts_of(origin(node)[0].target).save:
            continue
        block, stage = block_of(node), program.stage.get(node)
        forward = [user for user in node.users if user.op == "call_function" and not _backward(user)]
        alone = all(block_of(user) == block and program.stage.get(user) == stage for user in forward)
        if block is not None and stage is not None and alone and node not in program.outputs:
            found.add(node)
    return found


def _gathered(program: DifferentiatedProgram) -> tuple[set[fx.Node], set[fx.Node]]:
    """Forward nodes that each microbatch gathers for operators of the same stage: of parameters alone, with what views
    or casts the result; and these with gathers of other values, and what views those."""
    parameters, found = set[fx.Node](), set[fx.Node]()
    for node in program.graph.nodes:
        if node.op != "call_function" or _backward(node) or node in program.once or not node.all_input_nodes:
            continue
        sources = node.all_input_nodes
        alone = all(program.stage.get(user) == program.stage.get(node) for user in node.users if user.op != "output")
        if not alone or node in program.outputs:
            continue
        gathers = node.target is all_gather or any(source in found for source in sources)
        if gathers and all(source in parameters or parameter_of(source) is not None for source in sources):
            parameters.add(node)
            found.add(node)
        elif node.target is all_gather or (gathers and memory_of(node) is not node and not is_getitem(node)):
            found.add(node)
    return parameters, found


def dequantised(program: DifferentiatedProgram) -> set[fx.Node]:
    """Forward nodes that are computed from parameters alone, some of which are bytes: quantised weights."""
    alone, found = set[fx.Node](), set[fx.Node]()
    for node in program.graph.nodes:
        if node.op != "output" and _parameter(node):
            alone.add(node)
            if value(node).dtype in (torch.int8, torch.uint8):
                found.add(node)
        elif node.op == "call_function" and not _backward(node) and node.all_input_nodes:
            same = all(program.stage.get(user) == program.stage.get(node) for user in node.users if user.op != "output")
            if same and node not in program.outputs and alone.issuperset(node.all_input_nodes):
                alone.add(node)
                if not found.isdisjoint(node.all_input_nodes):
                    found.add(node)
    return {node for node in found if node.op == "call_function" and node not in program.once}


def _parameter(node: fx.Node) -> bool:
    """Whether a value is a parameter, or the copy of one that operators read."""
    found = leaf(copied_from(node) or node)
    return found is not None and found.kind == "parameter"


def _backward(node: fx.Node) -> bool:
    return node.op == "call_function" and facts(node).phase == "backward"
