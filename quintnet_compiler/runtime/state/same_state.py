"""Replicas that drift apart would train on without an error: from time to time ranks compare what they hold.

Digests of parameters that several ranks hold, of buffers, of optimizers' settings and of the random numbers' position
are taken before a step; they travel while it computes, and are looked at before the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import RunError
from ...core.mesh import Mesh
from ...ir.distributed_program import DistributedProgram, StateSpec
from ..launch.consistency import first_difference, tell
from ..launch.rank_status import some_ranks
from .buckets import reduced_axes
from .digests import device_digests, together
from .optimizer_settings import OptimizerSettings
from .same_values import FIXES, ValueDifference, gather_row, holders, split_ranks

Saved = Future[Path | str] | Path | str | None
Groups = tuple[tuple[int, ...], ...]


def due(run: int, every: int) -> bool:
    """Return whether ranks compare before training run ``run``, from 1: each ``every`` runs, and before these at 2, 4,
    8."""
    if every <= 0 or run < 2:
        return False
    return run % every == 0 if run >= every else run & (run - 1) == 0


@dataclass
class SameState:
    """What this rank tells of its state, and what it hears of the others'.

    ``every``: training runs between two comparisons, 0: never. ``settings``: of optimizers. ``equal``: the last step
    before which all ranks were equal; ``clean``: the newest checkpoint from before it.
    """

    mesh: Mesh
    device: torch.device
    every: int
    settings: OptimizerSettings
    runs: int = 0
    equal: str = "before the first step"
    clean: Saved = None
    newest: Saved = None
    pending: _Sent | None = None
    groups: dict[int, list[tuple[StateSpec, Groups]]] = field(default_factory=dict)

    def look(
        self, program: DistributedProgram, tensors: Callable[[], Mapping[str, Tensor]], random: str, where: str
    ) -> None:
        """Before each training run; every rank calls this. ``tensors``: this rank's parts of parameters, and whole
        buffers; ``random``: where random numbers stand; ``where``: which run it is, for people.

        Raises:
            RunError: QN404 on every rank, if ranks held different values before an earlier run.
        """
        self.hear()
        self.runs += 1
        if not due(self.runs, self.every):
            return
        compared = self._compared(program)
        here = tensors()
        mine = [spec for spec, _ in compared if spec.name in here]
        digests = device_digests([here[spec.name] for spec in mine], self.device)
        values = torch.zeros(len(compared), dtype=torch.int64, device=self.device)
        values[[i for i, (spec, _) in enumerate(compared) if spec.name in here]] = digests
        texts = f"random numbers: {random}\n{self.settings.of_all()}", self.settings.of_stage()
        kinds = list(dict.fromkeys(groups for _, groups in compared))
        numbers = [_joined(values, [groups == kind for _, groups in compared]) for kind in kinds]
        row = torch.stack([*numbers, *torch.tensor([together(text) for text in texts], device=self.device)])
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        work = dist.all_gather(rows, row, async_op=True)
        self.pending = _Sent(where, work, rows, row, kinds, compared, values, texts, self.newest)

    def hear(self) -> None:
        """Look at what ranks told last.

        Raises:
            RunError: QN404, see :meth:`look`.
        """
        if self.pending is None:
            return
        sent, self.pending = self.pending, None
        sent.work.wait()
        told = torch.stack(list(sent.rows)).tolist()
        if any(_differ(told, i, groups) for i, groups in enumerate([*sent.kinds, *self._tellers()])):
            raise self._error(sent)
        self.equal, self.clean = sent.where, sent.saved

    def _tellers(self) -> tuple[Groups, Groups]:
        """Return who has the same settings: all ranks, and those of a pipeline stage, whose optimizers have the same
        parameters."""
        axes = [name for name in self.mesh.names if name != "pp"]
        stages = dict.fromkeys(self.mesh.peers(rank, axes) for rank in range(self.mesh.size))
        return (tuple(range(self.mesh.size)),), tuple(stages)

    def _compared(self, program: DistributedProgram) -> list[tuple[StateSpec, Groups]]:
        """Return what several ranks hold, and who holds the same."""
        if id(program) not in self.groups:
            found = []
            for spec in program.state.values():
                groups = _alike(spec, program, self.mesh, self.device) if spec.kind in ("parameter", "buffer") else ()
                if groups:
                    found.append((spec, groups))
            self.groups[id(program)] = found
        return self.groups[id(program)]

    def _error(self, sent: _Sent) -> RunError:
        """Every rank asks the others for all that they hold, and says the same."""
        rows = gather_row(sent.values.tolist(), self.device)
        lines: list[object] = []
        wrong: dict[tuple[str, tuple[tuple[int, ...], ...]], list[str]] = {}
        for i, (spec, groups) in enumerate(sent.compared):
            for ranks in groups:
                split = split_ranks(ranks, [rows[rank][i] for rank in ranks])
                if len(split) > 1:
                    wrong.setdefault((spec.kind, split), []).append(spec.name)
        lines += [ValueDifference(kind, split, names) for (kind, split), names in wrong.items()]
        for text, groups in zip(sent.texts, self._tellers(), strict=True):
            texts = tell(text, self.device)
            for ranks in groups:
                usual, *others = split_ranks(ranks, [together(texts[rank]) for rank in ranks])
                for odd in others:
                    here, there = first_difference(texts[odd[0]], texts[usual[0]])
                    lines.append(f"{some_ranks(odd)}: {here}; {some_ranks(usual)}: {there}")
        lines = list(dict.fromkeys(map(str, lines)))
        lines.append(f"all ranks were equal {self.equal.removeprefix('at ')}")
        path = _path(self.clean)
        lines[-1] = f"{lines[-1]}; the newest checkpoint of this run from before that is {path}" if path else lines[-1]
        return RunError("QN404", "\n  ".join([f"{sent.where}:", *map(str, lines)]), fix=FIXES["state"])


@dataclass(frozen=True)
class _Sent:
    """What ranks are telling of their state. ``kinds``: the groups of each number of a row but the last two,
    which are of ``texts``; ``compared``: what ``values`` [n] are the digests of; ``saved``: the
    newest checkpoint at that time."""

    where: str
    work: dist.Work
    rows: Sequence[Tensor]
    row: Tensor  # alive until it is sent
    kinds: Sequence[Groups]
    compared: Sequence[tuple[StateSpec, Groups]]
    values: Tensor
    texts: tuple[str, str]
    saved: Saved


def _alike(spec: StateSpec, program: DistributedProgram, mesh: Mesh, device: torch.device) -> Groups:
    """Groups of ranks that hold the same bits of a tensor, if they work as they should.

    On accelerators, kernels may add in any order: only ranks that apply the same sum of gradients hold the same bits.
    """
    if spec.kind == "buffer":
        return (tuple(range(mesh.size)),) if device.type == "cpu" else ()
    groups = [ranks for ranks in holders(spec, program, mesh) if len(ranks) > 1]
    if device.type == "cpu":
        return tuple(groups)
    summed = reduced_axes(spec, program)
    peers = {tuple(sorted(set(mesh.peers(rank, summed)) & set(ranks))) for ranks in groups for rank in ranks}
    return tuple(sorted(ranks for ranks in peers if len(ranks) > 1))


def _joined(values: Tensor, chosen: Sequence[bool]) -> Tensor:
    """One number for several digests [n]."""
    factors = torch.arange(1, 2 * len(values), 2, device=values.device) * 0x9E3779B97F4A7C1
    return (values * factors)[torch.tensor(chosen, device=values.device)].sum()


def _differ(told: Sequence[Sequence[int]], place: int, groups: Groups) -> bool:
    return any(len({told[rank][place] for rank in ranks}) > 1 for ranks in groups)


def _path(saved: Saved) -> str:
    """Return where a checkpoint is, if it was written."""
    if isinstance(saved, Future):
        # as a Future: who looks here has not asked the user's question, see checkpoint.background
        return str(Future.result(saved)) if saved.done() and Future.exception(saved) is None else ""
    return "" if saved is None else str(saved)
