"""Numbers of the values of a differentiated program, by which checks compare two of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from torch import fx

from ...ir.program import DifferentiatedProgram
from ...ir.value_numbers import ValueNumbers


@dataclass
class NumberedValues(ABC):
    """Give each value a number; subclasses say which calls make values that are alike.

    Attributes:
        numbers: those of all programs that are compared.
        of: the number of each node.
    """

    program: DifferentiatedProgram
    numbers: ValueNumbers
    of: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Give all values numbers: inputs and parameters by their names, others by their calls."""
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.of[node] = self.numbers.number("leaf", node.name)
            elif node.op == "call_function":
                self.of[node] = self._call(node)

    @abstractmethod
    def _call(self, node: fx.Node) -> int:
        """Return the number of what a call makes; those of what it reads are in ``of``."""
