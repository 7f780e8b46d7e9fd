"""Initialize the parameters of lazy modules (``nn.LazyLinear``) before a trace, as their first call would.

The parameters of a lazy module depend on the shapes of its first input. A copy of the module is called on tensors
without values, so no effect of forward reaches the module itself. Then each lazy submodule initializes itself, in the
order in which the copies were called.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from ..compat.torch import FakeTensor, FakeTensorMode, TorchDispatchMode, pytree, without_modes
from ..compat.torch_hooks import initialise_lazy, initialised_by, is_lazy_module
from ..core.empty_storage import device_of
from ..core.errors import CompileError
from ..core.replaced import one_thread
from ..guards.function_reads import Walk
from ..guards.namespaces import Cell
from ..guards.python_state import AttributeSnapshot, Generators
from .step_module import StepModule


def materialise(step: StepModule, batch: Any, *, training: bool) -> None:
    """Turn each lazy submodule of ``step`` into a plain one, as the first call on ``batch`` would.

    They draw the random numbers of that call, if forward draws no others. Nothing else of the module changes.
    ``training``: whether submodules keep their modes; if not, all are in evaluation mode. Nothing changes at all if
    shapes do not suffice: forward needs values, a lazy module computes its parameters from the values of its input, or
    the module cannot be copied.

    Raises:
        CompileError: QN101, before anything has changed, if forward does not call a lazy module.
    """
    lazy = {path.removeprefix("model."): module for path, module in step.named_modules() if is_lazy_module(module)}
    if not lazy:
        return
    first = _FirstCalls(len(lazy))
    try:
        with one_thread(), _restoring(step):
            first.find(step, list(lazy.values()), batch, training=training)
    except Exception:  # of the user's code, or of torch: a first call will show it
        return
    called = {id(module) for module, _, _ in first.calls}
    unused = [path for path, module in lazy.items() if id(module) not in called]
    if unused:
        raise CompileError(
            "QN101",
            f"forward does not call lazy modules, so they have no shapes: {', '.join(unused[:3])}",
            fix="leave them out of the model, or give their sizes",
        )
    for module, args, kwargs in first.calls:
        with _ShapesAlone():  # type: ignore[no-untyped-call]
            initialise_lazy(module, args, kwargs)


class _AllCalled(BaseException):
    """Every lazy module was called. Not an Exception, so that forward does not catch it."""


class _ShapesAlone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that refuses operators on tensors with and without values, which would have no effect on the former."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.arg_tree_leaves(*args, **(kwargs or {}))
        if len({isinstance(x, FakeTensor) for x in leaves if isinstance(x, Tensor)}) == 2:
            raise ValueError("the parameters of a lazy module depend on the values of its input")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _FirstCalls:
    """Lazy modules in the order of their first calls, with the arguments."""

    count: int
    calls: list[tuple[nn.Module, Any, Any]] = field(default_factory=list)

    def find(self, step: StepModule, lazy: Sequence[nn.Module], batch: Any, *, training: bool) -> None:
        """Call a copy of ``step``, whose lazy submodules get tensors with values, until the last of them is called."""
        mode, device = FakeTensorMode(allow_non_fake_inputs=True), device_of(step)
        every = (*step.parameters(), *step.buffers())
        own = {id(x) for module in lazy for x in (*module.parameters(), *module.buffers())}
        memo: dict[int, Any] = {
            id(x): _unmade(x) if is_lazy(x) else _like(x, mode) for x in every if is_lazy(x) or id(x) not in own
        }
        twin = copy.deepcopy(step, memo)
        for module in lazy:
            initialised_by(memo[id(module)], functools.partial(self._begin, module))
        if not training:
            twin.eval()
        with contextlib.suppress(_AllCalled), mode:
            twin.compute_result(
                pytree.tree_map_only(Tensor, lambda x: torch.zeros(x.shape, dtype=x.dtype, device=device), batch)
            )

    def _begin(self, module: nn.Module, twin: nn.Module, args: Any, kwargs: Any) -> None:
        with without_modes(), _ShapesAlone():  # type: ignore[no-untyped-call]
            initialise_lazy(twin, args, kwargs)
        leaves = (*twin.parameters(), *twin.buffers(), *pytree.tree_leaves(list(vars(twin).values())))
        meta = any(x.is_meta for x in (*module.parameters(), *module.buffers()))
        if any(isinstance(x, FakeTensor) or (isinstance(x, Tensor) and x.is_meta and not meta) for x in leaves):
            raise ValueError("a lazy module keeps its input, or a value computed from it")
        self.calls.append((module, args, kwargs))
        if len(self.calls) == self.count:
            raise _AllCalled


def _like(x: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return nn.Parameter(copy, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else copy


def _unmade(x: Any) -> Any:
    return type(x)(requires_grad=x.requires_grad, device=x.device, dtype=x.dtype)


@contextlib.contextmanager
def _restoring(step: StepModule) -> Iterator[None]:
    """Restore the generators of random numbers, attributes, and variables of functions afterwards.

    Inside, no submodule of ``step`` itself may be called, as by a function that holds a module: it has no copy.

    Raises:
        ValueError: if one is called.
    """
    state, walk = AttributeSnapshot(), Walk()
    for path, module in step.named_modules():
        state.add(path, module)
        walk.follow(module)
    for variable in walk.variables:
        space = variable.space
        state.add_names(Cell(variable.name, space) if isinstance(space, CellType) else space, {variable.name})
    parts = {id(module) for module in step.modules()}

    def refused(module: nn.Module, _: Any) -> None:
        if id(module) in parts:
            raise ValueError("a function calls the module that was copied")

    generators, handle = Generators.now(), register_module_forward_pre_hook(refused)
    gpus = sorted({x.device.index or 0 for x in step.parameters() if x.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        handle.remove()
        state.restore()
        generators.restore()
