"""Order the nodes of a function so that communication overlaps with computation (list scheduling)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, chain, groupby

from torch import fx

from ...core.annotations import is_getitem
from ...ir.program import DifferentiatedProgram
from ...ir.repeated_blocks import Block, block_of
from ...ops.casts import parameter_of
from ...ops.catalog import op_spec
from ...ops.rules.work import takes_long
from .copies import with_copies
from .items import HIDING_MARGIN, Item, Seconds, Start, node_of, source_of, stored_in


class Order:
    """The order of one function's nodes, in which starts move up and waits move down, within bounds of memory.

    - A block's parameters are gathered as soon as those of the block before have arrived: while one block is computed,
      at most one other block's parameters are whole or under way. No gather starts more than a block ahead.
    - Gradients of a block's parameters are scattered while the next block is computed, one block's at a time.
    - Collectives on values between operators stay in their block. One starts early enough that matmuls (or attention)
      hide it, and no earlier. If there are too few between its input and its first use, independent ones change places
      with it: some from before its start, then some from after its wait.

    A collective that no matmul hides is not split. Copies to and from the host are placed last, see :mod:`.copies`.
    """

    def __init__(self, program: DifferentiatedProgram, nodes: Sequence[fx.Node], seconds: Seconds) -> None:
        self.seconds = seconds
        settled = set(program.gradients.values())
        self.picks: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # the getitems of each node
        for node in nodes:
            if is_getitem(node) and source_of(node) is not node:
                self.picks[source_of(node)].append(node)
        self.nodes = [node for node in nodes if source_of(node) is node]
        self.gathers = [n for n in self.nodes if _gathers_state(n)]
        self.scatters = [n for n in self.nodes if _scatters(n, settled)]
        self.busy: set[Item] = set()  # items that hide a collective already

    def items(self) -> list[Item]:
        """Return all nodes in order, and starts of those that are split."""
        moved = {*self.gathers, *self.scatters}
        runs = [list[Item](run) for _, run in groupby(self.nodes, key=block_of)]
        for run in runs:
            for node in [n for n in run if isinstance(n, fx.Node) and _splits(n) and n not in moved]:
                run[:] = self._overlapped(run, node)
        order = with_copies(self._state(list(chain(*runs))), self.seconds)
        picks = ((item, *(self.picks[item] if isinstance(item, fx.Node) else ())) for item in order)
        return list(chain.from_iterable(picks))

    # -- between operators

    def _overlapped(self, run: list[Item], node: fx.Node) -> list[Item]:
        """Return a run of items in which a collective is split around the matmuls that hide it, if there are some."""
        place = run.index(node)
        users, inputs = _users([node]), _inputs(node)
        first = 1 + max((i for i, item in enumerate(run[:place]) if item in inputs), default=-1)
        last = next((i for i in range(place + 1, len(run)) if node_of(run[i]) in users), len(run))
        head, early, late, tail = run[:first], run[first:place], run[place + 1 : last], run[last:]
        needed = HIDING_MARGIN * self.seconds(node) - self._hides([*early, *late])
        delayed = self._independent_before(head, {node, *map(node_of, run[:last])}, needed)
        advanced = self._independent_after(node, tail, needed - self._hides(delayed))
        while early and needed + self._hides(early[:1]) <= 0:  # more than enough: it may start later
            needed += self._hides(early[:1])
            head.append(early.pop(0))
        hiding = [*delayed, *early, *late, *advanced]
        if not any(map(_takes_long, hiding)):
            return run
        self.busy.update(hiding)
        return [*_without(head, delayed), Start(node), *hiding, node, *_without(tail, advanced)]

    def _independent_before(self, head: list[Item], readers: set[fx.Node], needed: float) -> list[Item]:
        """Return the last matmuls of ``head`` that none of ``readers``, the nodes up to the wait, reads."""
        independent: list[Item] = []
        for item in reversed(head):
            if needed <= 0:
                break
            if _takes_long(item) and item not in self.busy and not _users([node_of(item)]) & readers:
                independent.insert(0, item)
                needed -= self._hides([item])
        return independent

    def _independent_after(self, node: fx.Node, tail: list[Item], needed: float) -> list[Item]:
        """Return the first matmuls of ``tail`` that do not depend on ``node``, with the items that they need."""
        dependent: set[Item] = {node}
        independent: list[Item] = []
        for item in tail:
            if needed <= 0:
                break
            free = not isinstance(item, Start) and op_spec(item).start is None and item not in self.busy
            if free and not dependent.intersection(_inputs(node_of(item))):
                independent.append(item)
                needed -= self._hides([item])
            else:
                dependent.add(item)
        while independent and not _takes_long(independent[-1]):
            independent.pop()
        return independent

    def _hides(self, items: Iterable[Item]) -> float:
        return sum(self.seconds(node_of(item)) for item in items if _takes_long(item))

    # -- parameters and their gradients

    def _state(self, order: list[Item]) -> list[Item]:
        """Return the order with gathers of parameters and waits for scatters of gradients in new places."""
        place: dict[Item, int] = {item: i for i, item in enumerate(order)}
        matmuls_before = list(accumulate(map(_takes_long, order), initial=0))
        insertions: dict[int, list[Item]] = defaultdict(list)  # before the item at an index
        self._insert_gathers(order, place, matmuls_before, insertions)
        self._insert_scatters(order, place, matmuls_before, insertions)
        ordered: dict[Item, None] = {}
        moved = {*self.gathers, *self.scatters}
        for i, item in enumerate([*order, None]):
            ordered.update(dict.fromkeys(insertions[i]))
            if item is not None and item not in moved:
                ordered.setdefault(item)
        return list(ordered)

    def _insert_gathers(
        self, order: list[Item], place: dict[Item, int], matmuls_before: list[int], insertions: dict[int, list[Item]]
    ) -> None:
        """Start gathers when the block before has its parameters, and wait for them before their first use."""
        first_use = {n: _first_use(n, place) for n in self.gathers}
        last_block = 0
        for unit in _units(sorted(self.gathers, key=first_use.__getitem__)):
            first = min(first_use[n] for n in unit)
            begin = max(last_block, _a_block_earlier(order, first, {block_of(n) for n in unit}))
            for node in unit:
                if matmuls_before[first_use[node]] > matmuls_before[begin]:
                    insertions[begin] += [*_needed(node, place, begin), Start(node)]
                insertions[first_use[node]].append(node)
            last_block = first

    def _insert_scatters(
        self, order: list[Item], place: dict[Item, int], matmuls_before: list[int], insertions: dict[int, list[Item]]
    ) -> None:
        """Start scatters in their place, and wait for them before those of the next block."""
        units = _units(self.scatters)
        for number, unit in enumerate(units, 1):
            end = place[units[number][0]] if number < len(units) else len(order)
            for node in unit:
                begin = place[node]
                if matmuls_before[end] > matmuls_before[begin]:
                    insertions[begin].append(Start(node))
                    insertions[end].append(node)
                else:
                    insertions[begin].append(node)


def _first_use(gather: fx.Node, place: dict[Item, int]) -> int:
    """Return the index of the first item that reads a gathered parameter, or of the gather itself."""
    indices = (_first(place, user) for user in _users([gather]))
    return min((index for index in indices if index >= 0), default=place[gather])


def _units(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return the collectives in groups: of one block, or between two blocks."""
    return [list(unit) for _, unit in groupby(nodes, key=block_of)]


def _a_block_earlier(order: Sequence[Item], place: int, own: set[Block | None]) -> int:
    """Return the first index from which at most one other block is before ``place``."""
    seen: set[Hashable] = set()
    for i in range(place - 1, -1, -1):
        block = block_of(node_of(order[i]))
        if block is not None and block not in own:
            seen.add(block)
        if len(seen) > 1:
            return i + 1
    return 0


def _splits(node: fx.Node) -> bool:
    """Return whether a node is a collective with a start."""
    return op_spec(node).start is not None and op_spec(node).communicates


def _first(place: dict[Item, int], node: fx.Node) -> int:
    """Return the index at which a node reads its inputs; -1 in another function."""
    return place.get(Start(node), place.get(node, -1))


def _inputs(node: fx.Node) -> set[fx.Node]:
    return {source_of(n) for n in node.all_input_nodes}


def _needed(node: fx.Node, place: dict[Item, int], begin: int) -> list[fx.Node]:
    """Return the copies of parameters that a gather reads and that are not computed yet at index ``begin``."""
    late = [x for x in dict.fromkeys(map(source_of, node.all_input_nodes)) if place.get(x, -1) >= begin]
    return list(chain.from_iterable((*_needed(x, place, begin), x) for x in late))


def _users(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that read any of ``nodes``, or one of its results."""
    return {user for n in nodes for pick in n.users for user in (pick.users if source_of(pick) is n else (pick,))}


def _without(items: Iterable[Item], others: Sequence[Item]) -> list[Item]:
    removed = set(others)
    return [item for item in items if item not in removed]


def _takes_long(item: Item) -> bool:
    return isinstance(item, fx.Node) and takes_long(item)


def _gathers_state(node: fx.Node) -> bool:
    stored = all(stored_in(n) or parameter_of(n) is not None for n in node.all_input_nodes)
    return op_spec(node).gathers and stored


def _scatters(node: fx.Node, settled: set[fx.Node]) -> bool:
    """Return whether a node computes gradients of parameters that nothing else reads."""
    if not op_spec(node).scatters:
        return False
    results = [user for user in node.users if is_getitem(user)] or [node]
    return all(n in settled and all(user.op == "output" for user in n.users) for n in results)
