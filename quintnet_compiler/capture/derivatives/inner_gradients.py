"""``torch.autograd.grad`` in forward: one node of the traced graph (:mod:`...ops.derivatives.inner_gradients`).

Autograd runs beside the trace as it does in the plain module, unrecorded. So it says which inputs get a gradient at
all, and which results may be differentiated again, and raises what it would raise.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from ...compat.torch import recording, unrecorded, without_torch_function
from ...compat.torch_func import is_transformed
from ...core.errors import CompileError, Where
from ...ops.catalog import op_spec
from ...ops.derivatives.inner_gradients import gradient, start
from ..places import OWN
from ..watched_trace import user_line
from .transforms import by_transform

_FLAG = Tensor.requires_grad.__set__  # type: ignore[attr-defined]


class Linked(torch.autograd.Function):
    """A node's value, with the place in autograd's graph that ``beside`` has."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, beside: Tensor) -> Tensor:
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0]


class InnerGradients(TorchFunctionMode):
    """While inside, calls of ``torch.autograd.grad`` become nodes of the graph that is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        """Another trace begins: two of the same forward are the same."""
        self.accumulated: list[list[tuple[Tensor, Tensor]]] = []  # of each backward that is traced now
        self.numbers: Iterator[int] = itertools.count()
        self.starts: dict[int, tuple[Tensor, Tensor]] = {}  # a leaf, and the node from where on it is one
        self.originals: dict[int, tuple[Tensor, Tensor]] = {}  # what stands for an input of a Function, and that input

    def stand_in(self, detached: Tensor, original: Tensor) -> None:
        """Take ``detached`` for ``original``, where its gradient is asked for."""
        self.originals[id(detached)] = detached, original

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad and not any(map(is_transformed, _several(args[0]))):
            return self._grad(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "_make_dual" and recording() and not by_transform(sys._getframe(1)):
            where = Where("", user_line(sys._getframe(1), OWN))
            raise CompileError("QN105", "torch.autograd.forward_ad in forward", where=where, fix="use torch.func.jvp")
        leaf: Any = args[0] if (func is Tensor.requires_grad_ or func == _FLAG) and recording() else None
        leaf = None if leaf is not None and is_transformed(leaf) else leaf
        before = leaf is None or leaf.requires_grad
        found = func(*args, **(kwargs or {}))
        if not before and leaf.requires_grad:
            with torch.no_grad():
                made: Any = start(leaf, next(self.numbers))
                self.starts[id(leaf)] = leaf, made
        return found

    @property
    def accumulates(self) -> bool:
        """Whether the trace is in a backward, where gradients may be added to those of parameters."""
        return bool(self.accumulated)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """While inside, ``torch.autograd.backward`` adds to the list that this yields: parameter, gradient."""
        self.accumulated.append([])
        try:
            yield self.accumulated[-1]
        finally:
            self.accumulated.pop()

    def backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
        gradient: Any = None,
    ) -> None:
        """``torch.autograd.backward`` of what a Function's backward runs again. A leaf that this made gets ``grad``."""
        outs, arriving = _several(tensors), _several(grad_tensors if gradient is None else gradient)
        chosen = [i for i, out in enumerate(outs) if isinstance(out, Tensor) and out.requires_grad]
        outs, arriving = tuple(outs[i] for i in chosen), tuple(arriving[i] for i in chosen) if arriving else ()
        leaves = _several(inputs) or tuple(_leaves(outs))
        made = self._once(outs, leaves, arriving, create_graph, True)
        for leaf, found in zip(leaves, made, strict=True):
            if found is None:
                continue
            if isinstance(leaf, nn.Parameter):
                self.accumulated[-1].append((leaf, found))
            else:
                leaf.grad = found if leaf.grad is None else leaf.grad + found

    def _grad(
        self,
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        is_grads_batched: bool = False,
        materialize_grads: bool = False,
    ) -> tuple[Tensor | None, ...]:
        outs, arriving = _several(outputs), _several(grad_outputs)
        ins = tuple(self.originals.get(id(x), (x, x))[1] for x in _several(inputs))
        unused = materialize_grads if allow_unused is None else allow_unused
        if is_grads_batched:
            rows = [
                self._grad(outs, ins, one, True, create_graph, allow_unused=unused)
                for one in zip(*arriving, strict=True)
            ]
            made = [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]
        else:
            made = self._once(outs, ins, arriving, create_graph, unused)
        if materialize_grads:
            made = [torch.zeros_like(x) if g is None else g for x, g in zip(ins, made, strict=True)]
        return tuple(made)

    def _once(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], arriving: Sequence[Any], again: bool, unused: bool
    ) -> list[Tensor | None]:
        with unrecorded():
            given = arriving or None
            beside = torch.autograd.grad(outs, ins, given, retain_graph=True, create_graph=again, allow_unused=unused)
        asked = [place for place, one in enumerate(beside) if one is not None]
        ones = [torch.ones_like(out) if g is None else g for out, g in zip(outs, arriving, strict=False)]
        wanted = [self.starts.get(id(ins[place]), (None, ins[place]))[1] for place in asked]
        made: list[Tensor | None] = [None] * len(ins)
        with torch.no_grad():
            found = gradient(list(outs), wanted, ones, again) if asked else []
        for place, one in zip(asked, found, strict=True):
            linked = again and beside[place].requires_grad
            made[place] = Linked.apply(one, beside[place]) if linked else one  # type: ignore[no-untyped-call]
        return made


def _several(given: Any) -> tuple[Any, ...]:
    return () if given is None else (given,) if isinstance(given, Tensor) else tuple(given)


def _leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves that a backward of ``outputs`` reaches."""
    with without_torch_function():
        todo = [x.grad_fn for x in outputs]
    found, seen = list[Tensor](), set[Any]()
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [source for source, _ in node.next_functions]
    return found


def place_starts(graph: fx.Graph) -> None:
    """In a traced graph, what is computed of an input of a gradient reads its ``start``: all of it, or what comes after
    a tensor was made a leaf."""
    starts = [node for node in graph.nodes if op_spec(node).inner_gradient == "start"]
    numbers = itertools.count(1 + max((node.args[1] for node in starts), default=-1))
    place = {node: number for number, node in enumerate(graph.nodes)}
    last = max((node for node in graph.nodes if node.op == "placeholder"), key=place.__getitem__, default=None)
    for node in starts:
        x = node.args[0]
        for user in [u for u in x.users if u is not node and place[u] > place[node]]:
            user.replace_input_with(x, node)
    for node in [n for n in graph.nodes if op_spec(n).inner_gradient == "gradient"]:
        for x in [x for x in node.args[1] if op_spec(x).inner_gradient != "start"]:
            after = last if x.op == "placeholder" else x
            assert after is not None
            with graph.inserting_after(after):
                made = graph.call_function(start, (x, next(numbers)))
            made.meta = dict(x.meta)
            x.replace_all_uses_with(made, lambda user, made=made: user is not made)
