"""Gradients as optimizers see them: the same tensors in every step, unless something else refers to them."""

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

Old = Sequence[Tensor | None] | None  # gradients of parameters before a step; None if no parameter had one


class HandOver:
    """Hands ``gradients``, over memory that every step writes to, to ``parameters``.

    Reference counts show whether something keeps a gradient (or its memory) of an earlier step; the next step then
    needs new ones. There is no Python loop over parameters, unless they still have gradients, to which those of a
    step are added.
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
        """Return whether something else refers to one of the gradients, a view of it, or its memory."""
        return self._references() != self._own

    def take_gradients(self) -> Old:
        """Take the gradients from the parameters before a step, as copies that the step does not overwrite."""
        with without_torch_function():
            current = list(map(_GRAD, self.parameters))
        if all(map(is_, current, repeat(None))):
            return None
        old = [None if g is None else like(g.clone(), type(g)) for g in current]
        self.set_gradients(repeat(None))
        return old

    def give(self, old: Old) -> None:
        """Set the step's gradients, added to ``old`` ones, and call the hooks of the parameters.

        The hooks are those that autograd calls after accumulating (``register_post_accumulate_grad_hook``).
        """
        if old is None:
            self.set_gradients(self.gradients)
        else:
            pairs = zip(old, self.gradients, strict=True)
            self.set_gradients([g if previous is None else like(previous + g, type(g)) for previous, g in pairs])
        with without_torch_function():
            hooked = any(map(accumulation_hooks, self.parameters))
        if hooked:
            for parameter in self.parameters:
                for hook in tuple((accumulation_hooks(parameter) or {}).values()):
                    hook(parameter)

    def set_gradients(self, gradients: Iterable[Tensor | None]) -> None:
        """Set every parameter's ``grad``."""
        with without_torch_function():
            deque(map(setattr, self.parameters, repeat("grad"), gradients), maxlen=0)
