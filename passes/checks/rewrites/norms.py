"""Check of norms that are one operator: what they replace is computed again, from the graph before, on numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ....core.absent_gpu import CPU, on_device
from ....core.annotations import shape, value
from ....ir.program import LocalProgram, outputs
from ..failure import check_failure

_fail = partial(check_failure, "norm check")
aten = torch.ops.aten
ROWS, TOLERANCE = 3, 1e-9
SCALES = (1.0, 1e-2, 1e-4)  # of what is drawn: a constant under the root shows where squares are as small


def check_norms(before: LocalProgram, after: LocalProgram) -> None:
    """Each operator of ``after`` is that of the same name of ``before``, or a norm that computes what this one and
    those that it needs compute.

    Raises:
        CompileError: QN209 with what differs.
    """
    known = {node.name: node for node in before.graph.nodes}
    env: dict[fx.Node, fx.Node] = {}
    for node in after.graph.nodes:
        if node.op == "output":
            continue
        source = known.get(node.name)
        if source is None:
            raise _fail(f"{node.name} is not in the graph before", node)
        env[node] = source
        given = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.target is aten.rms_norm.default and source.target is not aten.rms_norm.default:
            _check_norm(node.name, source, *given[0])
        elif (node.op, node.target) != (source.op, source.target) or given != (source.args, source.kwargs):
            raise _fail(f"{node.name} is another call than before", source)
        if after.stage.get(node) != before.stage.get(source) or (node in after.once) != (source in before.once):
            raise _fail(f"{node.name} runs elsewhere than before", source)
    if tuple(env[node] for node in outputs(after.graph)) != outputs(before.graph):
        raise _fail("the graph returns something else", None)
    kept = set(env.values())
    if {env[n]: kind for n, kind in after.sharding.items()} != {n: s for n, s in before.sharding.items() if n in kept}:
        raise _fail("values have other types", None)
    if {env[n]: env[start] for n, start in after.deferred.items()} != dict(before.deferred):
        raise _fail("other gradients wait for the end of the step", None)


def _check_norm(name: str, end: fx.Node, x: fx.Node, sizes: list[int], weight: fx.Node | None, eps: float) -> None:
    """``end`` is x * rsqrt(mean(x ** 2) + eps) * weight over the last dim."""
    steps = _between(end, {x, *([] if weight is None else [weight])})
    widths = [value(step).dtype for step in steps]
    if sizes != [shape(x)[-1]] or shape(end) != shape(x) or any(w.itemsize < value(x).dtype.itemsize for w in widths):
        raise _fail(f"{name} is of other sizes or dtypes than {end.name}", end)
    if value(end).dtype is not value(x).dtype or (weight is not None and value(weight).dtype is not value(x).dtype):
        raise _fail(f"{name} does not have the dtype of its input", end)
    dice = torch.Generator().manual_seed(0)
    for scale in SCALES:
        drawn = torch.randn(_few(x, x), generator=dice, dtype=torch.float64) * scale
        env = {x: drawn}
        if weight is not None:
            env[weight] = torch.randn(shape(weight), generator=dice, dtype=torch.float64)
        expected = drawn * (drawn.square().mean(-1, keepdim=True) + eps).rsqrt()
        expected = expected if weight is None else expected * env[weight]
        for step in steps:
            env[step] = _computed(step, env)
        made = env[end]
        if made.shape != expected.shape or not torch.allclose(made, expected, rtol=TOLERANCE, atol=TOLERANCE * scale):
            raise _fail(f"{name} is not what {end.name} computes", end)


def _between(end: fx.Node, given: set[fx.Node]) -> list[fx.Node]:
    """What computes ``end`` from ``given``, in order."""
    found, todo = dict[fx.Node, None](), [end]
    while todo:
        here = todo.pop()
        if here in given:
            continue
        if here.op != "call_function" or here.target not in _ROWS_ALONE or (here in found and here is end):
            raise _fail(f"{end.name} also depends on {here.name}", end)
        found[here] = None
        todo += here.all_input_nodes
    return [node for node in end.graph.nodes if node in found]


# each row of what these make depends on the same row alone
_ROWS_ALONE = frozenset(
    {
        aten._to_copy.default, aten.pow.Tensor_Scalar, aten.sum.dim_IntList, aten.div.Scalar, aten.add.Scalar,
        aten.rsqrt.default, aten.mul.Tensor,
    }
)  # fmt: skip


def _few(node: fx.Node, like: fx.Node) -> tuple[int, ...]:
    """The shape of ``node`` with fewer rows."""
    return (*(min(n, ROWS) for n in shape(node)[:-1]), shape(like)[-1])


def _computed(step: fx.Node, env: dict[fx.Node, Tensor]) -> Tensor:
    """In float64, whatever the dtype: how it is rounded is another matter."""
    args, kwargs = on_device(fx.map_arg((step.args, step.kwargs), env.__getitem__), CPU)
    if step.target is aten._to_copy.default:
        found: Tensor = args[0]
        return found
    target: Any = step.target
    result: Tensor = target(*args, **kwargs)
    return result
