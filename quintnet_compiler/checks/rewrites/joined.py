"""Check of sums in which gradients of slices were joined: every value before is one after, up to the order of terms.

Both graphs are numbered: equal calls of equal values, in the same function, have one number. A sum is the multiset of
what it adds up; gradients of slices in it that cover a value once count as their join, in either graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from ...core.annotations import facts
from ...ir.program import DifferentiatedProgram
from ...ir.value_numbers import ValueNumbers
from ...ops.catalog import op_spec
from ..failure import check_failure
from .numbered_values import NumberedValues
from .results import check_results

_fail = partial(check_failure, "slices check")


def check_joined(original: DifferentiatedProgram, rewritten: DifferentiatedProgram) -> None:
    """Raise CompileError QN209 with the first value that is another one."""
    numbers = ValueNumbers()
    old, new = _Sums(original, numbers), _Sums(rewritten, numbers)
    check_results(original, rewritten, old.of, new.of, _fail)
    again = [{(p.of[copy], p.of[n]) for copy, n in p.program.copies.items()} for p in (old, new)]
    if again[0] != again[1]:
        raise _fail("something else is computed again", None)
    missing = [node for node in original.graph.nodes if node.users and old.of.get(node) in old.calls - new.calls]
    if missing:
        raise _fail(f"{missing[0].name} is not computed", missing[0])


@dataclass
class _Sums(NumberedValues):
    """``calls``: the numbers of calls that are neither sums nor terms of one that are joined."""

    sums: dict[int, tuple[Hashable, tuple[int, ...]]] = field(default_factory=dict)
    slices: dict[int, tuple[Hashable, int, int, int, int]] = field(default_factory=dict)  # kind, start, end, size, of
    calls: set[int] = field(default_factory=set)

    def _call(self, node: fx.Node) -> int:
        place = self.program.stage.get(node), node in self.program.once, facts(node).phase
        args: Any = node.args
        if op_spec(node).adds and not node.kwargs and all(isinstance(x, fx.Node) for x in args):
            terms = [term for x in args for term in self._terms(self.of[x], place)]
            return self._sum(place, terms)
        if op_spec(node).joins:
            return self._join(place, args[1] if len(args) > 1 else 0, (self.of[x] for x in args[0]))
        number = self.numbers.call(place, node.target, (args, node.kwargs), self.of.__getitem__)
        if op_spec(node).slice_gradient and args[5] == 1:
            dim = args[2] % len(args[1])
            kind = (place, tuple(args[1]), dim)
            self.slices[number] = kind, args[3], args[4], args[1][dim], self.of[args[0]]
        else:
            self.calls.add(number)
        return number

    def _join(self, place: Hashable, dim: int, parts: Iterable[int]) -> int:
        return self.numbers.number(place, "join", dim, tuple(parts))

    def _terms(self, number: int, place: Hashable) -> tuple[int, ...]:
        where, terms = self.sums.get(number, (None, ()))
        return terms if where == place else (number,)

    def _sum(self, place: Hashable, terms: list[int]) -> int:
        """Add up ``terms``; a whole that they make up is one term."""
        for kind in dict.fromkeys(self.slices[term][0] for term in terms if term in self.slices):
            if kind[0] != place:  # type: ignore[index]
                continue
            mine = sorted((t for t in terms if t in self.slices and self.slices[t][0] == kind), key=self._start)
            ends = [0, *(self.slices[term][2] for term in mine)]
            if [self._start(term) for term in mine] == ends[:-1] and ends[-1] == self.slices[mine[0]][3]:
                terms = [term for term in terms if term not in mine]
                terms.append(self._join(place, kind[2], (self.slices[t][4] for t in mine)))  # type: ignore[index]
        if len(terms) == 1:
            return terms[0]
        number = self.numbers.number(place, "sum", tuple(sorted(terms)))
        self.sums[number] = place, tuple(sorted(terms))
        return number

    def _start(self, term: int) -> int:
        return self.slices[term][1]
