"""Trace the user's derivatives: ``torch.autograd.Function`` and hooks.

``torch.export`` traces the forward of a Function as ordinary code and drops every hook. Here both become nodes of the
traced graph (:mod:`...ops.derivatives.user_derivatives`); those that cannot be traced are refused, with the line.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import BackwardHook

from ...compat.torch import is_recording, pytree, version, without_torch_function
from ...compat.torch_checkpoints import CheckpointOptions, options_of
from ...compat.torch_func import is_transformed, nodes_of_trace
from ...compat.torch_hooks import (
    GLOBAL_BACKWARD_HOOKS,
    FunctionBase,
    author_of,
    backward_hooks,
    functions_applied_by,
    module_backward_hooks_by,
    node_class,
    old_backward_hooks,
)
from ...core.errors import CompileError, Where
from ...core.replaced import for_this_thread
from ..changes.user_frames import user_line
from ..places import OWN
from ..step_module import StepModule
from .autograd_functions import Joined, follow_hook, trace_function
from .checkpoints import Checkpoints, line_of_checkpoint
from .inner_gradients import InnerGradients, Linked
from .module_hooks import ModuleHooks
from .tensor_hooks import place_hooks

_MAX_TRACES = 4  # a backward that gets None may pass None to others
# Functions with which PyTorch itself implements operators and checkpoints, which a trace sees without them.
_OF_TORCH = ("torch._", "torch.utils.checkpoint")


@contextlib.contextmanager
def user_derivatives(step: StepModule, inner: InnerGradients, *, trained: bool) -> Iterator[DerivativeFinder]:
    """Trace or refuse the Functions and hooks of ``step`` (a model and its loss) inside.

    The yielded finder finishes a traced graph. ``trained``: whether a program will compute gradients at all.

    Raises:
        CompileError: QN105 with the user's line.
    """
    finder = DerivativeFinder(step, inner)
    if not trained:
        yield finder
        return
    brought = [x for part in step.brought() for x in (part.parameters() if isinstance(part, nn.Module) else [part])]
    hooks = [(p, tuple(own.values())) for p in (*step.parameters(), *brought) if (own := backward_hooks(p))]
    step.seen.begin = functools.partial(finder.begin, hooks)
    step.seen.done = finder.done
    end = step.register_forward_hook(lambda module, inputs, result: finder.record_result(result))
    enter = torch.autograd.graph.saved_tensors_hooks.__enter__
    leave = torch.autograd.graph.saved_tensors_hooks.__exit__

    def usual(function: Any, *args: Any, **kwargs: Any) -> Any:
        return super(FunctionBase, function).apply(*args, **kwargs)

    def saving(hooks: torch.autograd.graph.saved_tensors_hooks) -> None:
        kind = type(hooks)  # PyTorch's own kinds (checkpoints, save_on_cpu) return the saved values
        if kind is torch.autograd.graph.saved_tensors_hooks or not kind.__module__.startswith("torch."):
            finder.refuse("torch.autograd.graph.saved_tensors_hooks")
        options = options_of(hooks) if is_recording() else None
        save: Callable[[Tensor], Tensor] = _same
        if options is not None:
            save = finder.checkpoints.open_checkpoint(options, line_of_checkpoint(), reentrant=False).save
        enter(torch.autograd.graph.saved_tensors_hooks(save, _same))  # gradients in forward do not run parts again

    def saved(hooks: torch.autograd.graph.saved_tensors_hooks, *error: Any) -> None:
        leave(hooks, *error)
        if is_recording() and options_of(hooks) is not None:
            finder.checkpoints.close_checkpoint()

    with (
        functions_applied_by(for_this_thread(finder.apply, usual)),
        mock.patch.object(torch.autograd.graph.saved_tensors_hooks, "__enter__", for_this_thread(saving, enter)),
        mock.patch.object(torch.autograd.graph.saved_tensors_hooks, "__exit__", for_this_thread(saved, leave)),
        module_backward_hooks_by(for_this_thread(functools.partial(ModuleHooks, finder), BackwardHook)),
        _Hooks(finder),
    ):
        try:
            yield finder
        finally:
            step.seen.begin = step.seen.done = None
            end.remove()


def _same(x: Any) -> Any:
    return x


Place = tuple[int, int]  # the number of a derivative, and one of its results


class DerivativeFinder:
    """The user's derivatives of a trace.

    ``known``: the results of derivatives at which no gradient arrives, according to the trace before this one.
    ``found``: the number of derivatives in the latest trace.
    """

    def __init__(self, step: StepModule, inner: InnerGradients) -> None:
        self.step, self.inner = step, inner
        self.known: frozenset[Place] | None = None
        self._restart()

    def _restart(self) -> None:
        self.found, self.removed = 0, set[int]()
        self.asked, self.seen = set[Place](), frozenset[Place]()
        self.settled: list[tuple[Tensor, int, str, Where]] = []
        self.checkpoints, self.operators = Checkpoints(), 0
        self.reached = set[int]()

    def begin(self, hooks: Sequence[tuple[nn.Parameter, Sequence[Any]]]) -> None:
        """Trace the hooks of parameters."""
        self._restart()
        _check_hooks(self.step)
        names = {id(p): name for name, p in self.step.named_parameters()}
        for real, parameter_hooks in hooks:
            if id(real) not in self.step.stands_for:
                continue  # the loss function has it but does not use it
            parameter = self.step.stands_for[id(real)]()
            for hook in parameter_hooks:
                self.watch(hook)
                what = f"a hook of the parameter {_path(names[id(parameter)])}"
                follow_hook(parameter, hook, self.next_number(), what, self.refuse)

    def done(self) -> None:
        """Record the end of forward; later nodes of the trace replace buffers."""
        self.operators = len(nodes_of_trace())

    def record_result(self, result: Any) -> None:
        """Record where gradients of forward's result arrive.

        Raises:
            CompileError: QN110 for an in-place change of a tensor that a Function keeps or returns unchanged.
        """
        for x, old_version, what, where in self.settled:
            if version(x) != old_version:
                message = f"the forward pass changes {what} in place; a program would not"
                raise CompileError("QN110", message, where=where, fix="change a copy: .clone()")
        if self.step.want == "loss" and isinstance(result, Tensor):
            reached = list(_reached(result))
            self.checkpoints.reach({node for node, _ in reached})
            self.checkpoints.mark_assigned(self.operators)
            for function in (node_class(node) for node, _ in reached):
                if not (function is None or function is Joined or _is_of_torch(function)):
                    self.refuse_kept(function)
            arrivals = {(node.number, node.places[place]) for node, place in reached if node_class(node) is Joined}
            self.seen = frozenset(self.asked - arrivals)
            self.reached = {number for number, _ in arrivals}

    def repeated(self, trace: Callable[[], Any]) -> Callable[[], Any]:
        """Return ``trace``, repeated if a derivative asked for something that is known only at the end of a trace."""

        def traced() -> Any:
            result = trace()
            for _ in range(_MAX_TRACES):
                if not self.asked or self.known == self.seen:
                    break
                self.known = self.seen
                result = trace()
            return result

        return traced

    def watch(self, *code: Any) -> None:
        """Watch functions for changes of Python state: they are called now, and not in each step."""
        if self.step.seen.trace is not None:
            self.step.seen.trace.follow(*code)

    def next_number(self) -> int:
        self.found += 1
        return self.found - 1

    def absent(self, number: int, place: int) -> bool | None:
        self.asked.add((number, place))
        return None if self.known is None else (number, place) in self.known

    def hook(self, x: Tensor, hook: Any) -> _Handle:
        if getattr(hook, "__module__", "") == "torch.autograd.graph":  # of register_multi_grad_hook
            self.refuse("Tensor.register_hook")
        number = self.next_number()
        if torch.is_grad_enabled():
            self.watch(hook)
            follow_hook(x, hook, number, "Tensor.register_hook", self.refuse)
        return _Handle(number, self.removed)

    def finish(self, graph: fx.Graph) -> None:
        """Put hooks where they belong in a traced graph."""
        place_hooks(graph, self.removed, self.refuse)

    def apply(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if function is CheckpointFunction:
            return self._checkpointed(*args)
        if function is Joined or _is_of_torch(function):
            return super(FunctionBase, function).apply(*args, **kwargs)  # type: ignore[misc]
        if any(isinstance(x, Tensor) and is_transformed(x) for x in (*args, *kwargs.values())):
            self.refuse(f"torch.autograd.Function {function.__name__} inside a transform of torch.func")
        author = author_of(function)
        self.watch(author, author.forward, author.setup_context, author.backward, author.vjp)
        self.checkpoints.function()
        return trace_function(function, args, kwargs, self.next_number(), self)

    def _checkpointed(self, function: Any, preserve: bool, *args: Any) -> Any:
        """Return what a reentrant checkpoint computes; if no argument needs a gradient, nothing inside gets one."""
        grad = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)
        if not (grad and is_recording()):
            with torch.set_grad_enabled(grad):
                return function(*args)
        options = CheckpointOptions(stops=False, same_numbers=preserve, selective=False)
        self.checkpoints.open_checkpoint(options, line_of_checkpoint(), reentrant=True)
        try:
            # what is returned as it was given has a node of its own in autograd's graph
            inputs = {id(x) for x in args}
            return pytree.tree_map_only(Tensor, lambda x: x.view_as(x) if id(x) in inputs else x, function(*args))
        finally:
            self.checkpoints.close_checkpoint()

    def forbid_changes(self, x: Tensor, what: str) -> None:
        """Record that ``x`` must not change in place from now on."""
        self.settled.append((x, version(x), what, Where("", user_line(sys._getframe(), OWN))))

    def refuse(self, what: str) -> NoReturn:
        raise CompileError("QN105", f"{what} would not be part of the program", where=self.current_place())

    def refuse_kept(self, function: type) -> NoReturn:
        name = function.__name__
        message = (
            f"{name}.apply, kept before the trace, is not seen by it: its backward would not be part of the program"
        )
        raise CompileError("QN105", message, fix=f"call {name}.apply(...) where it is used")

    def refuse_hook(self, module: nn.Module, hook: Any, what: str) -> NoReturn:
        name = next((name for name, child in self.step.named_modules() if child is module), "")
        message = f"a hook of a module's backward {what}: it would not be part of the program"
        raise CompileError("QN105", message, where=Where(_path(name), _line(hook)))

    def current_place(self) -> Where:
        """Return the module and the line of the user's code that is being traced."""
        source = ""
        for line in reversed(traceback.extract_stack()):
            if not line.filename.startswith((*OWN, "<")) and "unittest" not in line.filename:
                source = f"{Path(line.filename).name}:{line.lineno}: {line.line}"
                break
        names = {id(module): name for name, module in self.step.named_modules()}
        for frame, _ in traceback.walk_stack(None):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in names:
                return Where(_path(names[id(owner)]), source)
        return Where("", source)


@dataclass(frozen=True)
class _Handle:
    """The handle that ``register_hook`` returns."""

    number: int
    removed: set[int]

    def remove(self) -> None:
        self.removed.add(self.number)


class _Hooks(TorchFunctionMode):
    """A mode that sees hooks of tensors and of nodes of autograd's graph."""

    def __init__(self, finder: DerivativeFinder) -> None:
        super().__init__()
        self.finder = finder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook and args[0].requires_grad and not args[0].is_leaf:
            return self.finder.hook(*args, **(kwargs or {}))
        if func in _BACKWARD and self.finder.inner.accumulates:
            return self.finder.inner.backward(*args, **(kwargs or {}))
        if func is torch.autograd.backward and is_recording():
            self.finder.refuse("torch.autograd.backward in forward")
        if func in _REFUSED and args[0].requires_grad:
            self.finder.refuse(f"Tensor.{func.__name__}")
        result = func(*args, **(kwargs or {}))
        return _Node(result, self.finder) if func == _GRAD_FN and result is not None else result


_REFUSED = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.backward)
_BACKWARD = (Tensor.backward, torch.autograd.backward)
_GRAD_FN = Tensor.grad_fn.__get__  # type: ignore[union-attr]


class _Node:
    """A node of autograd's graph that takes no hooks."""

    def __init__(self, node: Any, finder: DerivativeFinder) -> None:
        self._node, self._finder = node, finder

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            self._finder.refuse(f"grad_fn.{name}")
        return getattr(self._node, name)


def _check_hooks(step: nn.Module) -> None:
    """Refuse hooks that were registered before forward and cannot be traced."""
    for name, module in step.named_modules():
        if old_hooks := old_backward_hooks(module):
            raise _dropped("of register_backward_hook", _path(name), old_hooks)
    for hooks in GLOBAL_BACKWARD_HOOKS:
        if hooks:
            raise _dropped("of the backward of all modules", "", hooks)


def _dropped(whose: str, module: str, hooks: Mapping[int, Any]) -> CompileError:
    where = Where(module, _line(next(iter(hooks.values()))))
    return CompileError("QN105", f"a hook {whose} would not be part of the program", where=where)


def _line(hook: Any) -> str:
    """Return the line where a hook is defined."""
    code = getattr(hook, "__code__", None)
    return repr(hook) if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}: {hook.__qualname__}"


def _reached(loss: Tensor) -> Iterator[tuple[Any, int]]:
    """Yield the nodes of autograd's graph of a loss, each with every result that has a gradient."""
    with without_torch_function():
        todo: list[tuple[Any, int]] = [(loss.grad_fn, 0)]
    seen = set[tuple[Any, int]]()
    followed = set[Any]()
    while todo:
        node, place = todo.pop()
        if node is None or (node, place) in seen:
            continue
        seen.add((node, place))
        yield node, place
        if node not in followed:
            followed.add(node)
            todo += node.next_functions


def _is_of_torch(function: type) -> bool:
    return function is Linked or (author_of(function) is function and function.__module__.startswith(_OF_TORCH))


def _path(name: str) -> str:
    """Return the name in the user's model of a module or parameter of the traced step."""
    return name.removeprefix("model").removeprefix(".")
