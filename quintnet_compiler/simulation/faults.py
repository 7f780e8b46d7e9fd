"""Slow ranks, and slow links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from ..core.errors import CompileError, describe_value, finite, whole_number
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
        """Return the axis along which the two ends of a link differ.

        Raises:
            CompileError: QN201 if they differ along more than one axis, or not at all.
        """
        a, b = (mesh.coordinate(rank) for rank in link)
        axes = [name for name in mesh.names if a[name] != b[name]]
        if len(axes) != 1:
            raise _refused(
                f"slow_links joins ranks {link[0]} and {link[1]}, which differ in {' and '.join(axes) or 'nothing'}",
                _link_fix(mesh),
            )
        return axes[0]

    def checked(self, mesh: Mesh) -> Faults:
        """Return the same in plain ints and floats.

        Raises:
            CompileError: QN201 for ranks and links that do not exist, for factors that are not positive, and for what
                is no rank, no link or no number at all.
        """
        ranks = {_rank(mesh, "slow_ranks", rank): _factor("slow_ranks", rank, factor)
                 for rank, factor in _items("slow_ranks", self.slow_ranks, "{0: 1.5}")}  # fmt: skip
        links = {}
        for link, factor in _items("slow_links", self.slow_links, "{(0, 1): 1.5}"):
            if not isinstance(link, tuple) or len(link) != 2:
                raise _refused(f"a link of slow_links is {describe_value(link)}", _link_fix(mesh))
            first, second = (_rank(mesh, "slow_links", rank) for rank in link)
            self.axis_of(mesh, (first, second))
            links[first, second] = _factor("slow_links", link, factor)
        return Faults(ranks, links)


def read_faults(faults: Faults | None, mesh: Mesh) -> Faults:
    """Return the faults of a mesh, checked; None: there are none.

    Raises:
        CompileError: QN201 for anything but faults of ranks and links of this mesh.
    """
    if faults is None:
        return Faults()
    if not isinstance(faults, Faults):
        raise _refused(
            f"faults is {describe_value(faults)}", "pass faults=quintnet.Faults(slow_ranks={0: 1.5}), or None"
        )
    return faults.checked(mesh)


def _refused(problem: str, fix: str) -> CompileError:
    return CompileError("QN201", problem, fix=fix)


def _items(name: str, factors: Any, example: str) -> list[tuple[Any, Any]]:
    if not isinstance(factors, Mapping):
        raise _refused(
            f"{name} of the faults is {describe_value(factors)}",
            f"give a dict such as {name}={example}, or leave it out",
        )
    return list(factors.items())


def _rank(mesh: Mesh, name: str, value: Any) -> int:
    number = whole_number(value)
    if number is None or not 0 <= number < mesh.size:
        problem = describe_value(value) if number is None else f"{describe_value(value)}, which is not on {mesh}"
        raise _refused(f"a rank in {name} is {problem}", f"name ranks by ints from 0 to {mesh.size - 1}")
    return number


def _factor(name: str, key: object, value: Any) -> float:
    number = finite(value)
    if number is None or number <= 0:
        raise _refused(
            f"the factor of {key} in {name} is {describe_value(value)}",
            "give a finite Python number above 0, such as 1.5",
        )
    return number


def _link_fix(mesh: Mesh) -> str:
    """Return a fix that names an existing link: of rank 0 and its neighbour along the innermost axis."""
    axis = next((name for name in reversed(mesh.names) if mesh[name] > 1), None)
    if axis is None:
        return f"leave slow_links out: {mesh} has one rank and no links"
    return f"name two ranks that differ along one axis, such as (0, {mesh.rank({axis: 1})}), which differ in {axis}"


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
    def to_simulate(cls, mesh: Mesh, lockstep: Iterable[str], faults: Faults) -> Rows:
        """Return the ranks to simulate.

        ``lockstep``: axes along which ranks meet within every function, so that each waits for the slowest.
        """
        faults = read_faults(faults, mesh)
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
        unaffected = pipelines - len(affected)
        group = mesh.size // mesh["pp"] // pipelines
        rows: list[RankGroup] = []
        for column, place in enumerate(columns):
            count = group * (unaffected if tuple(place.values()) not in affected else 1)
            for stage in range(mesh["pp"]):
                first = mesh.rank({**place, **({"pp": stage} if "pp" in mesh.names else {})})
                rows.append(_row(mesh, first, stage, column, count, locked, faults))
        return cls(tuple(rows), tuple(columns))


def _untouched(mesh: Mesh, free: list[str], affected: Mapping[tuple[int, ...], object]) -> dict[str, int]:
    """Return the first coordinate of a pipeline that nothing slows down."""
    for indices in product(*(range(mesh[name]) for name in free)):
        if indices not in affected:
            return dict(zip(free, indices, strict=True))
    raise AssertionError("some pipeline is unaffected")


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
            for source, receiver in ((a, b), (b, a)):
                if source in group:
                    target = mesh.coordinate(receiver)["pp"]
                    sends[target] = max(factor, sends.get(target, 1.0))
        elif {a, b} & group:
            links[axis] = max(factor, links.get(axis, 1.0))
    return RankGroup(first, stage, column, count, compute, links, sends)
