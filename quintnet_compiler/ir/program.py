"""The compiler's intermediate programs. Each stage of knowledge is a type of its own: a pass that runs out of
order does not type-check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, fx, nn

from ..compat.torch import FakeTensorMode
from ..core.absent_gpu import AbsentGpu
from ..core.annotations import Leaf, leaf
from ..core.axes import Role
from ..core.precision import Precision
from ..core.sharding import AxisType, Sharding
from ..guards.guards import Guards
from .batch_form import BatchForm
from .loss_parts import LossParts
from .result_form import ResultForm

TILE_BYTES = 32 * 2**20  # of a mask of attention: large enough to keep a device busy, and little of its memory
BUCKET_MIB = 25.0  # as in DistributedDataParallel: large enough for bandwidth, small enough to overlap


@dataclass(frozen=True)
class Captured:
    """The user's model as torch.export sees it: ATen operators, symbols for sizes that vary, global shapes.

    ``tensors`` holds the module's own parameters, buffers and constants under their original names; ``aliases``
    maps every further name of a tied parameter to the one that is kept. ``guards``: what must be as it was for the
    graph to be that of the module. ``form``: of the batches that it serves; ``symbols``: what it calls the sizes that
    are symbols in the graph. ``output_spec``: of what the model returns. ``only_rows``: the batch size, where the
    model's code fixes it. ``changed``: the buffers and parameters that forward changes; the graph's last outputs are
    their new values.
    ``assigned``: the buffers of them in whose place forward puts another tensor. ``brought``: a module with what the
    loss function uses and the model does not have. ``parts``: what the results behind the loss are, if there are any.
    """

    graph: fx.Graph
    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    form: BatchForm
    output_spec: ResultForm
    training: bool
    only_rows: int | None = None
    symbols: Mapping[str, str] = field(default_factory=dict)
    like: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    guards: Guards | None = field(default=None, compare=False, repr=False)
    changed: tuple[str, ...] = ()
    assigned: frozenset[str] = frozenset()
    brought: nn.Module | None = field(default=None, compare=False, repr=False)
    parts: LossParts | None = field(default=None, compare=False, repr=False)

    @cached_property
    def result_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype of each result of the module itself."""
        ends = outputs(self.graph)
        return tuple(node.meta["val"].dtype for node in ends[: len(ends) - len(self.changed)])


@dataclass(frozen=True)
class StepEnd:
    """New values of buffers that are computed after the last microbatch, from sums over all rows of the step.

    ``graph``: its first placeholders are the last results of the program, with the names ``reads``; the others are
    buffers and constants. Its outputs are the new values of the buffers ``makes``.
    """

    graph: fx.Graph
    reads: tuple[str, ...]
    makes: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A captured program for one global batch size: functional, canonical operators, concrete global shapes.

    ``precision``: in which dtypes gradients and other partial sums are added up. ``absent``: the GPU that the program
    is for, where this machine has none. ``batches``: of how many batches of ``batch_size`` rows a step consists, each
    of which is one microbatch (``batch_statistics="microbatch"``); the loss is then divided by that, and a buffer that
    one of them changes is read by the next. ``end``: what is computed of the last results when the step is over.
    Invariants: every node carries facts; only the output node has no users; the output is a tuple of nodes.
    """

    captured: Captured
    graph: fx.Graph
    mode: FakeTensorMode
    batch_size: int
    precision: Precision = Precision()
    absent: AbsentGpu | None = None
    batches: int = 1
    end: StepEnd | None = None

    @property
    def last(self) -> tuple[str, ...]:
        """What the last outputs are, behind those of the module: new values of what it changes, by its names, and what
        the end of the step reads."""
        changed = self.captured.changed
        return changed if self.end is None else (*(n for n in changed if n not in self.end.makes), *self.end.reads)

    @property
    def ended(self) -> range:
        """The positions of the outputs that the end of the step reads."""
        many = len(outputs(self.graph))
        return range(many - (0 if self.end is None else len(self.end.reads)), many)

    @property
    def carried(self) -> Mapping[str, int]:
        """The buffers that go from one batch of a step to the next, and which output is their new value."""
        names = self.last if self.batches > 1 else ()
        first = len(outputs(self.graph)) - len(names)
        return {name: first + i for i, name in enumerate(names)}

    @property
    def stored(self) -> Mapping[int, fx.Node]:
        """The outputs that are new values of parameters, by position: each stays where its parameter is, in slices."""
        names = self.last
        first = len(outputs(self.graph)) - len(names)
        at = {name: first + i for i, name in enumerate(names)}
        return {at[f.name]: node for node, f in self.leaves.items() if f.kind == "parameter" and f.name in at}

    @property
    def leaves(self) -> dict[fx.Node, Leaf]:
        return {n: kind for n in self.graph.nodes if n.op == "placeholder" and (kind := leaf(n)) is not None}


def outputs(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The nodes that a graph returns."""
    result: tuple[fx.Node, ...] = tuple(graph.output_node().args[0])  # type: ignore[arg-type]
    return result


@dataclass(frozen=True)
class Axis:
    """An axis as the passes see it: a name, how many ranks (or microbatches) it has, and its role.

    Roles: see :class:`..core.axes.MeshAxis`; ``time`` is the axis of microbatches.
    """

    name: str
    size: int
    role: Role


@dataclass(frozen=True, slots=True)
class Strategy:
    """How one operator runs on one axis: the types it takes and the types it makes. ``part``: of the work that the
    earlier axes leave, what a rank does; more than a fair share where a size does not divide. ``inside``: where rows
    travel over another axis as slices, the types of the rows that arrive and of what is made of them there."""

    inputs: tuple[AxisType, ...]
    outputs: tuple[AxisType, ...]
    label: str = ""
    part: float = field(default=1.0, compare=False)
    inside: tuple[AxisType, AxisType] | None = None

    @property
    def splits(self) -> bool:
        """Whether each rank does a part of the operator's work."""
        return self.label.startswith("split ")

    @property
    def factor(self) -> tuple[str, int]:
        """What is split (``"a+b"``: two at once), and behind which cut of it."""
        _, name, cut, *_ = self.label.split()
        return name, int(cut)

    @property
    def units(self) -> tuple[tuple[str, int], ...]:
        """Each factor that is split, and where it does not divide: how many of its indices stay together (else 0)."""
        if not self.splits:
            return ()
        _, names, _, *units = self.label.split()
        each = units[0].split("+") if units else ["0"] * (names.count("+") + 1)
        return tuple(zip(names.split("+"), map(int, each), strict=True))

    @property
    def uneven(self) -> bool:
        """Whether ranks have padding of what is split."""
        return any(unit for _, unit in self.units)

    @property
    def signature(self) -> str:
        """The types, as reports say them."""
        inside = f" ({' -> '.join(map(str, self.inside))} inside)" if self.inside is not None else ""
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}{inside}"

    @property
    def exchanges(self) -> bool:
        """Whether the operator itself brings together what two factors that are split at once tear apart."""
        return "+" in self.label


@dataclass(frozen=True)
class Gathered:
    """What a parameter is for its operators, where it is stored in more slices than they read; or what ranks cast of
    these slices, where operators read 8-bit numbers alone.

    ``once``: it is gathered at the start of a step and not in each microbatch. ``deferred``: its gradient is added up
    over the microbatches as it is here, and scattered to the slices at the end of the step and not in each microbatch.
    """

    sharding: Sharding
    once: bool
    deferred: bool


@dataclass(frozen=True)
class ShardedProgram:
    """Every value has a sharding: for each node, one strategy per axis (outermost first).

    ``gathered``: the parameters that are stored in slices and gathered for operators, and what is cast of these.
    Invariants: a node's strategies are legal for its operator; the shape left by the earlier axes divides.
    """

    program: Program
    axes: tuple[Axis, ...]
    strategies: Mapping[fx.Node, tuple[Strategy, ...]]
    gathered: Mapping[fx.Node, Gathered] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    def produced(self, node: fx.Node, output: int = 0) -> Sharding:
        return tuple(s.outputs[output] for s in self.strategies[node])

    def wanted(self, node: fx.Node, position: int) -> Sharding:
        return tuple(s.inputs[position] for s in self.strategies[node])


@dataclass(frozen=True)
class StagedProgram:
    """Every node that depends on a parameter has a pipeline stage; the others run wherever they are needed.

    Invariants: no edge points to an earlier stage; a parameter belongs to every stage that uses it.
    """

    sharded: ShardedProgram
    num_stages: int
    stage: Mapping[fx.Node, int]


@dataclass(frozen=True)
class LocalProgram:
    """What one rank computes, with all stages still in one graph: local shapes, conversions as nodes.

    ``sharding`` types every leaf and output; ``stage`` is as in :class:`StagedProgram` (absent: any stage);
    ``once`` names the nodes that run once a step, before the first microbatch. ``deferred`` maps a parameter that was
    gathered once, or copied to another dtype, to its leaf, if the transpose of that is part of settling its gradient at
    the end of the step. ``parts`` maps an output of the
    program's operators to the node that makes this rank's part of it; ``reads`` an operator to the nodes that stand for
    its tensor inputs. ``again``: nodes whose values are not kept for the backward, which computes them again.
    """

    staged: StagedProgram
    graph: fx.Graph
    mode: FakeTensorMode
    stage: Mapping[fx.Node, int]
    sharding: Mapping[fx.Node, Sharding]
    once: frozenset[fx.Node]
    parts: Mapping[tuple[fx.Node, int], fx.Node]
    reads: Mapping[fx.Node, tuple[fx.Node, ...]]
    deferred: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    again: frozenset[fx.Node] = frozenset()

    @property
    def at_start(self) -> frozenset[fx.Node]:
        """What gathers or copies stored parameters once a step: these nodes alone run once, and have a stage."""
        return self.once & self.stage.keys()

    def moved(
        self, graph: fx.Graph, new: Mapping[fx.Node, fx.Node], typed: Mapping[fx.Node, fx.Node] | None = None
    ) -> LocalProgram:
        """The same program in another ``graph``: ``new`` says where each node went that still exists, and ``typed``
        (default: ``new``) where its value is what the node was sharded to."""
        typed = new if typed is None else typed
        return replace(
            self,
            graph=graph,
            stage={new[n]: s for n, s in self.stage.items() if n in new},
            sharding={typed[n]: s for n, s in self.sharding.items() if n in typed},
            once=frozenset(new[n] for n in self.once if n in new),
            parts={key: typed[n] for key, n in self.parts.items() if n in typed},
            reads={key: tuple(typed[n] for n in ns) for key, ns in self.reads.items() if all(n in typed for n in ns)},
            deferred={new[n]: new[start] for n, start in self.deferred.items() if n in new},
            again=frozenset(new[n] for n in self.again if n in new),
        )


@dataclass(frozen=True)
class DifferentiatedProgram:
    """A local program with its backward: one graph of forward and backward nodes.

    ``gradients`` maps (parameter, a stage that uses it) to the node of its gradient: partial over the axes on
    which the parameter (or what it is gathered to, see :class:`Gathered`) is R, over microbatches, and over the stages
    that share it. Empty for inference.
    ``values`` and ``cotangents`` map an output of the local program's operators to the node that computes it, and to
    the node of its gradient; ``copies`` maps a node that is computed again in the backward to its original. ``again``:
    see :class:`LocalProgram`.
    Invariants: typed conversions are lowered to plain communication; every backward node has a stage.
    """

    local: LocalProgram
    graph: fx.Graph
    outputs: tuple[fx.Node, ...]
    stage: Mapping[fx.Node, int]
    once: frozenset[fx.Node]
    gradients: Mapping[tuple[str, int], fx.Node]
    values: Mapping[tuple[fx.Node, int], fx.Node]
    cotangents: Mapping[tuple[fx.Node, int], fx.Node]
    copies: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    again: frozenset[fx.Node] = frozenset()

    def moved(
        self, graph: fx.Graph, new: Mapping[fx.Node, fx.Node], stage: Mapping[fx.Node, int]
    ) -> DifferentiatedProgram:
        """The same program in another ``graph``: ``new`` says where each node went."""
        return replace(
            self,
            graph=graph,
            outputs=tuple(new[n] for n in self.outputs),
            stage=stage,
            once=frozenset(new[n] for n in self.once),
            gradients={key: new[n] for key, n in self.gradients.items()},
            values={key: new[n] for key, n in self.values.items()},
            cotangents={key: new[n] for key, n in self.cotangents.items()},
            copies={new[copy]: new[n] for copy, n in self.copies.items()},
            again=frozenset(new[n] for n in self.again),
        )
