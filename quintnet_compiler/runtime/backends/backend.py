"""The interface of backends, which hold a program's state and run it, and functions that they share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

import torch
from torch import Tensor, nn

from ...compat.torch import foreach_mul_, foreach_norm
from ...compat.torch_codegen import SHIPPED
from ...core.errors import RunError
from ...ir.distributed_program import DistributedProgram, StateSpec
from ..execute.executor import Executor, Run
from ..execute.finite import require_finite
from ..execute.interpreter_trace import Watch
from ..execute.loss_scale import LossScale
from ..execute.out_of_memory import with_operator
from ..execute.record import Recorder
from ..execute.whole_steps import StepFunction
from ..launch.consistency import SAME_SCRIPT
from ..launch.device_faults import explained
from ..state.gradients import GradientStore
from ..state.same_state import Saved
from ..state.true_part import StoredPart
from ..state.whole_optimizer import WholeTensors

HOST = torch.device("cpu")
Caches = Mapping[int, Mapping[str, Tensor]]  # of each rank of this process, by name


class Backend(Protocol):
    """Holds state and runs programs."""

    label: str  # tells its programs' calls from those of other backends, see :func:`..launch.calls.next_label`
    scaler: LossScale
    unset: set[str]  # tensors (of all ranks) that have no values yet: while there are some, nothing runs

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]: ...

    def run(
        self,
        program: DistributedProgram,
        inputs: Sequence[Tensor],
        how: Run,
        *,
        caches: Caches | None = None,
        recorder: Recorder | None = None,
    ) -> list[Tensor]:
        """Run one step over the whole batch, and return its results, the same on every rank.

        ``caches``: values that the program keeps from run to run. ``recorder`` takes the time.
        """
        ...

    def learn(self, program: DistributedProgram, tensors: Mapping[str, Tensor]) -> None:
        """Take those constants of ``program`` that the first program did not have; ``tensors``: their values."""
        ...

    def forget(self, program: DistributedProgram) -> None:
        """Free what ran ``program``, which will not run again."""
        ...

    def new_caches(self, program: DistributedProgram, pages: int, old: Caches | None = None) -> Caches:
        """Return caches of ``program`` for the ranks of this process, with ``pages`` pages in each pool.

        The first pages are copies of those of ``old``, which has fewer.
        """
        ...

    def weights_stay(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which only programs of this backend change parameters.

        Programs that generate on CPUs may hold a second copy of them inside, in the layout that is fastest to read.
        """
        ...

    def clip_grad_norm(self, program: DistributedProgram, max_norm: float) -> Tensor:
        """Scale all gradients to a global L2 norm of at most ``max_norm``; return the norm before that."""
        ...

    def parts(
        self, program: DistributedProgram, kinds: Sequence[str] = ("parameter",)
    ) -> Iterator[tuple[StateSpec, Tensor, list[Tensor]]]:
        """Yield the parameters of which this process has a part: the part, and the global indices of each dim in it."""
        ...

    def wholes(self, program: DistributedProgram, names: Sequence[str]) -> Iterator[tuple[str, Tensor | None]]:
        """Yield these tensors, whole on the first rank, None on the others, which must iterate as far."""
        ...

    def whole_tensors(self, program: DistributedProgram) -> WholeTensors:
        """Return where each parameter is whole, for an optimizer that needs it so, or that computes on the host.

        Every rank calls this.
        """
        ...

    def cuts(self) -> Mapping[str, StoredPart]:
        """Return which part of each parameter this process has; empty where all ranks run in it."""
        ...

    def everywhere(self, program: DistributedProgram, names: Sequence[str]) -> dict[str, Tensor]:
        """Return these tensors, whole on every rank (copies, where ranks have parts)."""
        ...

    def agree(self, claims: Mapping[str, str], fix: str = SAME_SCRIPT) -> None:
        """Raise RunError QN403 on every rank if their claims differ."""
        ...

    def saved(self, path: Saved) -> None:
        """Remember a checkpoint that was written, or is being written, from now."""
        ...

    def told(self, text: str) -> tuple[str, ...]:
        """Return the text of every rank, in their order."""
        ...

    @property
    def first(self) -> bool:
        """Return whether this process is the one that writes files."""
        ...


def running_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which generated code, which names only the type of device, makes tensors on ``device``."""
    if device.type == "cpu" or device.index is None:
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


def total_norm(gradients: Sequence[Tensor], program: DistributedProgram, device: torch.device) -> Tensor:
    """Return the L2 norm of all elements: in float64 if any parameter of the program is, else in float32."""
    double = torch.float64 in set(map(attrgetter("dtype"), program.state.values()))
    dtype = torch.float64 if double else torch.float32
    if not gradients:
        return SHIPPED.zeros((), dtype=dtype, device=device)
    total: Tensor = torch.linalg.vector_norm(SHIPPED.stack(foreach_norm(list(gradients))).to(dtype))
    return total


def clip(gradients: Sequence[Tensor], max_norm: float, total: Tensor) -> None:
    """Scale gradients as torch.nn.utils.clip_grad_norm_ does."""
    if not gradients:  # of a step that was skipped
        return
    share = SHIPPED.clamp(max_norm / (total + 1e-6), max=1.0)
    foreach_mul_(list(gradients), share.to(gradients[0].device, gradients[0].dtype))


def new_constants(program: DistributedProgram, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the buffers and constants of ``program`` that are not in ``tensors``."""
    kinds = ("buffer", "constant")
    return [spec.name for spec in program.state.values() if spec.kind in kinds and spec.name not in tensors]


def refuse_unset(unset: set[str], program: DistributedProgram) -> None:
    """Raise RunError QN604 if the program reads a tensor without values."""
    if unset and (names := sorted(unset & program.state.keys())):
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise RunError(
            "QN604",
            f"values are missing for {', '.join(names[:8])}{more}",
            fix="call program.load_pretrained(folder), program.initialize() for the module's own initial values, or "
            "program.initialize(build), where build() makes the module",
        )


def home_of(spec: StateSpec, device: torch.device) -> torch.device:
    """Return where the ranks on ``device`` have a parameter, buffer or constant."""
    return HOST if spec.host else device


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the gradients that exist."""
    gradients = zip(parameters, map(attrgetter("grad"), parameters.values()), strict=True)
    return {name: gradient for name, gradient in gradients if gradient is not None}


@dataclass(frozen=True)
class Ready:
    """The executor of a program on one rank, for all of its runs.

    Attributes:
        store: None for forwards alone.
        run_step: runs the steps that nobody watches.
    """

    program: DistributedProgram
    executor: Executor
    store: GradientStore | None
    run_step: StepFunction

    def step(
        self,
        state: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        how: Run,
        watch: Watch | None = None,
        recorder: Recorder | None = None,
    ) -> tuple[list[Tensor], bool]:
        """Run a step; return its results, and whether gradients are finite (if not, their scale was too large).

        Raises:
            RunError: QN501 on every rank where the scale is not to blame; QN402, QN405, QN406 or QN407 if a device
                or communication between devices failed.
        """
        try:
            if recorder is None and watch is None:
                results = self.run_step(state, inputs, how)
            elif recorder is None:
                results = self.executor.step(state, inputs, how, watch)
            else:
                results = recorder.step(self.executor, lambda: self.executor.step(state, inputs, how, watch))
        except RuntimeError as error:
            fault = explained(error, self.executor.part.rank, how.step, self.program.sites)
            if fault is None:
                raise
            if fault.code == "QN405":
                fault = with_operator(error, fault, self.executor, state)
            raise fault from error
        if not self.executor.finite and not how.may_skip:
            require_finite(self.executor, state, inputs, how, results[0])
        return results, self.executor.finite or not how.may_skip
