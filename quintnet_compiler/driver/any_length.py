"""One compilation for all lengths: a program whose lengths are symbols, and what must be true of these.

Passes and checks compute with symbols as with numbers. Where one of them asks something about a size, the answer holds
for the lengths of which it is true, and is a condition of the program; where it needs the number itself, that is the
condition. A program for other lengths has other numbers, and is used where

- its lengths meet the conditions,
- the same of its sizes are equal as in the example: what compares by keys or by texts notes no condition,
- with the numbers of the example, and of other lengths that were compiled as usual, it was the same, node by node.

The order of its nodes depends on prices. It is chosen for each program, and code generated and checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from ..capture.modes import modes_of_a_trace
from ..core.annotations import facts, has_facts
from ..core.replaced import new_garbage_only, one_thread
from ..ir.at_sizes import at_sizes, expressions
from ..ir.batch_form import ROWS
from ..ir.distributed_program import DistributedProgram
from ..ir.program import Captured, DifferentiatedProgram
from ..ir.symbolic_sizes import SymbolicSizes
from .compiler import Compiled, Runner, followed_graph, generated
from .pipeline import PassSetting, Request

Sizes = Mapping[str, int]
FEW = 4  # programs of other lengths: compiling with symbols takes about as long
TRIES = 4


@dataclass(frozen=True)
class AnyLength:
    """``program``: with symbols; ``sizes``: its expressions; ``numbers``: its other numbers."""

    setting: PassSetting
    program: DifferentiatedProgram
    symbols: SymbolicSizes
    sizes: tuple[Any, ...]
    numbers: frozenset[int]

    @classmethod
    def compile_symbolic(
        cls, captured: Captured, request: Request, primary: Compiled, *, training: bool
    ) -> AnyLength | None:
        """The program for all lengths that those of ``request`` are an example of; None if there is none: this is
        tried, and whatever fails is for the usual way to tell."""
        symbols = SymbolicSizes({name: size for name, size in request.lengths.items() if name != ROWS})
        asked = replace(request, lengths=symbols.sizes)
        try:
            with one_thread(), new_garbage_only(), modes_of_a_trace(), symbols.used():
                setting, program = followed_graph(captured, asked, primary, Runner(), training=training)
            sizes, numbers = expressions(program, symbols)
        except Exception:  # of whatever kind
            return None
        if not symbols.open:
            return None
        return cls(setting, program, symbols, tuple(sizes | symbols.hashed_expressions()), numbers)

    def program_for(self, lengths: Sizes) -> DistributedProgram | None:
        """The program for these; None if they do not meet the conditions, or if anything fails: the usual way tells."""
        setting = replace(self.setting, request=replace(self.setting.request, lengths=lengths))
        with one_thread(), new_garbage_only(), modes_of_a_trace():
            try:
                if self._hold(lengths):
                    return generated(setting, at_sizes(self.program, self.symbols, lengths), Runner())
            except Exception:  # of whatever kind, as above
                return None
        return None

    def _hold(self, lengths: Sizes) -> bool:
        return self.symbols.conditions_hold(lengths) and self._equal(lengths) == self._equal(self.symbols.example)

    def _equal(self, lengths: Sizes) -> list[tuple[bool, int]]:
        """Return for each expression the equal number of the program's, or else the first equal expression."""
        number = self.symbols.evaluated(lengths)
        values = [number(expression) for expression in self.sizes]
        return [(True, x) if x in self.numbers else (False, values.index(x)) for x in values]


@dataclass
class LengthPrograms:
    """The programs for all lengths of one capture and number of rows, each for those that meet its conditions."""

    symbolic: list[AnyLength] = field(default_factory=list)
    usual: dict[tuple[tuple[str, int], ...], DistributedProgram] = field(default_factory=dict)
    tried: int = 0

    def program_for(self, lengths: Sizes) -> DistributedProgram | None:
        """Return the program for these lengths; None where it has to be compiled as usual."""
        programs = (symbolic.program_for(lengths) for symbolic in self.symbolic)
        return next((program for program in programs if program is not None), None)

    def note_compiled(
        self, captured: Captured, request: Request, primary: Compiled, program: DistributedProgram, *, training: bool
    ) -> None:
        """Note that ``program`` was compiled as usual; after a few of these, one with symbols is tried."""
        self.usual[tuple(request.lengths.items())] = program
        if len(self.usual) < FEW or self.tried == TRIES:
            return
        self.tried += 1
        symbolic = AnyLength.compile_symbolic(captured, replace(request, known=program), primary, training=training)
        if symbolic is not None:
            pairs = [(symbolic.program_for(dict(key)), usual) for key, usual in self.usual.items()]
            if pairs[-1][0] is not None and all(x is None or _same(x, usual) for x, usual in pairs):
                self.symbolic.append(symbolic)
        self.usual.clear()


def _same(first: DistributedProgram, second: DistributedProgram) -> bool:
    """Return whether two programs, and all that they were compiled from, are equal."""
    return first.digest == second.digest and all(map(_alike, _graphs(first.source), _graphs(second.source)))


def _graphs(program: DifferentiatedProgram) -> tuple[fx.Graph, fx.Graph, fx.Graph]:
    return program.local.staged.sharded.program.graph, program.local.graph, program.graph


def _alike(graph: fx.Graph, other: fx.Graph) -> bool:
    first, second = list(graph.nodes), list(other.nodes)
    return len(first) == len(second) and all(map(_same_node, first, second))


def _same_node(first: fx.Node, second: fx.Node) -> bool:
    a, b = (
        (node.op, node.target, node.name, repr((node.args, node.kwargs)), _looks(node), _told(node))
        for node in (first, second)
    )
    return a == b


def _looks(node: fx.Node) -> list[Any]:
    value = facts(node).value if has_facts(node) else ()
    return [
        None if x is None else (tuple(x.shape), x.stride(), x.dtype, x.device)
        for x in (value if isinstance(value, (tuple, list)) else (value,))
    ]


def _told(node: fx.Node) -> Any:
    return replace(facts(node), value=()) if has_facts(node) else None
