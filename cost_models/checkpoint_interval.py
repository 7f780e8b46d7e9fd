"""How often to save, where failures come at random: the interval that wastes the least time."""

from __future__ import annotations

import math

from quintnet_compiler.core.errors import CompileError


def daly_interval(save: float, between_failures: float) -> float:
    """Seconds of training between the end of one save and the start of the next, for the least expected run time.

    ``save``: seconds that a save keeps training from going on; ``between_failures``: the mean time between failures of
    the whole run, in seconds, which come as a Poisson process. sqrt(2 save M) is Young's first-order optimum (J. W.
    Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974); this is the higher order
    of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22(3), 2006, equation 37.

    >>> round(daly_interval(60, 5 * 3600))  # Young: 1470
    1430

    Raises:
        CompileError: QN108 for a time that is not positive.
    """
    if not (save > 0 and 0 < between_failures < math.inf):
        raise CompileError(
            "QN108",
            f"a save of {save:g} s, and {between_failures:g} s between failures",
            fix="give the mean time between failures of the whole run in seconds: that of a node / nodes",
        )
    if save >= 2 * between_failures:
        return between_failures
    ratio = save / (2 * between_failures)
    return math.sqrt(2 * save * between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def expected_goodput(interval: float, save: float, restart: float, between_failures: float) -> float:
    """The share of time that is training which is kept, in a long run with synchronous saves: Daly's equation 20, exact
    for failures that are a Poisson process and may come during saves and restarts too. All in seconds."""
    mean = between_failures
    return interval / (mean * math.exp(restart / mean) * math.expm1((interval + save) / mean))
