"""Check of norms that are one operator, against the operators that they replace, on drawn values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ...core.absent_gpu import CPU, on_device
from ...core.annotations import shape, value
from ...ir.program import LocalProgram, outputs
from ...ops.catalog import op_spec
from ..failure import check_failure

_fail = partial(check_failure, "norm check")
aten = torch.ops.aten
ROWS, TOLERANCE = 3, 1e-9
SCALES = (1.0, 1e-2, 1e-4)  # of drawn values: small squares show a wrong constant under the root


def check_norms(original: LocalProgram, rewritten: LocalProgram) -> None:
    """Check that each operator of ``rewritten`` is that of its name in ``original``, or a norm that computes the same.

    Raises:
        CompileError: QN209 with what differs.
    """
    sources = {node.name: node for node in original.graph.nodes}
    source_of: dict[fx.Node, fx.Node] = {}
    for node in rewritten.graph.nodes:
        if node.op == "output":
            continue
        source = sources.get(node.name)
        if source is None:
            raise _fail(f"{node.name} is not in the graph before", node)
        source_of[node] = source
        _check_node(node, source, source_of)
        place = rewritten.stage.get(node), node in rewritten.once
        if place != (original.stage.get(source), source in original.once):
            raise _fail(f"{node.name} runs elsewhere than before", source)
    _check_records(original, rewritten, source_of)


def _check_node(node: fx.Node, source: fx.Node, source_of: dict[fx.Node, fx.Node]) -> None:
    arguments: Any = fx.map_arg((node.args, node.kwargs), source_of.__getitem__)
    if node.target is aten.rms_norm.default and source.target is not node.target:
        _check_norm(node.name, source, *arguments[0])
    elif (node.op, node.target, *arguments) != (source.op, source.target, source.args, source.kwargs):
        raise _fail(f"{node.name} is another call than before", source)


def _check_records(original: LocalProgram, rewritten: LocalProgram, source_of: dict[fx.Node, fx.Node]) -> None:
    """Check what the programs return, the types of values, and the gradients of the end of the step."""
    if tuple(source_of[node] for node in outputs(rewritten.graph)) != outputs(original.graph):
        raise _fail("the graph returns something else")
    sources = set(source_of.values())
    types = {node: kind for node, kind in original.sharding.items() if node in sources}
    if {source_of[node]: kind for node, kind in rewritten.sharding.items()} != types:
        raise _fail("values have other types")
    if {source_of[node]: source_of[start] for node, start in rewritten.deferred.items()} != dict(original.deferred):
        raise _fail("other gradients wait for the end of the step")


def _check_norm(name: str, end: fx.Node, x: fx.Node, sizes: list[int], weight: fx.Node | None, eps: float) -> None:
    """Check that ``end`` is x * rsqrt(mean(x ** 2) + eps) * weight over the last dim."""
    steps = _steps_between({x} if weight is None else {x, weight}, end)
    _check_sizes(name, end, steps, x, sizes, weight)
    generator = torch.Generator().manual_seed(0)
    for scale in SCALES:
        drawn = torch.randn(_few(x, x), generator=generator, dtype=torch.float64) * scale
        env = {x: drawn}
        expected = drawn * (drawn.square().mean(-1, keepdim=True) + eps).rsqrt()
        if weight is not None:
            env[weight] = torch.randn(shape(weight), generator=generator, dtype=torch.float64)
            expected = expected * env[weight]
        for step in steps:
            env[step] = _computed(step, env)
        result = env[end]
        is_close = result.shape == expected.shape and torch.allclose(
            result, expected, rtol=TOLERANCE, atol=TOLERANCE * scale
        )
        if not is_close:
            raise _fail(f"{name} is not what {end.name} computes", end)


def _check_sizes(
    name: str, end: fx.Node, steps: list[fx.Node], x: fx.Node, sizes: list[int], weight: fx.Node | None
) -> None:
    dtype = value(x).dtype
    is_narrower = any(value(step).dtype.itemsize < dtype.itemsize for step in steps)
    if sizes != [shape(x)[-1]] or shape(end) != shape(x) or is_narrower:
        raise _fail(f"{name} has other sizes or dtypes than {end.name}", end)
    if value(end).dtype is not dtype or (weight is not None and value(weight).dtype is not dtype):
        raise _fail(f"{name} does not have the dtype of its input", end)


def _steps_between(inputs: set[fx.Node], end: fx.Node) -> list[fx.Node]:
    """Return the nodes that compute ``end`` from ``inputs``, in order."""
    steps, pending = set[fx.Node](), [end]
    while pending:
        node = pending.pop()
        if node in inputs:
            continue
        if node.op != "call_function" or node.target not in _ROWS_ALONE or (node in steps and node is end):
            raise _fail(f"{end.name} also depends on {node.name}", end)
        steps.add(node)
        pending += node.all_input_nodes
    return [node for node in end.graph.nodes if node in steps]


# operators each row of whose result depends on the same row alone
_ROWS_ALONE = frozenset(
    {
        aten._to_copy.default, aten.pow.Tensor_Scalar, aten.sum.dim_IntList, aten.div.Scalar, aten.add.Scalar,
        aten.rsqrt.default, aten.mul.Tensor,
    }
)  # fmt: skip


def _few(node: fx.Node, like: fx.Node) -> tuple[int, ...]:
    """Return the shape of ``node`` with fewer rows."""
    return (*(min(n, ROWS) for n in shape(node)[:-1]), shape(like)[-1])


def _computed(step: fx.Node, env: dict[fx.Node, Tensor]) -> Tensor:
    """Compute a step in float64, whatever its dtype, so that rounding does not matter."""
    args, kwargs = on_device(fx.map_arg((step.args, step.kwargs), env.__getitem__), CPU)
    if op_spec(step).casts:
        uncast: Tensor = args[0]
        return uncast
    target: Any = step.target
    result: Tensor = target(*args, **kwargs)
    return result
