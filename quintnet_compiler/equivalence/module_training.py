"""The user's module, trained in one process beside a compiled program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.batch_norms import one_process
from ..capture.step_module import LossFn, called, loss_of
from ..compat.torch import pytree
from ..core.errors import CompileError, QuintNetError
from ..ir.containers import loss_inputs, model_inputs, rebuilt, takes_labels_of
from ..ir.distributed_program import DistributedProgram
from .module_copy import module_copy
from .plain_control_flow import in_python
from .reference import differs, largest

Numbers = Callable[[], contextlib.AbstractContextManager[None]]  # returns a context with the random numbers of a step
LEARNING_RATE = 0.01
FLOOR = 1e-3  # an error is relative to the largest element of its tensor, or to this share of that of its kind


@dataclass(frozen=True)
class TrainedStep:
    """The loss and gradients of a step of the module, and parameters and buffers after it.

    Buffers are copies in float64; complex ones are pairs.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


class ModuleTraining:
    """The training of a copy of a module, in its own dtypes or (``exact``) in float64."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, device: torch.device, *, exact: bool) -> None:
        self.model, self.loss_fn = module_copy(model, loss_fn)
        self.exact = exact
        loss_module = self.loss_fn if isinstance(self.loss_fn, nn.Module) else None
        self.sides = {"": self.model, **({} if loss_module is None else {"loss_fn.": loss_module})}
        for module in self.sides.values():
            module.to(device)
            if exact:
                module.double()
        named = [(f"{prefix}{n}", p) for prefix, m in self.sides.items() for n, p in m.named_parameters()]
        first = {id(p): name for name, p in reversed(named)}  # the loss function may use parameters of the model
        self.parameters = {name: p for name, p in named if first[id(p)] == name}
        self.optimizer = sgd(p for p in self.parameters.values() if p.requires_grad)

    def inputs(self, batch: Any) -> Any:
        """Return a batch in the module's dtype."""
        return in_float64(batch) if self.exact else batch

    def step(self, batches: Sequence[tuple[Any, Numbers]], forwards: int = 1) -> TrainedStep:
        """Train one step, whose loss is the mean of those of its ``batches``.

        Each batch comes with a context for its forward and backward. ``forwards``: how often forward runs.

        Raises:
            CompileError: QN111 for whatever the module itself raises.
        """
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        for again in reversed(range(forwards)):
            for batch, numbers in batches:
                with failing("a training step"), one_process(), numbers():  # checkpoints draw in the backward, too
                    loss = self._loss(self.inputs(batch))
                    if not again:
                        (loss / len(batches)).backward()  # type: ignore[no-untyped-call]
                        losses.append(loss.detach())
        mean = torch.stack(losses).mean() if len(losses) > 1 else losses[0]
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        gradients = {name: or_zeros(p.grad, p) for name, p in trained.items()}
        self.optimizer.step()
        return TrainedStep(mean, gradients, {n: p.detach() for n, p in self.parameters.items()}, self.buffers())

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the values of buffers."""
        return {f"{prefix}{n}": as_float64(x) for prefix, m in self.sides.items() for n, x in m.named_buffers()}

    def real(self, name: str) -> bool:
        """Return whether a buffer has floating-point numbers."""
        prefix = "loss_fn." if name.startswith("loss_fn.") and "loss_fn." in self.sides else ""
        buffer: Tensor = self.sides[prefix].get_buffer(name.removeprefix(prefix))
        return buffer.is_floating_point()

    def _loss(self, batch: Any) -> Tensor:
        batch = rebuilt(batch)
        with in_python():
            out = called(self.model, model_inputs(batch, self.loss_fn))
            if self.loss_fn is not None and takes_labels_of(batch, self.loss_fn):
                out = self.loss_fn(out, loss_inputs(batch, self.loss_fn))
            loss: Tensor = loss_of(out)
        return loss


def own_errors(
    model: nn.Module,
    loss_fn: LossFn | None,
    device: torch.device,
    steps: Sequence[Sequence[tuple[Any, Numbers]]],
) -> dict[tuple[str, str, int], float]:
    """Return the errors of a module relative to itself in float64, by (what, name, step).

    Some tensors are nothing but rounding, such as the gradient of a bias before a batch norm. ``steps``: see
    :meth:`ModuleTraining.step`.

    Raises:
        CompileError: QN111 if the module does not run in float64.
    """
    rounded, exact = (ModuleTraining(model, loss_fn, device, exact=exact) for exact in (False, True))
    errors: dict[tuple[str, str, int], float] = {}
    for step, batches in enumerate(steps):
        a, b = (side.step(batches) for side in (rounded, exact))
        errors["loss", "", step] = differs(a.loss, b.loss)
        kinds = ("gradient", a.gradients, b.gradients), ("parameter", a.parameters, b.parameters)
        for what, ours, theirs in (*kinds, ("buffer", a.buffers, b.buffers)):
            floor = FLOOR * largest(list(theirs.values()))
            errors |= {(what, name, step): differs(ours[name], x, floor) for name, x in theirs.items()}
    return errors


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of both sides."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def as_float64(x: Tensor) -> Tensor:
    """Return a copy in float64; complex values are pairs."""
    x = x.detach()
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).to(torch.float64, copy=True)


def in_float64(batch: Any) -> Any:
    """Return a batch whose floating-point tensors are in float64."""
    return pytree.tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, batch)


def or_zeros(x: Tensor | None, like: Tensor) -> Tensor:
    """Return a gradient, or zeros if there is none."""
    return torch.zeros_like(like) if x is None else x.detach()


@contextlib.contextmanager
def failing(what: str) -> Iterator[None]:
    """Raise CompileError QN111 for whatever the module itself raises inside."""
    try:
        yield
    except QuintNetError:
        raise
    except Exception as error:
        text = (str(error).splitlines() or [""])[0][:300]
        raise CompileError("QN111", f"{what} of the module itself fails: {type(error).__name__}: {text}") from error


def batches_of(program: DistributedProgram, batch: Any) -> list[Any]:
    """Return the batches of a step of ``program``, in order: one, or its microbatches.

    Each data rank has a run of rows, and each microbatch a run of those of every data rank.
    """
    if program.batches == 1:
        return [batch]
    captured = program.source.local.staged.sharded.program.captured
    rows, ranks, count = captured.form.rows_in(batch), program.mesh.data_ways, program.batches

    def _rows_of(x: Tensor, index: int) -> Tensor:
        if not x.dim() or x.shape[0] != rows:
            return x
        return x.reshape(ranks, count, rows // (ranks * count), *x.shape[1:])[:, index].flatten(0, 1)

    return [pytree.tree_map_only(Tensor, lambda x: _rows_of(x, index), batch) for index in range(count)]  # noqa: B023
