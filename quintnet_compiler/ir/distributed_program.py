"""What ranks run: generated functions by stage, parameters as they are stored, and the actions of a schedule."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ..core.mesh import Mesh
from ..core.precision import Precision
from ..core.sharding import P, Shard, Sharding, local_shape
from ..schedules.schedule import Action, Schedule, StageEdge
from .generated import GeneratedModule, StoredModule
from .headings import with_headings
from .program import BUCKET_MIB, Axis, Captured, DifferentiatedProgram


@dataclass(frozen=True)
class Piece:
    """One generated function: ``module([comm, *static, *dynamic])`` empties the list and returns a tuple.

    ``static`` values stay the same for a whole step (state, whole-batch values); ``dynamic`` ones belong to a
    microbatch; ``outputs`` names what comes back.
    """

    module: GeneratedModule
    static: tuple[str, ...]
    dynamic: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def code(self) -> str:
        """The generated Python source, with a comment where the module path changes."""
        if isinstance(self.module, StoredModule):
            return self.module.code
        return with_headings(self.module.code, self.module.graph)


@dataclass(frozen=True)
class Transfer:
    """The values that stage ``source`` hands to stage ``target`` for each microbatch, and the gradients that
    come back."""

    source: int
    target: int
    forward: tuple[str, ...]
    backward: tuple[str, ...]


@dataclass(frozen=True)
class Slice:
    """A microbatch's part of the whole-batch value ``source``."""

    source: str
    dim: int
    parts: int


@dataclass(frozen=True)
class StageProgram:
    """Everything that one pipeline stage runs. Values have the names of the differentiated graph's nodes.

    ``once`` runs at the start of a step (what no parameter touches); ``forward`` and ``backward`` run once per
    microbatch. Where a schedule splits backwards, ``backward`` computes what other stages wait for, and ``weight``
    the rest, from the same values and from what ``backward`` hands it. ``state`` maps a value to the parameter,
    buffer or constant that it is; ``inputs`` to its position in the flat batch; ``results`` a position among the
    program's outputs to the value. ``saved`` is what the backward needs of the forward. ``gradients`` maps what the
    backward accumulates to its parameter, in the order of settling. ``carried`` maps a value of ``state`` that changes
    from microbatch to microbatch to the value that it becomes.
    """

    index: int
    once: Piece
    forward: Piece
    backward: Piece
    state: Mapping[str, str]
    inputs: Mapping[str, int]
    slices: Mapping[str, Slice]
    results: Mapping[int, str]
    saved: tuple[str, ...]
    gradients: Mapping[str, str]
    weight: Piece | None = None
    carried: Mapping[str, str] = field(default_factory=dict)

    @property
    def pieces(self) -> Mapping[str, Piece]:
        """Its functions by name, in the order in which a microbatch passes them."""
        found = {"once": self.once, "forward": self.forward, "backward": self.backward}
        return found if self.weight is None else {**found, "weight": self.weight}


@dataclass(frozen=True)
class StateSpec:
    """How a parameter, buffer or constant is laid out: its global shape, its type on each axis, its stages.

    ``resident``: its type for operators all through a step, if it is gathered at the start, else as ``sharding``.
    ``accumulated``: the type whose gradient the microbatches add up; at the end of the step it becomes that of
    ``sharding``. ``read``: the dtype of what operators read, a copy where it is not ``dtype``. ``summed``: the dtype
    in which microbatches add up its gradient, ``reduced``: in which ranks do. ``host``: whether it is in memory of the
    host, with its gradient when that is added up.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    sharding: Sharding
    stages: tuple[int, ...]
    resident: Sharding
    accumulated: Sharding
    read: torch.dtype
    summed: torch.dtype
    reduced: torch.dtype
    host: bool = False

    @property
    def in_place(self) -> bool:
        """Whether what a rank stores is a run of rows of what is resident, and can lie in its memory."""
        if self.read != self.dtype:
            return False
        rows = [kind for kind, whole in zip(self.sharding, self.resident, strict=True) if kind != whole]
        first = next((i for i, kind in enumerate(self.sharding) if kind != self.resident[i]), 0)
        inner = [w for w in self.resident[first:] if isinstance(w, Shard) and w.dim == 0]
        return bool(rows) and all(kind == Shard(0) for kind in rows) and not inner

    def room(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The shape of the memory in which a rank keeps it: of its part, or of what is gathered there, with padding."""
        part = local_shape(self.shape, self.sharding, ranks)
        if not self.in_place:
            return part
        kinds = zip(ranks, self.sharding, self.resident, strict=True)
        return part[0] * math.prod(size for size, kind, there in kinds if kind != there), *part[1:]


@dataclass(frozen=True)
class ValueSpec:
    """What one leaf of the batch must be (or one output is): its path, global shape, and type on every axis."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: Sharding

    def summed(self, axes: Sequence[Axis]) -> tuple[str, ...]:
        """The axes whose ranks have terms of it. Scalars are added up with the loss, in another message."""
        kinds = zip(axes, self.sharding, strict=True)
        return tuple(axis.name for axis, kind in kinds if kind is P and axis.role != "time" and self.shape != ())


@dataclass(frozen=True)
class DiskSpec:
    """In which folder a rank makes its own for files, and bytes of the largest value that goes there."""

    folder: str
    largest: int


@dataclass(frozen=True)
class RankProgram:
    """One rank's part: its coordinate on the mesh, its stages and what it does in order."""

    rank: int
    coordinate: Mapping[str, int]
    stages: tuple[StageProgram, ...]
    actions: tuple[Action, ...]

    @property
    def forward(self) -> Piece:
        """The forward of the rank's first stage."""
        return self.stages[0].forward

    @property
    def backward(self) -> Piece:
        """The backward of the rank's first stage."""
        return self.stages[0].backward


@dataclass(frozen=True)
class DistributedProgram:
    """The compiled program of all ranks. Ranks of one stage share one :class:`StageProgram`.

    ``values``: shape and dtype of what crosses stages.
    ``results``: what the module returns, and then the new values of what it changes: of a buffer the whole, of a
    parameter what each rank stores of it. ``end``: a function of the last of these, by their paths, and of buffers and
    constants by name, that makes new values of buffers when a step is over; all of them are whole.
    ``sites``: what the numbers at communication calls mean (operator, module path, source line). ``precision`` and
    ``batches``: see :class:`Program`. ``made_from``: gives ``source``. ``bucket_mib``: see
    :class:`.plan.Plan`, also for ``expert_imbalance`` and ``hot_rows``, which predictions read.
    ``disk``: where saved values wait in files. ``host_optimizer``: whether optimizers that the program makes compute
    on the host.
    ``flops``: of a step of the unsplit model, where that was written with the program. ``key``: of the
    cache, if the program is kept there.
    """

    mesh: Mesh
    axes: tuple[Axis, ...]
    stages: tuple[StageProgram, ...]
    state: Mapping[str, StateSpec]
    inputs: tuple[ValueSpec, ...]
    results: tuple[ValueSpec, ...]
    transfers: tuple[Transfer, ...]
    values: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    schedule: Schedule
    sites: tuple[str, ...]
    captured: Captured = field(repr=False, compare=False)
    precision: Precision
    batches: int
    made_from: Callable[[], DifferentiatedProgram] = field(repr=False, compare=False)
    bucket_mib: float = BUCKET_MIB
    flops: float | None = field(default=None, compare=False, repr=False)
    key: str = field(default="", compare=False, repr=False)
    end: Piece | None = None
    expert_imbalance: float = field(default=1.0, compare=False)
    hot_rows: float | None = field(default=None, compare=False)
    disk: DiskSpec | None = field(default=None, compare=False)
    host_optimizer: bool = field(default=False, compare=False)

    @cached_property
    def source(self) -> DifferentiatedProgram:
        """The graph that the functions were cut from. A program that was read from a file is compiled for it."""
        return self.made_from()

    @property
    def has_source(self) -> bool:
        """Whether :attr:`source` is at hand, and nothing has to be compiled for it."""
        return self.flops is None or "source" in vars(self)

    @property
    def space(self) -> tuple[Axis, ...]:
        """The axes over ranks (all but the microbatch axis), outermost first."""
        return tuple(axis for axis in self.axes if axis.role != "time")

    @cached_property
    def stored(self) -> Mapping[int, StateSpec]:
        """The results that are new values of parameters, by position."""
        found = {position: self.state.get(self.results[position].path) for position in self.last}
        return {position: spec for position, spec in found.items() if spec is not None and spec.kind == "parameter"}

    @cached_property
    def last(self) -> range:
        """The positions of the results that are not the module's own: new values of what it changes, and what ``end``
        reads."""
        changed = len(self.captured.changed)
        many = changed if self.end is None else changed - len(self.end.outputs) + len(self.end.dynamic)
        return range(len(self.results) - many, len(self.results))

    @property
    def edges(self) -> tuple[StageEdge, ...]:
        """Which stages hand values to which."""
        return tuple(StageEdge(t.source, t.target, bool(t.backward)) for t in self.transfers)

    @property
    def text(self) -> str:
        """All that ranks must agree on: layout, schedule, and every stage's code."""
        parts: list[object] = [self.mesh, self.axes, self.schedule, self.transfers, self.inputs, self.results]
        parts += [self.bucket_mib, self.batches]
        parts += [*sorted(self.state.items()), *sorted(self.values.items())]
        for stage in self.stages:
            parts += [stage.state, stage.inputs, stage.slices, stage.results, stage.saved, stage.gradients]
            parts.append(stage.carried)
            for name, piece in stage.pieces.items():
                parts += [name, piece.code, piece.static, piece.dynamic, piece.outputs]
        if self.end is not None:
            parts += ["end", self.end.code, self.end.static, self.end.dynamic, self.end.outputs]
        return "\n".join(part if isinstance(part, str) else repr(part) for part in parts)

    @property
    def digest(self) -> str:
        """SHA-256 of :attr:`text`."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def rank(self, rank: int) -> RankProgram:
        """Rank ``rank``'s part."""
        place = self.mesh.coordinate(rank)
        pipeline_rank = place.get("pp", 0)
        mine = [s for s in self.stages if self.schedule.placement[s.index] == pipeline_rank]
        return RankProgram(rank, place, tuple(mine), self.schedule.actions[pipeline_rank])
