"""A graph for which each of many equal blocks was traced once, with all of them: what a trace of each would have made.

Nothing is taken for granted of the user's code. Blocks that were left out consist of the same parts as one that was
traced, and were called with the same (:mod:`.block_reuse`). Here the trace must show that the number of a block was not
read, that nothing in Python changed, that the first, the second and the last block are the same operators wired alike,
and that nobody but the next block reads anything of a block but its results. Else all blocks are traced.
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
    """Whether the trace read the number of a block in that block."""
    own = {
        (id(model.get_submodule(f"{name}.{path}" if path else name)), number)
        for run in runs
        for name in run.names
        for path, number in run.numbers
    }
    return any((id(read.owner), read.name) in own for read in reads)


def reads_of_all(reads: Sequence[Read], model: nn.Module, captured: Captured) -> list[Read]:
    """What a trace of all blocks reads, where blocks were left out: of each, what was read of the one that it is
    like."""
    found = list(reads)
    paths = {id(module): path for path, module in model.named_modules()}
    for first, others in captured.like.items():
        for read in reads:
            path = paths.get(id(read.owner), "")
            if path != first and not path.startswith(f"{first}."):
                continue
            for other in others:
                there = other + path[len(first) :]
                label = read.label.replace(path, there, 1)
                found.append(Read(label, model.get_submodule(there), read.name))
    return found


def with_all_blocks(captured: Captured, runs: Sequence[BlockRun]) -> Captured | None:
    """``captured`` with the blocks that were left out of it, and with the names that a trace of all gives to nodes;
    None if they may not do what the others do. It must have the parameters of all blocks."""
    try:
        graph = captured.graph
        for run in runs:
            left = {name for names in captured.like.values() for name in names if name in run.names}
            if left:
                graph = _Repeat(graph, run, left).made()
    except _Differs:
        return None
    return replace(captured, graph=graph, like=MappingProxyType({}))


def _require(holds: bool) -> None:
    if not holds:
        raise _Differs


@dataclass
class _Repeat:
    """One run of equal blocks. ``env``: where nodes went. ``of[i]``: the nodes of block ``i``, in order: where it was
    left out, copies of those of block ``template(i)``, which is in the second unit."""

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
            found.name: n for n in nodes if n.op == "placeholder" and (found := _leaf(n)) is not None
        }
        self.first = min((self.order[n] for n in self.home), default=0)
        self.new, self.env, self.of = fx.Graph(), dict[fx.Node, fx.Node](), dict[int, list[fx.Node]]()

    def _block(self, module: str) -> int | None:
        """The block that a module is in."""
        parts = module.split(".")
        depth = self.run.names[0].count(".") + 1
        return self.index.get(".".join(parts[:depth])) if len(parts) >= depth else None

    def template(self, i: int) -> int:
        """The block of the second unit that block ``i`` is like."""
        return self.run.period + i % self.run.period

    def made(self) -> fx.Graph:
        period, times = self.run.period, self.run.times
        out = range(2 * period, (times - 1) * period)
        _require(self.left == {self.run.names[i] for i in out})
        for i in out:
            _require(all(module_of(n) == self.run.names[i] and _is_clone(n) for n in self.traced[i]))
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
            new = self._made(node, names.moved(node), self.env.__getitem__)
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

    def _require_alike(self, i: int, j: int) -> None:
        """Two traced blocks are the same operators on values of the same kinds, wired alike inside."""
        _require(len(self.traced[i]) == len(self.traced[j]))

        def inside(block: int) -> Any:
            return lambda n: self.place[n] if self.home.get(n) == block else "outside"

        for a, b in zip(self.traced[i], self.traced[j], strict=True):
            same = a.target is b.target and _look(a) == _look(b)
            given = [repr(fx.map_arg((n.args, n.kwargs), inside(at))) for n, at in ((a, i), (b, j))]
            _require(same and given[0] == given[1])

    def _require_results_alone(self) -> None:
        """Of a traced block, nobody reads more than what it returns: of the blocks that were left out, there is no
        more. Of those in the second unit, what they return is read by the next block alone."""
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
        """A node of a traced block of the last unit is what it would be if that had been left out, too."""
        at, j = len(self.of[i]) - 1, self.template(i)
        _require(at < len(self.traced[j]))
        like = self.traced[j][at]
        args, kwargs = fx.map_arg((like.args, like.kwargs), lambda n: self._at(n, i))
        _require(new.target is like.target and _look(new) == _look(like))
        _require((new.args, new.kwargs) == (args, kwargs))

    # -- copies

    def _original(self, clone: fx.Node) -> fx.Node:
        """What the traced block returned in the place of that which a block that was left out returns."""
        while self.home.get(clone) is not None and _is_clone(clone) and module_of(clone) in self.left:
            (clone,) = clone.all_input_nodes
        return clone

    def _at(self, node: fx.Node, i: int) -> fx.Node:
        """For block ``i``, what ``node`` is for the block that it is like."""
        j = self.template(i)
        home = self.home.get(node)
        if home is not None and home in (j, j - 1):
            return self.of[i - (j - home)][self.place[node]]
        found = _leaf(node) if node.op == "placeholder" else None
        if found is not None and found.kind != "input" and (home := self._block(found.name)) is not None:
            _require(home == j and found.kind == "parameter")
            other = self.leaves.get(self.run.names[i] + found.name[len(self.run.names[j]) :])
            _require(other is not None)
            return self.env[other]  # type: ignore[index]
        _require(node.op == "placeholder" or node in self.sizes or self.order[node] < self.first)
        _require(found is None or found.kind != "constant")
        return self.env[node]

    def _repeat(self, i: int, names: _Names) -> None:
        """Append block ``i``, which was left out."""
        j, unit = self.template(i), i // self.run.period
        made: list[fx.Node] = []
        self.of[i] = made
        for node in self.traced[j]:
            new = self._made(node, names.repeated(node, unit - 1), lambda n: self._at(n, i))
            where = node.meta[WHERE]
            module = self.run.names[i] + where.module[len(self.run.names[j]) :]
            new.meta = {**node.meta, WHERE: Where(module, where.source)}
            made.append(new)

    def _made(self, node: fx.Node, name: str, moved: Callable[[fx.Node], fx.Node]) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), moved)
        return self.new.create_node(node.op, node.target, args, kwargs, name=name)


class _Names:
    """The names that a trace of all blocks gives: numbers count on, from block to block. ``steps``: how many of them a
    unit takes; those of the last unit follow those of the second. ``last``: the largest of the second."""

    def __init__(self, repeat: _Repeat) -> None:
        period, times = repeat.run.period, repeat.run.times
        out = range(2 * period, (times - 1) * period)
        gone = Counter(_numbered(n)[0] for i in out for n in repeat.traced[i])
        self.steps, self.last = dict[str, int](), dict[str, int]()
        for i in range(period, 2 * period):
            for a, b in zip(repeat.traced[i], repeat.traced[i + len(out) + period], strict=False):
                (name, before), (_, after) = _numbered(a), _numbered(b)
                self.steps.setdefault(name, after - before - gone[name])
                self.last[name] = max(before, self.last.get(name, 0))
        self.more = {name: step * (times - 3) - gone[name] for name, step in self.steps.items()}

    def moved(self, node: fx.Node) -> str:
        """Of a node that was traced."""
        name, number = _numbered(node)
        if node.op != "call_function" or number <= self.last.get(name, number):
            return node.name
        return f"{name}_{number + self.more[name]}"

    def repeated(self, node: fx.Node, units: int) -> str:
        """Of the copy of a node of the second unit, so many units later."""
        name, number = _numbered(node)
        return f"{name}_{number + units * self.steps[name]}"


def _is_clone(node: fx.Node) -> bool:
    return op_spec(node).clones


def _sizes(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Numbers that sizes of the batch decide alone: a trace computes each of them once, where it is needed first."""
    found: set[fx.Node] = set()
    for node in nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), (torch.SymInt, int)):
            found |= {node} if all(n.op == "placeholder" or n in found for n in node.all_input_nodes) else set()
    return found


def _numbered(node: fx.Node) -> tuple[str, int]:
    """``add_3`` as a name and its number."""
    match = _NUMBER.fullmatch(node.name)
    assert match is not None
    return match[1], int(match[2] or 0)


def _leaf(node: fx.Node) -> Leaf | None:
    found: Leaf | None = node.meta.get(LEAF)
    return found


def _look(node: fx.Node) -> Any:
    """What a value is like: sizes that vary by their symbols."""
    made = node.meta.get("val")
    several = made if isinstance(made, (list, tuple)) else (made,)
    return [(str(tuple(x.shape)), str(x.stride()), x.dtype, x.device) if isinstance(x, Tensor) else str(x)
            for x in several]  # fmt: skip
