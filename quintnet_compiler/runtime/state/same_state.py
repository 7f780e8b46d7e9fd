"""Detect replicas that drift apart, which would otherwise train on without an error.

From time to time ranks compare digests of replicated parameters, buffers, optimizer settings and the position of random
numbers. They are taken before a step, sent while it computes, and compared before the next run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...core.errors import CheckWarning, RunError
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


def compares_state(run: int, every: int) -> bool:
    """Return whether ranks compare before training run ``run``, from 1: each ``every`` runs, and at 2, 4, 8 earlier."""
    if every <= 0 or run < 2:
        return False
    return run % every == 0 if run >= every else run & (run - 1) == 0


@dataclass
class SameState:
    """Compares the state of this rank with that of other ranks.

    Attributes:
        mesh: of all ranks.
        device: ranks exchange digests there.
        every: training runs between two comparisons; 0: never.
        settings: of optimizers.
        runs: training runs so far.
        equal: the last step before which all ranks were equal.
        clean: the newest checkpoint from before that step.
        newest: the newest checkpoint.
        pending: the comparison that is being sent.
        alike: whether all groups of optimizers had the same settings in every stage at the last comparison.
        groups: for each program, by ``id()``: the tensors to compare, and the groups of ranks that hold the same bits.
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
    alike: bool = False
    groups: dict[int, list[tuple[StateSpec, Groups]]] = field(default_factory=dict)

    def look(
        self, program: DistributedProgram, tensors: Callable[[], Mapping[str, Tensor]], random: str, where: str
    ) -> None:
        """Finish the last comparison, and start one if it is due; every rank calls this before each training run.

        Args:
            program: that runs.
            tensors: returns this rank's parts of parameters, and whole buffers.
            random: the position of random numbers.
            where: the run's name in messages.

        Raises:
            RunError: QN404 on every rank, if ranks held different values before an earlier run.
        """
        self.finish_comparison()
        self.runs += 1
        if not compares_state(self.runs, self.every):
            return
        compared = self._compared(program)
        own_tensors = tensors()
        own_specs = [spec for spec, _ in compared if spec.name in own_tensors]
        digests = device_digests([own_tensors[spec.name] for spec in own_specs], self.device)
        values = SHIPPED.zeros(len(compared), dtype=torch.int64, device=self.device)
        values[[i for i, (spec, _) in enumerate(compared) if spec.name in own_tensors]] = digests
        random_and_options = f"random numbers: {random}\n{self.settings.of_all()}"
        texts = random_and_options, self.settings.of_stage(), self.settings.of_groups()
        kinds = list(dict.fromkeys(groups for _, groups in compared))
        numbers = [_joined(values, [groups == kind for _, groups in compared]) for kind in kinds]
        row = SHIPPED.stack([*numbers, *torch.tensor([together(text) for text in texts], device=self.device)])
        rows = [SHIPPED.empty_like(row) for _ in range(dist.get_world_size())]
        work = dist.all_gather(rows, row, async_op=True)
        self.pending = _Sent(where, work, rows, row, kinds, compared, values, texts, self.newest)

    def finish_comparison(self) -> None:
        """Finish the pending comparison.

        Raises:
            RunError: QN404, see :meth:`look`.
        """
        if self.pending is None:
            return
        sent, self.pending = self.pending, None
        sent.work.wait()
        table = SHIPPED.stack(list(sent.rows)).tolist()
        if any(_differ(table, i, groups) for i, groups in enumerate([*sent.kinds, *self._tellers()])):
            raise self._error(sent)
        self.equal, self.clean = sent.where, sent.saved
        alike = len({row[-1] for row in table}) == 1
        if self.alike and not alike:
            self._warn_of_groups(sent)
        self.alike = alike and bool(sent.texts[-1])

    def _warn_of_groups(self, sent: _Sent) -> None:
        """Warn that stages have other settings in optimizers with several groups, which may be meant."""
        texts = tell(sent.texts[-1], self.device)
        usual, odd, *_ = split_ranks(range(len(texts)), [together(text) for text in texts])
        lines = zip((odd, usual), first_difference(texts[odd[0]], texts[usual[0]]), strict=True)
        shown = "; ".join(f"{some_ranks(ranks)}: {line}" for ranks, line in lines)
        message = f"{sent.where}: {shown}; at the comparison before, all ranks had the same settings. {FIXES['state']}"
        warnings.warn(CheckWarning(message), stacklevel=2)

    def _tellers(self) -> tuple[Groups, Groups]:
        """Return the groups of ranks with the same settings, for the texts of all ranks and of pipeline stages."""
        axes = [name for name in self.mesh.names if name != "pp"]
        stages = dict.fromkeys(self.mesh.peers(rank, axes) for rank in range(self.mesh.size))
        return (tuple(range(self.mesh.size)),), tuple(stages)

    def _compared(self, program: DistributedProgram) -> list[tuple[StateSpec, Groups]]:
        """Return the tensors that several ranks hold, and the groups of ranks that hold the same bits."""
        if id(program) not in self.groups:
            compared = []
            for spec in program.state.values():
                groups = _alike(spec, program, self.mesh, self.device) if spec.kind in ("parameter", "buffer") else ()
                if groups:
                    compared.append((spec, groups))
            self.groups[id(program)] = compared
        return self.groups[id(program)]

    def _error(self, sent: _Sent) -> RunError:
        """Return the error, the same on every rank, after gathering the digests and texts of all ranks."""
        rows = gather_row(sent.values.tolist(), self.device)
        lines: list[object] = []
        wrong: dict[tuple[str, tuple[tuple[int, ...], ...]], list[str]] = {}
        for i, (spec, groups) in enumerate(sent.compared):
            for ranks in groups:
                split = split_ranks(ranks, [rows[rank][i] for rank in ranks])
                if len(split) > 1:
                    wrong.setdefault((spec.kind, split), []).append(spec.name)
        lines += [ValueDifference(kind, split, names) for (kind, split), names in wrong.items()]
        for text, groups in zip(sent.texts[:-1], self._tellers(), strict=True):
            texts = tell(text, self.device)
            for ranks in groups:
                usual, *others = split_ranks(ranks, [together(texts[rank]) for rank in ranks])
                for odd_ranks in others:
                    own_line, usual_line = first_difference(texts[odd_ranks[0]], texts[usual[0]])
                    lines.append(f"{some_ranks(odd_ranks)}: {own_line}; {some_ranks(usual)}: {usual_line}")
        lines = list(dict.fromkeys(map(str, lines)))
        lines.append(f"all ranks were equal {self.equal.removeprefix('at ')}")
        path = _path(self.clean)
        lines[-1] = f"{lines[-1]}; the newest checkpoint of this run from before that is {path}" if path else lines[-1]
        return RunError("QN404", "\n  ".join([f"{sent.where}:", *map(str, lines)]), fix=FIXES["state"])


@dataclass(frozen=True)
class _Sent:
    """A comparison that is being sent.

    Attributes:
        where: the run's name in messages.
        work: the all-gather.
        rows: of all ranks; filled by ``work``.
        row: of this rank; must live until it is sent.
        kinds: the groups of ranks that must agree on each number of a row, except for the last three, of ``texts``.
        compared: the tensors whose digests are ``values`` [n].
        texts: the settings of all ranks, those of the pipeline stage, and those of all groups.
        saved: the newest checkpoint at that time.
    """

    where: str
    work: dist.Work
    rows: Sequence[Tensor]
    row: Tensor
    kinds: Sequence[Groups]
    compared: Sequence[tuple[StateSpec, Groups]]
    values: Tensor
    texts: tuple[str, str, str]
    saved: Saved


def _alike(spec: StateSpec, program: DistributedProgram, mesh: Mesh, device: torch.device) -> Groups:
    """Return the groups of ranks that hold the same bits of a tensor unless something went wrong.

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
    """Return one digest of the chosen digests [n]."""
    factors = SHIPPED.arange(1, 2 * len(values), 2, device=values.device) * 0x9E3779B97F4A7C1
    return (values * factors)[torch.tensor(chosen, device=values.device)].sum()


def _differ(table: Sequence[Sequence[int]], column: int, groups: Groups) -> bool:
    return any(len({table[rank][column] for rank in ranks}) > 1 for ranks in groups)


def _path(saved: Saved) -> str:
    """Return the path of a checkpoint if it was written, else ""."""
    if isinstance(saved, Future):
        # call the base class's methods: this must not count as the user's request, see checkpoint.background
        return str(Future.result(saved)) if saved.done() and Future.exception(saved) is None else ""
    return "" if saved is None else str(saved)
