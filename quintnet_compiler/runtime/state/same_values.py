"""Detect ranks that run equal programs on different values: another seed, file or order of data.

Ranks compare digests of their modules and of each program's first batch before the first run. Later batches are
compared from time to time, in a message of a few bytes that is sent while ranks compute.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ...compat.torch import version
from ...compat.torch_codegen import SHIPPED
from ...core.axes import DATA_AXES
from ...core.errors import CheckWarning, RunError
from ...core.mesh import Mesh
from ...core.sharding import Shard
from ...ir.distributed_program import DistributedProgram, StateSpec
from ..launch.rank_status import SHOWN, some_ranks
from .digests import digests, together

MAX_ELEMENTS = 2**16  # of each tensor of a later batch that enter its digest
EVERY = 100  # runs between comparisons, after the first ones
LATER = 0  # in place of the digest of a tensor that got its values after the module was compiled


Split = tuple[tuple[int, ...], ...]  # groups of ranks with equal values, the largest first
_MODULE = "build the same module on every rank: torch.manual_seed before it is built, or load the same file"
_DRIFT = "make the same calls with the same arguments on every rank, and change parameters and settings on all of them"
FIXES = {
    "state": _DRIFT,
    "parameter": _MODULE,
    "buffer": _MODULE,
    "constant": _MODULE,
    "batch": "give every rank the same global batch: the same data in the same order (one seed for shuffling)",
    "rows": "give the same rows to ranks that differ along other axes than dp and ep alone",
}
_ALL_ALIKE = (
    "batch_is_local=True, and all data ranks have the same rows: each counts as often as there are data ranks. Let "
    "each rank read rows of its own: those of program.data_rank, of program.data_ranks"
)


@dataclass(frozen=True)
class ValueDifference:
    """Tensors of one kind whose values differ between ranks."""

    kind: str
    split: Split
    names: Sequence[str]

    def __str__(self) -> str:
        """Return the line of an error message."""
        usual, *odd = self.split
        if len(odd) == 1:
            text = f"{some_ranks(odd[0])} {'have' if len(odd[0]) > 1 else 'has'} other values than {some_ranks(usual)}"
        else:
            text = (
                f"{len(self.split)} different ones, of {' | '.join(some_ranks(ranks) for ranks in self.split[:SHOWN])}"
            )
        kind = "" if self.kind in ("batch", "rows") else f"{self.kind}{'s' if len(self.names) > 1 else ''} "
        others = f" and {len(self.names) - SHOWN} more" if len(self.names) > SHOWN else ""
        return f"{text}: {kind}{', '.join(self.names[:SHOWN])}{others}"


def compares_batch(run: int) -> bool:
    """Return whether the batch of a program's run is compared: 1, 2, 4, ... 64, then every hundredth."""
    return run % EVERY == 0 if run >= EVERY else run & (run - 1) == 0


@dataclass
class SameValues:
    """Compares the module and the batches of this rank with those of other ranks.

    Attributes:
        mesh: of all ranks.
        device: ranks exchange digests there.
        built: digests of the module's tensors when it was compiled.
        kept: name, tensor and version counter of this rank's parts at that time; a larger counter shows a change.
        runs: the number of runs of each program, by ``id()``.
        compared: the names of tensors that were compared.
        pending: the comparison of a batch that is being sent.
    """

    mesh: Mesh
    device: torch.device
    built: dict[str, int] = field(default_factory=dict)
    kept: list[tuple[str, Tensor, int]] = field(default_factory=list)
    runs: dict[int, int] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)
    pending: _PendingBatch | None = None

    def see(self, tensors: Mapping[str, Tensor]) -> None:
        """Take digests of whole tensors; those on the meta device have no values yet."""
        with_values = {name: x for name, x in tensors.items() if not x.is_meta}
        self.built |= zip(with_values, digests(with_values.values()), strict=True)

    def remember_parts(self, *mappings: Mapping[str, Tensor]) -> None:
        """Remember this rank's parts, so that later changes of them are noticed."""
        for tensors in mappings:
            self.kept += [(name, x, version(x)) for name, x in tensors.items()]

    def require_same(
        self, program: DistributedProgram, inputs: Sequence[Tensor], parts: Mapping[str, Tensor], *, local: bool
    ) -> None:
        """Compare modules and batches; every rank calls this before the first run of ``program``.

        Raises:
            RunError: QN404 on every rank, if values differ, with the tensors and the groups of ranks.
        """
        specs = [s for s in program.state.values() if s.kind != "cache" and s.name not in self.compared]
        changed = {name for name, x, count in self.kept if version(x) != count}
        own_digests = [LATER if s.name in changed else self.built.get(s.name, LATER) for s in specs]
        table = gather_row([together(*own_digests), LATER in own_digests, *digests(inputs)], self.device)
        groups = _groups(self.mesh, DATA_AXES if local else ())
        differences = _batches([row[2:] for row in table], [spec.path for spec in program.inputs], groups, local)
        if any(row[1] for row in table) or len({row[0] for row in table}) > 1:
            differences = self._modules(specs, own_digests, parts, program) + differences
        if differences:
            raise _error(differences, "before the first step", self.mesh)
        if local and self.mesh.data_ways > 1 and len({tuple(row[2:]) for row in table}) == 1:
            warnings.warn(CheckWarning(_ALL_ALIKE), stacklevel=2)
        self.compared |= {spec.name for spec in specs}  # from now on they change together
        self.kept.clear()
        self.runs[id(program)] = 1

    def look(self, program: DistributedProgram, inputs: Sequence[Tensor], step: int | None, *, local: bool) -> None:
        """Finish the last comparison of batches, and start one if it is due; every rank calls this before later runs.

        ``step``: the number of the training step; None if the run is another one.

        Raises:
            RunError: QN404 on every rank, if batches of an earlier run differed.
        """
        if self.pending is not None:
            pending, self.pending = self.pending, None
            if differences := pending.differences():
                raise _error(differences, pending.where, self.mesh)
        run = self.runs[id(program)] = self.runs[id(program)] + 1
        if compares_batch(run):
            row = torch.tensor(digests(inputs, MAX_ELEMENTS), dtype=torch.int64, device=self.device)
            rows = [SHIPPED.empty_like(row) for _ in range(dist.get_world_size())]
            work = dist.all_gather(rows, row, async_op=True)
            groups, paths = _groups(self.mesh, DATA_AXES if local else ()), [spec.path for spec in program.inputs]
            where = "a run without training" if step is None else f"step {step}"
            self.pending = _PendingBatch(where, work, rows, row, paths, groups, local)

    def _modules(
        self,
        specs: Sequence[StateSpec],
        own_digests: Sequence[int],
        parts: Mapping[str, Tensor],
        program: DistributedProgram,
    ) -> list[ValueDifference]:
        """Return differences of modules.

        Tensors that got their values after compiling are compared part by part, between ranks with the same part.
        """
        table = gather_row(own_digests, self.device)
        later = [any(row[i] == LATER for row in table) for i in range(len(specs))]
        compared = [spec.name in parts and flag for spec, flag in zip(specs, later, strict=True)]
        part_digests = iter(digests(parts[s.name] for s, flag in zip(specs, compared, strict=True) if flag))
        part_table = table
        if any(later):
            part_table = gather_row([next(part_digests) if flag else 0 for flag in compared], self.device)
        wrong: dict[tuple[str, Split], list[str]] = {}
        for i, spec in enumerate(specs):
            rows = part_table if later[i] else table
            for ranks in holders(spec, program, self.mesh) if later[i] else [tuple(range(len(table)))]:
                split = split_ranks(ranks, [rows[rank][i] for rank in ranks])
                if len(split) > 1:
                    wrong.setdefault((spec.kind, split), []).append(spec.name)
        return [ValueDifference(kind, split, names) for (kind, split), names in wrong.items()]


@dataclass(frozen=True)
class _PendingBatch:
    """A comparison of a run's batch that is being sent."""

    where: str
    work: dist.Work
    rows: Sequence[Tensor]
    row: Tensor  # must live until it is sent
    paths: Sequence[str]
    groups: Sequence[tuple[int, ...]]
    local: bool

    def differences(self) -> list[ValueDifference]:
        """Wait for the rows of all ranks, and return the differences."""
        self.work.wait()
        return _batches(SHIPPED.stack(list(self.rows)).tolist(), self.paths, self.groups, self.local)


def gather_row(numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return the numbers of all ranks, by rank; every rank must call this with as many."""
    row = torch.tensor(numbers, dtype=torch.int64, device=device)
    rows = [SHIPPED.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    table: list[list[int]] = SHIPPED.stack(rows).tolist()
    return table


def _groups(mesh: Mesh, axes: Iterable[str]) -> list[tuple[int, ...]]:
    """Return the groups of ranks that must have equal values: those with equal coordinates along ``axes``."""
    others = [name for name in mesh.names if name not in tuple(axes)]
    return list(dict.fromkeys(mesh.peers(rank, others) for rank in range(mesh.size)))


def holders(spec: StateSpec, program: DistributedProgram, mesh: Mesh) -> list[tuple[int, ...]]:
    """Return the groups of ranks that hold the same part."""
    split = [a.name for a, kind in zip(program.axes, spec.sharding, strict=True) if isinstance(kind, Shard)]
    stages = {program.schedule.placement[stage] for stage in spec.stages}
    parameter = spec.kind == "parameter"
    owners = {rank for rank in range(mesh.size) if not parameter or mesh.coordinate(rank).get("pp", 0) in stages}
    return [ranks for group in _groups(mesh, split) if (ranks := tuple(rank for rank in group if rank in owners))]


def split_ranks(ranks: Sequence[int], values: Sequence[int]) -> Split:
    """Return the groups of ranks with equal values, the largest first."""
    groups: dict[int, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        groups.setdefault(value, []).append(rank)
    return tuple(sorted((tuple(group) for group in groups.values()), key=lambda group: (-len(group), group)))


def _batches(
    table: Sequence[Sequence[int]], paths: Sequence[str], groups: Sequence[tuple[int, ...]], local: bool
) -> list[ValueDifference]:
    wrong: dict[Split, list[str]] = {}
    for i, path in enumerate(paths):
        for ranks in groups:
            split = split_ranks(ranks, [table[rank][i] for rank in ranks])
            if len(split) > 1:
                wrong.setdefault(split, []).append(f"batch{path}")
    return [ValueDifference("rows" if local else "batch", split, names) for split, names in wrong.items()]


def _error(differences: Sequence[ValueDifference], where: str, mesh: Mesh) -> RunError:
    fixes = dict.fromkeys(FIXES[difference.kind] for difference in differences)
    if mesh.data_ways > 1 and any(difference.kind == "batch" for difference in differences):
        fixes["or each data rank its own rows, with batch_is_local=True"] = None
    return RunError("QN404", "\n  ".join([f"{where}:", *map(str, differences)]), fix="; ".join(fixes))
