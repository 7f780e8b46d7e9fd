"""Units put together to pipeline stages, and what ranks hold of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..core.axes import SHARDED
from ..core.errors import CompileError
from ..core.mesh import Mesh
from ..cost_models.collectives import in_turn
from ..cost_models.kernels import with_host
from ..ir.cost_protocol import RankCosts
from ..ir.plan import Offloaded
from ..passes.stages.partition import balanced_starts
from ..simulation.host_update import GATHERED
from .layouts import UNSPLIT, Layout
from .pipeline import StageWork
from .places import Place, alike, placement
from .stage_units import ParameterGroup, StageUnit, Widths
from .unlike_stages import State, unlike_starts

Stages = list[Sequence[StageUnit]]


def cut(units: Sequence[StageUnit], layout: Layout, costs: RankCosts, begins: Sequence[str] = ()) -> Stages:
    """Balanced stages, or those that begin where ``begins`` says.

    Raises:
        CompileError: QN206 if no unit begins where a stage should, or there are fewer units than stages.
    """
    return cut_places([Place(units, costs)] * layout.pp, layout, begins)


def cut_places(
    places: Sequence[Place], layout: Layout, begins: Sequence[str] = (), state: State | None = None
) -> Stages:
    """Stages that are balanced as their places run them, or that begin where ``begins`` says. ``state``: see
    :func:`.unlike_stages.unlike_starts`.

    Raises:
        CompileError: as :func:`cut`.
    """
    units, costs = places[0].units, places[0].costs
    count, most = layout.pp * layout.virtual_stages, 1 + sum(bool(unit.begin) for unit in units[1:])
    if count > most:
        raise CompileError("QN206", f"{count} stages, where the model can begin {most}", fix="use fewer stages")
    if begins:
        starts = _named_starts(units, begins)
    elif alike(places):
        starts = _starts(units, count, costs, layout.mesh)
    else:
        starts = unlike_starts(places, layout, state)
    edges = zip(placement(layout), [0, *starts], [*starts, len(units)], strict=True)
    return [places[home].units[a:b] for home, a, b in edges]


def send_seconds(unit: StageUnit, costs: RankCosts, mesh: Mesh, way: tuple[int, int] = (0, 1)) -> float:
    """Of what the unit receives, if a stage begins with it; ``way``: from which place of the pipeline to which."""
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
    if not costs.overlaps:  # else the way of a value is no work of its stage
        seconds += np.array([0.0, *(2 * send_seconds(unit, costs, mesh) for unit in units[1:]), 0.0])[:, None]
    seconds[[i for i, unit in enumerate(units) if i and not unit.begin]] = np.inf
    return balanced_starts(seconds, count)


@dataclass(frozen=True)
class Slices:
    """ZeRO, and parameters on hosts, as prices: what of a rank's parameters is held in slices over ranks of
    ``layout.zero_axes``, and what that moves (Rajbhandari et al. 2019, 2021). ``offload``: what is on hosts; with
    ``"optimizer"`` each parameter is updated whole, on the host of one of the ranks of a stage."""

    layout: Layout
    costs: RankCosts
    mesh: Mesh
    offload: tuple[Offloaded, ...] = ()
    known: dict[tuple[str, ParameterGroup], float] = field(default_factory=dict)  # equal blocks ask for the same

    @property
    def on_host(self) -> bool:
        """Whether what a rank stores of parameters is on its host, with its gradients when they are added up."""
        return "parameters" in self.offload

    def _over(self, held: ParameterGroup) -> tuple[str, ...]:
        return (
            tuple(a for a in self.layout.zero_axes if a in held.axes and self.mesh[a] > 1) if self.layout.zero else ()
        )

    def ways(self, held: ParameterGroup) -> int:
        """In how many slices the optimizer's state is."""
        return int(np.prod([self.mesh[axis] for axis in self._over(held)], dtype=int))

    def updated(self, held: ParameterGroup) -> int:
        """Bytes of parameters that a rank updates."""
        if "optimizer" not in self.offload:
            return held.bytes // self.ways(held)
        return held.bytes // int(np.prod([self.mesh[axis] for axis in held.axes if axis != "pp"], dtype=int))

    def update(self, parts: Sequence[ParameterGroup]) -> float:
        """Seconds of the optimizer's step. On hosts: ranks exchange parts of parameters and of gradients, these go out,
        parameters are updated, come in and are handed out, one after the other."""
        mine = sum(map(self.updated, parts))
        if "optimizer" not in self.offload:
            return self.costs.host_update_seconds(mine) if self.on_host else self.costs.optimizer_seconds(mine)
        ranks = self.mesh.peers(0, [axis for axis in self.mesh.names if axis != "pp"])
        part = sum(held.bytes // self.ways(held) for held in parts)
        exchanged = self.costs.group_seconds("all_gather", len(ranks) * part, ranks) if len(ranks) > 1 else 0.0
        copied = self.costs.copy_seconds(2 * mine) + self.costs.copy_seconds(mine)
        return GATHERED * exchanged + copied + self.costs.host_update_seconds(mine)

    def sums(self, held: ParameterGroup) -> int:
        """Bytes in which microbatches add up gradients."""
        return held.gradients // (self.ways(held) if self.layout.zero >= 2 else 1)

    def copies(self, held: ParameterGroup) -> int:
        """Bytes of what an optimizer sees of sums that have more bits than the parameter."""
        return held.bytes // self.ways(held) if held.widths.gradient != held.widths.held else 0

    def messages(self, held: ParameterGroup) -> bool:
        """Whether ranks add up gradients when microbatches have."""
        before = self._over(held) if self.layout.zero >= 2 else ()
        return any(self.mesh[axis] > 1 for axis in held.axes if axis != "pp" and axis not in before)

    def moving(self, held: ParameterGroup) -> int:
        """Bytes of what ranks add up, where that is in another dtype."""
        if held.widths.reduced == held.widths.gradient or not self.messages(held):
            return 0
        return held.reduced // (self.ways(held) if self.layout.zero >= 2 else 1)

    def _seconds(self, name: str, held: ParameterGroup) -> float:
        over = list(self._over(held))
        if (name, held) not in self.known:
            moved = held.read if name == "all_gather" else held.reduced
            found = self.costs.group_seconds(name, moved, self.mesh.peers(0, over)) if over else 0.0
            self.known[name, held] = found
        return self.known[name, held]

    def gather(self, parts: Sequence[ParameterGroup]) -> float:
        """Seconds of bringing parameters together."""
        return sum(self._seconds("all_gather", held) for held in parts)

    def scatter(self, parts: Sequence[ParameterGroup]) -> float:
        """Seconds of adding up gradients where each rank gets a slice."""
        return sum(self._seconds("reduce_scatter", held) for held in parts)

    def lost(self, hidden: float) -> float:
        """What computing loses to so many seconds of messages between ranks with other rows beside it."""
        return self.costs.lost_seconds(hidden, self._others) if len(self._others) > 1 else 0.0

    @cached_property
    def _others(self) -> tuple[int, ...]:
        return self.mesh.peers(0, [axis.name for axis in SHARDED if axis.role in ("data", "context")])

    def each_use(self, stage: Sequence[StageUnit]) -> tuple[float, float]:
        """Seconds that a microbatch's forward and backward wait for slices: parameters are copied from the host and
        gathered before each use, one unit ahead of computing, and gradients scattered behind it."""
        if self.layout.zero < 2 and not self.on_host:
            return 0.0, 0.0
        parts, none = [(*unit.parameters, *unit.tied.values()) for unit in stage], [0.0] * len(stage)
        gather = [self.gather(one) for one in parts] if self.layout.zero == 3 else none
        scatter = [self.scatter(one) for one in parts] if self.layout.zero >= 2 else none
        copy = [self.copy_in(one) for one in parts] if self.on_host else none
        if not any(gather) and not any(scatter) and not any(copy):
            return 0.0, 0.0
        back = [seconds * unit.again for seconds, unit in zip(copy, stage, strict=True)]
        cast = [unit.once if self.on_host else 0.0 for unit in stage]  # computed of each copy
        if not self.costs.overlaps:
            arrive = sum(gather) + sum(cast)
            return arrive + sum(copy), arrive + sum(back) + sum(scatter)
        ahead = self._seconds_of([unit.forward for unit in stage], gather, none, copy, cast)
        last = gather[::-1] if self.on_host else [0.0, *gather[-2::-1]]  # the last unit's parameters are still there
        behind = self._seconds_of([unit.backward for unit in stage][::-1], last, scatter[::-1], back[::-1], cast[::-1])
        return ahead - sum(unit.forward for unit in stage), behind - sum(unit.backward for unit in stage)

    def _seconds_of(
        self, work: Sequence[float], gather: Sequence[float], scatter: Sequence[float], copy: Sequence[float],
        cast: Sequence[float],
    ) -> float:  # fmt: skip
        """Of units that follow each other, with what is ``cast`` of copies. Copies and messages run beside each other,
        but for those of the first unit, and copies take nothing from computing."""
        work = [sum(both) for both in zip(work, cast, strict=True)]
        messages = in_turn(work, gather, scatter, self.lost)
        if not self.on_host:
            return messages
        copies = in_turn(work, copy, [0.0] * len(work), lambda hidden: 0.0)
        return max(messages + copy[0], copies + gather[0])

    def copy_in(self, parts: Sequence[ParameterGroup]) -> float:
        """Seconds of copying what a rank stores of parameters from its host."""
        return self.costs.copy_seconds(sum(map(self.stored, parts)))

    def stored(self, held: ParameterGroup) -> int:
        """Bytes that a rank stores of parameters, where ZeRO 3 slices them."""
        return held.bytes // (self.ways(held) if self.layout.zero == 3 else 1)

    def leave(self, parts: Sequence[ParameterGroup]) -> float:
        """Seconds of copying gradients that are added up to the host."""
        return self.costs.copy_seconds(sum(map(self.sums, parts)))

    def settle(self, parts: Sequence[ParameterGroup]) -> float:
        """Seconds of adding up gradients at the end of a step; ``pp`` is for what several ranks of stages have."""
        total = self.scatter(parts) if self.layout.zero == 1 else 0.0
        for held in parts:
            over = self._over(held)
            size = held.reduced / self.ways(held)
            inside = self.mesh.peers(0, [axis for axis in held.axes if axis != "pp" and axis not in over])
            if len(inside) > 1:
                total += self.costs.group_seconds("all_reduce", size, inside)
            if "pp" in held.axes:
                ends = (0, self.mesh.rank({"pp": self.mesh["pp"] - 1}))
                total += self.costs.group_seconds("all_reduce", size, ends)
        return total


def stage_work(
    stage: Sequence[StageUnit], first: bool, slices: Slices, way: tuple[int, int] = (0, 1), sent: int = 0
) -> StageWork:
    """One microbatch of a stage, with what it waits for slices of ZeRO 2 and 3, or for the host. ``first``:
    nothing is sent to it; ``way``: see :func:`send_seconds`; ``sent``: bytes that another rank gets, which are kept
    until their gradient is there."""
    costs, (ahead, back) = slices.costs, slices.each_use(stage)
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
    apart = slices.layout.schedule not in UNSPLIT
    saved = sum(max(unit.saved, unit.later * apart) for unit in stage)
    saved += max(0, sent - stage[-1].shared)
    return StageWork(forward + busy, backward + busy, weight, send - busy, saved)


def held_by(stage: Sequence[StageUnit], owners: Mapping[str, int]) -> list[ParameterGroup]:
    """What a rank holds, by the axes over which gradients are summed: ``pp`` for what several ranks of it have.
    ``owners``: how many have it, by name."""
    found: Counter[tuple[tuple[str, ...], Widths]] = Counter()
    for unit in stage:
        for one in unit.parameters:
            found[one.axes, one.widths] += one.bytes
    for name, one in {name: one for unit in stage for name, one in unit.tied.items()}.items():
        found[(*one.axes, "pp") if owners[name] > 1 else one.axes, one.widths] += one.bytes
    return [ParameterGroup(size, *kind) for kind, size in sorted(found.items())]
