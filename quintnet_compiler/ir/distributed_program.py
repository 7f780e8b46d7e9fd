"""The program of all ranks: generated functions by stage, parameters as they are stored, and a schedule's actions."""

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
from .expectations import Expectations
from .generated import GeneratedModule, StoredModule
from .headings import with_headings
from .program import BUCKET_MIB, Axis, Captured, DifferentiatedProgram


@dataclass(frozen=True)
class Piece:
    """A generated function: ``module([comm, *static, *dynamic])`` empties the list and returns a tuple.

    Attributes:
        module: the function.
        static: values that stay the same for a whole step (state, whole-batch values).
        dynamic: values of a microbatch.
        outputs: names of the results.
    """

    module: GeneratedModule
    static: tuple[str, ...]
    dynamic: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def code(self) -> str:
        """Return the generated Python source, with a comment where the module path changes."""
        if isinstance(self.module, StoredModule):
            return self.module.code
        return with_headings(self.module.code, self.module.graph)


@dataclass(frozen=True)
class Transfer:
    """Values that stage ``source`` sends to stage ``target`` for each microbatch, and gradients that come back."""

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

    Attributes:
        index: the number of the stage.
        once: runs at the start of a step (what does not depend on parameters).
        forward: runs once per microbatch.
        backward: likewise; where a schedule splits backwards, only what other stages wait for.
        state: the parameter, buffer or constant of each value.
        inputs: the position of each value in the flat batch.
        slices: the values that are a microbatch's part of whole-batch values.
        results: the values that are outputs of the program, by position.
        saved: the values that the backward reads from the forward.
        gradients: the parameter of each gradient that the backward accumulates, in the order in which they are settled.
        weight: the remaining backward where a schedule splits it; reads the same values, and results of ``backward``.
        carried: the values of ``state`` that change from microbatch to microbatch, and their new values.
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
        """Return the functions by name, in the order in which a microbatch passes them."""
        pieces = {"once": self.once, "forward": self.forward, "backward": self.backward}
        return pieces if self.weight is None else {**pieces, "weight": self.weight}


@dataclass(frozen=True)
class StateSpec:
    """The layout of a parameter, buffer or constant.

    Attributes:
        name: its name in the module.
        kind: ``parameter``, ``buffer``, ``constant`` or ``cache``.
        shape: the global shape.
        dtype: the dtype in which it is stored.
        trainable: whether it is a parameter that is trained.
        sharding: its type on each axis, as it is stored.
        stages: the stages that use it.
        resident: its type for operators all through a step, if it is gathered at the start, else as ``sharding``.
        accumulated: the type whose gradient the microbatches add up; at the end of the step it becomes that of
            ``sharding``.
        read: the dtype that operators read; a copy where it is not ``dtype``.
        summed: the dtype in which microbatches add up its gradient.
        reduced: the dtype in which ranks add up its gradient.
        host: whether it is in host memory, with its accumulated gradient.
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
        """Return whether a rank's part is a run of rows of what is resident, so that it can lie in the same memory."""
        if self.read != self.dtype:
            return False
        gathered = [axis for axis, kind in enumerate(self.sharding) if kind != self.resident[axis]]
        if not gathered or any(self.sharding[axis] != Shard(0) for axis in gathered):
            return False
        return not any(isinstance(kind, Shard) and kind.dim == 0 for kind in self.resident[gathered[0] :])

    def room(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the memory in which a rank stores its part, or what is gathered there, with padding."""
        part = local_shape(self.shape, self.sharding, ranks)
        if not self.in_place:
            return part
        types = zip(ranks, self.sharding, self.resident, strict=True)
        return part[0] * math.prod(size for size, stored, resident in types if stored != resident), *part[1:]


@dataclass(frozen=True)
class ValueSpec:
    """The required form of one leaf of the batch, or of one output: its path, global shape, and type on every axis."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: Sharding

    def summed(self, axes: Sequence[Axis]) -> tuple[str, ...]:
        """Return the axes whose ranks hold terms of it. Scalars are added up with the loss, in another message."""
        kinds = zip(axes, self.sharding, strict=True)
        return tuple(axis.name for axis, kind in kinds if kind is P and axis.role != "time" and self.shape != ())


SLOTS = 2  # buffers for values that wait to be written; there is one more for reading


@dataclass(frozen=True)
class DiskSpec:
    """Files of a rank: the folder in which it creates its own, and the bytes of the largest value that it writes."""

    folder: str
    largest: int

    @property
    def staging_bytes(self) -> int:
        """Return the bytes of the buffers in host memory through which values travel."""
        return (SLOTS + 1) * self.largest


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

    Attributes:
        mesh: the mesh of ranks.
        axes: its axes, and that of microbatches.
        stages: what each pipeline stage runs.
        state: the layout of each parameter, buffer and constant, by name.
        inputs: the form of each leaf of the batch.
        results: what the module returns, then the new values of what it changes: of a buffer the whole value, of a
            parameter the part that each rank stores.
        transfers: the values that cross stages.
        values: their shapes and dtypes.
        schedule: the order of each pipeline rank's actions.
        sites: the meaning of the numbers at communication calls (operator, module path, source line).
        captured: the captured model.
        precision: see :class:`Program`, also for ``batches``.
        made_from: returns ``source``.
        bucket_mib: see :class:`.plan.Plan`, also for ``expect``, which predictions read.
        flops: of a step of the unsplit model, where it was written with the program.
        key: the key of the cache, if the program is in one.
        end: a function that runs when a step is over. It computes new values of buffers from the last results (by their
            paths) and from buffers and constants (by name); all of them are whole.
        disk: where saved values wait in files.
        host_optimizer: whether optimizers that the program makes compute on the host.
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
    expect: Expectations = field(default=Expectations(), compare=False)
    disk: DiskSpec | None = field(default=None, compare=False)
    host_optimizer: bool = field(default=False, compare=False)

    @cached_property
    def source(self) -> DifferentiatedProgram:
        """Return the graph from which the functions were cut. A program read from a file is compiled for it."""
        return self.made_from()

    @property
    def has_source(self) -> bool:
        """Return whether :attr:`source` is available without compiling."""
        return self.flops is None or "source" in vars(self)

    @property
    def space(self) -> tuple[Axis, ...]:
        """Return the axes over ranks (all but the microbatch axis), outermost first."""
        return tuple(axis for axis in self.axes if axis.role != "time")

    @cached_property
    def stored(self) -> Mapping[int, StateSpec]:
        """Return the results that are new values of parameters, by position."""
        specs = {position: self.state.get(self.results[position].path) for position in self.last}
        return {position: spec for position, spec in specs.items() if spec is not None and spec.kind == "parameter"}

    @cached_property
    def last(self) -> range:
        """Return the positions of the results that the module does not return.

        They are new values of what it changes, and what ``end`` reads.
        """
        changed = len(self.captured.changed)
        count = changed if self.end is None else changed - len(self.end.outputs) + len(self.end.dynamic)
        return range(len(self.results) - count, len(self.results))

    @property
    def edges(self) -> tuple[StageEdge, ...]:
        """Return the pairs of stages between which values travel."""
        return tuple(StageEdge(t.source, t.target, bool(t.backward)) for t in self.transfers)

    @property
    def text(self) -> str:
        """Return everything on which ranks must agree: layout, schedule, and every stage's code."""
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
        """Return the SHA-256 of :attr:`text`."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def rank(self, rank: int) -> RankProgram:
        """Return the part of rank ``rank``."""
        coordinate = self.mesh.coordinate(rank)
        pipeline_rank = coordinate.get("pp", 0)
        stages = [stage for stage in self.stages if self.schedule.placement[stage.index] == pipeline_rank]
        return RankProgram(rank, coordinate, tuple(stages), self.schedule.actions[pipeline_rank])
