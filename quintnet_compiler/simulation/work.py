"""Durations: what the event simulation asks of whoever prices a program, and prices that are simply given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from ..cost_models.kernels import with_host
from ..schedules.schedule import RELEASES, Action, Op


@dataclass(frozen=True, slots=True)
class WorkPart:
    """A run of seconds within an action: computing, or (with an ``axis``, which may be a way of the link to the host) a
    collective or copy that computing waits for.

    ``ahead``: how many parts before this one the collective was started; it runs beside those.
    """

    seconds: float
    axis: str = ""
    name: str = ""
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Hidden:
    """A collective that runs beside computing: ``offset`` seconds after its action starts."""

    offset: float
    seconds: float
    axis: str
    name: str


@dataclass(frozen=True)
class ActionWork:
    """What one action does, in order; ``host``: seconds in which its kernels are started, beside that (see
    ``with_host`` of the cost models)."""

    parts: tuple[WorkPart, ...] = ()
    host: float = 0.0

    @cached_property
    def seconds(self) -> float:
        return with_host(self.device, self.host) if self.host else self.device

    @cached_property
    def device(self) -> float:
        """Seconds without the host."""
        return sum(part.seconds for part in self._timed[0])

    @property
    def waited(self) -> tuple[WorkPart, ...]:
        """The parts as computing sees them: of a collective that was started before, what is left to wait for. Last,
        what the device waits for the host."""
        found = self._timed[0]
        waits = self.seconds - self.device
        return (*found, WorkPart(waits)) if waits > 0 else found

    @property
    def hidden(self) -> tuple[Hidden, ...]:
        """The collectives that were started before they were waited for."""
        return self._timed[1]

    @cached_property
    def _timed(self) -> tuple[tuple[WorkPart, ...], tuple[Hidden, ...]]:
        """Collectives of an axis follow each other in the order in which they start."""
        if not any(part.ahead for part in self.parts):
            return self.parts, ()
        starts: dict[int, list[int]] = defaultdict(list)
        for index, part in enumerate(self.parts):
            if part.axis:
                starts[index - part.ahead].append(index)
        waited: list[WorkPart] = []
        hidden: list[Hidden] = []
        now, free, ends = 0.0, defaultdict[str, float](float), dict[int, float]()
        for index, part in enumerate(self.parts):
            for begun in starts[index]:
                one = self.parts[begun]
                start = max(now, free[one.axis])
                ends[begun] = free[one.axis] = start + one.seconds
                if one.ahead:
                    hidden.append(Hidden(start, one.seconds, one.axis, one.name))
            seconds = max(0.0, ends[index] - now) if part.axis else part.seconds
            waited.append(replace(part, seconds=seconds))
            now += seconds
        return tuple(waited), tuple(hidden)

    def scaled(self, compute: float, links: Mapping[str, float]) -> ActionWork:
        """With computing, and the collectives of each axis, so many times slower; with computing, its host."""
        if compute == 1.0 and not links:
            return self
        parts = tuple(
            replace(p, seconds=p.seconds * (links.get(p.axis, 1.0) if p.axis else compute)) for p in self.parts
        )
        return ActionWork(parts, self.host * compute)


@dataclass(frozen=True)
class GradientSum:
    """Gradients that ranks along ``axes`` add up while they compute.

    ``ready``: for each stage that has a term, how many seconds before the end of its last backward that term exists.
    """

    name: str
    axes: tuple[str, ...]
    seconds: float
    ready: Mapping[int, float]


@dataclass(frozen=True)
class StepEndCollective:
    """What ranks of several pipeline places do together at the end of the step, in order; the first waits for the last.

    ``everyone``: all ranks of the mesh take part, not just those at ``places`` with the same other coordinates.
    """

    name: str
    places: tuple[int, ...]
    seconds: float
    axis: str = "pp"
    everyone: bool = False


class Durations(Protocol):
    """Prices of one pipeline (ranks that differ only along the pipeline), all in seconds."""

    @property
    def overlaps(self) -> bool:
        """Whether gradient sums run beside computing, or take its time."""
        ...

    @property
    def cores(self) -> int | None:
        """How many ranks can compute at once where all of them share one machine."""
        ...

    def begin(self, place: int) -> ActionWork:
        """What the rank at a pipeline place does before its first action."""
        ...

    def work(self, action: Action) -> ActionWork:
        """A compute action."""
        ...

    def transfer(self, send: Action) -> float:
        """The time on the wire of what a send action sends."""
        ...

    def sums(self, place: int) -> tuple[GradientSum, ...]:
        """The gradient sums of the rank at a pipeline place, in the order in which they start."""
        ...

    def meetings(self) -> tuple[StepEndCollective, ...]:
        """What happens after all actions, in order."""
        ...


Seconds = float | Mapping[int, float]


@dataclass(frozen=True)
class Given:
    """Durations that somebody knows: one number, or one per stage. ``links``: per (source, target) stage.

    Unless it is given, each half of a split backward takes half of it. ``reduction``: the sum of a stage's gradients
    over data ranks, which starts after the stage's last backward.
    """

    forward: Seconds = 1.0
    backward: Seconds = 2.0
    input: Seconds | None = None
    weight: Seconds | None = None
    transfer_seconds: float = 0.0
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    reduction: Seconds = 0.0
    placement: tuple[int, ...] = ()
    overlaps: bool = True
    cores: int | None = None

    def begin(self, place: int) -> ActionWork:
        return ActionWork()

    def work(self, action: Action) -> ActionWork:
        given: dict[Op, Seconds | None] = {
            Op.FORWARD: self.forward,
            Op.BACKWARD: self.backward,
            Op.BACKWARD_INPUT: self.input,
            Op.BACKWARD_WEIGHT: self.weight,
        }
        seconds = given[action.op]
        found = at(self.backward, action.stage) / 2 if seconds is None else at(seconds, action.stage)
        return ActionWork((WorkPart(found),))

    def transfer(self, send: Action) -> float:
        return self.links.get((send.stage, send.peer), self.transfer_seconds)

    def sums(self, place: int) -> tuple[GradientSum, ...]:
        stages = [stage for stage, owner in enumerate(self.placement) if owner == place]
        found = [(stage, at(self.reduction, stage)) for stage in reversed(stages)]
        return tuple(GradientSum(f"stage {s}", ("dp",), seconds, {s: 0.0}) for s, seconds in found if seconds)

    def meetings(self) -> tuple[StepEndCollective, ...]:
        return ()


def at(seconds: Seconds, stage: int) -> float:
    """The seconds of a stage."""
    return seconds[stage] if isinstance(seconds, Mapping) else seconds


def last_releases(row: tuple[Action, ...]) -> dict[int, int]:
    """For each stage of a rank, the index of the action after which its gradients are complete."""
    return {action.stage: index for index, action in enumerate(row) if action.op in RELEASES}
