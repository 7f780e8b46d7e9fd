"""The parts of a function's time, from the prices of its nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from .work import WorkPart

ACCUMULATE = ("accumulate", "accumulate_matmul")


@dataclass(frozen=True)
class NodeTime:
    """A node of a rank's function and its price in seconds.

    Attributes:
        compute: of the device.
        communication: that computing waits for, after it.
        axis: of that communication.
        begun: the node that started that communication earlier.
        host: what the host takes to launch the node, meanwhile.
    """

    node: fx.Node
    compute: float
    communication: float = 0.0
    axis: str = ""
    begun: fx.Node | None = None
    host: float = 0.0


def starts_collective(node: fx.Node) -> bool:
    """Return whether a node starts a collective that another node waits for."""
    return node.op == "call_method" and str(node.target).startswith("start_")


@dataclass
class PieceParts:
    """The parts of a function, as its nodes come.

    Attributes:
        overlaps: whether collectives are concurrent with computing.
        ends: receives, for each node that adds up a gradient, how many parts are over after it.
        started: by the node that starts a collective, how many parts were over.
        computing: seconds since the last part.
    """

    overlaps: bool
    ends: dict[fx.Node, int] | None
    parts: list[WorkPart] = field(default_factory=list)
    started: dict[fx.Node, int] = field(default_factory=dict)
    computing: float = 0.0

    def add_node(self, time: NodeTime) -> None:
        """Add a node."""
        node = time.node
        self.computing += time.compute
        starts = self.overlaps and starts_collective(node)
        ends = self.ends is not None and str(node.target) in ACCUMULATE
        if time.axis or starts or ends:
            self._flush()
        if starts:
            self.started[node] = len(self.parts)
        if time.axis:
            now = len(self.parts)
            begun = self.started.get(time.begun, now) if time.begun is not None else now
            self.parts.append(WorkPart(time.communication, time.axis, node.name, now - begun))
        if ends and self.ends is not None:
            self.ends[node] = len(self.parts)

    def _flush(self) -> None:
        if self.computing:
            self.parts.append(WorkPart(self.computing))
        self.computing = 0.0

    def take_parts(self) -> list[WorkPart]:
        """Return the parts, at least one."""
        if self.computing or not self.parts:
            self.parts.append(WorkPart(self.computing))
        return self.parts
