"""Add the blocks that a trace left out to its graph, as a trace of all blocks would have them.

Nothing is assumed of the user's code. Blocks that were left out have the same parts as one that was traced, and were
called with equal arguments (:mod:`.block_reuse`). The trace must also show that the number of a block was not read,
that no Python state changed, that the first, the second and the last block have the same operators with the same
inputs, and that other blocks read only the results of a block. Otherwise all blocks are traced.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..core.annotations import Leaf
from ..core.errors import Where
from ..guards.attribute_reads import Read
from ..ir.program import Captured
from ..ops.catalog import op_spec
from .block_reuse import BlockRun
from .canonical import module_of
from .places import LEAF, WHERE

_NUMBER = re.compile(r"(.*?)(?:_(\d+))?")


class _Differs(Exception):
    """Blocks may not be equal."""


def numbers_are_read(reads: Iterable[Read], model: nn.Module, runs: Iterable[BlockRun]) -> bool:
    """Return whether the trace read the number of a block in that block."""
    own = {
        (id(model.get_submodule(f"{name}.{path}" if path else name)), number)
        for run in runs
        for name in run.names
        for path, number in run.numbers
    }
    return any((id(read.owner), read.name) in own for read in reads)


def reads_of_all(reads: Sequence[Read], model: nn.Module, captured: Captured) -> list[Read]:
    """Return the attributes that a trace of all blocks reads: for a block that was left out, those of its equal."""
    all_reads = list(reads)
    paths = {id(module): path for path, module in model.named_modules()}
    for first, others in captured.like.items():
        for read in reads:
            path = paths.get(id(read.owner), "")
            if path != first and not path.startswith(f"{first}."):
                continue
            for other in others:
                other_path = other + path[len(first) :]
                label = read.label.replace(path, other_path, 1)
                all_reads.append(Read(label, model.get_submodule(other_path), read.name))
    return all_reads


def with_all_blocks(captured: Captured, runs: Sequence[BlockRun]) -> Captured | None:
    """Return ``captured`` with the blocks that were left out, and with the node names of a trace of all blocks.

    None if they may differ from the others. ``captured`` must have the parameters of all blocks.
    """
    try:
        graph = captured.graph
        for run in runs:
            omitted = {name for names in captured.like.values() for name in names if name in run.names}
            if omitted:
                graph = _Repeat(graph, run, omitted).whole_graph()
    except _Differs:
        return None
    return replace(captured, graph=graph, like=MappingProxyType({}))


def _require(holds: bool) -> None:
    if not holds:
        raise _Differs


@dataclass
class _Repeat:
    """One run of equal blocks.

    Attributes:
        graph: Without the blocks ``left``.
        run: The run.
        left: The names of blocks that were left out.
        env: The new node of each node.
        of: For block ``i``, its new nodes in order: if it was left out, copies of those of block ``template(i)``,
            which is in the second unit.
    """

    graph: fx.Graph
    run: BlockRun
    left: set[str]

    def __post_init__(self) -> None:
        run, nodes = self.run, list(self.graph.nodes)
        self.order = {node: i for i, node in enumerate(nodes)}
        self.index = {name: i for i, name in enumerate(run.names)}
        self.sizes = _sizes(nodes)
        inside = (n for n in nodes if n.op == "call_function" and n not in self.sizes)
        self.home = {n: i for n in inside if (i := self._block(module_of(n))) is not None}
        self.traced: dict[int, list[fx.Node]] = {i: [] for i in range(len(run.names))}
        for node, i in self.home.items():
            self.traced[i].append(node)
        self.place = {n: at for members in self.traced.values() for at, n in enumerate(members)}
        self.leaves: dict[str, fx.Node] = {
            leaf.name: n for n in nodes if n.op == "placeholder" and (leaf := _leaf(n)) is not None
        }
        self.first = min((self.order[n] for n in self.home), default=0)
        self.new, self.env, self.of = fx.Graph(), dict[fx.Node, fx.Node](), dict[int, list[fx.Node]]()

    def _block(self, module: str) -> int | None:
        """Return the block that a module is in."""
        parts = module.split(".")
        depth = self.run.names[0].count(".") + 1
        return self.index.get(".".join(parts[:depth])) if len(parts) >= depth else None

    def template(self, i: int) -> int:
        """Return the block of the second unit that block ``i`` is like."""
        return self.run.period + i % self.run.period

    def whole_graph(self) -> fx.Graph:
        period, times = self.run.period, self.run.times
        out = range(2 * period, (times - 1) * period)
        _require(self.left == {self.run.names[i] for i in out})
        self._require_clones(out)
        for i in range(period):
            self._require_alike(i, i + period)
        self._require_results_alone()
        names, todo = _Names(self), list(reversed(out))
        for node in self.graph.nodes:
            block = self.home.get(node)
            while todo and block is not None and todo[-1] <= block:
                self._repeat(todo.pop(), names)
            if block is not None and block in out:
                self.env[node] = self._at(self._original(node), block)
                continue
            new = self._copy(node, names.new_name(node), self.env.__getitem__)
            new.meta = dict(node.meta)
            self.env[node] = new
            if block is not None:
                self.of.setdefault(block, []).append(new)
                if block >= out.stop:
                    self._require_wired(new, block)
        for i in range(out.stop, times * period):
            _require(len(self.of[i]) == len(self.traced[self.template(i)]))
        return self.new

    # -- what must hold

    def _require_clones(self, out: range) -> None:
        """Require that blocks which were left out only copy the results of another one."""
        for i in out:
            _require(all(module_of(n) == self.run.names[i] and _is_clone(n) for n in self.traced[i]))

    def _require_alike(self, i: int, j: int) -> None:
        """Require that two traced blocks have the same operators on equal kinds of values, with the same inputs."""
        _require(len(self.traced[i]) == len(self.traced[j]))

        def inside(block: int) -> Any:
            return lambda n: self.place[n] if self.home.get(n) == block else "outside"

        for a, b in zip(self.traced[i], self.traced[j], strict=True):
            same = a.target is b.target and _value_type(a) == _value_type(b)
            arguments = [repr(fx.map_arg((n.args, n.kwargs), inside(at))) for n, at in ((a, i), (b, j))]
            _require(same and arguments[0] == arguments[1])

    def _require_results_alone(self) -> None:
        """Require that other blocks read only the results of a traced block, as blocks that were left out have no more.

        Of blocks in the second unit, only the next block may read results.
        """
        period, times = self.run.period, self.run.times
        returned = {n for i in range(2 * period, 3 * period) for n in map(self._original, self.traced[i])}
        second = [n for i in range(period, 2 * period) for n in self.traced[i]]
        returned |= {n for n in second if any(self.home.get(user) == self.home[n] + 1 for user in n.users)}
        places = {(self.home[n], self.place[n]) for n in second if n in returned}
        for i in (*range(2 * period), *range((times - 1) * period, times * period)):
            for node in self.traced[i]:
                others = [user for user in node.users if self.home.get(user) != i]
                _require(not others or (self.template(i), self.place[node]) in places)
                _require(i // period != 1 or all(u in self.home for u in others))

    def _require_wired(self, new: fx.Node, i: int) -> None:
        """Require that a node of a traced block of the last unit is what it would be if that had been left out, too."""
        at, j = len(self.of[i]) - 1, self.template(i)
        _require(at < len(self.traced[j]))
        like = self.traced[j][at]
        args, kwargs = fx.map_arg((like.args, like.kwargs), lambda n: self._at(n, i))
        _require(new.target is like.target and _value_type(new) == _value_type(like))
        _require((new.args, new.kwargs) == (args, kwargs))

    # -- copies

    def _original(self, clone: fx.Node) -> fx.Node:
        """Return the result of the traced block that a block which was left out returned instead."""
        while self.home.get(clone) is not None and _is_clone(clone) and module_of(clone) in self.left:
            (clone,) = clone.all_input_nodes
        return clone

    def _at(self, node: fx.Node, i: int) -> fx.Node:
        """Return the node for block ``i`` that corresponds to ``node`` for its template."""
        j = self.template(i)
        home = self.home.get(node)
        if home is not None and home in (j, j - 1):
            return self.of[i - (j - home)][self.place[node]]
        node_leaf = _leaf(node) if node.op == "placeholder" else None
        if node_leaf is not None and node_leaf.kind != "input" and (home := self._block(node_leaf.name)) is not None:
            _require(home == j and node_leaf.kind == "parameter")
            other = self.leaves.get(self.run.names[i] + node_leaf.name[len(self.run.names[j]) :])
            _require(other is not None)
            return self.env[other]  # type: ignore[index]
        _require(node.op == "placeholder" or node in self.sizes or self.order[node] < self.first)
        _require(node_leaf is None or node_leaf.kind != "constant")
        return self.env[node]

    def _repeat(self, i: int, names: _Names) -> None:
        """Append block ``i``, which was left out."""
        j, unit = self.template(i), i // self.run.period
        block: list[fx.Node] = []
        self.of[i] = block
        for node in self.traced[j]:
            new = self._copy(node, names.repeated(node, unit - 1), lambda n: self._at(n, i))
            where = node.meta[WHERE]
            module = self.run.names[i] + where.module[len(self.run.names[j]) :]
            new.meta = {**node.meta, WHERE: Where(module, where.source)}
            block.append(new)

    def _copy(self, node: fx.Node, name: str, moved: Callable[[fx.Node], fx.Node]) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), moved)
        return self.new.create_node(node.op, node.target, args, kwargs, name=name)


class _Names:
    """The node names of a trace of all blocks, whose numbers increase from block to block.

    ``steps``: by how much in each unit, by name. ``last``: the largest number of the second unit.
    """

    def __init__(self, repeat: _Repeat) -> None:
        period, times = repeat.run.period, repeat.run.times
        out = range(2 * period, (times - 1) * period)
        gone = Counter(_numbered(n)[0] for i in out for n in repeat.traced[i])
        self.steps, self.last = dict[str, int](), dict[str, int]()
        for i in range(period, 2 * period):
            for a, b in zip(repeat.traced[i], repeat.traced[i + len(out) + period], strict=False):
                (name, first), (_, second) = _numbered(a), _numbered(b)
                self.steps.setdefault(name, second - first - gone[name])
                self.last[name] = max(first, self.last.get(name, 0))
        self.more = {name: step * (times - 3) - gone[name] for name, step in self.steps.items()}

    def new_name(self, node: fx.Node) -> str:
        """Return the name of a node that was traced."""
        name, number = _numbered(node)
        if node.op != "call_function" or number <= self.last.get(name, number):
            return node.name
        return f"{name}_{number + self.more[name]}"

    def repeated(self, node: fx.Node, units: int) -> str:
        """Return the name of the copy of a node of the second unit, ``units`` units later."""
        name, number = _numbered(node)
        return f"{name}_{number + units * self.steps[name]}"


def _is_clone(node: fx.Node) -> bool:
    return op_spec(node).clones


def _sizes(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the numbers that depend on sizes of the batch alone; a trace computes each once, at its first use."""
    sizes: set[fx.Node] = set()
    for node in nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), (torch.SymInt, int)):
            sizes |= {node} if all(n.op == "placeholder" or n in sizes for n in node.all_input_nodes) else set()
    return sizes


def _numbered(node: fx.Node) -> tuple[str, int]:
    """Return ``add_3`` as a name and its number."""
    match = _NUMBER.fullmatch(node.name)
    assert match is not None
    return match[1], int(match[2] or 0)


def _leaf(node: fx.Node) -> Leaf | None:
    leaf: Leaf | None = node.meta.get(LEAF)
    return leaf


def _value_type(node: fx.Node) -> Any:
    """Return shapes (with symbols for sizes that vary), strides, dtypes and devices of a node's values."""
    result = node.meta.get("val")
    values = result if isinstance(result, (list, tuple)) else (result,)
    return [
        (str(tuple(x.shape)), str(x.stride()), x.dtype, x.device) if isinstance(x, Tensor) else str(x) for x in values
    ]
