"""Expressions of the four indices of a ``mask_mod``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class NotFollowed(Exception):
    """A mask that is not supported."""


@dataclass(frozen=True, eq=False)
class IndexTerm:
    """``op`` of ``args`` (terms, numbers, tensors), or an index, whose name ``op`` is: "b", "h", "q" or "k"."""

    op: Any
    args: tuple[Any, ...] = ()

    @property
    def reads(self) -> frozenset[str]:
        """Return the indices in it."""
        if isinstance(self.op, str):
            return frozenset([self.op])
        return frozenset().union(*(x.reads for x in _terms(self.args)))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> IndexTerm:
        if kwargs:
            raise NotFollowed(f"{getattr(func, '__name__', func)} with named arguments")
        return IndexTerm(func, tuple(args))

    def __bool__(self) -> bool:
        raise NotFollowed("an if, and, or, not of Python on a value of an index")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        method = getattr(Tensor, name)
        if not callable(method):
            raise NotFollowed(f"the attribute {name} of an index")

        def called(*args: Any, **kwargs: Any) -> IndexTerm:
            if kwargs and method not in CONSTANTS:
                raise NotFollowed(f"{name} with named arguments")
            return IndexTerm(method, (self, *args))

        return called

    def at(self, index: Mapping[str, Tensor]) -> Any:
        """Return its values at these indices."""
        if isinstance(self.op, str):
            return index[self.op]
        looked_up = _lookup(self)
        if looked_up is not None and (values := _whole(*looked_up, index)) is not None:
            return values
        return self.op(*(_at(x, index) for x in self.args))

    def is_term(self, other: Any, *, turned: bool = True) -> bool:
        """Return whether it is ``other``, with the index of a query in place of that of a key if ``turned``."""
        if not isinstance(other, IndexTerm) or len(self.args) != len(other.args):
            return False
        if isinstance(self.op, str) or isinstance(other.op, str):
            return bool(other.op == ("k" if turned and self.op == "q" else self.op))
        return self.op == other.op and all(_same(a, b, turned) for a, b in zip(self.args, other.args, strict=True))


CONSTANTS = frozenset({Tensor.new_ones, Tensor.new_zeros})  # what torch's and_masks and or_masks begin with


def _same(a: Any, b: Any, turned: bool) -> bool:
    if isinstance(a, IndexTerm):
        return a.is_term(b, turned=turned)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(_same(x, y, turned) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    return type(a) is type(b) and bool(a == b)


def _terms(args: Any) -> list[IndexTerm]:
    if isinstance(args, IndexTerm):
        return [args]
    return [x for arg in args for x in _terms(arg)] if isinstance(args, (tuple, list)) else []


def _at(x: Any, index: Mapping[str, Tensor]) -> Any:
    if isinstance(x, (tuple, list)):
        return type(x)(_at(part, index) for part in x)
    return x.at(index) if isinstance(x, IndexTerm) else x


def _lookup(term: IndexTerm) -> tuple[Tensor, tuple[str, ...]] | None:
    """Return a tensor and the plain indices at which it is read, or None."""
    if term.op is not Tensor.__getitem__ or not isinstance(term.args[0], Tensor):
        return None
    places = term.args[1] if isinstance(term.args[1], tuple) else (term.args[1],)
    names = tuple(x.op for x in places if isinstance(x, IndexTerm) and isinstance(x.op, str))
    return (term.args[0], names) if len(names) == len(places) == term.args[0].dim() else None


def _whole(table: Tensor, names: tuple[str, ...], index: Mapping[str, Tensor]) -> Tensor | None:
    """Return ids of all rows and positions from the table itself: a lookup by indices would mix rows."""
    if names == ("b",):
        return table[:, None]
    if names in (("q",), ("k",)):
        return table[None, : index[names[0]].shape[1]]
    return table[:, : index[names[1]].shape[1]] if names in (("b", "q"), ("b", "k")) else None


def _operator(function: Callable[..., Any], *, swapped: bool = False) -> Any:
    def made(self: IndexTerm, *others: Any) -> IndexTerm:
        return IndexTerm(function, (*others, self) if swapped else (self, *others))

    return made


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor"):
    _function = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(IndexTerm, f"__{_name}__", _operator(_function))
    setattr(IndexTerm, f"__r{_name}__", _operator(_function, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "invert", "abs"):
    setattr(IndexTerm, f"__{_name}__", _operator(getattr(operator, _name)))

SYNONYMS: Mapping[Any, Any] = {
    torch.logical_and: operator.and_, torch.bitwise_and: operator.and_, Tensor.logical_and: operator.and_,
    Tensor.__and__: operator.and_, Tensor.__rand__: operator.and_, torch.logical_or: operator.or_,
    torch.bitwise_or: operator.or_, Tensor.logical_or: operator.or_, Tensor.__or__: operator.or_,
    Tensor.__ror__: operator.or_,
    torch.eq: operator.eq, torch.ge: operator.ge, torch.gt: operator.gt, torch.le: operator.le, torch.lt: operator.lt,
    Tensor.eq: operator.eq, Tensor.ge: operator.ge, Tensor.gt: operator.gt, Tensor.le: operator.le,
    Tensor.lt: operator.lt, Tensor.__eq__: operator.eq, Tensor.__ge__: operator.ge, Tensor.__gt__: operator.gt,
    Tensor.__le__: operator.le, Tensor.__lt__: operator.lt,
    torch.add: operator.add, torch.sub: operator.sub, torch.floor_divide: operator.floordiv,
    Tensor.__rsub__: lambda a, b: b - a,
}  # fmt: skip
