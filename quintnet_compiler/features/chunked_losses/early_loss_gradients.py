"""DifferentiatedProgram -> DifferentiatedProgram: gradients of logits are computed in the forward."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

import torch
from torch import fx

from ...core.annotations import annotate, facts, shape, values
from ...ir.builder import GraphBuilder
from ...ir.program import DifferentiatedProgram
from ...ops.catalog import adds_two, op_spec

aten = torch.ops.aten
_SUMS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.matmul.default, aten.sum.dim_IntList})


@dataclass(frozen=True)
class EarlyLossGradients:
    """Move the backward of each part of the logits into the forward, right after that part: nothing is recomputed.

    Before: forward: %y = linear(%h, %w);  %l = nll(%y, ..);  backward: %y_1 = linear(%h, %w);  %g = nll_backward(%l_g,
            %y_1);  %h_g = mm(%g, %w)
    After:  forward: %y = linear(%h, %w);  %l = nll(%y, ..);  %g = nll_backward(%l_g, %y);  %h_g = mm(%g, %w)
    Ensures: each value is computed by the same operators from the same values; gradients of parts are summed in the
    order of parts, so that memory holds one term at a time. The backward of a loss starts from a gradient that is known
    before anything is computed. A gradient that depends on what other stages send, or on all parts (as where ranks hold
    slices of the classes), stays in the backward.

    The gradients of rows and table are saved between the forward and the backward of a microbatch: this is for
    schedules in which the last stage has one microbatch at a time. Hsu et al. 2024, "Liger Kernel", computes them in
    its forward, too.
    """

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        """Return the program with gradients of logits in the forward."""
        moving = _moving_nodes(program)
        return _Moving(program, moving).run() if moving else program


def _moving_nodes(program: DifferentiatedProgram) -> set[fx.Node]:
    """Return the backward nodes of logits, with the backward nodes that they need.

    They read parts of logits, and compute a few numbers of each row or of each class. Empty if they belong to several
    stages, or if one reads a value that depends on several parts.
    """
    copies = {copy for copy, original in program.copies.items() if original in program.again}
    nodes = _readers_of_logits(program, copies)
    _add_sources(program, nodes)
    _add_joins(program, nodes)
    stages = {program.stage.get(node) for node in (*nodes, *copies)}
    of_several_parts = _values_of_several_parts(program)
    sources = (program.copies.get(source, source) for node in nodes for source in node.all_input_nodes)
    return nodes if len(stages) == 1 and of_several_parts.isdisjoint(sources) else set()


def _readers_of_logits(program: DifferentiatedProgram, copies: set[fx.Node]) -> set[fx.Node]:
    """Return the backward nodes that read copies of logits, or values as wide that are computed from these."""
    sizes = {tuple(sorted(shape(node))) for node in program.again}
    wide = set(copies)
    readers: set[fx.Node] = set()
    for node in program.graph.nodes:
        if not _is_backward(node) or node in program.copies or wide.isdisjoint(node.all_input_nodes):
            continue
        readers.add(node)
        if node.target not in _SUMS and any(tuple(sorted(x.shape)) in sizes for x in values(node)):
            wide.add(node)
    return readers


def _add_sources(program: DifferentiatedProgram, nodes: set[fx.Node]) -> None:
    """Add the backward nodes that ``nodes`` are computed from, but no copies of forward nodes."""
    todo = list(nodes)
    while todo:
        for source in todo.pop().all_input_nodes:
            if _is_backward(source) and source not in program.copies and source not in nodes:
                nodes.add(source)
                todo.append(source)


def _add_joins(program: DifferentiatedProgram, nodes: set[fx.Node]) -> None:
    """Add the backward nodes that combine gradients of parts, all of which are in ``nodes``."""
    for node in program.graph.nodes:
        joins = op_spec(node).adds or op_spec(node).slice_gradient
        if _is_backward(node) and joins and nodes.issuperset(node.all_input_nodes):
            nodes.add(node)


def _values_of_several_parts(program: DifferentiatedProgram) -> set[fx.Node]:
    """Return the forward nodes that depend on more than one part of the logits."""
    parts: dict[fx.Node, set[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and not _is_backward(node):
            above = {part for source in node.all_input_nodes for part in parts.get(source, ())}
            parts[node] = above or ({node} if node in program.again else set())
    return {node for node, above in parts.items() if len(above) > 1}


class _Moving:
    """A copy of a program in which nodes of the backward run in the forward.

    Attributes:
        new: the copy of each node.
        copies: the copies of forward nodes that the backward still reads.
        sums: for each term, the sums that it belongs to, as often as it is added.
        missing_terms: for each sum, the number of terms that are not added yet.
        partial: for each sum, what is added so far.
        waiting: for each moving node that is no sum, the number of its inputs that are not computed yet.
        readers: for each node, the moving nodes that wait for it.
        first: the first part of the logits.
    """

    def __init__(self, program: DifferentiatedProgram, moving: set[fx.Node]) -> None:
        self.program, self.moving = program, moving
        self.builder = GraphBuilder(program.local.mode)
        self.new: dict[fx.Node, fx.Node] = {}
        self.stage: dict[fx.Node, int] = {}
        self.copies = _needed_copies(program, moving)
        self.sums, inner = _sums(program, moving)
        self.missing_terms = Counter(total for totals in self.sums.values() for total in totals)
        self.partial: dict[fx.Node, fx.Node] = {}
        self.waiting: dict[fx.Node, int] = {}
        self.readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self.first = next(node for node in program.graph.nodes if node in program.again)
        for node in program.graph.nodes:
            if node not in moving or node in inner or node in self.missing_terms:
                continue
            sources = dict.fromkeys((self.first, *map(self._source, node.all_input_nodes)))
            self.waiting[node] = len(sources)
            for source in sources:
                self.readers[source].append(node)

    def run(self) -> DifferentiatedProgram:
        program, gradients = self.program, dict[fx.Node, fx.Node]()
        moved_gradients = {node for node in program.gradients.values() if node in self.moving}
        for node in program.graph.nodes:
            if node.op == "output":
                self.builder.graph.output(fx.map_arg(node.args[0], lambda n: gradients.get(n, self.new[n])))
            elif node in moved_gradients:  # returned where the backward would have computed it
                with self.builder.at(node, backward=True):
                    gradients[node] = self.builder.call(aten.alias.default, self.new[node])
                self.stage[gradients[node]] = program.stage[node]
            elif self._stays(node):
                if node is self.first:
                    for source in self._sources_before_logits():
                        self._emit(source)
                self._emit(node)
        self.builder.graph.lint()
        needed = replace(program, copies={copy: program.copies[copy] for copy in self.copies})
        moved = needed.moved(self.builder.graph, self.new, self.stage)
        all_gradients = {key: gradients.get(node, self.new[node]) for key, node in program.gradients.items()}
        return replace(moved, gradients=all_gradients)

    def _stays(self, node: fx.Node) -> bool:
        """Return whether a node that is not emitted yet keeps its place."""
        needed = node not in self.program.copies or node in self.copies
        return node not in self.moving and node not in self.new and needed

    def _source(self, node: fx.Node) -> fx.Node:
        """Return what a moving node reads: the forward node instead of its copy in the backward."""
        return self.program.copies.get(node, node)

    def _sources_before_logits(self) -> list[fx.Node]:
        """Return the nodes that moving nodes read and that do not depend on logits, such as counts of labels."""
        needed, late = set(self.moving), set(self.program.again)
        for node in reversed(self.program.graph.nodes):
            if node in needed:
                needed.update(map(self._source, node.all_input_nodes))
        sources = []
        for node in self.program.graph.nodes:
            if any(source in late for source in node.all_input_nodes):
                late.add(node)
            elif node in needed and node.op == "call_function" and node not in self.moving and node not in self.new:
                sources.append(node)
        return [node for node in sources if node not in late]

    def _emit(self, node: fx.Node) -> None:
        """Append a node, and the moving nodes that waited for it alone."""
        source = self._source if node in self.moving else lambda n: n
        copy = self.builder.graph.node_copy(node, lambda n: self.new[source(n)])
        if node in self.moving:
            annotate(copy, replace(facts(node), phase="forward"))
        if node in self.program.stage:
            self.stage[copy] = self.program.stage[node]
        self._computed(node, copy)

    def _computed(self, node: fx.Node, copy: fx.Node) -> None:
        """Add ``node`` to its sums, and emit the moving nodes that waited for it."""
        self.new[node] = copy
        for total in self.sums.get(node, ()):
            self._add(total, copy)
        for reader in self.readers[node]:
            self.waiting[reader] -= 1
            if not self.waiting[reader]:
                self._emit(reader)

    def _add(self, total: fx.Node, term: fx.Node) -> None:
        partial = self.partial.get(total)
        if partial is not None:
            with self.builder.at(total):
                term = self.builder.call(aten.add.Tensor, partial, term)
            self.stage[term] = self.program.stage[total]
        self.partial[total] = term
        self.missing_terms[total] -= 1
        if not self.missing_terms[total]:
            self._computed(total, term)


Sums = dict[fx.Node, list[fx.Node]]


def _sums(program: DifferentiatedProgram, moving: set[fx.Node]) -> tuple[Sums, set[fx.Node]]:
    """Return, for each term, the moving sums that it belongs to (as often as it is added), and partial sums."""
    results = {*program.gradients.values(), *program.cotangents.values(), *program.values.values(), *program.outputs}
    adds = {node for node in moving if adds_two(node)}
    inner = {n for n in adds if n not in results and len(n.users) == 1 and next(iter(n.users)) in adds}
    sums: Sums = defaultdict(list)
    for total in program.graph.nodes:
        todo = [total] if total in adds and total not in inner else []
        while todo:
            for source in todo.pop().all_input_nodes:
                if source in inner:
                    todo.append(source)
                else:
                    sums[source].append(total)
    return sums, inner


def _needed_copies(program: DifferentiatedProgram, moving: set[fx.Node]) -> set[fx.Node]:
    """Return the copies that nodes which stay in the backward read."""
    needed: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if node in program.copies and any(
            user in needed or (user not in program.copies and user not in moving) for user in node.users
        ):
            needed.add(node)
    return needed


def _is_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and facts(node).phase == "backward"
