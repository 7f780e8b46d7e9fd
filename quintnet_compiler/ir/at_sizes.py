"""Replace the symbols of a program's sizes by numbers."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch.fx.node import map_aggregate

from ..compat.torch import FakeTensorMode
from ..core.annotations import annotate, facts, has_facts
from .program import Captured, DifferentiatedProgram, LocalProgram, Program, ShardedProgram, StagedProgram
from .symbolic_sizes import SymbolicSizes


def at_sizes(
    program: DifferentiatedProgram, symbols: SymbolicSizes, numbers: Mapping[str, int]
) -> DifferentiatedProgram:
    """Return ``program`` with ``numbers``, by name, in place of its symbols: the same nodes, in all its graphs.

    Conditions on the symbols are not checked here.

    Raises:
        ValueError: if an expression is no whole number.
    """
    return _Numbers(symbols, numbers).differentiated(program)


def expressions(program: DifferentiatedProgram, symbols: SymbolicSizes) -> tuple[frozenset[Any], frozenset[int]]:
    """Return the expressions and the numbers in the values and arguments of a program's nodes.

    Raises:
        ValueError: if there are symbols elsewhere, in texts, or in numbers that are not whole.
    """
    named = re.compile(rf"\b({'|'.join(map(re.escape, symbols.names))})\b")
    symbolic, plain = set[Any](), set[int]()

    def collect_sizes(x: Any) -> None:
        if isinstance(x, SymInt):
            symbolic.add(symbols.expression(x))
        elif isinstance(x, (SymFloat, SymBool)) or (isinstance(x, str) and named.search(x)):
            raise ValueError(f"a symbol is part of {x!r}")
        elif type(x) is int:
            plain.add(x)

    local = program.local
    unsplit = local.staged.sharded.program
    end_graphs = [] if unsplit.end is None else [unsplit.end.graph]
    for graph in (unsplit.graph, local.graph, program.graph, *end_graphs):
        for node in graph.nodes:
            map_aggregate((node.args, node.kwargs), collect_sizes)
            for x in _tensors(node):
                map_aggregate((tuple(x.shape), x.stride()), collect_sizes)
    for x in _leaves(program):
        if isinstance(x, (SymInt, SymFloat, SymBool)) or (isinstance(x, str) and named.search(x)):
            raise ValueError(f"a symbol is part of {x!r}, which is no node")
    return frozenset(symbolic), frozenset(plain)


def _tensors(node: fx.Node) -> tuple[Tensor, ...]:
    """Return the fake tensors of a node; none for a node without facts."""
    if not has_facts(node):
        return ()
    value = facts(node).value
    return tuple(x for x in ((value,) if isinstance(value, Tensor) else value) if isinstance(x, Tensor))


def _leaves(x: Any) -> Iterator[Any]:
    """Yield the values of a program's fields, graphs excepted."""
    if isinstance(x, (Captured, fx.Graph, fx.Node, FakeTensorMode)):
        return
    if isinstance(x, Mapping):
        x = [*x.keys(), *x.values()]
    if isinstance(x, (list, tuple, set, frozenset)):
        for element in x:
            yield from _leaves(element)
    elif is_dataclass(x) and not isinstance(x, type):
        for field in fields(x):
            yield from _leaves(getattr(x, field.name))
    else:
        yield x


class _Numbers:
    """Copies programs, with numbers in place of symbols."""

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
        shape, strides = tuple(map(self.number, x.shape)), tuple(map(self.number, x.stride()))
        key = shape, strides, x.dtype, x.device
        if key not in self.tensors:
            with self.mode:
                self.tensors[key] = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
        return self.tensors[key]

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
            if has_facts(node):
                node_facts = facts(node)
                annotate(copy, replace(node_facts, value=self.value(node_facts.value)))
        return new

    def moved(self, x: Any) -> Any:
        """Return a field with each node replaced by its copy."""
        if isinstance(x, fx.Node):
            return self.nodes[x]
        if isinstance(x, Mapping):
            return {self.moved(key): self.moved(value) for key, value in x.items()}
        if isinstance(x, frozenset):
            return frozenset(map(self.moved, x))
        return tuple(map(self.moved, x)) if type(x) is tuple else x

    def with_moved_fields(self, program: Any, /, **replaced: Any) -> Any:
        """Return a program with some fields ``replaced``, and the nodes of all others by their copies."""
        names = [field.name for field in fields(program) if field.name not in replaced]
        return replace(program, **replaced, **{name: self.moved(getattr(program, name)) for name in names})

    def differentiated(self, program: DifferentiatedProgram) -> DifferentiatedProgram:
        local = self.local(program.local)
        copy: DifferentiatedProgram = self.with_moved_fields(program, local=local, graph=self.graph(program.graph))
        return copy

    def local(self, local: LocalProgram) -> LocalProgram:
        staged = self.staged(local.staged)
        copy: LocalProgram = self.with_moved_fields(local, staged=staged, graph=self.graph(local.graph), mode=self.mode)
        return copy

    def staged(self, staged: StagedProgram) -> StagedProgram:
        copy: StagedProgram = self.with_moved_fields(staged, sharded=self.sharded(staged.sharded))
        return copy

    def sharded(self, sharded: ShardedProgram) -> ShardedProgram:
        end = sharded.program.end
        end = None if end is None else replace(end, graph=self.graph(end.graph))
        program: Program = replace(sharded.program, graph=self.graph(sharded.program.graph), mode=self.mode, end=end)
        copy: ShardedProgram = self.with_moved_fields(sharded, program=program)
        return copy
