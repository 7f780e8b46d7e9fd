"""A small interface to scipy's HiGHS: 0/1 choices, edges between them, linear costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

FORBIDDEN_SECONDS = 1e9  # above any real cost: such a choice is taken only where there is no other
MAX_SCALED_COST = 1e4  # real costs are scaled to it, so that the solver's tolerances (1e-6, 1e-7) mean something
TIE_COST = 1e-5  # added for each position in the order of choices: of equal choices, the first is taken
INTEGRALITY_TOLERANCE = 1e-6  # how far from a whole number a choice may be
_INFEASIBLE_STATUS = 2  # of scipy.optimize.milp


@dataclass
class IntegerProgram:
    """A linear program with some integral variables, numbered from 0; all lie in [0, 1]."""

    costs: list[float] = field(default_factory=list)
    integral: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _entries: list[float] = field(default_factory=list)
    _low: list[float] = field(default_factory=list)
    _high: list[float] = field(default_factory=list)

    def variable(self, cost: float, *, integral: bool = False, order: int = 0) -> int:
        """Add a variable and return its number; of equal costs, the lower ``order`` is preferred."""
        self.costs.append(cost)
        self.order.append(order)
        self.integral.append(int(integral))
        return len(self.costs) - 1

    def constrain(self, terms: Iterable[tuple[int, float]], low: float, high: float) -> None:
        """Require low <= sum of coefficient * variable <= high."""
        row = len(self._low)
        for column, coefficient in terms:
            self._rows.append(row)
            self._columns.append(column)
            self._entries.append(coefficient)
        self._low.append(low)
        self._high.append(high)

    def choose_one(self, variables: Sequence[int]) -> None:
        """Require that exactly one of the variables is 1."""
        self.constrain([(v, 1.0) for v in variables], 1, 1)

    def solve(self, *, gap: float = 1e-6, seconds: float = 120.0) -> np.ndarray | None:
        """Return the values of all variables, or None where nothing satisfies the constraints.

        The linear relaxation is solved first: its solution is nearly always integral, and takes half of the time.
        """
        # imported late: scipy takes 11 MB of a rank's memory, and many programs need no search
        import scipy.sparse as sparse
        from scipy.optimize import Bounds, LinearConstraint, milp

        count = len(self.costs)
        matrix = sparse.csr_matrix((self._entries, (self._rows, self._columns)), shape=(len(self._low), count))
        cost = np.array(self.costs)
        real_costs = cost[cost < FORBIDDEN_SECONDS]
        scale = MAX_SCALED_COST / max(float(real_costs.max()), 1e-30)
        cost = np.where(cost < FORBIDDEN_SECONDS, cost * scale, 100 * MAX_SCALED_COST) + TIE_COST * np.array(self.order)
        integral = np.array(self.integral, np.int64)
        for integrality in (np.zeros(count, np.int64), integral):
            result = milp(
                cost,
                constraints=LinearConstraint(matrix, self._low, self._high),
                integrality=integrality,
                bounds=Bounds(0, 1),
                options={"mip_rel_gap": gap, "time_limit": seconds},
            )
            values: np.ndarray | None = result.x
            if values is not None:
                distances = np.abs(values - values.round())[integral > 0]
                if distances.max(initial=0.0) < INTEGRALITY_TOLERANCE:
                    return values
            if result.status == _INFEASIBLE_STATUS:
                return None
        return values
