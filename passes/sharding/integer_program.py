"""A small front for scipy's HiGHS: 0/1 choices, edges between them, linear costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

# Seconds beyond any real cost: a choice with this price is used only where nothing else is left.
FORBIDDEN = 1e9
LARGEST = 1e4  # real costs are scaled to it: there, the tolerances of the solver (1e-6, 1e-7) mean something
TIE = 1e-5  # what a place in the order of choices costs then: of equal choices, the first is taken
_INFEASIBLE = 2  # a status of scipy.optimize.milp
INTEGRAL = 1e-6  # how far from a whole number a choice may be


@dataclass
class IntegerProgram:
    """Variables are numbered from 0; all lie in [0, 1]."""

    costs: list[float] = field(default_factory=list)
    integral: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _entries: list[float] = field(default_factory=list)
    _low: list[float] = field(default_factory=list)
    _high: list[float] = field(default_factory=list)

    def variable(self, cost: float, *, integral: bool = False, order: int = 0) -> int:
        """``order``: where costs are equal, lower ones are preferred."""
        self.costs.append(cost)
        self.order.append(order)
        self.integral.append(int(integral))
        return len(self.costs) - 1

    def constrain(self, terms: Iterable[tuple[int, float]], low: float, high: float) -> None:
        """low <= sum of coefficient * variable <= high."""
        row = len(self._low)
        for column, coefficient in terms:
            self._rows.append(row)
            self._columns.append(column)
            self._entries.append(coefficient)
        self._low.append(low)
        self._high.append(high)

    def choose_one(self, variables: Sequence[int]) -> None:
        self.constrain([(v, 1.0) for v in variables], 1, 1)

    def solve(self, *, gap: float = 1e-6, seconds: float = 120.0) -> np.ndarray | None:
        """The values of all variables, or None where nothing satisfies the constraints.

        The linear relaxation comes first: its solution is nearly always integral, and takes half of the time.
        """
        # here: scipy takes 11 MB of a rank's memory, and programs without such an axis do not need it
        import scipy.sparse as sparse
        from scipy.optimize import Bounds, LinearConstraint, milp

        count = len(self.costs)
        matrix = sparse.csr_matrix((self._entries, (self._rows, self._columns)), shape=(len(self._low), count))
        cost = np.array(self.costs)
        real = cost[cost < FORBIDDEN]
        scale = LARGEST / max(float(real.max()), 1e-30)
        cost = np.where(cost < FORBIDDEN, cost * scale, 100 * LARGEST) + TIE * np.array(self.order)
        whole = np.array(self.integral, np.int64)
        for integrality in (np.zeros(count, np.int64), whole):
            result = milp(
                cost,
                constraints=LinearConstraint(matrix, self._low, self._high),
                integrality=integrality,
                bounds=Bounds(0, 1),
                options={"mip_rel_gap": gap, "time_limit": seconds},
            )
            values: np.ndarray | None = result.x
            if values is not None and np.abs(values - values.round())[whole > 0].max(initial=0.0) < INTEGRAL:
                return values
            if result.status == _INFEASIBLE:
                return None
        return values
