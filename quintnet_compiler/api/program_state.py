"""A program's state as users see it: parameters, gradients, weights on disk, checkpoints."""

from __future__ import annotations

import abc
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..driver.compiler import Compiled
from ..driver.task import Task, modules_of
from ..driver.variants import Programs
from ..runtime.backends.backend import Backend, refuse_unset
from ..runtime.launch.calls import collective, frequent
from ..runtime.launch.preemption import SIGNALS, Preemption, handling
from ..runtime.state.state import without_offset
from ..runtime.threads.turns import Turn, in_turn

if TYPE_CHECKING:
    from ..runtime.state.plain_update import Make
    from ..runtime.state.whole_optimizer import WholeOptimizer
    from .initial_values import InitialValues


class ProgramState(abc.ABC):
    """State that a compiled program keeps between steps."""

    _task: Task
    _steps: int
    _programs: Programs
    _preemption: Preemption | None
    _compiling: float
    _batch: Any  # the latest

    def _primary(self) -> Compiled:
        return self._programs.primary

    @abc.abstractmethod
    def _state(self) -> Backend: ...

    @property
    @abc.abstractmethod
    def _label(self) -> str: ...

    @property
    @abc.abstractmethod
    def _turn(self) -> Turn: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this rank's parameters (those of its stages) under the model's names. All ranks in one process: whole;
        one process per rank: DTensors. Both have ``full_tensor()``."""
        yield from self._state().parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return :meth:`named_parameters` without the names: what an optimizer takes."""
        for _, parameter in self.named_parameters():
            yield parameter

    @in_turn
    def state_dict(self) -> dict[str, Tensor]:
        """Return the module's state dict (with one process per rank: this rank's DTensors), and under ``loss_fn.`` that
        of the loss function. The tensors are the trained ones, not copies.

        With :meth:`load_state_dict`, this makes a program Stateful for torch.distributed.checkpoint:
        ``dcp.save({"model": program}, checkpoint_id=folder)`` writes, and ``dcp.load`` reads, what it does for the
        plain module and for ``fully_shard``'s, on any layout.
        """
        parameters = dict(self.named_parameters())
        tensors = {
            ".".join(filter(None, (prefix, name))): x
            for prefix, module in modules_of(self._task).items()
            for name, x in module.state_dict().items()
        }
        tensors |= {name: p.detach() for name, p in parameters.items() if name not in tensors}
        return {name: without_offset(x) for name, x in tensors.items()}

    @in_turn
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`state_dict` gave on this layout, or whole tensors on any: each rank keeps its part.

        Raises:
            RuntimeError: for names that are missing or unexpected, and for other shapes, as ``Module.load_state_dict``.
        """
        cuts, model = self._state().cuts(), self._task.model
        own = model.state_dict().keys()
        of_loss = {name: x for name, x in state.items() if name.startswith("loss_fn.") and name not in own}
        brought: dict[str, Any] = {
            name: p for name, p in self.named_parameters() if name.startswith("loss_fn.") and name not in own
        }
        loss_module = self._task.loss_fn if isinstance(self._task.loss_fn, nn.Module) else None
        expected = {f"loss_fn.{name}" for name in loss_module.state_dict()} if loss_module else brought.keys()
        if expected != of_loss.keys():
            missing, unexpected = sorted(expected - of_loss.keys()), sorted(of_loss.keys() - expected)
            raise RuntimeError(f"missing in the state: {missing}; unexpected in it: {unexpected}; nothing was loaded")
        model.load_state_dict({name: x for name, x in state.items() if name not in of_loss})
        if loss_module:
            loss_module.load_state_dict({name.removeprefix("loss_fn."): x for name, x in of_loss.items()})
        else:
            with torch.no_grad():
                for name, p in brought.items():
                    p.copy_(cuts[name](of_loss[name], p) if name in cuts else of_loss[name])
        parameters = {spec.name for spec in self._primary().program.state.values() if spec.kind == "parameter"}
        self._state().unset -= parameters | state.keys()  # other ranks load those of their stages

    @collective
    def initialize(self, values: InitialValues = "model", *, seed: int | None = None) -> None:
        """Give parameters and buffers initial values: the same on every layout. Each rank keeps its parts, and makes
        whole tensors one at a time.

        Args:
            values: where values come from.

                - ``"model"``: the module's own reset functions (``init_weights`` of a Hugging Face model, else
                  ``reset_parameters`` of each module, its children's first). The values are those that
                  ``torch.manual_seed(seed)`` and these functions give the unsplit module on the CPU.
                - a function that builds the module, such as its class: the values of
                  ``torch.manual_seed(seed); build()``, of buffers and tensors in attributes, too.
                - a dict from names (or globs) of parameters to :class:`quintnet.Normal`, ``Uniform``, ``Constant``, or
                  to functions that fill a tensor, such as those of ``torch.nn.init``. Later patterns win, and what
                  none matches keeps its values. Buffers are given by their full names. Functions are called in the
                  order of ``model.named_parameters()`` (and buffers last), after ``torch.manual_seed(seed)``.
            seed: by default the program's.

        Raises:
            CompileError: QN204 for a pattern that matches no parameter; QN604 with the tensors that would be left
                without values, before any is changed, or if a function does not fill its tensor.
            RunError: QN403 if ranks have other code or constants.
        """
        from .initial_values import give_values

        seed = self._task.plan.seed if seed is None else seed
        give_values(self._primary().program, self._state(), modules_of(self._task), values, seed)

    @in_turn
    def zero_grad(self) -> None:
        """Set every parameter's ``grad`` to None."""
        deque(map(setattr, self._state().parameters.values(), repeat("grad"), repeat(None)), maxlen=0)

    @in_turn
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global L2 norm is at most ``max_norm``. Returns the norm before."""
        with frequent("clip_grad_norm", self._label):
            return self._state().clip_grad_norm(self._primary().program, max_norm)

    @in_turn
    def grad_norm(self) -> Tensor:
        """Return the global L2 norm of all gradients, those of other stages among them."""
        with frequent("grad_norm", self._label):
            return self._state().clip_grad_norm(self._primary().program, math.inf)

    @property
    def loss_scale(self) -> float:
        """The next step's loss scale with ``precision="fp16"``, else 1."""
        return self._state().scaler.scale

    def get_rng_state(self) -> dict[str, int]:
        """Return the seed of dropout masks and the number of the next training step, which determine all masks."""
        return {"seed": self._task.plan.seed, "step": self._steps}

    def set_rng_state(self, state: Mapping[str, int]) -> None:
        """Continue with the dropout masks that followed when ``state`` was taken, on this or any other layout."""
        plan = self._task.plan.changed({"seed": state["seed"]})
        self._task = replace(self._task, plan=plan)
        self._steps = state["step"]

    @collective
    def optimizer(self, make: Make, parameters: Iterable[Any] | None = None) -> WholeOptimizer:
        """Make an optimizer whose update of a parameter needs all of it (Muon, Adafactor, Shampoo): the same on every
        layout as ``make`` of the unsplit parameters. With ``offload=("optimizer",)`` in the plan, whatever optimizer:
        the host's processor computes the update, and keeps the state, and copies of the parameters, in its memory
        (ZeRO-Offload, Ren et al. 2021).

        Each parameter and its gradient are gathered on one of the ranks that share it, which computes the update, keeps
        the state and sends the parts back: ranks divide the work. :meth:`save` and :meth:`load` take the optimizer; any
        layout reads its state.

        Args:
            make: makes the optimizer of whole parameters: ``lambda p: torch.optim.Muon(p, lr=0.02)``. An update must be
                a function of one parameter, its gradient and its state; none may depend on other parameters.
            parameters: those of this program to optimize, or groups of them; by default all.

        Raises:
            RunError: QN113 for parameters of others.
        """
        from ..runtime.state.whole_optimizer import WholeOptimizer

        optimized = self.parameters() if parameters is None else parameters
        backend, program = self._state(), self._primary().program
        refuse_unset(backend.unset, program)
        return WholeOptimizer(optimized, make, backend.whole_tensors(program))

    @contextmanager
    def on_preempt(
        self, save: Callable[[], object], *, signals: Sequence[int] = SIGNALS
    ) -> Iterator[Callable[[], None]]:
        """Let a scheduler ask this run to end: by one of ``signals``, sent to any rank.

        ::

            with program.on_preempt(lambda: program.save(folder, step=step, optimizer=optimizer)) as end_of_step:
                for step in range(first + 1, steps + 1):
                    program.step(batches[step - 1])
                    optimizer.step()
                    optimizer.zero_grad()
                    end_of_step()

        Every rank enters this, and calls what it gets after each step. There ``save`` is called on every rank after the
        same step, and :class:`quintnet.Preempted` is raised, which ends the process with
        :data:`quintnet.REQUEUE_EXIT_CODE`. Ranks agree on the step through the sum that checks whether its gradients
        are finite. With ``check_finite=False``, each step waits for that sum. A signal that comes after the last step
        has no effect.

        Handling signals changes the process: Python's handlers are set on entry, and those before on exit.

        Args:
            save: writes what the run needs to go on.
            signals: by default SIGTERM and SIGUSR1.

        Raises:
            RunError: QN306 outside of the main thread, or for a signal that cannot be handled.
        """
        outer, asked = self._preemption, Preemption()
        with handling(signals, asked.ask):
            self._preemption = asked
            try:
                yield partial(asked.leave_if_agreed, save)
            finally:
                self._preemption = outer
