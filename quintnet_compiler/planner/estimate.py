"""The time and memory of a layout, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from ..ir.cost_protocol import guess_note
from .layouts import Layout
from .workload import Figures, Workload, four_digits


@dataclass(frozen=True)
class StageMemory:
    """Peak memory of a rank, in bytes.

    Attributes:
        parameters: stored, and copies that operators read.
        gradients: at the peak.
        optimizer: state of the optimizer.
        saved: values for backwards, at the peak.
        working: temporary memory.
        settled: all gradients, at the end of a step.
        host: parameters, gradients and optimizer state on the host.
    """

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    working: int
    settled: int
    host: int = 0

    @property
    def parts(self) -> Mapping[str, int]:
        """Return device memory at the peak, by name."""
        return {name: size for name, size in vars(self).items() if name not in ("settled", "host")}

    @property
    def total(self) -> int:
        """Return device memory at the peak."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class PlaceLoad:
    """One place of a pipeline on a cluster of several kinds of devices.

    Attributes:
        devices: of its ranks.
        units: the number of blocks, and of parts between blocks, that they run.
        seconds: of a step in which they are busy.
        memory_bytes: what each of them may hold.
        room: see :class:`.places.Place`.
        alone: see :class:`.places.Place`.
    """

    devices: str
    units: int
    seconds: float
    memory_bytes: float
    room: float
    alone: tuple[tuple[str, float], ...]

    def text(self, place: int, step: float, memory: StageMemory) -> str:
        """Return a line for people; ``step``: seconds of a step."""
        line = f"place {place} on {self.devices}: {self.units} units, busy {self.seconds / step:.0%} of the step, "
        line += f"{bytes_of(memory.total)} of {bytes_of(self.memory_bytes)}"
        waits = [f"{name} would take {share:.0%} of that time alone" for name, share in self.alone if share < 0.995]
        return "; ".join([line, *(["each waits for the slowest"] if waits else []), *waits])


@dataclass(frozen=True)
class Estimate:
    """The predicted cost of a layout. Times are in seconds.

    Attributes:
        layout: the layout.
        pipeline: forward and backward of all microbatches.
        bubble: the part of it in which the busiest rank is idle.
        gradients: gradient reduction after the pipeline, as far as nothing hides it.
        optimizer: the optimizer's step, on a host with all that ranks exchange and copy for it.
        communication: by axis, the time for which the busiest rank waits inside the pipeline.
        memory: of each pipeline rank, in bytes.
        begins: where each stage but the first begins.
        guessed: operators whose price is a bound (the bytes that they move), as nothing better is known of them.
        workload: what a step does; None where only its parts are compared.
        places: on a cluster of several kinds of devices, what lies where.
    """

    layout: Layout
    pipeline: float
    bubble: float
    gradients: float
    optimizer: float
    communication: Mapping[str, float]
    memory: tuple[StageMemory, ...]
    begins: tuple[str, ...]
    guessed: tuple[str, ...] = ()
    workload: Workload | None = None
    places: tuple[PlaceLoad, ...] = ()

    @property
    def seconds(self) -> float:
        """Return seconds of a step."""
        return self.pipeline + self.gradients + self.optimizer

    @property
    def memory_bytes(self) -> int:
        """Return peak memory of the rank that needs the most."""
        return max(stage.total for stage in self.memory)

    @property
    def host_bytes(self) -> int:
        """Return host memory of the rank that needs the most, without saved values."""
        return max(stage.host for stage in self.memory)

    @property
    def claimed_bytes(self) -> float:
        """Return memory of the fullest rank, scaled to the largest device of the cluster."""
        if not self.places:
            return self.memory_bytes
        return max(stage.total * place.room for stage, place in zip(self.memory, self.places, strict=True))

    @property
    def exposed(self) -> float:
        """Return seconds that the busiest rank waits for communication."""
        return sum(self.communication.values()) + self.gradients

    @property
    def figures(self) -> Figures:
        """Return throughput, model FLOP utilisation, energy, and time and cost of the goal.

        Raises:
            ValueError: without a workload.
        """
        if self.workload is None:
            raise ValueError("an estimate without a workload has no figures")
        return self.workload.figures(self.seconds, self.layout.mesh.size)

    def numbers(self) -> dict[str, Any]:
        """Return all fields, in seconds and bytes; with the keys of :meth:`.workload.Figures.numbers`."""
        return {
            "layout": str(self.layout),
            "step_seconds": self.seconds,
            "pipeline_seconds": self.pipeline,
            "bubble_seconds": self.bubble,
            "gradient_seconds": self.gradients,
            "optimizer_seconds": self.optimizer,
            "communication_seconds": dict(self.communication),
            "memory_bytes": self.memory_bytes,
            "stage_memory_bytes": [vars(stage) | {"total": stage.total} for stage in self.memory],
            "stages": list(self.begins),
            "guessed_prices": list(self.guessed),
            **({"places": [_numbers(place) for place in self.places]} if self.places else {}),
            **(self.figures.numbers() if self.workload else {}),
        }

    def to_json(self) -> str:
        """Return :meth:`numbers` as JSON."""
        return json.dumps(self.numbers(), indent=2)

    def __str__(self) -> str:
        fullest = max(self.memory, key=lambda stage: stage.total)
        parts = ", ".join(f"{name} {bytes_of(size)}" for name, size in fullest.parts.items())
        waits = ", ".join(f"{axis} {time_of(seconds)}" for axis, seconds in self.communication.items())
        return "\n".join(
            [
                f"{self.layout}",
                f"step {time_of(self.seconds)}: pipeline {time_of(self.pipeline)} (bubble {time_of(self.bubble)}), "
                f"gradients {time_of(self.gradients)}, optimizer {time_of(self.optimizer)}",
                f"communication on the fullest stage: {waits or 'none'}",
                f"memory of the fullest rank {bytes_of(fullest.total)}{self._device}: {parts}",
                *([f"memory of its host {bytes_of(self.host_bytes)}"] if self.host_bytes else []),
                *self.places_text(),
                *(self.workload.text(self.figures) if self.workload else []),
                *([guess_note(self.guessed)] if self.guessed else []),
            ]
        )

    @property
    def _device(self) -> str:
        if self.workload is None or self.places:
            return ""
        available = self.workload.device.memory_bytes
        return f" of {bytes_of(available)}" + (", which is not enough" if self.memory_bytes > available else "")

    @property
    def mixed(self) -> bool:
        """Return whether a place of the pipeline has several kinds of devices."""
        return any(place.alone for place in self.places)

    def places_text(self) -> list[str]:
        """Return lines for people about each place, if the cluster has several kinds of devices."""
        rows = zip(self.places, self.memory, strict=False)
        return [place.text(number, self.seconds, memory) for number, (place, memory) in enumerate(rows)]

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


@dataclass(frozen=True)
class RankBound:
    """A lower bound of what one rank holds.

    Attributes:
        saved_bytes: values that are saved for backwards.
        state_share: parameters, gradients and optimizer state, as a multiple of the mean over ranks.
        saves_before_gradients: whether all values may be saved before there are sums of gradients.
    """

    saved_bytes: float
    state_share: float
    saves_before_gradients: bool

    def total_bytes(self, state: float, gradients: float) -> float:
        """Return the bytes of the rank, where ranks hold ``state`` and sums of ``gradients`` on average."""
        sums = self.state_share * gradients
        peak = max(self.saved_bytes, sums) if self.saves_before_gradients else self.saved_bytes + sums
        return self.state_share * state + peak


@dataclass(frozen=True)
class LowerBound:
    """A lower bound of a layout's time and memory.

    Attributes:
        seconds: of a step.
        working_bytes: temporary memory of every rank.
        block_bytes: parameters of a block.
        ranks: bounds of some ranks; the fullest rank holds no less than any.
    """

    seconds: float = 0.0
    working_bytes: float = 0.0
    block_bytes: float = 0.0
    ranks: tuple[RankBound, ...] = ()

    def over_ranks(self, number: int) -> LowerBound:
        """Return the bound of a model that is split over ``number`` times as many ranks."""
        ranks = tuple(replace(rank, saved_bytes=rank.saved_bytes / number) for rank in self.ranks)
        return LowerBound(self.seconds / number, self.working_bytes / number, self.block_bytes / number, ranks)

    def fullest_rank_bytes(self, state: float, gradients: float) -> float:
        """Return the bytes of the fullest rank, where ranks hold ``state`` and sums of ``gradients`` on average."""
        sizes = (rank.total_bytes(state, gradients) for rank in self.ranks)
        return self.working_bytes + max(sizes, default=state + gradients)


def _numbers(place: PlaceLoad) -> dict[str, Any]:
    return {
        "devices": place.devices, "units": place.units, "busy_seconds": place.seconds,
        "memory_bytes": place.memory_bytes, "alone": dict(place.alone),
    }  # fmt: skip


def bytes_of(size: float) -> str:
    """Return bytes for people: ``1.5 GiB`` or ``3.0 MiB``."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def time_of(seconds: float) -> str:
    """Return seconds for people: ``1.25 s`` or ``3.5 ms``."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def cells_of(estimates: Sequence[Estimate]) -> list[tuple[str, ...]]:
    """Return estimates of one workload as rows of a table, below a row of names."""
    first = estimates[0]
    head = ["step", "memory", "bubble", "exposed"]
    if first.workload:
        head += [f"{first.figures.unit}s/s/device", "MFU", *(["per million"] if first.figures.cost_per_million else [])]
    rows = [(*head, "layout")]
    for estimate in estimates:
        cells = [time_of(estimate.seconds), bytes_of(estimate.memory_bytes)]
        cells += [f"{estimate.bubble / estimate.seconds:.1%}", f"{estimate.exposed / estimate.seconds:.1%}"]
        if estimate.workload:
            figures = estimate.figures
            cells += [four_digits(figures.per_second_per_device), figures.share]
            cells += [four_digits(figures.cost_per_million)] if figures.cost_per_million else []
        rows.append((*cells, str(estimate.layout)))
    return rows


def aligned_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines with aligned columns, except the last."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]) for row in rows]
