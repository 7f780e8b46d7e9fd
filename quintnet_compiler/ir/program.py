"""The compiler's intermediate programs.

Each stage of knowledge is a type of its own: a pass that runs out of order does not type-check.
"""

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

    Attributes:
        graph: the exported graph.
        tensors: the module's own parameters, buffers and constants, by their original names.
        aliases: the name in ``tensors`` of every further name of a tied parameter.
        form: the form of the batches for which the graph holds.
        output_spec: the structure of what the model returns.
        training: whether the model was in training mode.
        only_rows: the batch size, where the model's code fixes it.
        symbols: the names in ``form`` of the graph's symbols.
        like: by path of a traced block, the paths of equal blocks that the trace left out.
        guards: conditions on the module under which the graph is still its graph.
        changed: the buffers and parameters that forward changes; the graph's last outputs are their new values.
        assigned: the buffers among them that forward replaces by another tensor.
        brought: a module with what the loss function uses and the model does not have.
        parts: the parts of the loss, which follow the module's results, if there are any.
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
        """Return the dtype of each result of the module itself."""
        results = outputs(self.graph)
        return tuple(node.meta["val"].dtype for node in results[: len(results) - len(self.changed)])


@dataclass(frozen=True)
class StepEnd:
    """New values of buffers that are computed after the last microbatch, from sums over all rows of the step.

    Attributes:
        graph: its first placeholders are the last results of the program; the others are buffers and constants. Its
            outputs are the new values.
        reads: the names of those results.
        makes: the buffers that get the new values.
    """

    graph: fx.Graph
    reads: tuple[str, ...]
    makes: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A captured program for one global batch size: functional, canonical operators, concrete global shapes.

    Invariants: every node carries facts; only the output node has no users; the output is a tuple of nodes.

    Attributes:
        captured: the captured model.
        graph: the graph at this batch size.
        mode: the fake mode of its values.
        batch_size: the number of rows of a batch.
        precision: the dtypes in which gradients and other partial sums are added up.
        absent: the GPU for which the program is, where this machine has none.
        batches: how many batches of ``batch_size`` rows a step has, each of which is one microbatch
            (``batch_statistics="microbatch"``). The loss is then divided by it, and a buffer that a batch changes is
            read by the next.
        end: what is computed from the last results when the step is over.
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
        """Return the names of the last outputs, which the module does not return.

        They are new values of what it changes, and what the end of the step reads.
        """
        changed = self.captured.changed
        return changed if self.end is None else (*(n for n in changed if n not in self.end.makes), *self.end.reads)

    @property
    def ended(self) -> range:
        """Return the positions of the outputs that the end of the step reads."""
        count = len(outputs(self.graph))
        return range(count - (0 if self.end is None else len(self.end.reads)), count)

    @property
    def carried(self) -> Mapping[str, int]:
        """Return the buffers that go from one batch of a step to the next, with the positions of their new values."""
        names = self.last if self.batches > 1 else ()
        first = len(outputs(self.graph)) - len(names)
        return {name: first + i for i, name in enumerate(names)}

    @property
    def stored(self) -> Mapping[int, fx.Node]:
        """Return the outputs that are new values of parameters, by position. Ranks store them in slices."""
        names = self.last
        first = len(outputs(self.graph)) - len(names)
        positions = {name: first + i for i, name in enumerate(names)}
        return {
            positions[source.name]: node
            for node, source in self.leaves.items()
            if source.kind == "parameter" and source.name in positions
        }

    @property
    def leaves(self) -> dict[fx.Node, Leaf]:
        """Return what each placeholder stands for."""
        return {n: kind for n in self.graph.nodes if n.op == "placeholder" and (kind := leaf(n)) is not None}


def outputs(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the nodes that a graph returns."""
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
    """The types of an operator's inputs and outputs on one axis.

    Attributes:
        inputs: the types of its tensor inputs.
        outputs: the types of its outputs.
        label: how the work is split, for reports; see :attr:`factor`.
        part: the share of the work left by the earlier axes that a rank does; more than a fair share where a size does
            not divide.
        inside: where rows travel over another axis as slices, the types of rows that arrive and of results there.
    """

    inputs: tuple[AxisType, ...]
    outputs: tuple[AxisType, ...]
    label: str = ""
    part: float = field(default=1.0, compare=False)
    inside: tuple[AxisType, AxisType] | None = None

    @property
    def splits(self) -> bool:
        """Return whether each rank does a part of the operator's work."""
        return self.label.startswith("split ")

    @property
    def factor(self) -> tuple[str, int]:
        """Return the factor that is split (``"a+b"``: two at once) and its cut: the number of parts split apart."""
        _, name, cut, *_ = self.label.split()
        return name, int(cut)

    @property
    def units(self) -> tuple[tuple[str, int], ...]:
        """Return each factor that is split, and how many indices stay together where it does not divide (else 0)."""
        if not self.splits:
            return ()
        _, names, _, *units = self.label.split()
        sizes = units[0].split("+") if units else ["0"] * (names.count("+") + 1)
        return tuple(zip(names.split("+"), map(int, sizes), strict=True))

    @property
    def uneven(self) -> bool:
        """Return whether ranks hold padding of the factor that is split."""
        return any(unit for _, unit in self.units)

    @property
    def signature(self) -> str:
        """Return the types as reports show them."""
        inside = f" ({' -> '.join(map(str, self.inside))} inside)" if self.inside is not None else ""
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}{inside}"

    @property
    def exchanges(self) -> bool:
        """Return whether the operator itself exchanges the values of two factors that are split at once."""
        return "+" in self.label


@dataclass(frozen=True)
class Gathered:
    """The form in which operators read a parameter that is stored in more slices than they read.

    Where operators read 8-bit numbers only, ranks may gather the cast of these slices instead.

    Attributes:
        sharding: the type on each axis after gathering.
        once: whether it is gathered at the start of a step, and not in each microbatch.
        deferred: whether its gradient is added up in this form over the microbatches, and scattered to the slices at
            the end of the step, and not in each microbatch.
    """

    sharding: Sharding
    once: bool
    deferred: bool


@dataclass(frozen=True)
class ShardedProgram:
    """Every value has a sharding: for each node, one strategy per axis (outermost first).

    Invariants: a node's strategies are legal for its operator; the shape left by the earlier axes divides.

    Attributes:
        gathered: the parameters that are stored in slices and gathered for operators, and casts of them.
    """

    program: Program
    axes: tuple[Axis, ...]
    strategies: Mapping[fx.Node, tuple[Strategy, ...]]
    gathered: Mapping[fx.Node, Gathered] = field(default_factory=dict)

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Return the size of each axis."""
        return tuple(axis.size for axis in self.axes)

    def produced(self, node: fx.Node, output: int = 0) -> Sharding:
        """Return the sharding of an output of ``node``."""
        return tuple(s.outputs[output] for s in self.strategies[node])

    def wanted(self, node: fx.Node, position: int) -> Sharding:
        """Return the sharding in which ``node`` reads a tensor input."""
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
    """The computation of one rank, with all stages still in one graph: local shapes, conversions as nodes.

    Attributes:
        stage: as in :class:`StagedProgram` (absent: any stage).
        sharding: the types of every leaf and output.
        once: the nodes that run once a step, before the first microbatch.
        parts: the node that computes this rank's part of each output of the program's operators.
        reads: for each operator, the nodes that are its tensor inputs.
        deferred: the leaf of a parameter that was gathered once, or copied to another dtype, if the transpose of that
            is part of settling its gradient at the end of the step.
        again: nodes whose values are not saved for the backward, which recomputes them.
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
        """Return the nodes that gather or copy stored parameters once a step: only these run once and have a stage."""
        return self.once & self.stage.keys()

    def moved(
        self, graph: fx.Graph, new: Mapping[fx.Node, fx.Node], typed: Mapping[fx.Node, fx.Node] | None = None
    ) -> LocalProgram:
        """Return the same program in another ``graph``.

        Args:
            graph: the new graph.
            new: the new node of each node that still exists.
            typed: likewise, where the new node's value has the node's sharding; by default ``new``.
        """
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

    Invariants: typed conversions are lowered to plain communication; every backward node has a stage.

    Attributes:
        gradients: the gradient of each (parameter, stage that uses it). It is partial over the axes on which the
            parameter (or its gathered form, see :class:`Gathered`) is R, over microbatches, and over the stages that
            share it. Empty for inference.
        values: the node that computes each output of the local program's operators.
        cotangents: the node of the gradient of each of them.
        copies: the original of each node that is recomputed in the backward.
        again: see :class:`LocalProgram`.
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
        """Return the same program in another ``graph``, in which ``new`` has the place of each node."""
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
