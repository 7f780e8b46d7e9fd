"""``torch.autograd.grad`` in forward: one node of the traced graph (:mod:`...ops.derivatives.inner_gradients`).

Autograd itself runs, too, unrecorded, as in the plain module. It determines which inputs get a gradient and which
results may be differentiated again, and raises the errors that it would raise.
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

from ...compat.torch import is_recording, unrecorded, without_torch_function
from ...compat.torch_func import is_transformed
from ...core.errors import CompileError, Where
from ...ops.catalog import op_spec
from ...ops.derivatives.inner_gradients import gradient, start
from ..changes.user_frames import user_line
from ..places import OWN
from .transforms import by_transform

_FLAG = Tensor.requires_grad.__set__  # type: ignore[attr-defined]


class Linked(torch.autograd.Function):
    """A node's value, with the place in autograd's graph that ``like`` has."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, like: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0]


class InnerGradients(TorchFunctionMode):
    """A mode in which calls of ``torch.autograd.grad`` become nodes of the traced graph."""

    def __init__(self) -> None:
        super().__init__()
        self.begin_trace()

    def begin_trace(self) -> None:
        """Begin a trace; two traces of one forward are equal."""
        self.accumulated: list[list[tuple[Tensor, Tensor]]] = []  # of each backward that is traced now
        self.numbers: Iterator[int] = itertools.count()
        self.starts: dict[int, tuple[Tensor, Tensor]] = {}  # a leaf, and the node at which it became one
        self.originals: dict[int, tuple[Tensor, Tensor]] = {}  # a detached input of a Function, and the input

    def treat_as(self, detached: Tensor, original: Tensor) -> None:
        """Treat ``detached`` as ``original`` if its gradient is asked for."""
        self.originals[id(detached)] = detached, original

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad and not any(map(is_transformed, _as_tuple(args[0]))):
            return self._grad(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "_make_dual" and is_recording() and not by_transform(sys._getframe(1)):
            where = Where("", user_line(sys._getframe(1), OWN))
            raise CompileError("QN105", "torch.autograd.forward_ad in forward", where=where, fix="use torch.func.jvp")
        leaf: Any = args[0] if (func is Tensor.requires_grad_ or func == _FLAG) and is_recording() else None
        leaf = None if leaf is not None and is_transformed(leaf) else leaf
        required_grad = leaf is None or leaf.requires_grad
        result = func(*args, **(kwargs or {}))
        if not required_grad and leaf.requires_grad:
            with torch.no_grad():
                node: Any = start(leaf, next(self.numbers))
                self.starts[id(leaf)] = leaf, node
        return result

    @property
    def accumulates(self) -> bool:
        """Return whether the trace is in a backward, which may add to gradients of parameters."""
        return bool(self.accumulated)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Let ``torch.autograd.backward`` add to the yielded list inside: parameter, gradient."""
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
        """Trace ``torch.autograd.backward`` in a Function's backward, as of checkpoints. Leaves get ``grad``."""
        outs, arriving = _as_tuple(tensors), _as_tuple(grad_tensors if gradient is None else gradient)
        chosen = [i for i, out in enumerate(outs) if isinstance(out, Tensor) and out.requires_grad]
        outs, arriving = tuple(outs[i] for i in chosen), tuple(arriving[i] for i in chosen) if arriving else ()
        leaves = _as_tuple(inputs) or tuple(_leaves(outs))
        gradients = self._once(outs, leaves, arriving, create_graph, True)
        for leaf, grad in zip(leaves, gradients, strict=True):
            if grad is None:
                continue
            if isinstance(leaf, nn.Parameter):
                self.accumulated[-1].append((leaf, grad))
            else:
                leaf.grad = grad if leaf.grad is None else leaf.grad + grad

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
        outs, arriving = _as_tuple(outputs), _as_tuple(grad_outputs)
        ins = tuple(self.originals.get(id(x), (x, x))[1] for x in _as_tuple(inputs))
        unused = materialize_grads if allow_unused is None else allow_unused
        if is_grads_batched:
            rows = [
                self._grad(outs, ins, row, True, create_graph, allow_unused=unused)
                for row in zip(*arriving, strict=True)
            ]
            gradients = [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]
        else:
            gradients = self._once(outs, ins, arriving, create_graph, unused)
        if materialize_grads:
            gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(ins, gradients, strict=True)]
        return tuple(gradients)

    def _once(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], arriving: Sequence[Any], again: bool, unused: bool
    ) -> list[Tensor | None]:
        """Return the gradients of ``ins``, as a node of the graph, after autograd itself has computed them."""
        with unrecorded():
            end_gradients = arriving or None
            of_autograd = torch.autograd.grad(
                outs, ins, end_gradients, retain_graph=True, create_graph=again, allow_unused=unused
            )
        places = [place for place, grad in enumerate(of_autograd) if grad is not None]
        ones = [torch.ones_like(out) if g is None else g for out, g in zip(outs, arriving, strict=False)]
        wanted = [self.starts.get(id(ins[place]), (None, ins[place]))[1] for place in places]
        gradients: list[Tensor | None] = [None] * len(ins)
        with torch.no_grad():
            traced = gradient(list(outs), wanted, ones, again) if places else []
        for place, grad in zip(places, traced, strict=True):
            linked = again and of_autograd[place].requires_grad
            gradients[place] = Linked.apply(grad, of_autograd[place]) if linked else grad  # type: ignore[no-untyped-call]
        return gradients


def _as_tuple(tensors: Any) -> tuple[Any, ...]:
    return () if tensors is None else (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def _leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that a backward of ``outputs`` reaches."""
    with without_torch_function():
        todo = [x.grad_fn for x in outputs]
    leaves, seen = list[Tensor](), set[Any]()
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        todo += [source for source, _ in node.next_functions]
    return leaves


def place_starts(graph: fx.Graph) -> None:
    """Let users of an input of a gradient read its ``start``: all of them, or those after it became a leaf."""
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
                started = graph.call_function(start, (x, next(numbers)))
            started.meta = dict(x.meta)
            x.replace_all_uses_with(started, lambda user, started=started: user is not started)
