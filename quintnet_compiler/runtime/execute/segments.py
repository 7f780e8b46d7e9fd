"""Cut a generated function into calls of ``comm`` and the segments of operators between them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ...compat.torch import codegen_of
from ...compat.torch_codegen import goes_with_its_text, reads_shipped
from ...core.annotations import is_getitem
from ...ir.program import outputs
from ...ops.catalog import op_spec
from .gradient_calls import OPERATORS, handle

Function = Callable[[list[Any]], Sequence[Any]]  # takes its arguments in a list, which it empties

MAX_VARIANTS = 8  # of one segment; with data-dependent sizes (routed experts), code for each would not pay


@dataclass(frozen=True)
class Segment:
    """A run of operators without communication.

    Attributes:
        nodes: the operators, in order.
        inputs: nodes whose values the segment reads.
        outputs: nodes whose values are read after it.
        module: ``module([*inputs])`` empties the list and returns the outputs. Equal segments have equal code,
            whatever the names of their values.
        settles: the names of the gradients that it passes to ``comm``. ``comm`` is then one of its inputs, and gets
            the tensor of :func:`.gradient_calls.handle` in its place.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    module: fx.GraphModule
    settles: tuple[str, ...] = ()


def split(graph: fx.Graph, *, pure: bool = False, apart: bool = False) -> list[fx.Node | Segment]:
    """Return the calls of ``comm`` in a graph (and getitems of their results), and the segments between them.

    Args:
        graph: of a generated function.
        pure: segments only compute; gradients are passed to ``comm`` after their segment. By default segments pass
            them.
        apart: make a segment of each connected group of operators, for example of each parameter's casts.
    """
    steps: list[fx.Node | Segment] = []
    run: list[fx.Node] = []
    waiting: list[fx.Node] = []

    def close() -> None:
        if run:
            groups = _connected(run) if apart else [run]
            steps.extend(_segment(graph, nodes) for nodes in groups)
        steps.extend(waiting)
        run.clear()
        waiting.clear()

    for node in graph.nodes:
        if node.op == "call_method" and node.target in OPERATORS and not pure:
            run.append(node)
        elif op_spec(node).accumulates == "value":
            waiting.append(node)
        elif node.op == "call_method" or (is_getitem(node) and node.all_input_nodes[0].op == "call_method"):
            close()
            steps.append(node)
        elif node.op == "call_function" and not is_getitem(node):
            # getitems follow at once, so that no tuple of results is passed from segment to segment
            run += [node, *filter(is_getitem, node.users)]
    close()
    return steps


def _connected(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return the groups of ``nodes`` that values connect, in the order of their first nodes; each in order."""
    first: dict[fx.Node, fx.Node] = {}  # a union-find forest, whose roots are the first nodes of groups

    def root(node: fx.Node) -> fx.Node:
        while first[node] is not node:
            node = first[node]
        return node

    place = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        first[node] = node
        roots = {root(source) for source in node.all_input_nodes if source in first} | {node}
        earliest = min(roots, key=place.__getitem__)
        first |= dict.fromkeys(roots, earliest)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        groups.setdefault(root(node), []).append(node)
    return list(groups.values())


def _segment(graph: fx.Graph, nodes: Sequence[fx.Node]) -> Segment:
    inside = set(nodes)
    inputs = tuple(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    new = fx.Graph()
    env = {node: new.placeholder(f"x{i}") for i, node in enumerate(inputs)}
    settles: list[str] = []
    for i, node in enumerate(nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "call_method":
            new.call_function(OPERATORS[str(node.target)], (*args[:-1], len(settles)))
            settles.append(str(args[-1]))
        else:
            env[node] = new.create_node("call_function", node.target, args, kwargs, name=f"v{i}")
    new.output(tuple(env[node] for node in outputs))
    new.set_codegen(codegen_of(graph))
    return Segment(
        tuple(nodes), inputs, outputs, goes_with_its_text(reads_shipped(fx.GraphModule({}, new))), tuple(settles)
    )


@dataclass(frozen=True)
class _Step:
    """A function that reads the slots ``takes`` and writes the slots ``makes``; ``dead`` ones are not read later."""

    run: Function
    takes: tuple[int, ...]
    dead: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True)
class Stepper:
    """A function in steps. It empties the list of its arguments, and frees each value after its last use."""

    steps: tuple[_Step, ...]
    slots: int
    returns: tuple[int, ...]

    @classmethod
    def from_parts(
        cls,
        graph: fx.Graph,
        parts: Sequence[fx.Node | Segment],
        kernel: Callable[[Segment], Function],
    ) -> Stepper:
        """Return the steps of a graph that was split into ``parts``; ``kernel`` returns what runs a segment."""
        slot = {node: i for i, node in enumerate(graph.nodes)}
        returned = tuple(slot[node] for node in outputs(graph))
        steps: list[_Step] = []
        used = set(returned)
        for part in reversed(parts):
            if isinstance(part, Segment):
                run, inputs, results = _run(part, kernel(part)), part.inputs, part.outputs
            else:
                run, inputs, results = _call(part), tuple(dict.fromkeys(part.all_input_nodes)), (part,)
            takes = tuple(slot[node] for node in inputs)
            dead = tuple(i for i in takes if i not in used)
            used.update(takes)
            steps.append(_Step(run, takes, dead, tuple(slot[node] for node in results)))
        return cls(tuple(reversed(steps)), len(slot), returned)

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        """Run the steps."""
        env: list[Any] = [*args, *[None] * (self.slots - len(args))]
        args.clear()
        for step in self.steps:
            inputs = [env[i] for i in step.takes]
            for i in step.dead:
                env[i] = None
            for i, x in zip(step.makes, step.run(inputs), strict=True):
                env[i] = x
        return tuple(env[i] for i in self.returns)


def _run(segment: Segment, kernel: Function) -> Function:
    """Return ``kernel``, with a handle of its gradients in place of ``comm``."""
    if not segment.settles:
        return kernel
    (position,) = (i for i, node in enumerate(segment.inputs) if node.name == "comm")

    def run(inputs: list[Any]) -> Sequence[Any]:
        inputs[position] = handle(inputs[position], segment.settles)
        return kernel(inputs)

    return run


def _call(node: fx.Node) -> Function:
    """Return what runs a call of a method of ``comm``, or a getitem of its result."""
    order = {n: i for i, n in enumerate(dict.fromkeys(node.all_input_nodes))}
    receiver, *rest = (_argument(a, order) for a in node.args)
    name = str(node.target)

    def run(inputs: list[Any]) -> Sequence[Any]:
        args = [argument(inputs) for argument in rest]
        source = receiver(inputs)
        inputs.clear()
        return (source[args[0]],) if node.op == "call_function" else (getattr(source, name)(*args),)

    return run


def _argument(argument: Any, order: Mapping[fx.Node, int]) -> Callable[[list[Any]], Any]:
    """Return what builds an argument of a node from the values of its inputs."""
    if isinstance(argument, fx.Node):
        return operator.itemgetter(order[argument])
    if isinstance(argument, (list, tuple)) and any(isinstance(a, (fx.Node, list, tuple)) for a in argument):
        parts = [_argument(a, order) for a in argument]
        return lambda inputs: [part(inputs) for part in parts]
    return lambda inputs: argument
