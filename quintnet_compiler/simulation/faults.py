"""What can be slow: single ranks, and single links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..core.errors import CompileError
from ..core.mesh import Mesh


@dataclass(frozen=True)
class Faults:
    """Slow ranks and links, for :meth:`CompiledProgram.simulate`.

    Attributes:
        slow_ranks: rank -> how many times longer it computes.
        slow_links: (rank, rank) -> how many times longer the link between them takes. The two must differ along one
            axis only. A collective is as slow as the slowest link within it.
    """

    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def axis_of(self, mesh: Mesh, link: tuple[int, int]) -> str:
        """The axis along which the two ends of a link differ.

        Raises:
            CompileError: QN201 if a rank is not on the mesh, or they differ along more than one axis, or not at all.
        """
        for rank in link:
            _check_rank(mesh, rank)
        a, b = (mesh.coordinate(rank) for rank in link)
        axes = [name for name in mesh.names if a[name] != b[name]]
        if len(axes) != 1:
            differ = " and ".join(axes) or "nothing"
            raise CompileError(
                "QN201",
                f"no link joins ranks {link[0]} and {link[1]}: they differ in {differ}",
                fix="name two ranks that are neighbours along one axis",
            )
        return axes[0]

    def check(self, mesh: Mesh) -> None:
        """Raises: CompileError QN201 for ranks and links that are not there, or factors that are not positive."""
        for link in self.slow_links:
            self.axis_of(mesh, link)
        for rank in self.slow_ranks:
            _check_rank(mesh, rank)
        for factor in (*self.slow_ranks.values(), *self.slow_links.values()):
            if not 0 < factor < float("inf"):
                raise CompileError("QN201", f"a factor of {factor} is no slowdown", fix="give a positive number")


def _check_rank(mesh: Mesh, rank: int) -> None:
    if not 0 <= rank < mesh.size:
        raise CompileError("QN201", f"{mesh} has no rank {rank}", fix=f"name ranks 0 to {mesh.size - 1}")


@dataclass(frozen=True)
class RankGroup:
    """A simulated rank, which stands for ``count`` ranks that do the very same at the very same time.

    ``place``: on the pipeline; ``column``: the pipeline it belongs to. ``compute``: how many times longer computing
    takes, ``links`` the collectives of an axis, ``sends`` transfers to another pipeline place.
    """

    rank: int
    place: int
    column: int
    count: int = 1
    compute: float = 1.0
    links: Mapping[str, float] = field(default_factory=dict)
    sends: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """The ranks to simulate. Ranks in lockstep are one; pipelines that nothing slows down are one.

    ``columns``: a coordinate of each pipeline on the axes that are not in lockstep.
    """

    rows: tuple[RankGroup, ...]
    columns: tuple[Mapping[str, int], ...]

    @classmethod
    def of(cls, mesh: Mesh, lockstep: Iterable[str], faults: Faults) -> Rows:
        """``lockstep``: axes along which ranks meet within every function, so that each waits for the slowest."""
        faults.check(mesh)
        locked = [name for name in mesh.names if name in set(lockstep)]
        free = [name for name in mesh.names if name != "pp" and name not in locked]
        touched = {*faults.slow_ranks, *(rank for link in faults.slow_links for rank in link)}
        affected: dict[tuple[int, ...], dict[str, int]] = {}
        for rank in sorted(touched):
            place = {name: mesh.coordinate(rank)[name] for name in free}
            affected[tuple(place.values())] = place
        pipelines = mesh.size // mesh["pp"]
        for name in locked:
            pipelines //= mesh[name]
        columns = list(affected.values())
        if len(columns) < pipelines:
            columns.insert(0, _untouched(mesh, free, affected))
        rest = pipelines - len(affected)
        group = mesh.size // mesh["pp"] // pipelines
        rows: list[RankGroup] = []
        for column, place in enumerate(columns):
            count = group * (rest if tuple(place.values()) not in affected else 1)
            for stage in range(mesh["pp"]):
                first = mesh.rank({**place, **({"pp": stage} if "pp" in mesh.names else {})})
                rows.append(_row(mesh, first, stage, column, count, locked, faults))
        return cls(tuple(rows), tuple(columns))


def _untouched(mesh: Mesh, free: list[str], affected: Mapping[tuple[int, ...], object]) -> dict[str, int]:
    number = 0
    while True:
        place, left = {}, number
        for name in reversed(free):
            left, place[name] = divmod(left, mesh[name])
        found = {name: place[name] for name in free}
        if tuple(found.values()) not in affected:
            return found
        number += 1


def _row(mesh: Mesh, first: int, stage: int, column: int, count: int, locked: list[str], faults: Faults) -> RankGroup:
    group = set(mesh.peers(first, locked))
    compute = max([faults.slow_ranks[rank] for rank in faults.slow_ranks if rank in group], default=1.0)
    if group - set(faults.slow_ranks):
        compute = max(compute, 1.0)
    links: dict[str, float] = {}
    sends: dict[int, float] = {}
    for (a, b), factor in faults.slow_links.items():
        axis = faults.axis_of(mesh, (a, b))
        if axis == "pp":
            for here, there in ((a, b), (b, a)):
                if here in group:
                    target = mesh.coordinate(there)["pp"]
                    sends[target] = max(factor, sends.get(target, 1.0))
        elif {a, b} & group:
            links[axis] = max(factor, links.get(axis, 1.0))
    return RankGroup(first, stage, column, count, compute, links, sends)
