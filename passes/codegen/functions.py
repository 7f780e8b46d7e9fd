"""Functions of nodes, as generated modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...compat.torch import function_name
from ...compat.torch_codegen import goes_with_its_text, reads_shipped
from ...core.annotations import facts, is_getitem, num_bytes, origin, value, values
from ...ir.distributed_program import (
    Piece,
)
from ...ir.generated import GeneratedModule
from ...ops.catalog import op_spec
from ...ops.op_spec import Product
from .python_ops import spelled
from .source_lines import WIDTH, body_lines, in_lines

MakeModule = Callable[[fx.Graph], GeneratedModule]


@dataclass(frozen=True)
class Functions:
    """Generates the functions of stages. ``sites``: the texts of calls that communicate, by their numbers."""

    sites: list[str]
    make_module: MakeModule

    def piece(
        self,
        nodes: list[fx.Node],
        returned: list[fx.Node],
        static: Set[fx.Node],
        gradients: Mapping[fx.Node, list[str]],
    ) -> Piece:
        """Return a function of ``nodes``.

        A parameter's gradient is not returned, but accumulated as soon as it exists; at the beginning, if another stage
        has sent it.
        """
        graph, nodes = fx.Graph(), _hoist_getitems(nodes)
        ordered = _inputs_of(nodes, static, gradients)
        comm = graph.placeholder("comm")
        env: dict[fx.Node, fx.Node] = {}
        for node in ordered:
            env[node] = graph.placeholder(node.name)
            env[node].meta = dict(node.meta)
        for node in ordered:
            for name in gradients.get(node, ()):
                graph.call_method("accumulate", (comm, env[node], name))
        for node in nodes:
            parameters = gradients.get(node, [])
            if len(parameters) == 1 and _is_matmul(node):
                left, right = node.args
                graph.call_method("accumulate_matmul", (comm, env[left], env[right], parameters[0]))  # type: ignore[index]
                continue
            env[node] = _emit(graph, node, env, comm, self.sites)
            for name in parameters:
                graph.call_method("accumulate", (comm, env[node], name))
        graph.output(tuple(env[n] for n in returned))
        return Piece(
            self.make_module(graph),
            tuple(n.name for n in ordered if n in static),
            tuple(n.name for n in ordered if n not in static),
            tuple(n.name for n in returned),
        )


def _inputs_of(nodes: Sequence[fx.Node], static: Set[fx.Node], gradients: Mapping[fx.Node, list[str]]) -> list[fx.Node]:
    """Return the inputs of a function of ``nodes`` that also accumulates ``gradients``: static ones first."""
    inside = set(nodes)
    inputs: dict[fx.Node, None] = dict.fromkeys(n for n in gradients if n not in inside)
    for node in nodes:
        inputs.update((n, None) for n in node.all_input_nodes if n not in inside)
    return [n for n in inputs if n in static] + [n for n in inputs if n not in static]


def written_module(graph: fx.Graph) -> GeneratedModule:
    """Return a module whose code is written, with long lines broken."""
    graph.set_codegen(_Boxed())
    graph.on_generate_code(lambda _: body_lines)
    return goes_with_its_text(reads_shipped(fx.GraphModule({}, graph)))


def _hoist_getitems(nodes: list[fx.Node]) -> list[fx.Node]:
    """Move each getitem right after its operator: all results of an operator live until the last is taken."""
    inside, ordered = set(nodes), list[fx.Node]()
    items: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if is_getitem(node) and (producer := origin(node)[0]) in inside and not op_spec(producer).communicates:
            items[producer].append(node)
    moved = {node for getitems in items.values() for node in getitems}
    for node in nodes:
        ordered += [node, *items[node]] if node not in moved else []
    return ordered


def _is_matmul(node: fx.Node) -> bool:
    """Return whether a gradient is a product that nothing else reads: the product can add to the gradient."""
    return op_spec(node).product == Product() and len(node.users) == 1 and len(node.all_input_nodes) == 2


def _emit(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node], comm: fx.Node, sites: list[str]) -> fx.Node:
    if op_spec(node).shares:
        divide = spelled(torch.ops.aten.div.Scalar)
        new = graph.create_node("call_function", divide, (env[node.args[0]], node.args[2]), name=node.name)  # type: ignore[index]
        new.meta = dict(node.meta)
        return new
    if not op_spec(node).on_rank:
        new = graph.node_copy(node, lambda n: env[n])
        new.meta = dict(node.meta)
        new.target = spelled(node.target)
        return new
    name = str(node.target).split(".")[1]
    args = list(fx.map_arg(node.args, lambda n: env[n]))
    over = ""
    size = f" {sum(map(num_bytes, values(node)))} bytes" if name.startswith("start_") else ""
    if op_spec(node).takes_size:
        over = f"[{args[1]}]"
        del args[2]  # the transport knows the axis' size
    moved = value(node.all_input_nodes[0]).dtype if op_spec(node).takes_size else None
    of = f" {str(moved).removeprefix('torch.')}" if moved else ""
    sites.append(f"{name}{over}{of}{size} {facts(node).where}".strip())
    new = graph.create_node("call_method", name, (comm, *args, len(sites) - 1), name=node.name)
    new.meta = dict(node.meta)
    return new


class _Boxed(fx.graph.CodeGen):
    """Functions that take arguments in a list and empty it, so that values die at their last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        unpack = f"{', '.join(names)}, = args" if names else "pass"
        if len(unpack) > WIDTH:
            unpack = f"{in_lines(names)} = args".replace("\n", "\n    ")
        return f"def {function_name(self)}(self, args):\n    {unpack}\n    args.clear()"
