"""DifferentiatedProgram -> DifferentiatedProgram: gradients of logits are computed where the forward has these."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import fx

from ...core.annotations import annotate, facts, shape, values
from ...ir.builder import GraphBuilder
from ...ir.program import DifferentiatedProgram

aten = torch.ops.aten
_SUMS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.matmul.default, aten.sum.dim_IntList})
_PLACES = frozenset({aten.add.Tensor, aten.slice_backward.default})  # what brings gradients of parts together


@dataclass(frozen=True)
class EarlyLossGradients:
    """What the backward makes of a part of the logits follows in the forward, right behind that part, so that nothing
    is computed twice.

    Before: forward: %y = linear(%h, %w);  %l = nll(%y, ..);  backward: %y_1 = linear(%h, %w);  %g = nll_backward(%l_g,
            %y_1);  %h_g = mm(%g, %w)
    After:  forward: %y = linear(%h, %w);  %l = nll(%y, ..);  %g = nll_backward(%l_g, %y);  %h_g = mm(%g, %w)
    Ensures: each value is computed by the same operators from the same values; sums of gradients of parts are added up
    in the order of parts, so that one term is held at a time. Of a loss, only its own gradient, which is known before
    anything is computed, comes back. A gradient that depends on what other stages send, or on all parts (as where ranks
    hold slices of the classes), stays where it is.

    Between the forward and the backward of a microbatch the gradients of rows and table are kept: for schedules in
    which the last stage has one microbatch at a time (Hsu et al. 2024, "Liger Kernel", computes them in its forward,
    too).
    """

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        moved = _moved(program)
        return _Moving(program, moved).run() if moved else program


def _moved(program: DifferentiatedProgram) -> set[fx.Node]:
    """The backward nodes that read parts of logits, and make a few numbers of each row, or of each class, of them; and
    what these need. None if any of them is of another stage."""
    copies = {copy for copy, made in program.copies.items() if made in program.again}
    sizes = {tuple(sorted(shape(made))) for made in program.again}
    wide: set[fx.Node] = set(copies)
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        if not _backward(node) or node in program.copies or not any(source in wide for source in node.all_input_nodes):
            continue
        found.add(node)
        if node.target not in _SUMS and any(tuple(sorted(x.shape)) in sizes for x in values(node)):
            wide.add(node)
    todo = list(found)
    while todo:
        for source in todo.pop().all_input_nodes:
            if _backward(source) and source not in program.copies and source not in found:
                found.add(source)
                todo.append(source)
    for node in program.graph.nodes:
        together = node.target in _PLACES and all(source in found for source in node.all_input_nodes)
        if _backward(node) and together:
            found.add(node)
    stages = {program.stage.get(node) for node in (*found, *copies)}
    several = _of_several_parts(program)
    apart = all(program.copies.get(source, source) not in several for node in found for source in node.all_input_nodes)
    return found if len(stages) == 1 and apart else set()


def _of_several_parts(program: DifferentiatedProgram) -> set[fx.Node]:
    """What of the forward depends on more than one part of the logits."""
    parts: dict[fx.Node, set[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and not _backward(node):
            above = {part for source in node.all_input_nodes for part in parts.get(source, ())}
            parts[node] = above or ({node} if node in program.again else set())
    return {node for node, above in parts.items() if len(above) > 1}


class _Moving:
    def __init__(self, program: DifferentiatedProgram, moved: set[fx.Node]) -> None:
        self.program, self.moved = program, moved
        self.builder = GraphBuilder(program.local.mode)
        self.new: dict[fx.Node, fx.Node] = {}
        self.stage: dict[fx.Node, int] = {}
        self.copies = _needed_copies(program, moved)
        self.terms, inner = _sums(program, moved)  # a term of a sum -> these sums
        self.left = {total: sum(total in totals for totals in self.terms.values()) for total in _totals(self.terms)}
        self.partial: dict[fx.Node, fx.Node] = {}
        self.waiting: dict[fx.Node, int] = {}  # of what moves, and is no sum: how many of its inputs are not there yet
        self.readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self.first = next(node for node in program.graph.nodes if node in program.again)
        for node in program.graph.nodes:
            if node not in moved or node in inner or node in self.left:
                continue
            sources = dict.fromkeys((self.first, *map(self._source, node.all_input_nodes)))
            self.waiting[node] = len(sources)
            for source in sources:
                self.readers[source].append(node)

    def run(self) -> DifferentiatedProgram:
        program, gradients = self.program, dict[fx.Node, fx.Node]()
        made_early = {node for node in program.gradients.values() if node in self.moved}
        for node in program.graph.nodes:
            if node.op == "output":
                self.builder.graph.output(fx.map_arg(node.args[0], lambda n: gradients.get(n, self.new[n])))
            elif node in made_early:  # handed over where the backward would have made it
                with self.builder.at(node, backward=True):
                    gradients[node] = self.builder.call(aten.alias.default, self.new[node])
                self.stage[gradients[node]] = program.stage[node]
            elif (
                node not in self.moved and node not in self.new and (node not in program.copies or node in self.copies)
            ):
                if node is self.first:
                    for known in self._known_before():
                        self._emit(known)
                self._emit(node)
        self.builder.graph.lint()
        kept = replace(program, copies={copy: program.copies[copy] for copy in self.copies})
        made = kept.moved(self.builder.graph, self.new, self.stage)
        handed = {key: gradients.get(node, self.new[node]) for key, node in program.gradients.items()}
        return replace(made, gradients=handed)

    def _source(self, node: fx.Node) -> fx.Node:
        """What a node that moves reads: not the copy, which is made in the backward."""
        return self.program.copies.get(node, node)

    def _known_before(self) -> list[fx.Node]:
        """What the moved nodes read that is not there yet, and does not depend on logits: counts of labels, say."""
        needed, late = set(self.moved), set(self.program.again)
        for node in reversed(self.program.graph.nodes):
            if node in needed:
                needed.update(map(self._source, node.all_input_nodes))
        found = []
        for node in self.program.graph.nodes:
            if any(source in late for source in node.all_input_nodes):
                late.add(node)
            elif node in needed and node.op == "call_function" and node not in self.moved and node not in self.new:
                found.append(node)
        return [node for node in found if node not in late]

    def _emit(self, node: fx.Node) -> None:
        """Append a node, and all that moves and waited for it alone."""
        source = self._source if node in self.moved else lambda n: n
        made = self.builder.graph.node_copy(node, lambda n: self.new[source(n)])
        if node in self.moved:
            annotate(made, replace(facts(node), phase="forward"))
        if node in self.program.stage:
            self.stage[made] = self.program.stage[node]
        self._there(node, made)

    def _there(self, node: fx.Node, made: fx.Node) -> None:
        self.new[node] = made
        for total in self.terms.get(node, ()):
            self._add(total, made)
        for reader in self.readers[node]:
            self.waiting[reader] -= 1
            if not self.waiting[reader]:
                self._emit(reader)

    def _add(self, total: fx.Node, term: fx.Node) -> None:
        before = self.partial.get(total)
        if before is not None:
            with self.builder.at(total):
                term = self.builder.call(aten.add.Tensor, before, term)
            self.stage[term] = self.program.stage[total]
        self.partial[total] = term
        self.left[total] -= 1
        if not self.left[total]:
            self._there(total, term)


Sums = dict[fx.Node, list[fx.Node]]


def _totals(terms: Sums) -> set[fx.Node]:
    return {total for totals in terms.values() for total in totals}


def _sums(program: DifferentiatedProgram, moved: set[fx.Node]) -> tuple[Sums, set[fx.Node]]:
    """Of what moves: which sums each term belongs to (as often as it is added), and sums that are part of others."""
    asked = {*program.gradients.values(), *program.cotangents.values(), *program.values.values(), *program.outputs}
    adds = {n for n in moved if n.target is aten.add.Tensor and len(n.args) == 2 and len(n.all_input_nodes) == 2}
    adds = {n for n in adds if not n.kwargs and all(shape(x) == shape(n) for x in n.all_input_nodes)}
    inner = {n for n in adds if n not in asked and len(n.users) == 1 and next(iter(n.users)) in adds}
    terms: Sums = defaultdict(list)
    for total in program.graph.nodes:
        todo = [total] if total in adds and total not in inner else []
        while todo:
            for source in todo.pop().all_input_nodes:
                if source in inner:
                    todo.append(source)
                else:
                    terms[source].append(total)
    return terms, inner


def _needed_copies(program: DifferentiatedProgram, moved: set[fx.Node]) -> set[fx.Node]:
    """The copies that what stays in the backward still reads."""
    found: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if node in program.copies and any(
            user in found or (user not in program.copies and user not in moved) for user in node.users
        ):
            found.add(node)
    return found


def _backward(node: fx.Node) -> bool:
    return node.op == "call_function" and facts(node).phase == "backward"
