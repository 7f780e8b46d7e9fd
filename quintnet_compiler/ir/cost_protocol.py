"""What passes ask of a cost model. Implementations live in ``cost_models``; units are in the names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from torch import fx

from ..core.mesh import Mesh
from ..schedules.synthesis import StageTimes


class CostModel(Protocol):
    """Prices work and communication. An unknown operator or collective raises; nothing ever costs 0 by default."""

    def operator_seconds(self, node: fx.Node) -> float:
        """Time of one unsplit operator, forward and (where gradients flow) backward."""
        ...

    def run_seconds(self, node: fx.Node, share: float, reads: Sequence[float], writes: float) -> StageTimes:
        """One run of a rank's ``share`` of an operator, and of its backward, with all that starting kernels takes,
        however small it is: it counts where operators are divided between ranks, and not where each of them is.
        ``reads``: bytes of the rank's part of each tensor input; ``writes``: of its results."""
        ...

    def accumulate_seconds(self, num_bytes: float) -> float:
        """Time of adding a gradient of so many bytes to another."""
        ...

    def send_seconds(self, num_bytes: float, apart: int = 1) -> float:
        """Time of sending a value from one stage to another, ``apart`` ranks away, with what starting that takes."""
        ...

    def meeting_seconds(self, name: str, num_bytes: float, ranks: int, apart: int = 1) -> float:
        """As :meth:`collective_seconds`, with what starting a collective takes, however small it is, over the links
        between ranks that lie so far ``apart``."""
        ...

    def collective_seconds(self, name: str, num_bytes: float, ranks: int) -> float:
        """Time of a collective over ``ranks``; ``num_bytes`` is the size of the full (unsplit) tensor."""
        ...

    def mask_seconds(self, num_bytes: float) -> float:
        """Time of replacing the padding of a value of so many bytes: it is read and written."""
        ...

    def parameter_seconds(self, num_bytes: float) -> float:
        """Time that holding a parameter costs each step: the optimizer reads and writes its state."""
        ...


@runtime_checkable
class RankCosts(Protocol):
    """Prices of what one rank runs, node by node: a simulation asks for them. All in seconds.

    ``overlaps``: whether communication that is started early runs beside computing, or takes its time. ``cores``: how
    many ranks compute at once where all share one machine; None if each has a device of its own. ``source``: whose
    prices these are.
    """

    @property
    def source(self) -> str: ...

    @property
    def overlaps(self) -> bool: ...

    @property
    def cores(self) -> int | None: ...

    @property
    def action_seconds(self) -> float:
        """What each action of a schedule takes besides its nodes."""
        ...

    def at(self, mesh: Mesh, place: int) -> RankCosts:
        """Prices of the ranks of ``mesh`` at a place of its pipeline, where places lie on unlike devices. Groups of
        ranks within a place may be given as those of the first."""
        ...

    def node_seconds(self, node: fx.Node) -> float:
        """One run of a node of a differentiated graph, which computes (forward or backward) on local shapes."""
        ...

    def host_seconds(self, node: fx.Node | None) -> float:
        """What the host spends to start the kernels of a node (None: a message, or the sum of a gradient), while the
        device computes what was started before. 0 where the host is the device."""
        ...

    def guessed(self, node: fx.Node) -> bool:
        """Whether its price is a bound (the bytes that it moves), as nothing better is known of it. Reports say so."""
        ...

    def accumulate_seconds(self, num_bytes: float) -> float:
        """Adding a gradient of so many bytes to those of earlier microbatches."""
        ...

    def copy_seconds(self, num_bytes: float) -> float:
        """A copy between a device and its host, one way. Each way has a link of its own."""
        ...

    def write_seconds(self, num_bytes: float) -> float:
        """A copy from a device to a file of its host."""
        ...

    def read_seconds(self, num_bytes: float) -> float:
        """A copy from a file to the device."""
        ...

    def optimizer_seconds(self, num_bytes: float) -> float:
        """The optimizer's pass over parameters of so many bytes."""
        ...

    def host_update_seconds(self, num_bytes: float) -> float:
        """The same on the device's host, by the memory of which each device has its share."""
        ...

    def group_seconds(self, name: str, num_bytes: float, ranks: tuple[int, ...]) -> float:
        """A collective over these ranks; ``num_bytes`` is the size of the full (unsplit) tensor."""
        ...

    def lost_seconds(self, hidden: float, ranks: tuple[int, ...]) -> float:
        """What computing loses to so many seconds of communication over these ranks beside it."""
        ...

    def send_seconds(self, num_bytes: float, source: int, target: int) -> float:
        """A tensor's way from one rank to another."""
        ...


def way_seconds(costs: RankCosts, way: str, num_bytes: float) -> float:
    """A copy one way, see :data:`..ops.copies.WAYS`."""
    prices = {"to disk": costs.write_seconds, "from disk": costs.read_seconds}
    return prices.get(way, costs.copy_seconds)(num_bytes)


def guesses(nodes: Iterable[fx.Node], costs: RankCosts) -> tuple[str, ...]:
    """The operators among ``nodes`` whose price is a bound, see :meth:`RankCosts.guessed`."""
    return tuple(sorted({str(node.target).removesuffix(".default") for node in nodes if costs.guessed(node)}))


def guess_note(names: Iterable[str]) -> str:
    """What reports say of operators whose price is a bound."""
    return f"priced as a bound, as nothing better is known: {', '.join(names)}"
