"""Check of a differentiated graph against the typed program that it was made from.

Forward, each operator and conversion must be there, reading what it should. Backward, the gradient of every value must
be the sum of one term per use, each the derivative of its operator (see :mod:`.derivatives`) or the transpose
that its conversion's types prescribe (:mod:`.tables`); nothing more, nothing less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ...core.annotations import (
    Leaf,
    copied_from,
    facts,
    is_getitem,
    leaf,
    needs_grad,
    origin,
    tensor_inputs,
    value,
    values,
)
from ...core.errors import REPORT, CompileError
from ...core.sharding import parse_type
from ...ir.builder import GraphBuilder
from ...ir.program import DifferentiatedProgram, outputs
from ...ops.collectives import convert
from ...ops.derivatives.user_derivatives import (
    after_gradients,
    arrives,
    declare_gradient,
    derivatives,
    of_tangents,
    with_tangent,
)
from ...ops.rank_local import LOOKUPS, loss_scale
from .derivatives.calls import OperatorCall, Pattern
from .derivatives.proven import Derivatives
from .tables import SUMS, backward_call, dtype_of_sum, dtypes_of_gradient, forward_call

aten = torch.ops.aten
Value = tuple[fx.Node, int]


@dataclass
class Term:
    """A term that a gradient must have: a pattern's node, with the pattern's inputs bound."""

    node: fx.Node
    bound: dict[fx.Node, fx.Node]
    user: fx.Node


def check_backward(
    program: DifferentiatedProgram,
    training: bool = True,
    templates: Mapping[Hashable, Any] | None = None,
    proven: set[Hashable] | None = None,
) -> None:
    """``templates``: operators that were traced; each that the program has is proven before it is believed.
    ``proven``: what proofs of other programs said of smaller calls; proofs of this one are added.

    Raises:
        CompileError: QN209 with the operator whose forward or backward is not what it should be.
    """
    _Check(program, training, templates or {}, proven).run()


@dataclass
class _Check:
    program: DifferentiatedProgram
    training: bool
    templates: Mapping[Hashable, Any]
    proven: set[Hashable] | None = None
    patterns: dict[Hashable, Pattern] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.local = self.program.local
        self.precision = self.local.staged.sharded.program.precision
        self.own, self.backward = derivatives(self.local.graph), of_tangents(self.local.graph.nodes)
        self.reaching = _reaching(self.local.graph)
        # placeholders of patterns only need fake values
        self.scratch = GraphBuilder(self.local.mode)
        absent = self.local.staged.sharded.program.absent
        self.operators = Derivatives(self.scratch, dict(self.templates), absent, self.proven)
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
        unread = self._unread()
        inner: dict[Value, list[Term]] = defaultdict(list)  # of all stages
        used: set[tuple[str, int | None]] = set()
        for (key, stage), terms in self.terms.items():
            found = self._leaf(key)
            if found is not None:
                used.add((found.name, stage))
            elif key not in unread:
                inner[key] += terms
        known: dict[Value, bool] = {}
        for key, terms in inner.items():
            if key not in self.program.cotangents and not self._reads(key, known):
                continue
            self._sum(self.program.cotangents.get(key), terms, f"the gradient of {key[0].name}", key[0], None)
        for name, stage in self.program.gradients:
            if (name, stage) not in used:
                raise self._fail(f"{name} gets a gradient in stage {stage}, and nothing there uses it", None)

    # -- operators

    def _operator(self, node: fx.Node) -> None:
        stage = self.local.stage.get(node)
        if node.target in (with_tangent, declare_gradient, after_gradients):
            self._derivative(node, stage)
            return
        made = [self.program.values.get((node, i)) for i in range(len(values(node)))]
        cotangents = [self.program.cotangents.get((node, i)) for i in range(len(values(node)))]
        if all(m is None for m in (*made, *cotangents)):
            return  # nothing of it is used
        dead = all(m is None for m in made)  # only its gradient is: a backward of the user's declares that
        values_of = self.program.values
        inputs = [
            self._original(values_of.get(origin(n), n)) if dead else self._value(origin(n)) for n in tensor_inputs(node)
        ]
        for x, found in zip(values(node), cotangents, strict=True):
            if found is not None and value(found).shape != x.shape:
                raise self._fail(f"the gradient of {node.name} has another shape than it: {found.name}", node)
        grad = self.training and needs_grad(node)
        pattern = self._pattern(node, inputs, [None if c is None else value(c) for c in cotangents], grad)
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

    def _derivative(self, node: fx.Node, stage: int | None) -> None:
        """The ends of a derivative that the user wrote: they pass on values and gradients as they come."""
        given = tensor_inputs(node)
        if node.target is declare_gradient:
            arrived = self.program.values.get(origin(given[1]))
            constant = arrived is not None and given[1] not in self.backward
            if constant and not any(n in self.reaching for n, d in self.own.items() if d is self.own[node]):
                return  # what never saw a gradient declares none
            if self.training and needs_grad(node) and arrived is not None:
                self._passes(origin(given[0]), arrived, node)
            return
        made = self.program.values.get((node, 0))
        passed = made if made is None or node.target is with_tangent else made.args[0]
        alias = made is passed or (made is not None and made.target is aten.alias.default)
        if made is not None and not (
            alias and isinstance(passed, fx.Node) and self._original(passed) is self._value(origin(given[0]))
        ):
            raise self._fail(f"{made.name} is not what {node.name} passes on", node)
        cotangent = self.program.cotangents.get((node, 0))
        if node.target is after_gradients and self.training and cotangent is not None:
            self._passes(origin(given[0]), cotangent, node)
        tangent = self.program.values.get((node, 1))
        if node.target is with_tangent and tangent is not None:
            nothing = cotangent is None and tangent.target is aten.zeros.default
            if tangent is not cotangent and not nothing:
                raise self._fail(f"{tangent.name} is not the gradient of {node.name}", node)

    def _passes(self, key: Value, gradient: fx.Node, node: fx.Node) -> None:
        place = self.scratch.placeholder("t", value(gradient))
        self.terms[key, self.local.stage.get(node)].append(Term(place, {place: gradient}, node))

    def _unread(self) -> frozenset[Value]:
        """Values whose gradients only a backward of the user's would read, and it does not."""
        read = set[Value]()
        for node in self.local.graph.nodes:
            if is_getitem(node) or node.op == "output" or not needs_grad(node):
                continue
            ends = range(len(values(node)))
            if node.target is with_tangent:
                reads = (node, 1) in self.program.values
            else:
                reads = node.op == "placeholder" or any(origin(n) in read for n in arrives(node))
            read |= {(node, i) for i in ends if reads}
        return frozenset(key for key, _ in self.terms if key not in read)

    def _reads(self, key: Value, known: dict[Value, bool]) -> bool:
        """Whether a parameter's gradient depends on that of ``key``: some derivatives are 0 whatever arrives."""
        if key in known:
            return known[key]
        (node, index), given = key, tensor_inputs(key[0])
        if not needs_grad(node) or node.op == "placeholder" or node in self.own or node.target is convert:
            found = needs_grad(node) and (node.target is not convert or self._reads(origin(given[0]), known))
        else:
            wanted = _wanted(node)
            arrives = [x if i in wanted else None for i, x in enumerate(values(node))]
            inputs = [self._value(origin(n)) for n in given]
            pattern = self._pattern(node, inputs, arrives, True)
            found = any(
                term is not None and self._reads(origin(n), known) and _depends(term, pattern.tangents[index])
                for n, term in zip(given, pattern.gradients, strict=True)
            )
        known[key] = found
        return found

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
        self, node: fx.Node, inputs: Sequence[fx.Node], arrives: Sequence[Tensor | None], grad: bool
    ) -> Pattern:
        """``arrives``: the gradients that there are, as fake tensors."""
        looks = [(*_look(value(n)), needs_grad(n), inputs.index(n)) for n in inputs]
        back = [None if t is None else _look(t) for t in arrives]
        literals = repr(fx.map_arg((node.args, node.kwargs), lambda _: "*"))
        wanted = _wanted(node)
        stored = node in self.local.at_start
        held = _parameter(node)
        reduced = None if held is None else value(held).dtype
        sums = _sums(node)
        key = (node.target, literals, tuple(looks), tuple(back), grad, tuple(wanted), stored, reduced, sums)
        if key not in self.patterns:
            self.patterns[key] = self._make(node, inputs, arrives, grad, wanted, sums)
        return self.patterns[key]

    def _make(
        self,
        node: fx.Node,
        inputs: Sequence[fx.Node],
        arrives: Sequence[Tensor | None],
        grad: bool,
        wanted: list[int],
        sums: torch.dtype | None,
    ) -> Pattern:
        if grad and node.target is not convert:
            operands, flags = tuple(value(n) for n in inputs), tuple(needs_grad(n) for n in inputs)
            same = tuple(inputs.index(n) for n in inputs)
            given = (node.args, node.kwargs)
            return self.operators.pattern(
                OperatorCall(node.target, given, operands, flags, same, tuple(arrives), tuple(wanted), sums)
            )
        stands = {n: self.scratch.placeholder("x", value(n), needs_grad=needs_grad(n)) for n in inputs}
        places = [stands[n] for n in inputs]
        following = iter(places)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(following))
        tangents = [None if t is None else self.scratch.placeholder("t", t) for t in arrives]
        if node.target is convert:
            return self._conversion(node, places[0], tangents[0], args)
        made = self.scratch.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
        several = isinstance(facts(made).value, tuple)
        outs = [self.scratch.getitem(made, i) for i in range(len(values(node)))] if several else [made]
        return Pattern(tuple(places), tuple(tangents), tuple(outs), (None,) * len(places))

    def _conversion(self, node: fx.Node, x: fx.Node, tangent: fx.Node | None, args: Any) -> Pattern:
        """Ranks add up values in the dtype of values, and gradients of parameters in that of these, in which they
        stay."""
        _, axis, size, source, target = args
        a, b = parse_type(source), parse_type(target)
        dtype, held = value(x).dtype, _parameter(node)
        forward = forward_call(a, b, stored=node in self.local.at_start)
        made, back = x, tangent
        if forward is not None:
            made = self._sent(x, forward, axis, size, dtype_of_sum(self.precision, dtype))
            made = self._cast(made, dtype)
        backward = backward_call(a, b)
        if tangent is not None and backward is not None:
            came = value(tangent).dtype
            if held is None:
                back = self._cast(self._sent(tangent, backward, axis, size, dtype_of_sum(self.precision, came)), came)
            else:
                wide = dtypes_of_gradient(self.precision, value(held).dtype)[1]
                back = self._sent(tangent, backward, axis, size, wide)
        return Pattern((x,), (tangent,), (made,), (back,))

    def _sent(self, x: fx.Node, call: Any, axis: str, size: int, wide: torch.dtype) -> fx.Node:
        """``x`` over the axis, in dtype ``wide`` where ranks add up."""
        op, dims = call
        return self.scratch.call(op, self._cast(x, wide) if op in SUMS else x, axis, size, *dims)

    def _cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if value(x).dtype is dtype else self.scratch.call(aten._to_copy.default, x, dtype=dtype)

    # -- gradients

    def _seed(self, loss: fx.Node) -> None:
        x = values(loss)[0]
        one = self.scratch.call(aten.ones.default, list(x.shape), dtype=x.dtype, device=x.device)
        if self.precision.scale is not None:
            one = self.scratch.call(loss_scale, one)
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
            if want in bound:
                if not self._same(bound[want], have):
                    return False
                continue
            while have.target is aten.contiguous.default and want.target is not have.target:
                (have,) = have.all_input_nodes
            if want.op != "call_function" or have.op != "call_function" or want.target is not have.target:
                return False
            if stage is not None and self.program.stage.get(have, stage) != stage:
                return False
            if _shapes(want) != _shapes(have) or _literals(want) != _literals(have):
                return False
            bound[want] = self._original(have)
            todo += zip(tensor_inputs(want), tensor_inputs(have), strict=True)
        return True

    def _same(self, want: fx.Node, have: fx.Node) -> bool:
        """Whether two nodes are one value, in whatever memory format."""
        want, have = self._original(want), self._original(have)
        while have is not want and have.target is aten.contiguous.default:
            have = self._original(have.all_input_nodes[0])
        return have is want

    def _check_copy(self, copy: fx.Node, original: fx.Node) -> None:
        same = copy.target is original.target and _literals(copy) == _literals(original)
        pairs = zip(tensor_inputs(copy), tensor_inputs(original), strict=False)
        if not same or any(self._original(a) is not self._original(b) for a, b in pairs):
            raise self._fail(f"{copy.name} is not {original.name} computed again", copy)

    def _fail(self, what: str, node: fx.Node | None) -> CompileError:
        where = facts(node).where if node is not None else None
        return CompileError("QN209", f"backward check: {what}", where=where, fix=REPORT)


def _reaching(graph: fx.Graph) -> frozenset[fx.Node]:
    """The operators to which a gradient of the loss comes."""
    found = {outputs(graph)[0]}
    for node in reversed(graph.nodes):
        if node in found and node.op == "call_function":
            found.update(n for n in tensor_inputs(node) if needs_grad(n))
    return frozenset(found)


def _depends(node: fx.Node, on: fx.Node | None) -> bool:
    seen, todo = set[fx.Node](), [node]
    while todo:
        here = todo.pop()
        if here is on:
            return True
        todo += [n for n in here.all_input_nodes if n not in seen]
        seen.update(here.all_input_nodes)
    return False


def _shapes(node: fx.Node) -> list[tuple[int, ...] | None]:
    return [None if v is None else tuple(v.shape) for v in values(node)]


def _literals(node: fx.Node) -> str:
    return repr(fx.map_arg((node.args, node.kwargs), lambda _: "*"))


def _wanted(node: fx.Node) -> list[int]:
    """The outputs of an operator through which a gradient may come back."""
    if not isinstance(facts(node).value, tuple):
        return [0]
    return sorted({origin(user)[1] for user in node.users if is_getitem(user) and needs_grad(user)})


def _look(x: Tensor) -> tuple[Hashable, ...]:
    return tuple(x.shape), x.stride(), x.dtype


def _parameter(node: fx.Node) -> fx.Node | None:
    """The parameter that a conversion moves: itself, a copy, or what other conversions made of it."""
    here = node
    while here.target is convert:
        (here,) = here.all_input_nodes
    here = copied_from(here) or here
    found = leaf(here)
    return here if found is not None and found.kind == "parameter" and node.target is convert else None


def _sums(node: fx.Node) -> torch.dtype | None:
    """Of a lookup in a copy of a parameter, the dtype of the parameter: rows of its gradient are added up in that."""
    if node.target not in LOOKUPS:
        return None
    here = tensor_inputs(node)[0]
    while here.target is convert:
        (here,) = here.all_input_nodes
    whole = copied_from(here)
    return None if whole is None else value(whole).dtype
