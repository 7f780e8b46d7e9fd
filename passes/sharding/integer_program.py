"""A small front for scipy's HiGHS: 0/1 choices, edges between them, linear costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

# Seconds beyond any real cost: a choice with this price is used only where nothing else is left.
FORBIDDEN = 1e9


@dataclass
class IntegerProgram:
    """Variables are numbered from 0; all lie in [0, 1]."""

    costs: list[float] = field(default_factory=list)
    integral: list[int] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _entries: list[float] = field(default_factory=list)
    _low: list[float] = field(default_factory=list)
    _high: list[float] = field(default_factory=list)

    def variable(self, cost: float, *, integral: bool = False) -> int:
        self.costs.append(cost)
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
        """The values of all variables, or None where nothing satisfies the constraints."""
        # here: scipy takes 11 MB of a rank's memory, and programs without such an axis do not need it
        import scipy.sparse as sparse
        from scipy.optimize import Bounds, LinearConstraint, milp

        count = len(self.costs)
        matrix = sparse.csr_matrix((self._entries, (self._rows, self._columns)), shape=(len(self._low), count))
        cost = np.array(self.costs)
        # Bring real costs into the range in which the solver's tolerances mean something.
        real = cost[cost < FORBIDDEN]
        scale = 1e4 / max(float(real.max()), 1e-30)
        cost = np.where(cost < FORBIDDEN, cost * scale, 1e6)
        result = milp(
            cost,
            constraints=LinearConstraint(matrix, self._low, self._high),
            integrality=np.array(self.integral),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": gap, "time_limit": seconds},
        )
        values: np.ndarray | None = result.x
        return values
