"""Convert a ``mask_mod`` to masks of the attention operator: a rule on positions, and ids of positions."""

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
    """A mask of :data:`quintnet_compiler.ops.attention.operator.attention`."""

    sight: Sight = Sight()
    padding: Tensor | None = None
    segments: Tensor | None = None
    groups: Tensor | None = None


def mask_of(mask_mod: Callable[..., Any], rows: Any, queries: int, keys: int, device: torch.device) -> FlexMask:
    """Return the mask of ``mask_mod(b, h, q, k)``.

    It may be a conjunction of causality, windows, chunks, equal ids of query and key, and conditions on keys alone; or
    such a mask or groups that see each other.

    Raises:
        NotFollowed: if it is anything else.
    """
    term = mask_mod(*map(IndexTerm, "bhqk"))
    if not isinstance(term, IndexTerm):
        raise NotFollowed("what does not depend on an index")
    return _MaskReader(rows, queries, keys, device).conjunction(term)


@dataclass(frozen=True)
class _MaskReader:
    rows: Any
    queries: int
    keys: int
    device: torch.device

    def conjunction(self, term: IndexTerm) -> FlexMask:
        """Return the mask of a conjunction."""
        mask = FlexMask()
        for condition in _flat(term, operator.and_):
            mask = self._with(mask, condition)
        return mask

    def _with(self, mask: FlexMask, condition: IndexTerm) -> FlexMask:
        """Return a mask with one more condition."""
        op, reads = _op(condition), condition.reads
        if "h" in reads:
            raise NotFollowed("heads that see different keys")
        if reads <= {"b", "k"}:
            seen = self._values(condition, "k").bool()
            return replace(mask, padding=seen if mask.padding is None else mask.padding & seen)
        if mask.groups is not None:
            raise NotFollowed("alternatives beside other conditions")
        if op is operator.or_:
            return self._alternatives(mask, list(_flat(condition, operator.or_)))
        if op in _ORDERS:
            return replace(mask, sight=_narrower(mask.sight, _band(condition)))
        if op is operator.eq:
            chunk = _chunk(condition)
            if chunk and not mask.sight.chunk:
                return replace(mask, sight=replace(mask.sight, chunk=chunk))
            if mask.segments is None and mask.groups is None:
                return replace(mask, segments=self._ids(condition))
            raise NotFollowed("several equalities of ids")
        raise NotFollowed(f"the function {getattr(op, '__name__', op)} of a query and a key")

    def _alternatives(self, mask: FlexMask, terms: list[IndexTerm]) -> FlexMask:
        """Return ``mask`` with two alternatives: a mask, and a group whose members see each other."""
        if len(terms) != 2 or mask.groups is not None or mask.segments is not None or mask.sight != Sight():
            raise NotFollowed("alternatives beside other conditions, or more than two of them")
        for term, group in (terms, terms[::-1]):
            try:
                alternative = self.conjunction(term)
            except NotFollowed:
                continue
            if alternative.padding is not None or alternative.groups is not None:
                continue
            groups = self._groups(group, alternative)
            if groups is not None:
                return replace(alternative, groups=groups, padding=mask.padding)
        raise NotFollowed("alternatives of which none is a group or a prefix")

    def _groups(self, term: IndexTerm, alternative: FlexMask) -> Tensor | None:
        """Return ids of groups, -1 for none; None if the term is no group."""
        if self.queries != self.keys:
            return None
        parts = list(_flat(term, operator.and_))
        if term.reads <= {"b", "k"} and alternative == FlexMask(Sight(causal=True)) and _is_prefix(term):
            return torch.where(self._values(term, "k").bool(), 0, -1)  # queries after a prefix see it anyway
        return self._groups_of_two(parts) if len(parts) == 2 else None

    def _groups_of_two(self, parts: list[IndexTerm]) -> Tensor | None:
        """Return ids of groups where two terms hold: equal ids that are not negative, or one flag of both positions."""
        for equal, least in (parts, parts[::-1]):
            if _op(equal) is operator.eq and _op(least) is operator.ge and _is(least.args[1], 0):
                ids, bounded = self._ids(equal), least.args[0]
                if any(side.is_term(bounded, turned=False) for side in _sides(equal)):
                    return ids
        for query, key in (parts, parts[::-1]):
            if query.reads <= {"b", "q"} and query.is_term(key):
                return torch.where(self._values(query, "q").bool(), 0, -1)
        return None

    def _ids(self, equal: IndexTerm) -> Tensor:
        """Return the ids in an equality of the same function of a query and of a key."""
        query, key = _sides(equal)
        if not (query.reads <= {"b", "q"} and query.is_term(key)):
            raise NotFollowed("an equality of two different functions of a query and a key")
        if self.queries != self.keys:
            raise NotFollowed("ids of as many queries as keys only")
        ids = self._values(query, "q")
        if ids.is_floating_point() or ids.is_complex():
            raise NotFollowed("ids that are no whole numbers")
        return ids.long()

    def _values(self, term: IndexTerm, name: str) -> Tensor:
        """Return the values of a term for all rows and positions [B, length]."""
        length = self.keys if name == "k" else self.queries
        index = {
            "b": torch.arange(self.rows, device=self.device)[:, None],
            name: torch.arange(length, device=self.device)[None, :],
        }
        return torch.as_tensor(term.at(index), device=self.device).expand(self.rows, length)


def _op(term: Any) -> Any:
    if not isinstance(term, IndexTerm):
        return None
    return term.op if isinstance(term.op, str) else SYNONYMS.get(term.op, term.op)


def _flat(term: Any, op: Any) -> Iterator[IndexTerm]:
    if not isinstance(term, IndexTerm):
        raise NotFollowed("what does not depend on an index")
    if _op(term) is op:
        for part in term.args:
            yield from _flat(part, op)
    elif not _neutral(term, op):
        yield term


def _neutral(term: IndexTerm, op: Any) -> bool:
    """Return whether a term is the neutral one that torch's ``and_masks`` and ``or_masks`` begin with."""
    return term.op is (Tensor.new_ones if op is operator.and_ else Tensor.new_zeros)


def _is(x: Any, number: int) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x == number


def _sides(equal: IndexTerm) -> tuple[IndexTerm, IndexTerm]:
    """Return the query's side and the key's side of an equality."""
    a, b = equal.args
    if not (isinstance(a, IndexTerm) and isinstance(b, IndexTerm)):
        raise NotFollowed("a query's own value")
    return (b, a) if "k" in a.reads else (a, b)


def _chunk(equal: IndexTerm) -> int:
    """Return the size if both sides are positions divided by it, else 0."""
    query, key = _sides(equal)
    for side, name in ((query, "q"), (key, "k")):
        if _op(side) is not operator.floordiv or _op(side.args[0]) != name or not isinstance(side.args[1], int):
            return 0
    return int(query.args[1]) if query.args[1] == key.args[1] > 0 else 0


def _linear(x: Any) -> tuple[int, int, int]:
    """Return the coefficients of a query's position, a key's position, and 1 in a sum."""
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
    """Return causality or a window, from a comparison of positions."""
    op = _op(term)
    (a, b, c), (d, e, f) = map(_linear, term.args)
    query, key, constant = a - d, b - e, c - f  # query * i + key * j + rest, compared with 0
    if (query, key) == (-1, 1):
        op, constant = _MIRRORED[op], -constant
    elif (query, key) != (1, -1):
        raise NotFollowed("a comparison of something else than a distance")
    if op in (operator.ge, operator.gt):
        if -constant + (op is operator.gt) == 0:
            return Sight(causal=True)
        raise NotFollowed("keys that are some places ahead, or queries that don't see themselves")
    window = -constant + (op is operator.le)  # i - j < window
    if window < 1:
        raise NotFollowed("a window that ends before the query")
    return Sight(window=window)


def _narrower(a: Sight, b: Sight) -> Sight:
    window = min(x for x in (a.window, b.window) if x) if a.window or b.window else 0
    return Sight(a.causal or b.causal, window, a.chunk)


def _is_prefix(term: IndexTerm) -> bool:
    """Return whether a term requires that a key is before some position of its row."""
    op = _op(term)
    if op not in _ORDERS:
        return False
    place, bound, less = (*term.args, (operator.lt, operator.le))
    if _op(bound) == "k":
        place, bound, less = bound, place, (operator.gt, operator.ge)
    return _op(place) == "k" and op in less and (not isinstance(bound, IndexTerm) or bound.reads <= {"b"})
