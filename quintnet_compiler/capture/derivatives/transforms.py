"""Trace ``torch.func`` and ``torch.vmap`` in forward by themselves, and run their plain operators in the trace.

The trace of a model records operators above autograd, where it does not know tensors that stand for a row of a batch,
or that have a tangent. So the outermost transform is traced below autograd, where it consists of plain operators on
plain tensors, and these run in its place.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from ...compat.torch import FakeTensor, get_decompositions, is_recording, make_fx, pytree, unrecorded
from ...compat.torch_func import nodes_of_trace, only_function_modes, set_grad, transforms_by
from ...core.errors import CompileError, Where
from ...core.replaced import for_this_thread
from ...ops.catalog import op_spec
from ..changes.user_frames import user_line
from ..places import OWN

aten = torch.ops.aten
_OURS = __name__.partition(".")[0]
# autograd cannot differentiate these again
_WRITTEN_OUT: Any = get_decompositions([aten.nll_loss_backward.default, aten.nll_loss2d_backward.default])
_DETACHES = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]


@contextlib.contextmanager
def transforms_followed() -> Iterator[None]:
    """Let transforms that a traced forward calls become plain operators inside.

    Raises:
        CompileError: QN105 for ``torch.no_grad`` or ``torch.autograd.grad`` inside one.
    """
    with transforms_by(_Transforms().run_transform, for_this_thread):
        yield


class _Transforms:
    def __init__(self) -> None:
        self.inside = False

    def run_transform(self, transform: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``transform(*args, **kwargs)``; the outermost one becomes plain operators."""
        if self.inside or not is_recording():
            return transform(*args, **kwargs)
        call = _TransformCall(transform, *pytree.tree_flatten((args, kwargs)))
        inputs = call.tensor_arguments()
        # the sizes only identify numbers of rows
        inputs += [n.meta["val"] for n in nodes_of_trace() if n.op == "placeholder" and _varies(n.meta.get("val"))]
        self.inside = True
        try:
            with unrecorded(), only_function_modes(lambda mode: type(mode).__module__.startswith(_OURS)):
                traced = make_fx(call.run_on, decomposition_table=_WRITTEN_OUT)(*inputs)
        finally:
            self.inside = False
        _drop_detaches(traced.graph, call.watch.meant)
        _plain_numbers(traced.graph)
        if any(op_spec(node).takes_strides for node in traced.graph.nodes):
            raise _refusal("an assignment to a part of a tensor", "torch.where", depth=1)
        return call.result_of(_Replay(traced).run(*inputs))


class _TransformCall:
    """A call of a transform, as a function of the tensors among its arguments."""

    def __init__(self, transform: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec) -> None:
        self.transform, self.leaves, self.spec = transform, leaves, spec
        self.watch = _Detaches()
        self.outputs: list[Any] = []

    def tensor_arguments(self) -> list[Tensor]:
        """Return the tensors among the arguments."""
        tensors = [x for x in self.leaves if isinstance(x, Tensor)]
        return [x if isinstance(x, FakeTensor) else x.view_as(x) for x in tensors]

    def run_on(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors among the results for other tensors, which more may follow."""
        arguments = iter(tensors)
        leaves = [next(arguments) if isinstance(x, Tensor) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with self.watch:
            self.outputs, self.form = pytree.tree_flatten(self.transform(*args, **kwargs))
        return [x for x in self.outputs if isinstance(x, Tensor)]

    def result_of(self, tensors: Iterable[Tensor]) -> Any:
        """Return the result of the latest run, with other tensors."""
        results = iter(tensors)
        return pytree.tree_unflatten([next(results) if isinstance(x, Tensor) else x for x in self.outputs], self.form)


def _drop_detaches(graph: fx.Graph, meant: Collection[str]) -> None:
    """Remove autograd's own detaches of values that a backward reads, but those that the user's code ``meant``."""
    for node in [node for node in graph.nodes if op_spec(node).detaches == "of its own" or op_spec(node).aliases]:
        if node.name in meant:
            node.target = aten.detach.default
        else:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


class _Replay(fx.Interpreter):
    """An interpreter that runs the operators of a trace in another one, which knows the sizes already."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is aten.sym_size.int:
            return args[0].shape[args[1]]
        return super().call_function(target, args, kwargs)


def _plain_numbers(graph: fx.Graph) -> None:
    """Make casts of Python's numbers the numbers themselves: a vmap inside another one casts them."""
    for node in [node for node in graph.nodes if op_spec(node).casts]:
        number, dtype = node.args[0], node.kwargs.get("dtype")
        if isinstance(number, (int, float)) and isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            node.replace_all_uses_with(float(number))
            graph.erase_node(node)


def _varies(x: Any) -> bool:
    return isinstance(x, Tensor) and any(isinstance(size, torch.SymInt) for size in x.shape)


class _Detaches(TorchFunctionMode):
    """A mode that records which nodes of the trace detach because the user's code does."""

    def __init__(self) -> None:
        super().__init__()
        self.meant: set[str] = set()
        self.grad = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is set_grad and self.grad and args == (False,):
            raise _refusal("torch.no_grad", "x.detach()")
        if func is torch.autograd.grad and not by_transform(sys._getframe(1)):
            raise _refusal("torch.autograd.grad", "torch.func.grad")
        if func not in _DETACHES:
            return func(*args, **(kwargs or {}))
        first_new = len(nodes_of_trace())
        result = func(*args, **(kwargs or {}))
        self.meant.update(node.name for node in nodes_of_trace()[first_new:])
        return result


def _refusal(construct: str, instead: str, depth: int = 2) -> CompileError:
    where = Where("", user_line(sys._getframe(depth), OWN))
    return CompileError(
        "QN105", f"{construct} inside a transform of torch.func", where=where, fix=f"use {instead} there"
    )


def by_transform(frame: types.FrameType | None) -> bool:
    """Return whether a transform of torch calls, and not the user's code."""
    while frame is not None and frame.f_code.co_filename.startswith(OWN):
        if frame.f_code.co_filename.endswith("eager_transforms.py"):
            return True
        frame = frame.f_back
    return False
