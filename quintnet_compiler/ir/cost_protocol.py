"""The interface of cost models to passes and simulations.

Implementations are in ``cost_models``; units are in the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from torch import fx

from ..core.mesh import Mesh
from ..schedules.synthesis import StageTimes


class CostModel(Protocol):
    """Prices work and communication. An unknown operator or collective raises; nothing ever costs 0 by default."""

    def operator_seconds(self, node: fx.Node) -> float:
        """Return the time of one unsplit operator, forward and (where gradients flow) backward."""
        ...

    def run_seconds(self, node: fx.Node, share: float, reads: Sequence[float], writes: float) -> StageTimes:
        """Return the times of one run of a rank's ``share`` of an operator, forward and backward.

        They include the cost of starting kernels, however small: it counts where operators are divided between ranks,
        and not where each of them is.

        Args:
            node: the operator.
            share: the rank's share of its work.
            reads: bytes of the rank's part of each tensor input.
            writes: bytes of the rank's part of its results.
        """
        ...

    def accumulate_seconds(self, num_bytes: float) -> float:
        """Return the time of adding a gradient of so many bytes to another."""
        ...

    def send_seconds(self, num_bytes: float, apart: int = 1) -> float:
        """Return the time of sending a value to a stage ``apart`` ranks away, latency included."""
        ...

    def meeting_seconds(self, name: str, num_bytes: float, ranks: int, apart: int = 1) -> float:
        """Return the time of a collective between ranks that lie ``apart`` ranks from each other, latency included.

        Other arguments are those of :meth:`collective_seconds`.
        """
        ...

    def collective_seconds(self, name: str, num_bytes: float, ranks: int) -> float:
        """Return the time of a collective over ``ranks``; ``num_bytes`` is the size of the full (unsplit) tensor."""
        ...

    def mask_seconds(self, num_bytes: float) -> float:
        """Return the time of replacing the padding of a value of so many bytes: it is read and written."""
        ...

    def parameter_seconds(self, num_bytes: float) -> float:
        """Return the time that a parameter costs each step: the optimizer reads and writes its state."""
        ...


@runtime_checkable
class RankCosts(Protocol):
    """Prices of what one rank runs, node by node, for simulations. All are in seconds.

    Attributes:
        overlaps: whether communication that is started early overlaps with computing, or takes its time.
        cores: how many ranks compute at once where all share one machine; None if each has a device of its own.
        source: where the prices come from.
    """

    @property
    def source(self) -> str: ...

    @property
    def overlaps(self) -> bool: ...

    @property
    def cores(self) -> int | None: ...

    @property
    def action_seconds(self) -> float:
        """Return the time that each action of a schedule takes in addition to its nodes."""
        ...

    def at(self, mesh: Mesh, place: int) -> RankCosts:
        """Return the prices of the ranks at a place of the pipeline of ``mesh``, where places lie on unlike devices.

        Groups of ranks within a place may be given as those of the first.
        """
        ...

    def node_seconds(self, node: fx.Node) -> float:
        """Return the time of one run of a node of a differentiated graph (forward or backward), on local shapes."""
        ...

    def host_seconds(self, node: fx.Node | None) -> float:
        """Return the host's time to start the kernels of a node; 0 where the host is the device.

        The device computes earlier kernels meanwhile. None: a message, or the sum of a gradient.
        """
        ...

    def guessed(self, node: fx.Node) -> bool:
        """Return whether a node's price is only a bound (the bytes that it moves). Reports say so."""
        ...

    def accumulate_seconds(self, num_bytes: float) -> float:
        """Return the time of adding a gradient of so many bytes to those of earlier microbatches."""
        ...

    def copy_seconds(self, num_bytes: float) -> float:
        """Return the time of a copy between a device and its host, one way. Each way has a link of its own."""
        ...

    def write_seconds(self, num_bytes: float) -> float:
        """Return the time of a copy from a device to a file of its host."""
        ...

    def read_seconds(self, num_bytes: float) -> float:
        """Return the time of a copy from a file to the device."""
        ...

    def optimizer_seconds(self, num_bytes: float) -> float:
        """Return the time of the optimizer's pass over parameters of so many bytes."""
        ...

    def host_update_seconds(self, num_bytes: float) -> float:
        """Return the time of the same pass on the host, of whose memory bandwidth each device has its share."""
        ...

    def group_seconds(self, name: str, num_bytes: float, ranks: tuple[int, ...]) -> float:
        """Return the time of a collective over these ranks; ``num_bytes`` is the size of the full (unsplit) tensor."""
        ...

    def lost_seconds(self, hidden: float, ranks: tuple[int, ...]) -> float:
        """Return the time that computing loses to ``hidden`` seconds of overlapped communication over these ranks."""
        ...

    def send_seconds(self, num_bytes: float, source: int, target: int) -> float:
        """Return the time of sending a tensor from one rank to another."""
        ...


def way_seconds(costs: RankCosts, way: str, num_bytes: float) -> float:
    """Return the time of a copy one way, see :data:`..ops.copies.WAYS`."""
    prices = {"to disk": costs.write_seconds, "from disk": costs.read_seconds}
    return prices.get(way, costs.copy_seconds)(num_bytes)


def guesses(nodes: Iterable[fx.Node], costs: RankCosts) -> tuple[str, ...]:
    """Return the operators among ``nodes`` whose price is a bound, see :meth:`RankCosts.guessed`."""
    return tuple(sorted({str(node.target).removesuffix(".default") for node in nodes if costs.guessed(node)}))


def guess_note(names: Iterable[str]) -> str:
    """Return the note of reports about operators whose price is a bound."""
    return f"priced as a bound, as nothing better is known: {', '.join(names)}"
