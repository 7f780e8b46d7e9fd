"""What passes ask of a cost model. Implementations live in ``cost_models``; units are in the names."""

from __future__ import annotations

from typing import Protocol

from torch import fx


class CostModel(Protocol):
    """Prices work and communication. An unknown operator or collective raises; nothing ever costs 0 by default."""

    def operator_seconds(self, node: fx.Node) -> float:
        """Time of one unsplit operator, forward and (where gradients flow) backward."""
        ...

    def collective_seconds(self, name: str, num_bytes: float, ranks: int) -> float:
        """Time of a collective over ``ranks``; ``num_bytes`` is the size of the full (unsplit) tensor."""
        ...

    def parameter_seconds(self, num_bytes: float) -> float:
        """Time that holding a parameter costs each step: the optimizer reads and writes its state."""
        ...
