"""Pipeline stages of units, and the state that ranks hold of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..core.axes import SHARDED
from ..core.errors import CompileError
from ..core.mesh import Mesh
from ..cost_models.collectives import in_turn
from ..cost_models.kernels import with_host
from ..ir.cost_protocol import RankCosts
from ..ir.plans.host_state import HostState
from ..passes.stages.partition import balanced_starts
from ..simulation.host_update import GATHERED
from .layouts import UNSPLIT, Layout
from .pipeline import StageWork
from .places import Place, are_identical, placement
from .stage_units import ParameterGroup, StageUnit, Widths
from .unlike_stages import State, unlike_starts

Stages = list[Sequence[StageUnit]]


def cut_units(units: Sequence[StageUnit], layout: Layout, costs: RankCosts, begins: Sequence[str] = ()) -> Stages:
    """Return balanced stages, or those that begin at the modules ``begins``.

    Raises:
        CompileError: QN206 if no unit begins where a stage should, or there are fewer units than stages.
    """
    return cut_places([Place(units, costs)] * layout.pp, layout, begins)


def cut_places(
    places: Sequence[Place], layout: Layout, begins: Sequence[str] = (), state: State | None = None
) -> Stages:
    """Return stages that are balanced as their places run them, or that begin at the modules ``begins``.

    ``state``: see :func:`.unlike_stages.unlike_starts`.

    Raises:
        CompileError: as :func:`cut_units`.
    """
    units, costs = places[0].units, places[0].costs
    count, most = layout.pp * layout.virtual_stages, 1 + sum(bool(unit.begin) for unit in units[1:])
    if count > most:
        raise CompileError("QN206", f"{count} stages, where the model can begin {most}", fix="use fewer stages")
    if begins:
        starts = _named_starts(units, begins)
    elif are_identical(places):
        starts = _starts(units, count, costs, layout.mesh)
    else:
        starts = unlike_starts(places, layout, state)
    edges = zip(placement(layout), [0, *starts], [*starts, len(units)], strict=True)
    return [places[home].units[a:b] for home, a, b in edges]


def send_seconds(unit: StageUnit, costs: RankCosts, mesh: Mesh, way: tuple[int, int] = (0, 1)) -> float:
    """Return seconds of sending a unit's input, if a stage begins with it.

    ``way``: the places of the pipeline that send and receive it.
    """
    source, target = (mesh.rank({"pp": place}) for place in way)
    return costs.send_seconds(unit.received, source, target) if mesh["pp"] > 1 else 0.0


def _named_starts(units: Sequence[StageUnit], begins: Sequence[str]) -> list[int]:
    places = {unit.begin: index for index, unit in enumerate(units) if unit.begin}
    for name in begins:
        if name not in places:
            raise CompileError(
                "QN206", f"{name} lies inside a block, and estimates cut between blocks", fix="leave `stages` open"
            )
    return [places[name] for name in begins]


def _starts(units: Sequence[StageUnit], count: int, costs: RankCosts, mesh: Mesh) -> list[int]:
    if count == 1:
        return []
    work = np.concatenate([[0.0], np.cumsum([unit.seconds for unit in units])])
    seconds = work[None, :] - work[:, None]
    if not costs.overlaps:  # else a stage does not wait while values are sent
        seconds += np.array([0.0, *(2 * send_seconds(unit, costs, mesh) for unit in units[1:]), 0.0])[:, None]
    seconds[[i for i, unit in enumerate(units) if i and not unit.begin]] = np.inf
    return balanced_starts(seconds, count)


@dataclass(frozen=True)
class Slices:
    """Prices of ZeRO, and of parameters on hosts.

    A rank holds slices of its parameters over the ranks of ``layout.zero_axes`` (Rajbhandari et al. 2019, 2021).
    ``host``: what hosts hold; an optimizer there updates each parameter whole, on the host of one of the ranks of a
    stage.
    """

    layout: Layout
    costs: RankCosts
    mesh: Mesh
    host: HostState = HostState()
    cache: dict[tuple[str, ParameterGroup], float] = field(default_factory=dict)  # equal blocks ask for the same

    @property
    def on_host(self) -> bool:
        """Return whether a rank's stored parameters, and their summed gradients, are on its host."""
        return self.host.parameters

    def _slicing_axes(self, group: ParameterGroup) -> tuple[str, ...]:
        if not self.layout.zero:
            return ()
        return tuple(axis for axis in self.layout.zero_axes if axis in group.axes and self.mesh[axis] > 1)

    def count(self, group: ParameterGroup) -> int:
        """Return the number of slices of the optimizer's state."""
        return int(np.prod([self.mesh[axis] for axis in self._slicing_axes(group)], dtype=int))

    def updated_bytes(self, group: ParameterGroup) -> int:
        """Return bytes of parameters that a rank updates."""
        if not self.host.optimizer:
            return group.bytes // self.count(group)
        return group.bytes // int(np.prod([self.mesh[axis] for axis in group.axes if axis != "pp"], dtype=int))

    def update_seconds(self, groups: Sequence[ParameterGroup]) -> float:
        """Return seconds of the optimizer's step.

        On hosts these follow each other: ranks exchange parts of parameters and of gradients, gradients are copied out,
        parameters are updated, copied in and gathered.
        """
        size = sum(map(self.updated_bytes, groups))
        if not self.host.optimizer:
            return self.costs.host_update_seconds(size) if self.on_host else self.costs.optimizer_seconds(size)
        ranks = self.mesh.peers(0, [axis for axis in self.mesh.names if axis != "pp"])
        slices = sum(group.bytes // self.count(group) for group in groups)
        exchanged = self.costs.group_seconds("all_gather", len(ranks) * slices, ranks) if len(ranks) > 1 else 0.0
        copied = self.costs.copy_seconds(2 * size) + self.costs.copy_seconds(size)
        return GATHERED * exchanged + copied + self.costs.host_update_seconds(size)

    def sum_bytes(self, group: ParameterGroup) -> int:
        """Return bytes of the gradients that microbatches accumulate."""
        return group.gradients // (self.count(group) if self.layout.zero >= 2 else 1)

    def copy_bytes(self, group: ParameterGroup) -> int:
        """Return bytes of the gradients in the parameters' dtype, where they are accumulated in a wider one."""
        return group.bytes // self.count(group) if group.widths.gradient != group.widths.held else 0

    def reduces_at_end(self, group: ParameterGroup) -> bool:
        """Return whether ranks reduce gradients after microbatches have accumulated them."""
        scattered = self._slicing_axes(group) if self.layout.zero >= 2 else ()
        return any(self.mesh[axis] > 1 for axis in group.axes if axis != "pp" and axis not in scattered)

    def reduced_bytes(self, group: ParameterGroup) -> int:
        """Return bytes of the gradients in the dtype in which ranks reduce them, where that is another one."""
        if group.widths.reduced == group.widths.gradient or not self.reduces_at_end(group):
            return 0
        return group.reduced // (self.count(group) if self.layout.zero >= 2 else 1)

    def _collective_seconds(self, name: str, group: ParameterGroup) -> float:
        if (name, group) not in self.cache:
            over = list(self._slicing_axes(group))
            size = group.read if name == "all_gather" else group.reduced
            seconds = self.costs.group_seconds(name, size, self.mesh.peers(0, over)) if over else 0.0
            self.cache[name, group] = seconds
        return self.cache[name, group]

    def gather_seconds(self, groups: Sequence[ParameterGroup]) -> float:
        """Return seconds of all-gathers of parameters."""
        return sum(self._collective_seconds("all_gather", group) for group in groups)

    def scatter_seconds(self, groups: Sequence[ParameterGroup]) -> float:
        """Return seconds of reduce-scatters of gradients."""
        return sum(self._collective_seconds("reduce_scatter", group) for group in groups)

    def overlap_loss(self, hidden: float) -> float:
        """Return seconds that computing loses to ``hidden`` seconds of overlapping messages between data ranks."""
        return self.costs.lost_seconds(hidden, self._data_ranks) if len(self._data_ranks) > 1 else 0.0

    @cached_property
    def _data_ranks(self) -> tuple[int, ...]:
        return self.mesh.peers(0, [axis.name for axis in SHARDED if axis.role in ("data", "context")])

    def waits(self, stage: Sequence[StageUnit]) -> tuple[float, float]:
        """Return seconds that a microbatch's forward and backward wait for slices.

        Parameters are copied from the host and gathered before each use, one unit ahead of computing; gradients are
        scattered after it.
        """
        if self.layout.zero < 2 and not self.on_host:
            return 0.0, 0.0
        gather, scatter, copy = map(list, zip(*map(self._unit_seconds, stage), strict=True))
        none = [0.0] * len(stage)
        if not any((*gather, *scatter, *copy)):
            return 0.0, 0.0
        back = [seconds * unit.backward_share for seconds, unit in zip(copy, stage, strict=True)]
        cast = [unit.once if self.on_host else 0.0 for unit in stage]  # casts are computed from each copy
        if not self.costs.overlaps:
            arrive = sum(gather) + sum(cast)
            return arrive + sum(copy), arrive + sum(back) + sum(scatter)
        ahead = self._overlapped_seconds([unit.forward for unit in stage], gather, none, copy, cast)
        again = gather[::-1] if self.on_host else [0.0, *gather[-2::-1]]  # the last unit's are still gathered
        backward = [unit.backward for unit in stage][::-1]
        behind = self._overlapped_seconds(backward, again, scatter[::-1], back[::-1], cast[::-1])
        return ahead - sum(unit.forward for unit in stage), behind - sum(unit.backward for unit in stage)

    def _unit_seconds(self, unit: StageUnit) -> tuple[float, float, float]:
        """Return seconds of all-gathers, reduce-scatters and copies from the host for one use of a unit."""
        groups = (*unit.parameters, *unit.tied.values())
        gather = self.gather_seconds(groups) if self.layout.zero == 3 else 0.0
        scatter = self.scatter_seconds(groups) if self.layout.zero >= 2 else 0.0
        return gather, scatter, self.copy_in_seconds(groups) if self.on_host else 0.0

    def _overlapped_seconds(
        self, work: Sequence[float], gather: Sequence[float], scatter: Sequence[float], copy: Sequence[float],
        cast: Sequence[float],
    ) -> float:  # fmt: skip
        """Return seconds of units that follow each other, with the casts of copies.

        Copies and messages overlap, except those of the first unit, and copies do not slow down computing.
        """
        work = [sum(both) for both in zip(work, cast, strict=True)]
        messages = in_turn(work, gather, scatter, self.overlap_loss)
        if not self.on_host:
            return messages
        copies = in_turn(work, copy, [0.0] * len(work), lambda hidden: 0.0)
        return max(messages + copy[0], copies + gather[0])

    def copy_in_seconds(self, groups: Sequence[ParameterGroup]) -> float:
        """Return seconds of copying a rank's stored parameters from its host."""
        return self.costs.copy_seconds(sum(map(self.stored_bytes, groups)))

    def stored_bytes(self, group: ParameterGroup) -> int:
        """Return bytes of parameters that a rank stores; ZeRO 3 slices them."""
        return group.bytes // (self.count(group) if self.layout.zero == 3 else 1)

    def copy_out_seconds(self, groups: Sequence[ParameterGroup]) -> float:
        """Return seconds of copying accumulated gradients to the host."""
        return self.costs.copy_seconds(sum(map(self.sum_bytes, groups)))

    def reduce_seconds(self, groups: Sequence[ParameterGroup]) -> float:
        """Return seconds of reducing gradients at the end of a step.

        Axis ``pp`` stands for parameters that several pipeline ranks hold.
        """
        total = self.scatter_seconds(groups) if self.layout.zero == 1 else 0.0
        for group in groups:
            over = self._slicing_axes(group)
            size = group.reduced / self.count(group)
            inside = self.mesh.peers(0, [axis for axis in group.axes if axis != "pp" and axis not in over])
            if len(inside) > 1:
                total += self.costs.group_seconds("all_reduce", size, inside)
            if "pp" in group.axes:
                ends = (0, self.mesh.rank({"pp": self.mesh["pp"] - 1}))
                total += self.costs.group_seconds("all_reduce", size, ends)
        return total


def stage_work(
    stage: Sequence[StageUnit], first: bool, slices: Slices, way: tuple[int, int] = (0, 1), sent: int = 0
) -> StageWork:
    """Return the work of one microbatch on a stage, with its waits for slices of ZeRO 2 and 3, or for the host.

    ``first``: nothing is sent to the stage; ``way``: see :func:`send_seconds`; ``sent``: bytes that are sent to another
    rank, which are kept until their gradient arrives.
    """
    costs, (ahead, back) = slices.costs, slices.waits(stage)
    send = 0.0 if first else send_seconds(stage[0], costs, slices.mesh, way)
    busy = 0.0 if costs.overlaps else send  # a stage waits for what it receives; gradients go back the same way
    weight = sum(unit.weight for unit in stage)
    forward = with_host(sum(unit.forward for unit in stage) + ahead, sum(unit.host.forward for unit in stage))
    backward = sum(unit.backward for unit in stage) - weight + back
    if slices.layout.halves:
        backward = with_host(backward, sum(unit.host.input for unit in stage))
        weight = with_host(weight, sum(unit.host.weight for unit in stage))
    else:
        backward = with_host(backward + weight, sum(unit.host.input + unit.host.weight for unit in stage)) - weight
    splits_backward = slices.layout.schedule not in UNSPLIT
    saved = sum(max(unit.saved, unit.saved_for_weight * splits_backward) for unit in stage)
    saved += max(0, sent - stage[-1].shared)
    return StageWork(forward + busy, backward + busy, weight, send - busy, saved)


def parameter_groups(units: Sequence[StageUnit], owners: Mapping[str, int]) -> list[ParameterGroup]:
    """Return the parameters of a rank, grouped by the axes over which their gradients are reduced, and by widths.

    Axis ``pp`` is added for parameters that several pipeline ranks hold. ``owners``: their number, by name.
    """
    sizes: Counter[tuple[tuple[str, ...], Widths]] = Counter()
    for unit in units:
        for group in unit.parameters:
            sizes[group.axes, group.widths] += group.bytes
    tied = {name: group for unit in units for name, group in unit.tied.items()}
    for name, group in tied.items():
        axes = (*group.axes, "pp") if owners[name] > 1 else group.axes
        sizes[axes, group.widths] += group.bytes
    return [ParameterGroup(size, *kind) for kind, size in sorted(sizes.items())]


@dataclass(frozen=True)
class StageBounds:
    """Work of stages, and lower bounds of their memory.

    Attributes:
        work: of each stage.
        working_bytes: the least temporary memory of any stage.
        block_bytes: the fewest parameter bytes of any stage's block.
        message_bytes: the fewest bytes that any rank receives and sends for a microbatch.
        parameter_shares: the parameters of each pipeline rank, as a multiple of the mean.
    """

    work: list[StageWork]
    working_bytes: float
    block_bytes: float
    message_bytes: float
    parameter_shares: list[float]


def stage_bounds(stages: Stages, slices: Slices, of_blocks: Callable[[Iterable[int]], int]) -> StageBounds:
    """Return bounds of stages; ``of_blocks``: min or max, over the blocks of a stage."""
    ranks, pp = placement(slices.layout), slices.layout.pp
    ends = zip(ranks, ranks[1:], stages[1:], strict=False)
    sent = [stage[0].crossing if source != target else 0 for source, target, stage in ends]
    units: list[list[StageUnit]] = [[] for _ in range(pp)]
    messages = [0] * pp
    for rank, stage, received_bytes, sent_bytes in zip(ranks, stages, [0, *sent], [*sent, 0], strict=True):
        units[rank] += stage
        messages[rank] += received_bytes + sent_bytes
    parameters = [sum(group.bytes for group in parameter_groups(part, Counter())) for part in units]
    return StageBounds(
        [stage_work(stage, True, slices, sent=size) for stage, size in zip(stages, [*sent, 0], strict=True)],
        min(of_blocks(unit.working for unit in stage) for stage in stages),
        min(of_blocks(sum(group.read for group in unit.parameters) for unit in stage) for stage in stages),
        min(messages),
        [len(parameters) * size / max(1, sum(parameters)) for size in parameters],
    )
