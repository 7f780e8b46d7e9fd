"""A ``mask_mod`` as what the attention operator knows: a word on positions, and ids of these."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...ops.attention.blocks import Sight
from .terms import SYNONYMS, IndexTerm, NotFollowed

_MIRRORED = {operator.lt: operator.gt, operator.le: operator.ge, operator.gt: operator.lt, operator.ge: operator.le}
_ORDERS = frozenset(_MIRRORED)


@dataclass(frozen=True)
class FlexMask:
    """See :data:`quintnet_compiler.ops.attention.operator.attention`."""

    sight: Sight = Sight()
    padding: Tensor | None = None
    segments: Tensor | None = None
    groups: Tensor | None = None


def mask_of(mask_mod: Callable[..., Any], rows: Any, queries: int, keys: int, device: torch.device) -> FlexMask:
    """What ``mask_mod(b, h, q, k)`` says: conjunctions of causality, windows, chunks, equal ids of a query and a key,
    and what a key alone says; or these beside groups that see each other.

    Raises:
        NotFollowed: with what else it says.
    """
    found = mask_mod(*map(IndexTerm, "bhqk"))
    if not isinstance(found, IndexTerm):
        raise NotFollowed("what does not depend on an index")
    return _MaskReader(rows, queries, keys, device).conjunction(found)


@dataclass(frozen=True)
class _MaskReader:
    rows: Any
    queries: int
    keys: int
    device: torch.device

    def conjunction(self, term: IndexTerm) -> FlexMask:
        made = FlexMask()
        for one in _flat(term, operator.and_):
            made = self._with(made, one)
        return made

    def _with(self, made: FlexMask, one: IndexTerm) -> FlexMask:
        """What was found, and one more condition."""
        op, reads = _op(one), one.reads
        if "h" in reads:
            raise NotFollowed("heads that see different keys")
        if reads <= {"b", "k"}:
            seen = self._values(one, "k").bool()
            return replace(made, padding=seen if made.padding is None else made.padding & seen)
        if made.groups is not None:
            raise NotFollowed("alternatives beside other conditions")
        if op is operator.or_:
            return self._beside(made, list(_flat(one, operator.or_)))
        if op in _ORDERS:
            return replace(made, sight=_narrower(made.sight, _band(one)))
        if op is operator.eq:
            chunk = _chunk(one)
            if chunk and not made.sight.chunk:
                return replace(made, sight=replace(made.sight, chunk=chunk))
            if made.segments is None and made.groups is None:
                return replace(made, segments=self._ids(one))
            raise NotFollowed("several equalities of ids")
        raise NotFollowed(f"the function {getattr(op, '__name__', op)} of a query and a key")

    def _beside(self, made: FlexMask, several: list[IndexTerm]) -> FlexMask:
        """A mask, or a group whose members see each other."""
        if len(several) != 2 or made.groups is not None or made.segments is not None or made.sight != Sight():
            raise NotFollowed("alternatives beside other conditions, or more than two of them")
        for mask, group in (several, several[::-1]):
            try:
                shown = self.conjunction(mask)
            except NotFollowed:
                continue
            if shown.padding is not None or shown.groups is not None:
                continue
            groups = self._groups(group, shown)
            if groups is not None:
                return replace(shown, groups=groups, padding=made.padding)
        raise NotFollowed("alternatives of which none is a group or a prefix")

    def _groups(self, term: IndexTerm, beside: FlexMask) -> Tensor | None:
        """Ids of groups, -1 for none."""
        if self.queries != self.keys:
            return None
        parts = list(_flat(term, operator.and_))
        if term.reads <= {"b", "k"} and beside == FlexMask(Sight(causal=True)) and _before(term):
            return torch.where(self._values(term, "k").bool(), 0, -1)  # queries behind a prefix see it anyway
        if len(parts) == 2:
            for equal, least in (parts, parts[::-1]):
                if _op(equal) is operator.eq and _op(least) is operator.ge and _is(least.args[1], 0):
                    ids, told = self._ids(equal), least.args[0]
                    if any(side.same(told, turned=False) for side in _sides(equal)):
                        return ids
            for query, key in (parts, parts[::-1]):
                if query.reads <= {"b", "q"} and query.same(key):
                    return torch.where(self._values(query, "q").bool(), 0, -1)
        return None

    def _ids(self, equal: IndexTerm) -> Tensor:
        """Of an equality of the same function of a query and of a key."""
        query, key = _sides(equal)
        if not (query.reads <= {"b", "q"} and query.same(key)):
            raise NotFollowed("an equality of two different functions of a query and a key")
        if self.queries != self.keys:
            raise NotFollowed("ids of as many queries as keys only")
        ids = self._values(query, "q")
        if ids.is_floating_point() or ids.is_complex():
            raise NotFollowed("ids that are no whole numbers")
        return ids.long()

    def _values(self, term: IndexTerm, name: str) -> Tensor:
        """Of all rows and positions [B, length]."""
        length = self.keys if name == "k" else self.queries
        index = {
            "b": torch.arange(self.rows, device=self.device)[:, None],
            name: torch.arange(length, device=self.device)[None, :],
        }
        made = term.at(index)
        return torch.as_tensor(made, device=self.device).expand(self.rows, length)


def _op(term: Any) -> Any:
    if not isinstance(term, IndexTerm):
        return None
    return term.op if isinstance(term.op, str) else SYNONYMS.get(term.op, term.op)


def _flat(term: Any, op: Any) -> Iterator[IndexTerm]:
    if not isinstance(term, IndexTerm):
        raise NotFollowed("what does not depend on an index")
    if _op(term) is op:
        for one in term.args:
            yield from _flat(one, op)
    elif not _neutral(term, op):
        yield term


def _neutral(term: IndexTerm, op: Any) -> bool:
    """Whether it is what torch's ``and_masks`` and ``or_masks`` begin with."""
    return term.op is (Tensor.new_ones if op is operator.and_ else Tensor.new_zeros)


def _is(x: Any, number: int) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x == number


def _sides(equal: IndexTerm) -> tuple[IndexTerm, IndexTerm]:
    """The query's and the key's."""
    a, b = equal.args
    if not (isinstance(a, IndexTerm) and isinstance(b, IndexTerm)):
        raise NotFollowed("a query's own value")
    return (b, a) if "k" in a.reads else (a, b)


def _chunk(equal: IndexTerm) -> int:
    """The size where both sides are places divided by it, else 0."""
    query, key = _sides(equal)
    for side, name in ((query, "q"), (key, "k")):
        if _op(side) is not operator.floordiv or _op(side.args[0]) != name or not isinstance(side.args[1], int):
            return 0
    return int(query.args[1]) if query.args[1] == key.args[1] > 0 else 0


def _linear(x: Any) -> tuple[int, int, int]:
    """How often a query's place, a key's, and 1 are in a sum."""
    if isinstance(x, int) and not isinstance(x, bool):
        return 0, 0, x
    op = _op(x)
    if op in ("q", "k"):
        return (1, 0, 0) if op == "q" else (0, 1, 0)
    if op in (operator.add, operator.sub):
        sign = 1 if op is operator.add else -1
        (a, b, c), (d, e, f) = map(_linear, x.args)
        return a + sign * d, b + sign * e, c + sign * f
    raise NotFollowed("a comparison of more than a query's place with a key's")


def _band(term: IndexTerm) -> Sight:
    """Causality or a window, from a comparison of places."""
    op = _op(term)
    (a, b, c), (d, e, f) = map(_linear, term.args)
    query, key, rest = a - d, b - e, c - f  # query * i + key * j + rest, compared with 0
    if (query, key) == (-1, 1):
        op, rest = _MIRRORED[op], -rest
    elif (query, key) != (1, -1):
        raise NotFollowed("a comparison of something else than a distance")
    if op in (operator.ge, operator.gt):
        if -rest + (op is operator.gt) == 0:
            return Sight(causal=True)
        raise NotFollowed("keys that are some places ahead, or queries that don't see themselves")
    window = -rest + (op is operator.le)  # i - j < window
    if window < 1:
        raise NotFollowed("a window that ends before the query")
    return Sight(window=window)


def _narrower(a: Sight, b: Sight) -> Sight:
    window = min(x for x in (a.window, b.window) if x) if a.window or b.window else 0
    return Sight(a.causal or b.causal, window, a.chunk)


def _before(term: IndexTerm) -> bool:
    """Whether it says that a key is before some place of its row."""
    op = _op(term)
    if op not in _ORDERS:
        return False
    place, bound, less = (*term.args, (operator.lt, operator.le))
    if _op(bound) == "k":
        place, bound, less = bound, place, (operator.gt, operator.ge)
    return _op(place) == "k" and op in less and (not isinstance(bound, IndexTerm) or bound.reads <= {"b"})
