"""The order of one function in which copies to and from the host run beside computing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import accumulate

from torch import fx

from ...ir.repeated_blocks import block_of
from ...ops.catalog import op_spec
from ..autodiff.recompute_cut import takes_long
from .items import MARGIN, Item, Seconds, Start, node_of, source_of


def with_copies(order: Sequence[Item], seconds: Seconds) -> list[Item]:
    """``order`` with each copy where it hides best; each way is a link of its own, on which one copy follows another.

    - What leaves starts as soon as it is made, and is waited for when it is expected to be gone, no earlier than its
      last reader and no later than a block behind it: so much memory is not free yet at most.
    - What returns is waited for before its first reader, and starts so that it is there by then, the latest possible;
      never before the reader is the next block's but one: so much memory is taken ahead at most. A block whose products
      all follow the reader, which gathers parameters of the next one, is none between.

    A copy with nothing to compute beside it stays whole.
    """
    copies = [item for item in order if _copy(item)]
    if not copies:
        return list(order)
    return _Placing(order, seconds).run()


class _Placing:
    def __init__(self, order: Sequence[Item], seconds: Seconds) -> None:
        self.seconds = seconds
        self.rest: list[Item] = []
        self.leaving: list[tuple[fx.Node, int]] = []  # a copy, and how many items are over before it
        self.returning: list[tuple[fx.Node, int]] = []
        for item in order:
            if _copy(item):
                node = node_of(item)
                (self.leaving if op_spec(node).copies_away else self.returning).append((node, len(self.rest)))
            else:
                self.rest.append(item)
        self.clock = list(accumulate(map(self._computing, self.rest), initial=0.0))
        self.made = {node_of(item): i for i, item in enumerate(self.rest) if not isinstance(item, Start)}
        self.waits: dict[int, list[Item]] = defaultdict(list)  # ahead of the item at an index
        self.begins: dict[int, list[Item]] = defaultdict(list)
        self.returns: dict[int, list[Item]] = defaultdict(list)

    def run(self) -> list[Item]:
        self._leave()
        self._return()
        found: list[Item] = []
        for i, item in enumerate([*self.rest, None]):
            found += [*self.waits[i], *self.begins[i], *self.returns[i]]
            if item is not None:
                found.append(item)
        return found

    def _computing(self, item: Item) -> float:
        return 0.0 if isinstance(item, Start) or op_spec(item).start is not None else self.seconds(item)

    def _leave(self) -> None:
        free = 0.0
        made = [(self._begin(node), node, last) for node, last in self.leaving]
        for begin, node, last in sorted(made, key=lambda one: one[0]):
            free = max(free, self.clock[begin]) + self.seconds(node)
            end = next((i for i in range(last, len(self.clock)) if self.clock[i] >= free), len(self.rest))
            end = min(end, self._a_block_behind(last, block_of(node)))
            if self.clock[end] > self.clock[begin]:
                self.begins[begin].append(Start(node))
            self.waits[end].append(node)

    def _begin(self, node: fx.Node) -> int:
        """Behind the item that makes what is copied; first, if the function gets it."""
        source = node.all_input_nodes[0]
        return max(self.made.get(source, -1), self.made.get(source_of(source), -1)) + 1

    def _return(self) -> None:
        latest: dict[object, float] = {}  # of each way
        for node, first in reversed(self.returning):
            free = latest.get(node.target, float("inf"))
            latest[node.target] = min(free, self.clock[first]) - MARGIN * self.seconds(node)
            begin = next((i for i in range(first, 0, -1) if self.clock[i] <= latest[node.target]), 0)
            begin = max(begin, self._a_block_ahead(first, block_of(node)))
            if self.clock[first] > self.clock[begin]:
                self.begins[begin].insert(0, Start(node))
            self.returns[first].insert(0, node)

    def _a_block_behind(self, place: int, own: Hashable) -> int:
        return next(iter(self._beyond(range(place, len(self.rest)), own)), len(self.rest))

    def _a_block_ahead(self, place: int, own: Hashable) -> int:
        over = next((i for i in range(place - 1, -1, -1) if takes_long(node_of(self.rest[i]))), -1)
        return next((i + 1 for i in self._beyond(range(over, -1, -1), own)), 0)

    def _beyond(self, places: range, own: Hashable) -> list[int]:
        """The first of ``places`` behind which there is more than one other block."""
        seen: set[Hashable] = set()
        for i in places:
            block = block_of(node_of(self.rest[i]))
            if block is not None and block != own:
                seen.add(block)
            if len(seen) > 1:
                return [i]
        return []


def _copy(item: Item) -> bool:
    return isinstance(item, fx.Node) and op_spec(item).copies
