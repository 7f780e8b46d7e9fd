"""A program whose sizes are symbols, with numbers in their places."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch.fx.node import map_aggregate

from ..compat.torch import FakeTensorMode
from ..core.annotations import annotate, facts, known
from .program import Captured, DifferentiatedProgram, LocalProgram, Program, ShardedProgram, StagedProgram
from .symbolic_sizes import SymbolicSizes


def at_sizes(
    program: DifferentiatedProgram, symbols: SymbolicSizes, numbers: Mapping[str, int]
) -> DifferentiatedProgram:
    """``program`` with ``numbers``, by name, in the places of its symbols: the same nodes, in all its graphs. Whether
    these numbers may stand there is not asked here.

    Raises:
        ValueError: if an expression is no whole number.
    """
    return _Numbers(symbols, numbers).differentiated(program)


def expressions(program: DifferentiatedProgram, symbols: SymbolicSizes) -> tuple[frozenset[Any], frozenset[int]]:
    """The expressions and the numbers in the values and arguments of a program's nodes.

    Raises:
        ValueError: if there are symbols elsewhere, in texts, or in numbers that are not whole.
    """
    named = re.compile(rf"\b({'|'.join(map(re.escape, symbols.names))})\b")
    found, plain = set[Any](), set[int]()

    def look(x: Any) -> None:
        if isinstance(x, SymInt):
            found.add(symbols.expression(x))
        elif isinstance(x, (SymFloat, SymBool)) or (isinstance(x, str) and named.search(x)):
            raise ValueError(f"a symbol is part of {x!r}")
        elif type(x) is int:
            plain.add(x)

    local = program.local
    whole = local.staged.sharded.program
    ends = [] if whole.end is None else [whole.end.graph]
    for graph in (whole.graph, local.graph, program.graph, *ends):
        for node in graph.nodes:
            map_aggregate((node.args, node.kwargs), look)
            for x in _tensors(node):
                map_aggregate((tuple(x.shape), x.stride()), look)
    for x in _leaves(program):
        if isinstance(x, (SymInt, SymFloat, SymBool)) or (isinstance(x, str) and named.search(x)):
            raise ValueError(f"a symbol is part of {x!r}, which is no node")
    return frozenset(found), frozenset(plain)


def _tensors(node: fx.Node) -> tuple[Tensor, ...]:
    if not known(node):
        return ()
    made = facts(node).value
    return tuple(x for x in ((made,) if isinstance(made, Tensor) else made) if isinstance(x, Tensor))


def _leaves(x: Any) -> Iterator[Any]:
    """What a program says beside its graphs."""
    if isinstance(x, (Captured, fx.Graph, fx.Node, FakeTensorMode)):
        return
    if isinstance(x, Mapping):
        x = [*x.keys(), *x.values()]
    if isinstance(x, (list, tuple, set, frozenset)):
        for each in x:
            yield from _leaves(each)
    elif is_dataclass(x) and not isinstance(x, type):
        for one in fields(x):
            yield from _leaves(getattr(x, one.name))
    else:
        yield x


class _Numbers:
    def __init__(self, symbols: SymbolicSizes, numbers: Mapping[str, int]) -> None:
        self.expression, self.evaluated = symbols.expression, symbols.evaluated(numbers)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.tensors: dict[Hashable, Tensor] = {}
        self.values: dict[int, Any] = {}  # by the identity of a node's value, which many nodes share

    def number(self, x: Any) -> Any:
        return self.evaluated(self.expression(x)) if isinstance(x, SymInt) else x

    def tensor(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        look = tuple(map(self.number, x.shape)), tuple(map(self.number, x.stride())), x.dtype, x.device
        if look not in self.tensors:
            with self.mode:
                self.tensors[look] = torch.empty_strided(*look[:2], dtype=x.dtype, device=x.device)
        return self.tensors[look]

    def value(self, x: Any) -> Any:
        if id(x) not in self.values:
            self.values[id(x)] = tuple(map(self.tensor, x)) if isinstance(x, (tuple, list)) else self.tensor(x)
        return self.values[id(x)]

    def argument(self, x: Any) -> Any:
        return self.nodes[x] if isinstance(x, fx.Node) else self.number(x)

    def graph(self, graph: fx.Graph) -> fx.Graph:
        new = fx.Graph()
        for node in graph.nodes:
            args, kwargs = map_aggregate((node.args, node.kwargs), self.argument)
            copy = self.nodes[node] = new.create_node(node.op, node.target, args, kwargs, node.name)
            copy.meta = dict(node.meta)
            if known(node):
                told = facts(node)
                annotate(copy, replace(told, value=self.value(told.value)))
        return new

    def moved(self, x: Any) -> Any:
        """A field that names nodes."""
        if isinstance(x, fx.Node):
            return self.nodes[x]
        if isinstance(x, Mapping):
            return {self.moved(key): self.moved(one) for key, one in x.items()}
        if isinstance(x, frozenset):
            return frozenset(map(self.moved, x))
        return tuple(map(self.moved, x)) if type(x) is tuple else x

    def rest(self, before: Any, /, **given: Any) -> Any:
        """A program with what is ``given``, and all else moved."""
        names = [one.name for one in fields(before) if one.name not in given]
        return replace(before, **given, **{name: self.moved(getattr(before, name)) for name in names})

    def differentiated(self, program: DifferentiatedProgram) -> DifferentiatedProgram:
        local = self.local(program.local)
        made: DifferentiatedProgram = self.rest(program, local=local, graph=self.graph(program.graph))
        return made

    def local(self, local: LocalProgram) -> LocalProgram:
        staged = self.staged(local.staged)
        made: LocalProgram = self.rest(local, staged=staged, graph=self.graph(local.graph), mode=self.mode)
        return made

    def staged(self, staged: StagedProgram) -> StagedProgram:
        made: StagedProgram = self.rest(staged, sharded=self.sharded(staged.sharded))
        return made

    def sharded(self, sharded: ShardedProgram) -> ShardedProgram:
        end = sharded.program.end
        end = None if end is None else replace(end, graph=self.graph(end.graph))
        whole: Program = replace(sharded.program, graph=self.graph(sharded.program.graph), mode=self.mode, end=end)
        made: ShardedProgram = self.rest(sharded, program=whole)
        return made
