"""The space that the planner searches: every way to spread a batch over the devices of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..mesh import Mesh
from ..plan import Plan

ORDER = ("pp", "dp", "ep", "cp", "tp")  # outermost first: neighbours along tp are closest


@dataclass(frozen=True)
class Limits:
    """What a model and a cluster allow. ``ways[axis]``: the sizes that the axis may have; ``units``: how many stages
    there can be at most."""

    devices: int
    batch: int
    ways: dict[str, tuple[int, ...]]
    contexts: tuple[str, ...]
    experts: tuple[tuple[str, ...], ...]
    schedules: tuple[str, ...]
    virtual_stages: int
    recompute: tuple[str, ...]
    microbatches: tuple[int, ...]
    units: int


@dataclass(frozen=True, order=True)
class Layout:
    """One point of the space. ``rows``: of the batch, that one rank sees in one microbatch."""

    tp: int
    cp: int
    ep: int
    pp: int
    dp: int
    microbatches: int
    rows: int
    context: str
    experts: tuple[str, ...]
    schedule: str
    virtual_stages: int
    recompute: str

    @property
    def mesh(self) -> Mesh:
        sizes = {name: getattr(self, name) for name in ORDER}
        return Mesh(**({name: size for name, size in sizes.items() if size > 1} or {"dp": 1}))

    @property
    def inside(self) -> tuple[object, ...]:
        """What the functions of a rank depend on; layouts that agree in it differ only in how often they run."""
        spread = self.dp if "dp" in self.experts else self.dp > 1
        once = self.microbatches > 1
        return self.tp, self.cp, self.ep, spread, once, self.rows, self.context, self.experts, self.recompute

    def decided(self, plan: Plan) -> Plan:
        """``plan`` with this layout's decisions."""
        return plan.changed(
            {
                "mesh": dict(self.mesh.axes),
                "microbatches": self.microbatches,
                "schedule": self.schedule,
                "virtual_stages": self.virtual_stages,
                "context": self.context,
                "experts": self.experts,
                "recompute": self.recompute,
            }
        )

    def __str__(self) -> str:
        parts = [f"{name}={getattr(self, name)}" for name in ORDER if getattr(self, name) > 1] or ["1 device"]
        more = [f"{self.microbatches} x {self.rows} rows"]
        more += [self.context] if self.cp > 1 else []
        more += [f"experts over {' and '.join(self.experts)}"] if self.experts else []
        several = f" of {self.virtual_stages} stages per rank" if self.virtual_stages > 1 else ""
        more += [f"{self.schedule}{several}"] if self.pp > 1 and self.schedule != "1f1b" else []
        more += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        return " x ".join(parts) + ", " + ", ".join(more)


def layouts(limits: Limits) -> Iterator[Layout]:
    """Every layout that uses all devices and the whole batch."""
    for tp in limits.ways["tp"]:
        for cp in limits.ways["cp"]:
            for ep in limits.ways["ep"]:
                for pp in limits.ways["pp"]:
                    inner = tp * cp * ep * pp
                    if limits.devices % inner or pp * limits.virtual_stages > limits.units:
                        continue
                    dp = limits.devices // inner
                    if dp in limits.ways["dp"]:
                        yield from _in_time(limits, tp, cp, ep, pp, dp)


def _in_time(limits: Limits, tp: int, cp: int, ep: int, pp: int, dp: int) -> Iterator[Layout]:
    share, left = divmod(limits.batch, dp * ep)
    if left:
        return
    for microbatches in limits.microbatches:
        if share % microbatches or (pp > 1 and microbatches < min(pp, share)):
            continue
        for context in limits.contexts if cp > 1 else ("all_gather",):
            for experts in limits.experts if ep == 1 else ((),):
                if not all({"dp": dp, "cp": cp}[axis] > 1 for axis in experts):
                    continue
                for schedule in limits.schedules if pp > 1 else limits.schedules[:1]:
                    for recompute in limits.recompute:
                        rows = share // microbatches
                        yield Layout(
                            tp, cp, ep, pp, dp, microbatches, rows, context, experts, schedule, limits.virtual_stages,
                            recompute,
                        )  # fmt: skip


def divisors(number: int) -> tuple[int, ...]:
    """
    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*low, *(number // n for n in low)}))
