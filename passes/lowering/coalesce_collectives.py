"""DifferentiatedProgram -> DifferentiatedProgram: slices of a block's state travel together."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from ...compat.torch import operator_name
from ...core.annotations import annotate, facts, leaf, num_bytes, value
from ...ir.program import BUCKET_MIB, DifferentiatedProgram
from ...ir.repeated_blocks import block_of
from ...ops.casts import parameter_of
from ...ops.catalog import op_spec
from ...ops.collectives import CollectiveSpec


@dataclass(frozen=True)
class CoalesceCollectives:
    """Replace the collectives of a block's parameters by one.

    The gathers of its parameters become one, before the first of them is used; the scatters of its gradients become
    one, when the last of them is there. Gathers at the start of a step become one for every ``bucket_mib`` MiB.

    Before: %w = all_gather(%p1, dp);  %y = linear(%x, %w);  %b = all_gather(%p2, dp)
    After:  %all = gather_together([%p1, %p2], dp);  %w = %all[0];  %y = linear(%x, %w);  %b = %all[1]
    Ensures: the same values, in fewer messages; a block's parameters are whole at once. Parameters between blocks
    travel with their neighbours there.
    """

    bucket_mib: float = BUCKET_MIB

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        gathers, scatters = _groups(program)
        gathers += _at_start(program, self.bucket_mib * 2**20)
        return _Coalescing(program, gathers, scatters).coalesced()


class _Coalescing:
    """A copy of a program with grouped collectives. ``new``: the copy of each node."""

    def __init__(
        self,
        program: DifferentiatedProgram,
        gathers: Sequence[Sequence[fx.Node]],
        scatters: Sequence[Sequence[fx.Node]],
    ) -> None:
        self.program = program
        self.gathers = {node: members for members in gathers for node in members}
        self.last_scatter = {members[-1]: members for members in scatters}
        self.scatters = {node for members in scatters for node in members}
        self.graph, self.new = fx.Graph(), dict[fx.Node, fx.Node]()
        self.stage: dict[fx.Node, int] = {}
        self.once: set[fx.Node] = set()

    def coalesced(self) -> DifferentiatedProgram:
        for node in self.program.graph.nodes:
            if node in self.last_scatter:
                self._coalesce(self.last_scatter[node])
            elif node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], lambda n: self.new[n]))
            elif node not in self.scatters:
                self._emit(node)
        self.graph.lint()
        moved = self.program.moved(self.graph, self.new, self.stage)
        return replace(moved, once=moved.once | self.once)

    def _emit(self, node: fx.Node) -> None:
        """Copy a node; of a gather that belongs to a group, emit the group."""
        if node in self.new:
            return
        if node in self.gathers:
            self._coalesce(self.gathers[node])
            return
        self.new[node] = self.graph.node_copy(node, lambda n: self.new[n])
        if node in self.program.stage:
            self.stage[self.new[node]] = self.program.stage[node]

    def _emit_with_inputs(self, node: fx.Node) -> None:
        """Emit a node after the inputs that are not emitted yet.

        The copy of a parameter that operators read, and its casts with the nodes that compute them, stand right
        before the parameter's own gather.
        """
        todo = [node]
        while todo:
            missing = [n for n in todo[-1].all_input_nodes if n not in self.new]
            if todo[-1] in self.new or not missing:
                self._emit(todo.pop())
            else:
                todo += missing

    def _coalesce(self, members: Sequence[fx.Node]) -> None:
        """Emit one collective for ``members``, and take its results apart under their names."""
        first, stage = members[0], self.program.stage
        each = op_spec(first).collective
        assert each is not None and each.together is not None
        target = each.together
        for node in members:
            self._emit_with_inputs(node.all_input_nodes[0])
        _, axis, size = first.args[:3]
        dims, parts = ([node.args[place] for node in members] for place in (3, 4))
        sources = [self.new[node.args[0]] for node in members]  # type: ignore[index]
        collective = self.graph.create_node(
            "call_function", target, (sources, axis, size, dims, parts), name=operator_name(target)
        )
        if first in self.program.once:
            self.once.add(collective)
        annotate(collective, replace(facts(first), value=tuple(value(node) for node in members)))
        self.stage[collective] = stage[first]
        for index, node in enumerate(members):
            item = self.graph.create_node("call_function", operator.getitem, (collective, index), name=node.name)
            annotate(item, facts(node))
            self.stage[item] = stage[node]
            self.new[node] = item


def _groups(program: DifferentiatedProgram) -> tuple[list[list[fx.Node]], list[list[fx.Node]]]:
    """Return groups of gathers of parameters, and of scatters of gradients that nothing else reads."""
    gathers: dict[Hashable, list[fx.Node]] = defaultdict(list)
    scatters: dict[Hashable, list[fx.Node]] = defaultdict(list)
    gradients, run, last_block = set(program.gradients.values()), 0, None
    for node in program.graph.nodes:
        if node.op != "call_function" or node not in program.stage:
            continue
        block = block_of(node)
        run, last_block = run + (block != last_block), block
        collective = _groupable(node, of_state=False)
        if node in program.once or collective is None:
            continue
        place = block or run
        key = program.stage[node], facts(node).phase, node.args[1], value(node).dtype, place
        if collective.price == "all_gather" and _stored(node.all_input_nodes[0]):
            gathers[key].append(node)
        elif node in gradients and all(user.op == "output" for user in node.users):
            scatters[key].append(node)
    return [m for m in gathers.values() if len(m) > 1], [m for m in scatters.values() if len(m) > 1]


def _groupable(node: fx.Node, *, of_state: bool) -> CollectiveSpec | None:
    """Return the collective that a node is, if one message can do it for several values."""
    collective = op_spec(node).collective
    if collective is None or collective.together is None or collective.of_state is not of_state:
        return None
    return collective


def _at_start(program: DifferentiatedProgram, limit: float) -> list[list[fx.Node]]:
    """Return groups of gathers of parameters at the start of a step; all but the last have ``limit`` bytes or more."""
    groups: dict[Hashable, list[list[fx.Node]]] = defaultdict(list)
    sizes: dict[Hashable, float] = {}
    for node in program.graph.nodes:
        collective = _groupable(node, of_state=True)
        if collective is not None and node in program.once and _stored(node.all_input_nodes[0]):
            key = program.stage[node], node.args[1], value(node).dtype
            if not groups[key] or sizes[key] >= limit:
                groups[key].append([])
                sizes[key] = 0.0
            groups[key][-1].append(node)
            sizes[key] += num_bytes(value(node))
    return [members for buckets in groups.values() for members in buckets]


def _stored(node: fx.Node) -> bool:
    return leaf(node) is not None or parameter_of(node) is not None
