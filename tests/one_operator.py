"""Programs of one operator, run on every rank of a small world: what the proofs of sharding rules are made of.

An operator with a strategy on each axis becomes a program whose leaves already have the types that the strategy takes,
so that nothing is converted. It is lowered and differentiated by the compiler's own passes. Each rank gets its part of
the inputs and of a random cotangent; the parts that come out, put together as their types say, must be the unsplit
operator's outputs and autograd's gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, fx
from torch.utils import _pytree as pytree

from quintnet_compiler.compat.torch import FakeTensorMode
from quintnet_compiler.core import slices
from quintnet_compiler.core.annotations import Leaf, facts, is_float, needs_grad, values
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.core.sharding import AxisType, P, Shard, Sharding, forward_type, gradient, shard_shape
from quintnet_compiler.ir.batch_form import BatchForm
from quintnet_compiler.ir.builder import GraphBuilder
from quintnet_compiler.ir.program import (
    Axis,
    Captured,
    DifferentiatedProgram,
    Program,
    ShardedProgram,
    StagedProgram,
    Strategy,
)
from quintnet_compiler.ir.result_form import ResultForm
from quintnet_compiler.ops.catalog import op_spec
from quintnet_compiler.ops.collectives import share
from quintnet_compiler.ops.rules.notation import Factors, Rule
from quintnet_compiler.passes.autodiff.differentiate import _Tape
from quintnet_compiler.passes.lowering.insert_communication import _CommunicationLowering
from quintnet_compiler.runtime.execute.comm import Comm
from quintnet_compiler.runtime.transport.local import LocalTransport, LocalWorld
from quintnet_compiler.strategies.rule_book import RuleBook, refine, strategies

aten = torch.ops.aten
AXES = ("dp", "tp", "cp")
# Shared by all programs here, because they depend on calls alone: autograd's traces, and what calls make.
MODE = FakeTensorMode(allow_non_fake_inputs=True)
TRACES: dict[Any, Any] = {}
TOLERANCE = 1e-12


class Wrong(AssertionError):
    """Parts do not make up the whole: a rule is wrong."""


# -- samples


@dataclass(frozen=True)
class Input:
    """A tensor argument: its shape and how its values are drawn; ``grad``: whether a gradient is asked for."""

    shape: tuple[int, ...]
    draw: Callable[[Generator, tuple[int, ...]], Tensor]
    grad: bool = True


@dataclass(frozen=True)
class Sample:
    """One call of an operator. ``compare``: a function of an output whose value is checked (None: only its shape)."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    compare: bool = True

    def __str__(self) -> str:
        literals = pytree.tree_map(lambda a: a.shape if isinstance(a, Input) else a, (self.args, dict(self.kwargs)))
        return f"{self.target}{literals}"

    @property
    def inputs(self) -> list[Input]:
        return [a for a in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(a, Input)]

    def call(self, tensors: Sequence[Any], function: Callable[..., Any]) -> Any:
        """``function(target, *args, **kwargs)`` with ``tensors`` in place of the inputs."""
        source = iter(tensors)
        args, kwargs = pytree.tree_map(
            lambda a: next(source) if isinstance(a, Input) else a, (self.args, dict(self.kwargs))
        )
        return function(self.target, *args, **kwargs)


def call(target: Any, *args: Any, **kwargs: Any) -> Sample:
    """A sample in the notation of a call."""
    return Sample(target, args, kwargs)


# -- the unsplit operator


@dataclass(frozen=True)
class Reference:
    """What the unsplit operator makes of ``inputs``: outputs, and gradients for ``cotangents`` of its outputs."""

    inputs: tuple[Tensor, ...]
    grads: tuple[bool, ...]
    outputs: tuple[Tensor, ...]
    cotangents: Mapping[int, Tensor]
    gradients: tuple[Tensor | None, ...]


def reference(
    sample: Sample,
    dice: Generator,
    *,
    training: bool = True,
    constant: bool = False,
) -> Reference:
    """``constant``: cotangents are the same along all dims."""
    given = [one.draw(dice, one.shape) for one in sample.inputs]
    grads = [training and one.grad and is_float(x) for one, x in zip(sample.inputs, given, strict=True)]
    leaves = [x.clone().requires_grad_(grad) for x, grad in zip(given, grads, strict=True)]
    made = sample.call(leaves, lambda target, *args, **kwargs: target(*args, **kwargs))
    outs = (made,) if isinstance(made, Tensor) else tuple(made)
    cotangents = {
        i: torch.full_like(out, 0.625) if constant else noise(out, dice)
        for i, out in enumerate(outs)
        if out.requires_grad
    }
    asked = [x for x, grad in zip(leaves, grads, strict=True) if grad]
    found = iter(
        torch.autograd.grad([outs[i] for i in cotangents], asked, list(cotangents.values()), allow_unused=True)
        if cotangents
        else [None] * len(asked)
    )
    return Reference(
        tuple(given),
        tuple(grads),
        tuple(out.detach() for out in outs),
        cotangents,
        tuple(next(found) if grad else None for grad in grads),
    )


def noise(like: Tensor, dice: Generator) -> Tensor:
    """Random values that add up without rounding, whatever the dtype."""
    eighths = torch.randint(-16, 17, like.shape, generator=dice)
    return eighths.to(like.dtype) / 8 if is_float(like) else eighths.to(like.dtype)


# -- layouts


def spaced(x: Tensor) -> Tensor:
    """``x`` as a slice of a larger tensor: no dim has the stride that it has in contiguous memory."""
    wide = x.new_zeros([*x.shape, 2])
    wide[..., 0] = x
    return wide[..., 0]


def transposed(x: Tensor) -> Tensor:
    """``x`` with its dims in memory in reverse order."""
    dims = list(reversed(range(x.dim())))
    return x.permute(dims).contiguous().permute(dims) if dims else x


def channels_last(x: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x


def expanded(x: Tensor) -> Tensor:
    """What is the same along all dims, with strides of 0; anything else as it is."""
    first = x[(slice(1),) * x.dim()] if x.numel() else x
    return first.expand(x.shape) if torch.equal(first.expand(x.shape), x) else x


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "spaced": spaced,
    "transposed": transposed,
    "channels_last": channels_last,
    "expanded": expanded,
}


def lay_out(x: Tensor, sharding: Sharding, ranks: Sequence[int], dice: Generator) -> list[Tensor]:
    """Every rank's part of ``x``, in rank order: slices, copies, or random terms that add up to it. Padding is NaN, or
    no index of anything."""
    if not sharding:
        return [x]
    kind, count = sharding[0], ranks[0]
    inner = sharding[1:], ranks[1:], dice
    if isinstance(kind, Shard):
        longer = kind.padded(x.shape[kind.dim], count) // kind.parts - x.shape[kind.dim] // kind.parts
        rows = torch.unflatten(x, kind.dim, (kind.parts, -1))
        poison = x.new_full([*rows.shape[: kind.dim + 1], longer, *rows.shape[kind.dim + 2 :]], _poison(x.dtype))
        x = torch.cat([rows, poison], kind.dim + 1).flatten(kind.dim, kind.dim + 1)
        wholes = [part.contiguous() for part in slices.stack(x, kind.dim, kind.parts, count)]
    elif kind is P:
        terms = [noise(x, dice) for _ in range(count - 1)]
        wholes = [*terms, x - sum(terms)]
    else:
        return lay_out(x, *inner) * count
    return [part for whole in wholes for part in lay_out(whole, *inner)]


def _poison(dtype: torch.dtype) -> float | int | bool:
    return math.nan if dtype.is_floating_point or dtype.is_complex else dtype is torch.bool or -(2**20)


def put_together(
    parts: Sequence[Tensor], sharding: Sharding, ranks: Sequence[int], shape: Sequence[int], *, zeros: bool = False
) -> Tensor:
    """The tensor of global ``shape`` of which ``parts`` are the ranks' parts. ``zeros``: padding must be zeros.

    Raises:
        Wrong: if ranks that must hold the same do not.
    """
    if not sharding:
        return parts[0]
    kind, count = sharding[0], ranks[0]
    size = len(parts) // count
    groups = [parts[i * size : (i + 1) * size] for i in range(count)]
    if not isinstance(kind, Shard) and kind is not P:
        for group in groups[1:]:
            for one, other in zip(groups[0], group, strict=True):
                require_equal(other, one, f"ranks that are {kind} differ")
        groups = groups[:1]
    left = shard_shape(shape, kind, count)
    wholes = [put_together(group, sharding[1:], ranks[1:], left, zeros=zeros) for group in groups]
    if isinstance(kind, Shard):
        joined = torch.unflatten(slices.join(wholes, kind.dim, kind.parts), kind.dim, (kind.parts, -1))
        have = shape[kind.dim] // kind.parts
        kept, padding = joined.tensor_split([have], kind.dim + 1)
        if zeros and padding.any():
            raise Wrong("padding has a gradient")
        return kept.flatten(kind.dim, kind.dim + 1)
    return sum(wholes[1:], start=wholes[0])


def require_equal(found: Tensor, expected: Tensor, what: str) -> None:
    """Raises: Wrong unless shape and dtype are the same and values agree to 1e-12."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise Wrong(f"{what}: {tuple(found.shape)} {found.dtype}, not {tuple(expected.shape)} {expected.dtype}")
    if found.dtype in (torch.float64, torch.complex128):
        same = torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    else:  # exactly; padding is NaN
        same = torch.equal(found, expected) or torch.allclose(found, expected, rtol=0, atol=0, equal_nan=True)
    if not same:
        error = (found.to(torch.complex128) - expected.to(torch.complex128)).abs().max()
        raise Wrong(f"{what}: off by {float(error):.3g}")


# -- the operator as a program


@dataclass(frozen=True)
class OneOperator:
    """A program of one operator and, for its gradients, the loss ``sum(output * cotangent)``."""

    program: Program
    node: fx.Node
    loss: tuple[fx.Node, ...]  # the nodes that make the loss
    cotangents: Mapping[fx.Node, int]  # leaf -> output


def operator_program(sample: Sample, known: Reference) -> OneOperator:
    builder = GraphBuilder(MODE)

    def leaf(name: str, x: Tensor, grad: bool) -> fx.Node:
        kind = Leaf("parameter" if grad else "input", name, trainable=grad)
        return builder.placeholder(name, MODE.from_tensor(x), kind, needs_grad=grad)

    given = [leaf(f"x{i}", x, g) for i, (x, g) in enumerate(zip(known.inputs, known.grads, strict=True))]
    made: fx.Node = sample.call(given, builder.call)
    several = isinstance(facts(made).value, tuple)
    outs = [builder.getitem(made, i) if several else made for i in range(len(known.outputs))]
    cotangents = {leaf(f"c{i}", x, False): i for i, x in known.cotangents.items()}
    before = len(builder.made)
    terms = [
        builder.call(aten.sum.default, builder.call(aten.mul.Tensor, outs[i], cotangent))
        for cotangent, i in cotangents.items()
    ]
    loss = terms[:1]
    for term in terms[1:]:
        loss = [builder.call(aten.add.Tensor, loss[0], term)]
    builder.output((*loss, *outs))
    return OneOperator(as_program(builder), made, tuple(builder.made[before:]), cotangents)


def as_program(builder: GraphBuilder) -> Program:
    """A finished graph as a program that was never captured."""
    nothing = pytree.tree_structure(())
    captured = Captured(builder.graph, {}, {}, BatchForm(nothing, ()), ResultForm(nothing, ()), training=True)
    return Program(captured, builder.graph, MODE, 1)


def sharded(one: OneOperator, axes: Sequence[Axis], chosen: Sequence[Strategy]) -> ShardedProgram:
    """The operator runs ``chosen``; leaves have what it takes, and what it makes leaves the program as it is."""
    found: dict[fx.Node, tuple[Strategy, ...]] = {one.node: tuple(chosen)}
    graph = one.program.graph
    inputs: list[fx.Node] = []
    fx.map_arg((one.node.args, one.node.kwargs), inputs.append)
    for position, node in enumerate(inputs):
        found[node] = tuple(Strategy((), (s.inputs[position],)) for s in chosen)
    for node, output in one.cotangents.items():
        found[node] = tuple(Strategy((), (forward_type(gradient(s.outputs[output])),)) for s in chosen)
    for node in one.loss:
        if node.target is aten.mul.Tensor:
            _source, cotangent = node.args
            output = one.cotangents[cotangent]  # type: ignore[index]
            found[node] = tuple(
                Strategy((s.outputs[output], found[cotangent][i].outputs[0]), (s.outputs[output],))  # type: ignore[index]
                for i, s in enumerate(chosen)
            )
        elif node.target is aten.sum.default:
            found[node] = tuple(Strategy((t.outputs[0],), (P,)) for t in found[node.args[0]])  # type: ignore[index]
        else:
            found[node] = (Strategy((P, P), (P,)),) * len(chosen)
    losses = [P] if one.loss else []
    found[graph.output_node()] = tuple(Strategy((*losses, *s.outputs), ()) for s in chosen)
    return ShardedProgram(one.program, tuple(axes), found)


class NoZeros(dict[fx.Node, frozenset[int]]):
    """Padding of leaves is anything here, and nothing that a pass knows of it holds."""

    def __setitem__(self, node: fx.Node, dims: frozenset[int]) -> None:
        pass


def lowered(program: ShardedProgram, rules: Mapping[Any, Rule]) -> DifferentiatedProgram:
    """What each rank runs, with its backward where there is a loss."""
    calls = [n for n in program.program.graph.nodes if n.op == "call_function"]
    # what the passes InsertCommunication and Differentiate run
    lowering = _CommunicationLowering(StagedProgram(program, 1, dict.fromkeys(calls, 0)), dict(rules))
    lowering.padding.zeros = NoZeros()
    tape = _Tape(lowering.lower_program(), any(needs_grad(n) for n in calls), {})
    tape.operators.templates = TRACES
    return tape.differentiate()


# -- running


def mesh_of(axes: Sequence[Axis]) -> Mesh:
    return Mesh(**{axis.name: axis.size for axis in axes})


def run_on_ranks(graph: fx.Graph, mesh: Mesh, given: Mapping[str, Sequence[Tensor]]) -> list[tuple[Any, ...]]:
    """The graph's results on every rank; ``given``: each placeholder's value on every rank."""

    def work(transport: LocalTransport) -> tuple[Any, ...]:
        env: dict[fx.Node, Any] = {}
        comm = Comm(transport, mesh, mesh.coordinate(transport.rank))
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = given[node.name][transport.rank]
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            if node.op == "output":
                return tuple(args[0])
            if node.target is share:
                env[node] = args[0] / args[2]
            elif op_spec(node).on_rank:
                args = [*args[:2], *args[3:]] if op_spec(node).takes_size else args
                env[node] = getattr(comm, node.target._opname)(*args, 0)
            else:
                env[node] = node.target(*args, **kwargs)
        raise AssertionError("no output")

    with torch.no_grad():
        return list(LocalWorld(mesh, ("test",)).run_ranks(dict.fromkeys(range(mesh.size), work)).values())


# -- checks


def cuts_of(factors: Factors) -> dict[str, set[int]]:
    """Every boundary inside every factor."""
    return {name: {k for k in range(2, size) if size % k == 0} for name, size in factors.sizes.items()}


def nested_strategies(node: fx.Node, factors: Factors, ranks: Sequence[int]) -> Iterator[tuple[Strategy, ...]]:
    """All strategies of an operator on nested axes."""
    if not ranks:
        yield ()
        return
    for first in strategies(node, factors, cuts_of(factors), ranks[0]):
        for rest in nested_strategies(node, refine(factors, first, ranks[0]), ranks[1:]):
            yield (first, *rest)


def check(
    sample: Sample,
    rules: Mapping[Any, Rule],
    ranks: Sequence[int],
    *,
    training: bool = True,
    label: str = "",
    memory: str | None = None,
) -> list[str]:
    """Run every strategy of ``sample`` on axes of ``ranks`` (those whose label contains ``label``), with inputs and
    cotangents that lie in ``memory`` (of ``FORMATS``; None: contiguous) on every rank.

    Returns what was checked.

    Raises:
        Wrong: if parts do not make up the whole.
    """
    dice = torch.Generator().manual_seed(0)
    known = reference(sample, dice, training=training, constant=memory == "expanded")
    one = operator_program(sample, known)
    factors = RuleBook(rules).factors(one.program.graph)[one.node]
    checked = []
    for chosen in nested_strategies(one.node, factors, ranks):
        name = " / ".join(s.label for s in chosen)
        if label not in name or _sums_bools(one.node, chosen):
            continue
        try:
            _check_strategy(sample, known, one, chosen, ranks, rules, dice, memory)
        except Wrong as error:
            raise Wrong(f"{sample} over {tuple(ranks)}, {name}, {memory or 'contiguous'}: {error}") from None
        checked.append(name)
    return checked


def _sums_bools(node: fx.Node, chosen: Sequence[Strategy]) -> bool:
    """Whether a strategy takes a partial bool. There is none, since no strategy makes one of anything else."""
    inputs: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), inputs.append)
    taken = {t for s in chosen for t, n in zip(s.inputs, inputs, strict=True) if values(n)[0].dtype == torch.bool}
    made = {t for s in chosen for t, v in zip(s.outputs, values(node), strict=True) if v.dtype == torch.bool}
    if P in made and P not in taken:
        raise Wrong(f"{node.target} makes a partial sum of bools")
    return P in taken


def _check_strategy(
    sample: Sample,
    known: Reference,
    one: OneOperator,
    chosen: Sequence[Strategy],
    ranks: Sequence[int],
    rules: Mapping[Any, Rule],
    dice: Generator,
    memory: str | None,
) -> None:
    axes = [Axis(name, size, "model") for name, size in zip(AXES, ranks, strict=False)]
    program = sharded(one, axes, chosen)
    made = lowered(program, rules)
    mesh = mesh_of(axes)
    leaves = dict(zip(_placeholders(one, "x"), known.inputs, strict=True))
    leaves |= {node: known.cotangents[output] for node, output in one.cotangents.items()}
    given = {node.name: lay_out(x, program.produced(node), ranks, dice) for node, x in leaves.items()}
    if memory is not None:
        given = {name: [FORMATS[memory](part) for part in parts] for name, parts in given.items()}
    results = run_on_ranks(made.graph, mesh, given)
    losses = 1 if one.loss else 0
    for i, expected in enumerate(known.outputs):
        parts = [r[losses + i] for r in results]
        if sample.compare:
            whole = put_together(parts, program.produced(one.node, i), ranks, expected.shape)
            require_equal(whole, expected, f"output {i}")
    _check_gradients(known, one, program, made, results, ranks)


def _check_gradients(
    known: Reference,
    one: OneOperator,
    program: ShardedProgram,
    made: DifferentiatedProgram,
    results: Sequence[tuple[Any, ...]],
    ranks: Sequence[int],
) -> None:
    returned = list(made.graph.output_node().args[0])  # type: ignore[arg-type]
    for i, (node, expected) in enumerate(zip(_placeholders(one, "x"), known.gradients, strict=True)):
        found = made.gradients.get((f"x{i}", 0))
        if found is None:
            if expected is not None and bool(expected.any()):
                raise Wrong(f"gradient {i} is missing")
            continue
        parts = [r[returned.index(found)] for r in results]
        types: tuple[AxisType, ...] = tuple(map(gradient, program.produced(node)))
        whole = put_together(parts, types, ranks, known.inputs[i].shape, zeros=True)
        require_equal(whole, torch.zeros_like(known.inputs[i]) if expected is None else expected, f"gradient {i}")


def _placeholders(one: OneOperator, prefix: str) -> list[fx.Node]:
    return [n for n in one.program.graph.nodes if n.op == "placeholder" and n.name.startswith(prefix)]
