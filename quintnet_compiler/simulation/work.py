"""Durations: what the event simulation asks of the prices of a program, and constant prices."""

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
    """Seconds within an action: computing, or a collective or copy that computing waits for.

    ``axis``: of the latter, or a direction of the link to the host. ``ahead``: how many parts before this one the
    collective was started; it is concurrent with those.
    """

    seconds: float
    axis: str = ""
    name: str = ""
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Hidden:
    """A collective that is concurrent with computing: ``offset`` seconds after its action starts."""

    offset: float
    seconds: float
    axis: str
    name: str


@dataclass(frozen=True)
class ActionWork:
    """The parts of one action, in order.

    ``host``: seconds in which its kernels are launched, meanwhile (see ``with_host`` of the cost models).
    """

    parts: tuple[WorkPart, ...] = ()
    host: float = 0.0

    @cached_property
    def seconds(self) -> float:
        """Return how long the action takes."""
        return with_host(self.device_seconds, self.host) if self.host else self.device_seconds

    @cached_property
    def device_seconds(self) -> float:
        """Return the seconds without waits for the host."""
        return sum(part.seconds for part in self._timed[0])

    @property
    def waited(self) -> tuple[WorkPart, ...]:
        """Return the parts with the seconds that computing waits for them; last, the wait for the host."""
        parts = self._timed[0]
        waits = self.seconds - self.device_seconds
        return (*parts, WorkPart(waits)) if waits > 0 else parts

    @property
    def hidden(self) -> tuple[Hidden, ...]:
        """Return the collectives that were started before they were waited for."""
        return self._timed[1]

    @cached_property
    def _timed(self) -> tuple[tuple[WorkPart, ...], tuple[Hidden, ...]]:
        """Return the parts as computing waits for them, and what they hide.

        Collectives of an axis follow each other in the order in which they start.
        """
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
                started = self.parts[begun]
                start = max(now, free[started.axis])
                ends[begun] = free[started.axis] = start + started.seconds
                if started.ahead:
                    hidden.append(Hidden(start, started.seconds, started.axis, started.name))
            seconds = max(0.0, ends[index] - now) if part.axis else part.seconds
            waited.append(replace(part, seconds=seconds))
            now += seconds
        return tuple(waited), tuple(hidden)

    def scaled(self, compute: float, links: Mapping[str, float]) -> ActionWork:
        """Return the work with computing, its host, and the collectives of each axis so many times slower."""
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
    """A collective of several pipeline places at the end of the step, in order; the first rank waits for the last.

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
        """Return whether gradient sums are concurrent with computing, or take its time."""
        ...

    @property
    def cores(self) -> int | None:
        """Return how many ranks can compute at once where all of them share one machine."""
        ...

    def begin(self, place: int) -> ActionWork:
        """Return what the rank at a pipeline place does before its first action."""
        ...

    def work(self, action: Action) -> ActionWork:
        """Return a compute action."""
        ...

    def transfer(self, send: Action) -> float:
        """Return the time on the wire of what a send action sends."""
        ...

    def sums(self, place: int) -> tuple[GradientSum, ...]:
        """Return the gradient sums of the rank at a pipeline place, in the order in which they start."""
        ...

    def meetings(self) -> tuple[StepEndCollective, ...]:
        """Return what happens after all actions, in order."""
        ...


Seconds = float | Mapping[int, float]


@dataclass(frozen=True)
class Given:
    """Constant durations: one number, or one per stage; ``links``: per (source, target) stage.

    By default each half of a split backward takes half of it. ``reduction``: the sum of a stage's gradients over data
    ranks, which starts after the stage's last backward.
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
        """Return nothing to do."""
        return ActionWork()

    def work(self, action: Action) -> ActionWork:
        """Return one part, of the action's duration."""
        durations: dict[Op, Seconds | None] = {
            Op.FORWARD: self.forward,
            Op.BACKWARD: self.backward,
            Op.BACKWARD_INPUT: self.input,
            Op.BACKWARD_WEIGHT: self.weight,
        }
        seconds = durations[action.op]
        half_backward = stage_seconds(self.backward, action.stage) / 2
        return ActionWork((WorkPart(half_backward if seconds is None else stage_seconds(seconds, action.stage)),))

    def transfer(self, send: Action) -> float:
        """Return the duration of the link between two stages."""
        return self.links.get((send.stage, send.peer), self.transfer_seconds)

    def sums(self, place: int) -> tuple[GradientSum, ...]:
        """Return a sum for each stage of the rank, the last stage first."""
        stages = [stage for stage, owner in enumerate(self.placement) if owner == place]
        terms = [(stage, stage_seconds(self.reduction, stage)) for stage in reversed(stages)]
        return tuple(GradientSum(f"stage {s}", ("dp",), seconds, {s: 0.0}) for s, seconds in terms if seconds)

    def meetings(self) -> tuple[StepEndCollective, ...]:
        """Return none."""
        return ()


def stage_seconds(seconds: Seconds, stage: int) -> float:
    """Return the seconds of a stage."""
    return seconds[stage] if isinstance(seconds, Mapping) else seconds


def last_releases(row: tuple[Action, ...]) -> dict[int, int]:
    """Return for each stage of a rank the index of the action after which its gradients are complete."""
    return {action.stage: index for index, action in enumerate(row) if action.op in RELEASES}
