"""Parameters of lazy modules (``nn.LazyLinear``), made before a module is traced, as its first call would make them.

What a lazy module makes of its first input depends on shapes. A copy of the module is called on tensors without values,
so nothing that forward does reaches the module itself. Then each of the module's own lazy parts initialises itself, in
the order in which the copies were called.
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
from ..guards.python_state import AttributeSnapshot, Cell, Generators
from .step_module import StepModule


def materialise(step: StepModule, batch: Any, *, training: bool) -> None:
    """Each lazy part of ``step`` becomes a plain module with parameters, as at the first call on ``batch``.

    They draw the random numbers that they would draw at that call if forward draws no others. Nothing else of the
    module changes. ``training``: whether parts have the modes that they have; if not, all are in evaluation mode.
    Nothing at all changes where shapes do not tell: forward needs values, a lazy module makes its parameters of the
    values of its input, or the module cannot be copied.

    Raises:
        CompileError: QN101, before anything has changed, if forward does not call a lazy module.
    """
    lazy = {path.removeprefix("model."): module for path, module in step.named_modules() if is_lazy_module(module)}
    if not lazy:
        return
    first = _FirstCalls(len(lazy))
    try:
        with one_thread(), _kept(step):
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
    """Every lazy module is known; no error that a forward might catch."""


class _ShapesAlone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, no operator mixes tensors with values and those without: it would leave the former as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.arg_tree_leaves(*args, **(kwargs or {}))
        if len({isinstance(x, FakeTensor) for x in given if isinstance(x, Tensor)}) == 2:
            raise ValueError("the parameters of a lazy module depend on the values of its input")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _FirstCalls:
    """Lazy modules in the order of their first calls, with the arguments."""

    count: int
    calls: list[tuple[nn.Module, Any, Any]] = field(default_factory=list)

    def find(self, step: StepModule, lazy: Sequence[nn.Module], batch: Any, *, training: bool) -> None:
        """Call a copy of ``step``, whose lazy parts have tensors with values, until the last of them was called."""
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
            twin.made(pytree.tree_map_only(Tensor, lambda x: torch.zeros(x.shape, dtype=x.dtype, device=device), batch))

    def _begin(self, module: nn.Module, twin: nn.Module, args: Any, kwargs: Any) -> None:
        with without_modes(), _ShapesAlone():  # type: ignore[no-untyped-call]
            initialise_lazy(twin, args, kwargs)
        made = (*twin.parameters(), *twin.buffers(), *pytree.tree_leaves(list(vars(twin).values())))
        meta = any(x.is_meta for x in (*module.parameters(), *module.buffers()))
        if any(isinstance(x, FakeTensor) or (isinstance(x, Tensor) and x.is_meta and not meta) for x in made):
            raise ValueError("a lazy module keeps its input, or what it computed of it")
        self.calls.append((module, args, kwargs))
        if len(self.calls) == self.count:
            raise _AllCalled


def _like(x: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        found = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return nn.Parameter(found, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else found


def _unmade(x: Any) -> Any:
    return type(x)(requires_grad=x.requires_grad, device=x.device, dtype=x.dtype)


@contextlib.contextmanager
def _kept(step: StepModule) -> Iterator[None]:
    """Afterwards the generators of random numbers, attributes, and variables of functions are as before. Inside, no
    part of ``step`` may be called, as functions do that hold a module: it is not copied for them.

    Raises:
        ValueError: for a part that is called.
    """
    state, walk = AttributeSnapshot(), Walk()
    for path, module in step.named_modules():
        state.add(path, module)
        walk.follow(module)
    for found in walk.variables:
        space = found.space
        state.add_names(Cell(found.name, space) if isinstance(space, CellType) else space, {found.name})
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
