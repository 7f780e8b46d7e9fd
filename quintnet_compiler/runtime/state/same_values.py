"""Ranks that run equal programs on other values would go on without an error: another seed, file or order of data.

What their modules held is compared before the first run, and so is the batch of each program's first run; later ones
now and then, by a few bytes that travel while ranks compute.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ...compat.torch import version
from ...core.axes import DATA_AXES
from ...core.errors import CheckWarning, RunError
from ...core.mesh import Mesh
from ...core.sharding import Shard
from ...ir.distributed_program import DistributedProgram, StateSpec
from ..launch.rank_status import SHOWN, some_ranks
from .digests import digests, together

MOST = 2**16  # elements of each tensor of a later batch that are looked at
EVERY = 100  # runs, after the first ones
LATER = 0  # stands for the digest of a tensor that got its values after the module was compiled


Split = tuple[tuple[int, ...], ...]  # ranks by what they have, the largest group first
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
    """Tensors of one kind of which some ranks have other values than the others."""

    kind: str
    split: Split
    names: Sequence[str]

    def __str__(self) -> str:
        usual, *odd = self.split
        if len(odd) == 1:
            who = f"{some_ranks(odd[0])} {'have' if len(odd[0]) > 1 else 'has'} other values than {some_ranks(usual)}"
        else:
            who = f"{len(self.split)} different ones, of {' | '.join(some_ranks(one) for one in self.split[:SHOWN])}"
        kind = "" if self.kind in ("batch", "rows") else f"{self.kind}{'s' if len(self.names) > 1 else ''} "
        more = f" and {len(self.names) - SHOWN} more" if len(self.names) > SHOWN else ""
        return f"{who}: {kind}{', '.join(self.names[:SHOWN])}{more}"


def due(run: int) -> bool:
    """Whether the batch of a program's ``run`` is compared: 1, 2, 4, ... 64, then every hundredth."""
    return run % EVERY == 0 if run >= EVERY else run & (run - 1) == 0


@dataclass
class SameValues:
    """What this rank has to tell of its values, and what it hears of the others'.

    ``built``: digests of the module's tensors as they were when it was compiled. ``kept``: what holds this rank's parts
    of them, each with the count of changes that it had then. ``device``: where ranks exchange.
    """

    mesh: Mesh
    device: torch.device
    built: dict[str, int] = field(default_factory=dict)
    kept: list[tuple[str, Tensor, int]] = field(default_factory=list)
    runs: dict[int, int] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)
    told: _Told | None = None

    def see(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the values of whole tensors; those on the meta device have none yet."""
        known = {name: x for name, x in tensors.items() if not x.is_meta}
        self.built |= zip(known, digests(known.values()), strict=True)

    def keep(self, *kept: Mapping[str, Tensor]) -> None:
        """These hold this rank's parts of them: whoever changes one gives it other values."""
        for tensors in kept:
            self.kept += [(name, x, version(x)) for name, x in tensors.items()]

    def require(
        self, program: DistributedProgram, inputs: Sequence[Tensor], parts: Mapping[str, Tensor], *, local: bool
    ) -> None:
        """Before the first run of ``program``. Every rank calls this at the same time.

        Raises:
            RunError: QN404 on every rank, if their values differ: in which tensors, and who has which.
        """
        specs = [s for s in program.state.values() if s.kind != "cache" and s.name not in self.compared]
        changed = {name for name, x, seen in self.kept if version(x) != seen}
        mine = [LATER if s.name in changed else self.built.get(s.name, LATER) for s in specs]
        told = gather_row([together(*mine), LATER in mine, *digests(inputs)], self.device)
        groups = _groups(self.mesh, DATA_AXES if local else ())
        found = _batches([row[2:] for row in told], [spec.path for spec in program.inputs], groups, local)
        if any(row[1] for row in told) or len({row[0] for row in told}) > 1:
            found = self._modules(specs, mine, parts, program) + found
        if found:
            raise _error(found, "before the first step", self.mesh)
        if local and self.mesh.data_ways > 1 and len({tuple(row[2:]) for row in told}) == 1:
            warnings.warn(CheckWarning(_ALL_ALIKE), stacklevel=2)
        self.compared |= {spec.name for spec in specs}  # from now on they change together
        self.kept.clear()
        self.runs[id(program)] = 1

    def look(self, program: DistributedProgram, inputs: Sequence[Tensor], where: str, *, local: bool) -> None:
        """Before each further run; ``where``: which one it is, for people.

        Raises:
            RunError: QN404 on every rank, if batches of an earlier run differed.
        """
        if self.told is not None:
            told, self.told = self.told, None
            if found := told.differences():
                raise _error(found, told.where, self.mesh)
        run = self.runs[id(program)] = self.runs[id(program)] + 1
        if due(run):
            row = torch.tensor(digests(inputs, MOST), dtype=torch.int64, device=self.device)
            rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
            work = dist.all_gather(rows, row, async_op=True)
            groups, paths = _groups(self.mesh, DATA_AXES if local else ()), [spec.path for spec in program.inputs]
            self.told = _Told(where, work, rows, row, paths, groups, local)

    def _modules(
        self,
        specs: Sequence[StateSpec],
        mine: Sequence[int],
        parts: Mapping[str, Tensor],
        program: DistributedProgram,
    ) -> list[ValueDifference]:
        """What got values after it was compiled is compared in parts, between the ranks that hold the same ones."""
        told = gather_row(mine, self.device)
        later = [any(row[i] == LATER for row in told) for i in range(len(specs))]
        here = [spec.name in parts and flag for spec, flag in zip(specs, later, strict=True)]
        kept = iter(digests(parts[s.name] for s, yes in zip(specs, here, strict=True) if yes))
        held = gather_row([next(kept) if yes else 0 for yes in here], self.device) if any(later) else told
        wrong: dict[tuple[str, Split], list[str]] = {}
        for i, spec in enumerate(specs):
            rows = held if later[i] else told
            for ranks in holders(spec, program, self.mesh) if later[i] else [tuple(range(len(told)))]:
                split = split_ranks(ranks, [rows[rank][i] for rank in ranks])
                if len(split) > 1:
                    wrong.setdefault((spec.kind, split), []).append(spec.name)
        return [ValueDifference(kind, split, names) for (kind, split), names in wrong.items()]


@dataclass(frozen=True)
class _Told:
    """What ranks are telling of the batch of a run."""

    where: str
    work: dist.Work
    rows: Sequence[Tensor]
    row: Tensor  # alive until it is sent
    paths: Sequence[str]
    groups: Sequence[tuple[int, ...]]
    local: bool

    def differences(self) -> list[ValueDifference]:
        self.work.wait()
        return _batches(torch.stack(list(self.rows)).tolist(), self.paths, self.groups, self.local)


def gather_row(mine: Sequence[int], device: torch.device) -> list[list[int]]:
    row = torch.tensor(mine, dtype=torch.int64, device=device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    found: list[list[int]] = torch.stack(rows).tolist()
    return found


def _groups(mesh: Mesh, axes: Iterable[str]) -> list[tuple[int, ...]]:
    """The ranks that must have equal values: all that differ along no other axis than ``axes`` apart."""
    others = [name for name in mesh.names if name not in tuple(axes)]
    return list(dict.fromkeys(mesh.peers(rank, others) for rank in range(mesh.size)))


def holders(spec: StateSpec, program: DistributedProgram, mesh: Mesh) -> list[tuple[int, ...]]:
    """Groups of the ranks that hold the same part."""
    split = [a.name for a, kind in zip(program.axes, spec.sharding, strict=True) if isinstance(kind, Shard)]
    stages = {program.schedule.placement[stage] for stage in spec.stages}
    parameter = spec.kind == "parameter"
    owners = {rank for rank in range(mesh.size) if not parameter or mesh.coordinate(rank).get("pp", 0) in stages}
    return [found for group in _groups(mesh, split) if (found := tuple(rank for rank in group if rank in owners))]


def split_ranks(ranks: Sequence[int], values: Sequence[int]) -> Split:
    """The ranks by what they have, the largest group first."""
    found: dict[int, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        found.setdefault(value, []).append(rank)
    return tuple(sorted((tuple(one) for one in found.values()), key=lambda one: (-len(one), one)))


def _batches(
    told: Sequence[Sequence[int]], paths: Sequence[str], groups: Sequence[tuple[int, ...]], local: bool
) -> list[ValueDifference]:
    wrong: dict[Split, list[str]] = {}
    for i, path in enumerate(paths):
        for ranks in groups:
            split = split_ranks(ranks, [told[rank][i] for rank in ranks])
            if len(split) > 1:
                wrong.setdefault(split, []).append(f"batch{path}")
    return [ValueDifference("rows" if local else "batch", split, names) for split, names in wrong.items()]


def _error(found: Sequence[ValueDifference], where: str, mesh: Mesh) -> RunError:
    fixes = dict.fromkeys(FIXES[one.kind] for one in found)
    if mesh.data_ways > 1 and any(one.kind == "batch" for one in found):
        fixes["or each data rank its own rows, with batch_is_local=True"] = None
    return RunError("QN404", "\n  ".join([f"{where}:", *map(str, found)]), fix="; ".join(fixes))
