"""Place copies to and from the host in a function, so that they overlap with computation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import accumulate

from torch import fx

from ...ir.repeated_blocks import block_of
from ...ops.catalog import op_spec
from ...ops.rules.work import takes_long
from .items import HIDING_MARGIN, Item, Seconds, Start, node_of, source_of


def with_copies(order: Sequence[Item], seconds: Seconds) -> list[Item]:
    """Return ``order`` with each copy where computation hides it best.

    Each direction is a link by itself, on which copies follow each other.

    - A copy to the host starts as soon as its value is computed. The wait comes when it is expected to be done, after
      the value's last reader and at most one block later, which bounds the memory that is not freed yet.
    - The wait for a copy from the host comes before its first reader. The copy starts as late as it can and still be
      done by then, and at most one block ahead, which bounds the memory that is taken early. A block whose matmuls all
      come after the reader (it gathers parameters of the next block) does not count.

    A copy that nothing can hide is not split.
    """
    copies = [item for item in order if _copy(item)]
    if not copies:
        return list(order)
    return _Placing(order, seconds).place_copies()


class _Placing:
    """The order of a function without copies (``rest``), and the items to insert at each index."""

    def __init__(self, order: Sequence[Item], seconds: Seconds) -> None:
        self.seconds = seconds
        self.rest: list[Item] = []
        self.leaving: list[tuple[fx.Node, int]] = []  # a copy, and the number of items before it
        self.returning: list[tuple[fx.Node, int]] = []
        for item in order:
            if _copy(item):
                node = node_of(item)
                (self.leaving if op_spec(node).copies_away else self.returning).append((node, len(self.rest)))
            else:
                self.rest.append(item)
        self.clock = list(accumulate(map(self._computing, self.rest), initial=0.0))
        self.made = {node_of(item): i for i, item in enumerate(self.rest) if not isinstance(item, Start)}
        self.waits: dict[int, list[Item]] = defaultdict(list)  # before the item at an index, as the next two
        self.begins: dict[int, list[Item]] = defaultdict(list)
        self.returns: dict[int, list[Item]] = defaultdict(list)

    def place_copies(self) -> list[Item]:
        self._leave()
        self._return()
        ordered: list[Item] = []
        for i, item in enumerate([*self.rest, None]):
            ordered += [*self.waits[i], *self.begins[i], *self.returns[i]]
            if item is not None:
                ordered.append(item)
        return ordered

    def _computing(self, item: Item) -> float:
        return 0.0 if isinstance(item, Start) or op_spec(item).start is not None else self.seconds(item)

    def _leave(self) -> None:
        """Place the copies to the host."""
        free = 0.0  # when the link is
        copies = [(self._begin(node), node, last) for node, last in self.leaving]
        for begin, node, last in sorted(copies, key=lambda entry: entry[0]):
            free = max(free, self.clock[begin]) + self.seconds(node)
            end = next((i for i in range(last, len(self.clock)) if self.clock[i] >= free), len(self.rest))
            end = min(end, self._a_block_later(last, block_of(node)))
            if self.clock[end] > self.clock[begin]:
                self.begins[begin].append(Start(node))
            self.waits[end].append(node)

    def _begin(self, node: fx.Node) -> int:
        """Return the index after the item that computes the copied value; 0 if it is an input."""
        source = node.all_input_nodes[0]
        return max(self.made.get(source, -1), self.made.get(source_of(source), -1)) + 1

    def _return(self) -> None:
        """Place the copies from the host, the last one first."""
        latest: dict[object, float] = {}  # by direction, when the next copy must be done
        for node, first in reversed(self.returning):
            free = latest.get(node.target, float("inf"))
            latest[node.target] = min(free, self.clock[first]) - HIDING_MARGIN * self.seconds(node)
            begin = next((i for i in range(first, 0, -1) if self.clock[i] <= latest[node.target]), 0)
            begin = max(begin, self._a_block_earlier(first, block_of(node)))
            if self.clock[first] > self.clock[begin]:
                self.begins[begin].insert(0, Start(node))
            self.returns[first].insert(0, node)

    def _a_block_later(self, place: int, own: Hashable) -> int:
        return next(iter(self._beyond(range(place, len(self.rest)), own)), len(self.rest))

    def _a_block_earlier(self, place: int, own: Hashable) -> int:
        last_matmul = next((i for i in range(place - 1, -1, -1) if takes_long(node_of(self.rest[i]))), -1)
        return next((i + 1 for i in self._beyond(range(last_matmul, -1, -1), own)), 0)

    def _beyond(self, places: range, own: Hashable) -> list[int]:
        """Return the first of ``places`` by which more than one other block has come, or nothing."""
        seen: set[Hashable] = set()
        for i in places:
            block = block_of(node_of(self.rest[i]))
            if block is not None and block != own:
                seen.add(block)
            if len(seen) > 1:
                return [i]
        return []


def _copy(item: Item) -> bool:
    return isinstance(item, fx.Node) and op_spec(item).is_copy
