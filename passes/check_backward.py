"""Check of a differentiated graph against the typed program that it was made from.

Forward, each operator and conversion must be there, reading what it should. Backward, the gradient of every value must
be the sum of one term per use, each the derivative of its operator (the templates of :mod:`.vector_jacobian`, proven by
brute force with the rules) or the transpose that its conversion's types prescribe; nothing more, nothing less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..annotations import Leaf, facts, is_getitem, leaf, needs_grad, origin, tensor_inputs, value, values
from ..builder import GraphBuilder
from ..comm_ops import convert
from ..errors import CompileError
from ..program import DifferentiatedProgram, outputs
from ..sharding import parse_type
from .reductions import move, move_back, of_parameters, seed_of
from .row_strides import rows_are_neighbours
from .vector_jacobian import VectorJacobian

aten = torch.ops.aten
Value = tuple[fx.Node, int]


@dataclass(frozen=True)
class Pattern:
    """What a graph should compute, as a small graph of its own: ``inputs`` and ``tangents`` stand for nodes of the
    checked graph; ``outputs`` and ``gradients`` are what it must contain."""

    inputs: tuple[fx.Node, ...]
    tangents: tuple[fx.Node | None, ...]
    outputs: tuple[fx.Node | None, ...]
    gradients: tuple[fx.Node | None, ...]


@dataclass
class Term:
    """A term that a gradient must have: a pattern's node, with the pattern's inputs bound."""

    node: fx.Node
    bound: dict[fx.Node, fx.Node]
    user: fx.Node


def check_backward(program: DifferentiatedProgram, training: bool = True) -> None:
    """Raises: CompileError QN209 with the operator whose forward or backward is not what it should be."""
    _Check(program, training).run()


@dataclass
class _Check:
    program: DifferentiatedProgram
    training: bool
    patterns: dict[Hashable, Pattern] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.local = self.program.local
        self.precision, self.parameters = self.local.staged.sharded.program.precision, of_parameters(self.local)
        # placeholders of patterns only need fake values
        self.scratch = GraphBuilder(self.local.mode)
        self.stands: dict[fx.Node, fx.Node] = {}  # placeholder of a pattern -> a node that it stands for
        self.operators = VectorJacobian(self.scratch, {}, lambda place: rows_are_neighbours(self.stands[place]))
        self.terms: dict[tuple[Value, int | None], list[Term]] = defaultdict(list)

    def run(self) -> None:
        nodes = [n for n in self.local.graph.nodes if n.op == "call_function" and not is_getitem(n)]
        for copy, original in self.program.copies.items():
            self._check_copy(copy, original)
        for node in nodes:
            self._operator(node)
        if not self.training:
            return
        loss = outputs(self.local.graph)[0]
        self._seed(loss)
        for (key, stage), terms in self.terms.items():
            found = self._leaf(key)
            if found is None:
                continue
            made = self.program.gradients.get((found.name, stage or 0))
            self._sum(made, terms, f"the gradient of {found.name} in stage {stage}", key[0], stage)
        for key in {key for key, _ in self.terms if self._leaf(key) is None}:
            terms = [t for (k, _), found in self.terms.items() if k == key for t in found]
            self._sum(self.program.cotangents.get(key), terms, f"the gradient of {key[0].name}", key[0], None)
        for name, stage in self.program.gradients:
            if not any((f := self._leaf(k)) is not None and f.name == name and s == stage for k, s in self.terms):
                raise self._fail(f"{name} gets a gradient in stage {stage}, and nothing there uses it", None)

    # -- operators

    def _operator(self, node: fx.Node) -> None:
        stage = self.local.stage.get(node)
        inputs = [self._value(origin(n)) for n in tensor_inputs(node)]
        made = [self.program.values.get((node, i)) for i in range(len(values(node)))]
        if all(m is None for m in made):
            return  # nothing of it is used
        cotangents = [self.program.cotangents.get((node, i)) for i in range(len(values(node)))]
        grad = self.training and needs_grad(node)
        pattern = self._pattern(node, inputs, [None if c is None else value(c).dtype for c in cotangents], grad)
        bound = dict(zip(pattern.inputs, inputs, strict=True))
        for found, wanted in zip(made, pattern.outputs, strict=False):
            if found is not None and wanted is not None and not self._equal(wanted, found, bound, stage):
                raise self._fail(f"{found.name} is not what {node.name} should compute", node)
        if not grad or all(c is None for c in cotangents):
            return
        bound |= {t: c for t, c in zip(pattern.tangents, cotangents, strict=False) if t is not None and c is not None}
        for given, term in zip(tensor_inputs(node), pattern.gradients, strict=True):
            if term is not None:
                key = origin(given)
                self.terms[key, stage].append(Term(term, bound, node))

    def _leaf(self, key: Value) -> Leaf | None:
        """The parameter whose gradient that of ``key`` is; types say how it is scattered at the end of the step."""
        return leaf(self.local.deferred.get(key[0], key[0]))

    def _value(self, key: Value) -> fx.Node:
        found = self.program.values.get(key)
        if found is None:
            raise self._fail(f"{key[0].name} is nowhere", key[0])
        return self._original(found)

    def _original(self, node: fx.Node) -> fx.Node:
        return self.program.copies.get(node, node)

    def _pattern(
        self, node: fx.Node, inputs: Sequence[fx.Node], arrives: Sequence[torch.dtype | None], grad: bool
    ) -> Pattern:
        """``arrives``: the dtypes of the gradients that there are."""
        even = node.target is aten.scaled_dot_product_attention.default
        looks = tuple(
            (tuple(value(n).shape), value(n).dtype, needs_grad(n), inputs.index(n), even and rows_are_neighbours(n))
            for n in inputs
        )
        literals = repr(fx.map_arg((node.args, node.kwargs), lambda _: "*"))
        wanted = _wanted(node)
        stored = node in self.local.at_start
        parameter = self.parameters.get(node)
        reduced = None if parameter is None else value(parameter).dtype
        key = (node.target, literals, looks, tuple(arrives), grad, tuple(wanted), stored, reduced)
        if key not in self.patterns:
            self.patterns[key] = self._make(node, inputs, arrives, grad, wanted)
        return self.patterns[key]

    def _make(
        self,
        node: fx.Node,
        inputs: Sequence[fx.Node],
        arrives: Sequence[torch.dtype | None],
        grad: bool,
        wanted: list[int],
    ) -> Pattern:
        stands: dict[fx.Node, fx.Node] = {}
        for given in inputs:
            if given not in stands:
                stands[given] = self.scratch.placeholder("x", value(given), needs_grad=needs_grad(given))
                self.stands[stands[given]] = given
        places = [stands[given] for given in inputs]
        following = iter(places)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(following))
        with self.local.mode:
            fakes = [None if d is None else v.to(d) for v, d in zip(values(node), arrives, strict=True)]
        tangents = [None if fake is None else self.scratch.placeholder("t", fake) for fake in fakes]
        if node.target is convert:
            return self._conversion(node, places[0], tangents[0], args)
        if not grad:
            made = self.scratch.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
            several = isinstance(facts(made).value, tuple)
            outs = [self.scratch.getitem(made, i) for i in range(len(values(node)))] if several else [made]
            return Pattern(tuple(places), tuple(tangents), tuple(outs), (None,) * len(places))
        outs_, pullback = self.operators.apply(node.target, args, kwargs, wanted)
        terms = pullback(tangents) if any(t is not None for t in tangents) else [None] * len(places)
        return Pattern(tuple(places), tuple(tangents), tuple(outs_), tuple(terms))

    def _conversion(self, node: fx.Node, x: fx.Node, tangent: fx.Node | None, args: Any) -> Pattern:
        _, axis, size, source, target = args
        a, b = parse_type(source), parse_type(target)
        made = move(self.scratch, x, axis, size, a, b, self.precision, stored=node in self.local.at_start)
        parameter = self.parameters.get(node)
        back = None if tangent is None else move_back(self.scratch, tangent, node, a, b, parameter, self.precision)
        return Pattern((x,), (tangent,), (made,), (back,))

    # -- gradients

    def _seed(self, loss: fx.Node) -> None:
        x = values(loss)[0]
        one = seed_of(self.scratch, x, self.precision)
        self.terms[origin(loss), self.local.stage.get(origin(loss)[0], 0)].append(Term(one, {}, origin(loss)[0]))

    def _sum(self, made: fx.Node | None, terms: list[Term], what: str, node: fx.Node, stage: int | None) -> None:
        """``made`` adds up exactly ``terms``; each term is computed in the stage of its operator, and added there to
        the others of that stage."""
        if made is None:
            raise self._fail(f"{what} is missing", node)
        left, todo, crossing = list(terms), [(made, self.program.stage.get(made))], set[int | None]()
        while todo:
            here, reader = todo.pop()
            found = next(
                (t for t in left if self._equal(t.node, here, dict(t.bound), self.local.stage.get(t.user))), None
            )
            # what an operator passes on as it came is in the stage that it came from
            home = self.program.stage.get(here) if found is None else self.local.stage.get(found.user)
            if here is made and stage not in (None, home):
                raise self._fail(f"{what} is added up in stage {home}", node)
            if home != reader:
                if home in crossing:
                    raise self._fail(f"{what} leaves stage {home} in several tensors", node)
                crossing.add(home)
            if found is not None:
                left.remove(found)
            elif here.target is aten.add.Tensor and len(here.args) == 2 and len(here.all_input_nodes) in (1, 2):
                todo += [(here.args[0], home), (here.args[1], home)]  # type: ignore[list-item]
            else:
                raise self._fail(f"{what} has a term too many or a wrong one: {here.name}", node)
        if left:
            users = ", ".join(t.user.name for t in left)
            raise self._fail(f"{what} lacks the term of {users}", node)

    # -- comparing graphs

    def _equal(self, pattern: fx.Node, node: fx.Node, bound: dict[fx.Node, fx.Node], stage: int | None) -> bool:
        """Whether ``node`` computes what ``pattern`` says, in ``stage``."""
        todo = [(pattern, node)]
        while todo:
            want, have = todo.pop()
            have = self._original(have) if want in bound else have
            if want in bound:
                if self._original(bound[want]) is not have:
                    return False
                continue
            if want.op != "call_function" or have.op != "call_function" or want.target is not have.target:
                return False
            if stage is not None and self.program.stage.get(have, stage) != stage:
                return False
            if _shapes(want) != _shapes(have) or _literals(want) != _literals(have):
                return False
            bound[want] = self._original(have)
            todo += zip(tensor_inputs(want), tensor_inputs(have), strict=True)
        return True

    def _check_copy(self, copy: fx.Node, original: fx.Node) -> None:
        same = copy.target is original.target and _literals(copy) == _literals(original)
        pairs = zip(tensor_inputs(copy), tensor_inputs(original), strict=False)
        if not same or any(self._original(a) is not self._original(b) for a, b in pairs):
            raise self._fail(f"{copy.name} is not {original.name} computed again", copy)

    def _fail(self, what: str, node: fx.Node | None) -> CompileError:
        where = facts(node).where if node is not None else None
        return CompileError("QN209", f"backward check: {what}", where=where, fix="report this, with the model")


def _shapes(node: fx.Node) -> list[tuple[int, ...] | None]:
    return [None if v is None else tuple(v.shape) for v in values(node)]


def _literals(node: fx.Node) -> str:
    return repr(fx.map_arg((node.args, node.kwargs), lambda _: "*"))


def _wanted(node: fx.Node) -> list[int]:
    """The outputs of an operator through which a gradient may come back."""
    if not isinstance(facts(node).value, tuple):
        return [0]
    return sorted({origin(user)[1] for user in node.users if is_getitem(user) and needs_grad(user)})
