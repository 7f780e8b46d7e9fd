"""Check of losses that are computed in parts: both graphs make the same of the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ....checks.failure import check_failure
from ....core.absent_gpu import CPU, on_device
from ....core.annotations import is_getitem, shape, value
from ....ir.program import LocalProgram
from ....ops.catalog import op_spec
from ....ops.cross_entropy import nll_terms
from ....ops.op_spec import Product

_fail = partial(check_failure, "check of losses in parts")
aten = torch.ops.aten
CLASSES, FEATURES = 5, 3  # numbers are drawn for so many, as columns do not meet but in the product and its loss
TOLERANCE = 1e-12


def check_chunked(old: LocalProgram, new: LocalProgram) -> None:
    """Check that each operator of ``new`` is that of the same name of ``old``, or part of what makes one of its values.

    Raises:
        CompileError: QN209 with what differs.
    """
    by_name = {node.name: node for node in old.graph.nodes}
    same: dict[fx.Node, fx.Node] = {node: by_name[node.name] for node in new.graph.nodes if node.name in by_name}
    replaced: dict[fx.Node, fx.Node] = {}
    for node, source in same.items():
        if (node.op, node.target) != (source.op, source.target):
            raise _fail(f"{node.name} is another call than before", source)
        _pair(node, source, same, replaced)
        if new.stage.get(node) != old.stage.get(source) or (node in new.once) != (source in old.once):
            raise _fail(f"{node.name} runs elsewhere than before", source)
    stands = {**same, **replaced}
    typed = {stands.get(node): kind for node, kind in new.sharding.items()}
    if typed != {source: kind for source, kind in old.sharding.items() if source in {*stands.values()}}:
        raise _fail("values have other types", None)
    kept = set(same.values())
    for value_of_parts, source in replaced.items():
        _check_value(value_of_parts, source, same, kept)
    added = [node for node in new.graph.nodes if node not in same]
    if any(node.op != "call_function" or node not in new.stage for node in added):
        raise _fail("what computes parts has no stage", None)


def _pair(node: fx.Node, source: fx.Node, same: Mapping[fx.Node, fx.Node], replaced: dict[fx.Node, fx.Node]) -> None:
    """Check that a node reads the same as before, or a value that stands for what was read then."""
    read: list[fx.Node] = []
    fx.map_arg((source.args, source.kwargs), read.append)
    due = iter(read)

    def expected(operand: fx.Node) -> fx.Node:
        then = next(due, None)
        if then is None or (operand in same and same[operand] is not then) or replaced.get(operand, then) is not then:
            raise _fail(f"{node.name} reads another value than before", source)
        if operand not in same:
            replaced[operand] = then
        return then

    if fx.map_arg((node.args, node.kwargs), expected) != (source.args, source.kwargs):
        raise _fail(f"{node.name} has other arguments than before", source)


def _check_value(node: fx.Node, source: fx.Node, same: Mapping[fx.Node, fx.Node], kept: set[fx.Node]) -> None:
    """Check that ``node`` of the new graph is ``source`` of the old one, for numbers in what both graphs have."""
    if (shape(node), value(node).dtype) != (shape(source), value(source).dtype):
        raise _fail(f"{node.name} is of another shape or dtype than {source.name}", source)
    old, old_inputs = _between(source, kept)
    new, new_inputs = _between(node, set(same))
    products = [(call, product) for call in old if (product := _product_with_table(call))]
    if len(products) != 1 or not {same[x] for x in new_inputs} <= old_inputs:
        raise _fail(f"{node.name} is not a loss of one product", source)
    sizes = _Sizes(*products[0])
    dice = torch.Generator().manual_seed(0)
    drawn = {x: sizes.draw(x, dice) for x in old_inputs}
    expected = _run(old, dict(drawn))[source]
    actual = _run(new, {x: drawn[same[x]] for x in new_inputs})[node]
    if actual.shape != expected.shape or not torch.allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE):
        raise _fail(f"{node.name} is not what {source.name} was", source)


def _product_with_table(node: fx.Node) -> Product | None:
    """Return where a product of rows with one table has its operands; None for other operators."""
    product = op_spec(node).product
    return None if product is None or product.weight_dims == 3 else product


class _Sizes:
    """Numbers for fewer classes and features than there are."""

    def __init__(self, node: fx.Node, product: Product) -> None:
        self.rows, self.table, _ = product.operands(node.args)
        self.by_class = product.transposed  # whether the table is [classes, features]
        self.classes = shape(node)[-1]

    def draw(self, node: fx.Node, dice: torch.Generator) -> Tensor:
        x, size = value(node), list(shape(node))
        if node is self.table:
            size = [CLASSES, FEATURES] if self.by_class else [FEATURES, CLASSES]
        elif node is self.rows:
            size[-1] = FEATURES
        elif size and size[-1] == self.classes and (x.is_floating_point() or x.dtype == torch.bool):
            size[-1] = CLASSES
        if x.dtype == torch.bool:
            return torch.rand(size, generator=dice) < 0.3
        if not x.is_floating_point():  # labels: one for each row
            return torch.randint(CLASSES, size, generator=dice)
        return torch.randn(size, generator=dice, dtype=torch.float64)


def _between(end: fx.Node, inputs: set[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
    """Return what computes ``end``, in order, and what of ``inputs`` that reads."""
    inside, read, todo = set[fx.Node](), set[fx.Node](), [end]
    while todo:
        here = todo.pop()
        if here in inputs:
            read.add(here)
        elif here not in inside:
            inside.add(here)
            todo += here.all_input_nodes
    return [node for node in end.graph.nodes if node in inside], read


def _run(nodes: list[fx.Node], env: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    """Run nodes in float64, whatever the dtype: how it is rounded is another matter."""
    for node in nodes:
        args, kwargs = on_device(fx.map_arg((node.args, node.kwargs), env.__getitem__), CPU)
        if is_getitem(node):
            env[node] = args[0][args[1]]
        elif op_spec(node).casts:
            env[node] = args[0]
        elif node.target is nll_terms:
            env[node] = _terms(*args[:2])
        elif op_spec(node).reshapes:
            kept = shape(node)[-1:] == shape(node.all_input_nodes[0])[-1:]  # of fewer columns than the graph has
            env[node] = args[0].reshape([*args[1][:-1], args[0].shape[-1]] if kept else args[1])
        else:
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return env


def _terms(logits: Tensor, labels: Tensor) -> Tensor:
    """``nll_terms`` of a rank that has all classes: the largest, exponentials less that added up, and the label's."""
    top = logits.max(1).values
    return torch.stack([top, logits.sub(top[:, None]).exp().sum(1), logits[torch.arange(len(top)), labels]])[None]
