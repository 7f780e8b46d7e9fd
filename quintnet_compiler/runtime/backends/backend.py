"""What holds a program's state and runs it, and what its two kinds share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

import torch
from torch import Tensor, nn

from ...compat.torch import foreach_mul_, foreach_norm
from ...core.errors import RunError
from ...ir.distributed_program import DistributedProgram, StateSpec
from ..execute.executor import Executor, Run
from ..execute.finite import require_finite
from ..execute.interpreter_trace import Watch
from ..execute.loss_scale import LossScale
from ..execute.out_of_memory import with_operator
from ..execute.record import Recorder
from ..launch.consistency import SAME_SCRIPT
from ..launch.device_faults import explained
from ..state.gradients import GradientStore
from ..state.local_values import StoredPart
from ..state.same_state import Saved
from ..state.whole_optimizer import WholeTensors

HOST = torch.device("cpu")
Caches = Mapping[int, Mapping[str, Tensor]]  # of each rank of this process, by name


class Backend(Protocol):
    """Holds state and runs programs."""

    label: str  # what tells its programs' calls from others', see :func:`..launch.calls.next_label`
    scaler: LossScale
    unset: set[str]  # tensors (of all ranks) that nobody gave values yet: with any of them, nothing runs

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
        """One step over the whole batch. The result is the same on every rank. What the program keeps from run to run
        is in ``caches``; ``recorder`` takes the time."""
        ...

    def learn(self, program: DistributedProgram, tensors: Mapping[str, Tensor]) -> None:
        """Take those constants of ``program`` that the first program did not have; ``tensors``: their values."""
        ...

    def forget(self, program: DistributedProgram) -> None:
        """Free what ran ``program``, which will not run again."""
        ...

    def new_caches(self, program: DistributedProgram, pages: int, old: Caches | None = None) -> Caches:
        """Room for ``pages`` pages in each pool of what the ranks of this process keep from one run of ``program`` to
        the next, with what ``old`` has in its (fewer) pages."""
        ...

    def weights_stay(self) -> contextlib.AbstractContextManager[None]:
        """While inside, nobody but the programs that run here changes parameters: programs that generate on CPUs may
        have them in memory a second time, as they are read fastest."""
        ...

    def clip_grad_norm(self, program: DistributedProgram, max_norm: float) -> Tensor:
        """Scale all gradients to a global L2 norm of at most ``max_norm``; returns the norm before."""
        ...

    def parts(
        self, program: DistributedProgram, kinds: Sequence[str] = ("parameter",)
    ) -> Iterator[tuple[StateSpec, Tensor, list[Tensor]]]:
        """Each parameter that this process holds a part of: the storage, and the global indices of each dim in it."""
        ...

    def wholes(self, program: DistributedProgram, names: Sequence[str]) -> Iterator[tuple[str, Tensor | None]]:
        """Each of these tensors in turn, whole on the first rank; None on the others, which must ask for as many."""
        ...

    def whole_tensors(self, program: DistributedProgram) -> WholeTensors:
        """Return where each parameter is whole, for an optimizer that needs it so, or that computes on the host.

        Every rank calls this.
        """
        ...

    def cuts(self) -> Mapping[str, StoredPart]:
        """Which part of each parameter this process has; none where all ranks are here."""
        ...

    def everywhere(self, program: DistributedProgram, names: Sequence[str]) -> dict[str, Tensor]:
        """These tensors, whole on every rank (copies, where ranks have parts)."""
        ...

    def agree(self, claims: Mapping[str, str], fix: str = SAME_SCRIPT) -> None:
        """Raises: RunError QN403 on every rank if their claims differ."""
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
    """While inside, generated code makes its tensors on ``device``: it names a kind of device, never which one."""
    if device.type == "cpu" or device.index is None:
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


def total_norm(gradients: Sequence[Tensor], program: DistributedProgram, device: torch.device) -> Tensor:
    """The L2 norm of all elements: in float64 if any parameter of the program is, else in float32."""
    double = torch.float64 in set(map(attrgetter("dtype"), program.state.values()))
    dtype = torch.float64 if double else torch.float32
    if not gradients:
        return torch.zeros((), dtype=dtype, device=device)
    total: Tensor = torch.linalg.vector_norm(torch.stack(foreach_norm(list(gradients))).to(dtype))
    return total


def clip(gradients: Sequence[Tensor], max_norm: float, total: Tensor) -> None:
    """As torch.nn.utils.clip_grad_norm_ does."""
    if not gradients:  # of a step that was skipped
        return
    share = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    foreach_mul_(list(gradients), share.to(gradients[0].device, gradients[0].dtype))


def not_known(program: DistributedProgram, known: Mapping[str, Tensor]) -> list[str]:
    """Return the constants of ``program`` that are not among those ``known``."""
    kinds = ("buffer", "constant")
    return [spec.name for spec in program.state.values() if spec.kind in kinds and spec.name not in known]


def refuse_unset(unset: set[str], program: DistributedProgram) -> None:
    """Raises: RunError QN604 if the program reads a tensor without values."""
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
    there = zip(parameters, map(attrgetter("grad"), parameters.values()), strict=True)
    return {name: gradient for name, gradient in there if gradient is not None}


@dataclass(frozen=True)
class Ready:
    """The executor of a program on one rank, for all of its runs. ``store``: None for forwards alone."""

    program: DistributedProgram
    executor: Executor
    store: GradientStore | None

    def step(
        self,
        state: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        how: Run,
        watch: Watch | None = None,
        recorder: Recorder | None = None,
    ) -> tuple[list[Tensor], bool]:
        """The results, and whether the gradients are good: if not, their scale was too large.

        Raises:
            RunError: QN501 on every rank where the scale is not to blame; QN402, QN405, QN406 or QN407 if a device
                or communication between devices failed.
        """
        try:
            if recorder is None:
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
