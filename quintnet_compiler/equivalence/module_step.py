"""One step of the user's module itself, in place, on a few rows; nothing of it changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.batch_norms import one_process
from ..capture.modes import evaluating
from ..capture.step_module import LossFn, called, loss_of
from ..compat.torch import pytree
from ..compat.torch_hooks import accumulation_hooks, node_class
from ..ir.containers import loss_inputs, model_inputs, rebuilt, takes_labels_of
from .made_leaves import MadeLeaves
from .plain_control_flow import in_python
from .reference import same_numbers
from .unchanged import ModuleChanges, Untouched, reseed_all


@dataclass(frozen=True)
class Owner:
    """The user's module and its loss function, and the names that a program has for their tensors.

    ``want``: ``"loss"`` or ``"outputs"``; ``training``: every module in the mode that it has, and gradients; else
    evaluation. ``around``: entered around every call."""

    model: nn.Module
    loss_fn: LossFn | None
    tensors: Mapping[str, Tensor]
    want: str
    training: bool
    around: Callable[[], contextlib.AbstractContextManager[Any]] | None = None

    @property
    def modules(self) -> list[nn.Module]:
        return [self.model, *([self.loss_fn] if isinstance(self.loss_fn, nn.Module) else [])]

    def __call__(self, batch: Any) -> Any:
        """What the module returns for a batch: its loss, or its outputs."""
        with self.around() if self.around is not None else contextlib.nullcontext(), in_python():
            return self._called(batch)

    def _called(self, batch: Any) -> Any:
        batch = rebuilt(batch)
        if self.want != "loss":
            return called(self.model, batch)
        out = called(self.model, model_inputs(batch, self.loss_fn))
        if self.loss_fn is not None and takes_labels_of(batch, self.loss_fn):
            out = self.loss_fn(out, loss_inputs(batch, self.loss_fn))
        return loss_of(out)


@dataclass(frozen=True)
class ModuleStep:
    """What the module made: its outputs (a loss alone, or whatever it returns), the gradients of everything that
    requires one (by the program's name; ``"?"`` and more if the program has none), and what forward changed.
    ``dtypes``: of all floating-point values that its operators made."""

    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor | None] = field(default_factory=dict)
    changes: ModuleChanges = ModuleChanges()
    dtypes: frozenset[torch.dtype] = frozenset()


def module_step(
    owner: Owner,
    batch: Any,
    masks: int | None,
    *,
    again: bool = False,
    reseed: int | None = None,
    watch: contextlib.AbstractContextManager[Any] | None = None,
    within: contextlib.AbstractContextManager[Any] | None = None,
) -> ModuleStep:
    """Run it.

    Args:
        batch: is copied; the module may change its copy.
        masks: the seed of a program's masks, if the program draws any.
        again: the second of two runs, with what the first one left behind.
        reseed: of all other random numbers.
        watch: entered around forward.
        within: entered around forward and backward.

    Raises:
        Whatever the module raises.
    """
    given = copied(batch)
    inputs = {f"the batch's tensor {i}": x for i, x in enumerate(tensors_of(given))}
    untouched = Untouched(owner.modules, {**owner.tensors, **inputs}, {"loss_fn": owner.loss_fn})
    with untouched, _mode(owner), one_process(), within or contextlib.nullcontext():
        if reseed is not None:
            reseed_all(reseed)
        if again:
            with _masks(masks), torch.enable_grad():
                owner(copied(batch))
        leaves = MadeLeaves(inputs.values())
        with _masks(masks):
            with torch.enable_grad(), watch or contextlib.nullcontext(), leaves:
                made = tensors_of(owner(given))
            gradients = _gradients(owner, made[0], leaves) if owner.training else {}
        outputs = tuple(x.detach().clone() for x in made)
    return ModuleStep(outputs, gradients, untouched.changes, untouched.dtypes)


def copied(batch: Any) -> Any:
    """With tensors of its own, of the same strides."""
    return pytree.tree_map_only(Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), batch)


def tensors_of(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


@contextlib.contextmanager
def _mode(owner: Owner) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in () if owner.training else owner.modules:
            stack.enter_context(evaluating(module))
        yield


def _masks(seed: int | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if seed is None else same_numbers(seed, 0)


def _wanted(owner: Owner, nodes: Iterable[Any], leaves: MadeLeaves) -> dict[str, Tensor]:
    """Everything that autograd would leave a gradient in, found in autograd's own graph; not the batch, and what
    forward itself has made a leaf: nobody sees its gradient afterwards."""
    names = {id(x): name for name, x in owner.tensors.items()}
    found = {name: x for name, x in owner.tensors.items() if x.requires_grad and x.is_leaf}
    for i, leaf in enumerate(node.variable for node in nodes if type(node).__name__ == "AccumulateGrad"):
        if leaf not in leaves:
            found.setdefault(names.get(id(leaf), f"? {i} {tuple(leaf.shape)}"), leaf)
    return found


def _nodes(loss: Tensor) -> list[Any]:
    """Autograd's graph."""
    todo: list[Any] = [loss.grad_fn]
    seen: dict[Any, None] = {}
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen[node] = None
            todo += [parent for parent, _ in node.next_functions]
    return list(seen)


def _gradients(owner: Owner, loss: Tensor, leaves: MadeLeaves) -> dict[str, Tensor | None]:
    """Hooks run as in training; those that run after a gradient was added up (an optimizer in the backward) do not."""
    nodes = _nodes(loss)
    wanted = _wanted(owner, nodes, leaves)
    if not nodes or not wanted:
        return dict.fromkeys(wanted)
    tensors = list(wanted.values())
    if any(node_class(node) is not None for node in nodes):  # a Function's backward may call that of a part
        found: tuple[Tensor | None, ...] = _by_backward(loss, tensors)
    else:
        found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def _by_backward(loss: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Reentrant checkpoints need ``backward``, and Functions that run a part again may add to ``grad`` themselves."""
    hooks = [(found, dict(found)) for x in tensors if (found := accumulation_hooks(x))]
    gradients = [x.grad for x in tensors]
    for found, _ in hooks:
        found.clear()
    for x in tensors:
        x.grad = None
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        return tuple(x.grad for x in tensors)
    finally:
        for found, before in hooks:
            found.update(before)
        for x, gradient in zip(tensors, gradients, strict=True):
            x.grad = gradient
