"""Gradients as optimizers see them: the same tensors in every step, as long as nobody else looks at them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from sys import getrefcount

from torch import Tensor, nn

from ...compat.torch import storage_uses, without_torch_function
from ...compat.torch_hooks import accumulation_hooks
from .module_parameters import like, local_of

_GRAD = attrgetter("grad")

Old = Sequence[Tensor | None] | None  # gradients that parameters had before a step; None: not one


class HandOver:
    """What a step gives to ``parameters``: ``gradients``, over memory that every step writes to.

    Whoever keeps one of them (or its memory) from an earlier step is told from the numbers of references: then the next
    step needs others. No loop over parameters is in Python unless they still have gradients, to which those of a step
    are added.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        self.parameters, self.gradients = parameters, gradients
        self._locals = [local_of(gradient) for gradient in gradients]
        storages = [x.untyped_storage() for x in self._locals]
        self._memory = list({storage.data_ptr(): storage for storage in storages}.values())
        del storages
        self._own = self._references()

    def _references(self) -> tuple[list[int], ...]:
        uses = storage_uses(self._memory)
        return list(map(getrefcount, self.gradients)), list(map(getrefcount, self._locals)), uses

    @property
    def kept(self) -> bool:
        """Whether somebody else has one of the gradients, a view of it or what it is a view of."""
        return self._references() != self._own

    def take(self) -> Old:
        """Before a step: what the parameters have. They have nothing then, and none of it is overwritten."""
        with without_torch_function():
            there = list(map(_GRAD, self.parameters))
        if all(map(is_, there, repeat(None))):
            return None
        old = [None if g is None else like(g.clone(), type(g)) for g in there]
        self.put(repeat(None))
        return old

    def give(self, old: Old) -> None:
        """After a step: its gradients, added to what there was; then each parameter's hooks, as autograd calls them
        when it has accumulated a gradient (``register_post_accumulate_grad_hook``)."""
        if old is None:
            self.put(self.gradients)
        else:
            pairs = zip(old, self.gradients, strict=True)
            self.put([g if before is None else like(before + g, type(g)) for before, g in pairs])
        with without_torch_function():
            hooked = any(map(accumulation_hooks, self.parameters))
        if hooked:
            for parameter in self.parameters:
                for hook in tuple((accumulation_hooks(parameter) or {}).values()):
                    hook(parameter)

    def put(self, gradients: Iterable[Tensor | None]) -> None:
        """Set every parameter's ``grad``."""
        with without_torch_function():
            deque(map(setattr, self.parameters, repeat("grad"), gradients), maxlen=0)
