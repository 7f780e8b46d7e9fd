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

    ``want``: ``"loss"`` or ``"outputs"``. ``training``: every module runs in its own mode, with gradients; else in
    evaluation mode. ``around``: entered around every call.
    """

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
        """Return the module's loss or outputs for a batch."""
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
    """The results of a step of the module.

    Attributes:
        outputs: The loss alone, or whatever the module returns.
        gradients: Of all tensors that require one, by the program's name, or by a name with ``"?"`` if it has none.
        changes: Made by forward.
        dtypes: Of all floating-point results of operators.
    """

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
    """Run a step of the module.

    Args:
        owner: The module.
        batch: Is copied; the module may change the copy.
        masks: The seed of a program's masks, if the program draws any.
        again: Return the second of two runs, which starts from the attributes that the first one set.
        reseed: The seed of all other random numbers.
        watch: Entered around forward.
        within: Entered around forward and backward.

    Raises:
        Whatever the module raises.
    """
    batch_copy = copy_batch(batch)
    inputs = {f"the batch's tensor {i}": x for i, x in enumerate(tensors_of(batch_copy))}
    untouched = Untouched(owner.modules, {**owner.tensors, **inputs}, {"loss_fn": owner.loss_fn})
    with untouched, _mode(owner), one_process(), within or contextlib.nullcontext():
        if reseed is not None:
            reseed_all(reseed)
        if again:
            with _masks(masks), torch.enable_grad():
                owner(copy_batch(batch))
        leaves = MadeLeaves(inputs.values())
        with _masks(masks):
            with torch.enable_grad(), watch or contextlib.nullcontext(), leaves:
                results = tensors_of(owner(batch_copy))
            gradients = _gradients(owner, results[0], leaves) if owner.training else {}
        outputs = tuple(x.detach().clone() for x in results)
    return ModuleStep(outputs, gradients, untouched.changes, untouched.dtypes)


def copy_batch(batch: Any) -> Any:
    """Return a batch with copies of its tensors, of the same strides."""
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
    """Return the tensors in which autograd would leave a gradient, from its own graph.

    The batch and leaves that forward made itself are left out, as their gradients are never seen.
    """
    names = {id(x): name for name, x in owner.tensors.items()}
    tensors = {name: x for name, x in owner.tensors.items() if x.requires_grad and x.is_leaf}
    for i, leaf in enumerate(node.variable for node in nodes if type(node).__name__ == "AccumulateGrad"):
        if leaf not in leaves:
            tensors.setdefault(names.get(id(leaf), f"? {i} {tuple(leaf.shape)}"), leaf)
    return tensors


def _nodes(loss: Tensor) -> list[Any]:
    """Return the nodes of autograd's graph."""
    todo: list[Any] = [loss.grad_fn]
    seen: dict[Any, None] = {}
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen[node] = None
            todo += [parent for parent, _ in node.next_functions]
    return list(seen)


def _gradients(owner: Owner, loss: Tensor, leaves: MadeLeaves) -> dict[str, Tensor | None]:
    """Return gradients. Hooks run as in training, except those after accumulation (an optimizer in the backward)."""
    nodes = _nodes(loss)
    wanted = _wanted(owner, nodes, leaves)
    if not nodes or not wanted:
        return dict.fromkeys(wanted)
    tensors = list(wanted.values())
    if any(node_class(node) is not None for node in nodes):  # a Function's backward may run another backward
        gradients: tuple[Tensor | None, ...] = _by_backward(loss, tensors)
    else:
        gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
    return dict(zip(wanted, gradients, strict=True))


def _by_backward(loss: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Compute gradients by ``backward``: reentrant checkpoints need it, and Functions may add to ``grad``."""
    hooks = [(registered, dict(registered)) for x in tensors if (registered := accumulation_hooks(x))]
    gradients = [x.grad for x in tensors]
    for registered, _ in hooks:
        registered.clear()
    for x in tensors:
        x.grad = None
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        return tuple(x.grad for x in tensors)
    finally:
        for registered, saved in hooks:
            registered.update(saved)
        for x, gradient in zip(tensors, gradients, strict=True):
            x.grad = gradient
