"""What batches have in common that one capture serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..compat.torch import pytree
from ..core.errors import CompileError, Where
from .containers import held

ROWS = "rows"
SHORTEST = 2  # code often does something else with one position


def plain_batch(batch: Any) -> tuple[Any, ...] | dict[str, Any]:
    """A batch as a plain tuple or dict, with what torch.export takes apart; see :mod:`.containers`.

    Raises:
        CompileError: QN102 if it is neither a tuple (or list), nor a mapping.
    """
    if isinstance(batch, (tuple, list)):
        return tuple(map(held, batch))
    if isinstance(batch, Mapping):
        return {name: held(value) for name, value in batch.items()}
    fix = "pass what one step consumes: a tuple (arguments) or a dict (keyword arguments)"
    if type(batch) in pytree.SUPPORTED_NODES or is_dataclass(batch):
        fix = f"pass a tuple, which holds it as the model's first argument: ({type(batch).__name__}(...),)"
    raise CompileError("QN102", f"the batch is a {type(batch).__name__}", fix=fix)


@dataclass(frozen=True)
class FlatBatch:
    """A batch, its leaves and its structure, and how many rows it has, see :func:`rows_among`: taken apart once a
    step."""

    batch: tuple[Any, ...] | dict[str, Any]
    leaves: list[Any]
    structure: pytree.TreeSpec
    rows: int

    @classmethod
    def of(cls, batch: Any, rows_at: Mapping[pytree.TreeSpec, int] = MappingProxyType({})) -> FlatBatch:
        """``rows_at``: which leaf has the rows, of batches of some structures.

        Raises:
            CompileError: QN102 if it is neither a tuple (or list) nor a mapping, or has no tensor with a dim, or one
                that is sparse or nested.
        """
        plain = plain_batch(batch)
        leaves, structure = pytree.tree_flatten(plain)
        sizes: list[int] = []
        for x in leaves:
            if isinstance(x, Tensor):
                if x.layout is not torch.strided or x.is_nested:
                    raise _irregular(x)
                sizes += x.shape[:1]
        if rows_at and structure in rows_at:
            leaf = leaves[rows_at[structure]]
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return cls(plain, leaves, structure, leaf.shape[0])
        if sizes:
            return cls(plain, leaves, structure, rows_among(sizes))
        raise CompileError("QN102", _without_rows(leaves), fix="pass a tuple or a dict of tensors that have rows")

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in self.leaves if isinstance(x, Tensor)]


def _irregular(x: Tensor) -> CompileError:
    nested = x.is_nested or x.layout is torch.jagged
    return CompileError(
        "QN102",
        f"the batch holds a tensor that is {'nested' if nested else 'sparse'}, of which ranks cannot take rows",
        fix="pad it to a plain tensor, and mask" if nested else "pass it as a plain tensor: x.to_dense()",
    )


def rows_among(sizes: Sequence[int]) -> int:
    """Return how many rows a batch has whose tensors have these sizes of dim 0.

    It is the first one, unless that tensor stands alone (a temperature, weights of classes, a mask of positions) and
    others agree: where no other tensor has its size, the size of the last tensor counts if another one shares it; and
    a size of 1 is that of no rows beside a larger one. A model that cannot run with other sizes there says more, see
    :class:`RowsElsewhere`.

    >>> rows_among([8, 8]), rows_among([8, 5]), rows_among([1, 8]), rows_among([5, 8, 8])
    (8, 8, 8, 8)
    """
    first, last = sizes[0], sizes[-1]
    if sizes.count(first) > 1:
        return first
    if sizes.count(last) > 1:
        return last
    return next((size for size in sizes if size > 1), first) if first == 1 else first


def _without_rows(leaves: Sequence[Any]) -> str:
    """Why a batch has no rows."""
    if any(isinstance(x, Tensor) for x in leaves):
        return "no tensor of the batch has a dim, whose size would be the number of rows"
    kinds = ", ".join(dict.fromkeys(type(x).__name__ for x in leaves))
    return f"the batch holds no tensor, but {kinds}" if kinds else "the batch holds no tensor"


def batch_size_of(batch: Any) -> int:
    """The number of rows of ``batch``, see :func:`rows_among`.

    Raises:
        CompileError: QN102 if there is no tensor with a dim.
    """
    return FlatBatch.of(batch).rows


class RowsElsewhere(CompileError):
    """The number of rows is not the size that was taken for it: a model cannot be traced with other sizes there, and
    can with other sizes of dim 0 of another tensor. ``structure``: of the batch; ``leaf``: that tensor's place."""

    def __init__(self, structure: pytree.TreeSpec, leaf: int, path: str, where: Where) -> None:
        super().__init__(
            "QN101",
            "the model's code does not run with other sizes of dim 0 of what was taken for the rows of the batch; it "
            f"does with other sizes of dim 0 of {path}",
            where=where,
            fix=f"put {path}, or another tensor that has rows, first in the batch",
        )
        self.structure, self.leaf = structure, leaf


@dataclass(frozen=True)
class TensorForm:
    """A tensor's dtype, and for each dim its size, or the name of a size that varies."""

    dtype: torch.dtype
    sizes: tuple[int | str, ...]

    def meets(self, other: TensorForm) -> bool:
        """Whether the same can be said of both, but for sizes other than the number of rows."""
        same = self.dtype is other.dtype and len(self.sizes) == len(other.sizes)
        return same and (self.sizes[:1] == (ROWS,)) == (other.sizes[:1] == (ROWS,))


@dataclass(frozen=True)
class BatchForm:
    """The structure of a batch, and its leaves: a :class:`TensorForm` of each tensor, and everything else as it is.
    ``limits``: the least and the greatest value of each size that varies (None: any)."""

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    limits: Mapping[str, tuple[int, int | None]] = field(default_factory=lambda: {ROWS: (1, None)})

    @classmethod
    def of(cls, batch: Any, rows: int, like: BatchForm | None = None) -> BatchForm:
        """The form of ``batch``: only the number of rows varies. A tensor has rows if its first dim is as long as the
        batch; of a further batch, those that have rows in ``like``.

        Raises:
            CompileError: QN102 if there is an array or a number of NumPy in it.
        """
        leaves, structure = pytree.tree_flatten(batch)
        _refuse_numpy(batch, leaves)
        before: list[Any] = (
            list(like.leaves) if like is not None and like.structure == structure else [None] * len(leaves)
        )

        def form(x: Any, known: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            has_rows = x.dim() > 0 and x.shape[0] == rows
            if isinstance(known, TensorForm) and len(known.sizes) == x.dim():
                has_rows = has_rows and known.sizes[:1] == (ROWS,)
            return TensorForm(x.dtype, (ROWS, *x.shape[1:]) if has_rows else tuple(x.shape))

        return cls(structure, tuple(map(form, leaves, before)))

    def rows_in(self, batch: Any) -> int:
        """The number of rows of a batch of this form."""
        for x, form in zip(pytree.tree_leaves(batch), self.leaves, strict=True):
            if isinstance(form, TensorForm) and form.sizes[:1] == (ROWS,):
                rows: int = x.shape[0]
                return rows
        return batch_size_of(batch)

    def sizes(self, given: FlatBatch) -> Mapping[str, int] | None:
        """The sizes that vary, by name, if a batch has this form; else None."""
        if given.structure != self.structure:
            return None
        found = {ROWS: given.rows}
        for x, form in zip(given.leaves, self.leaves, strict=True):
            if not isinstance(form, TensorForm):
                if not _same(x, form):
                    return None
                continue
            if not isinstance(x, Tensor) or x.dtype is not form.dtype or x.dim() != len(form.sizes):
                return None
            for size, wanted in zip(x.shape, form.sizes, strict=True):
                if size != (found.setdefault(wanted, size) if isinstance(wanted, str) else wanted):
                    return None
        within = all(
            low <= found[name] and (high is None or found[name] <= high) for name, (low, high) in self.limits.items()
        )
        return found if within else None

    def widened(self, other: BatchForm) -> BatchForm | None:
        """The form of both, with a name for each size in which they differ: sizes that differ in the same way have one
        name. None if they differ in more than sizes, or not at all."""
        if self.structure != other.structure:
            return None
        names: dict[tuple[int | str, int | str], str] = {}
        leaves: list[Any] = []
        for one, two in zip(self.leaves, other.leaves, strict=True):
            tensors = isinstance(one, TensorForm), isinstance(two, TensorForm)
            if tensors != (True, True):
                if any(tensors) or not _same(one, two):
                    return None
                leaves.append(one)
                continue
            if not one.meets(two):
                return None
            sizes = [
                a if a == b else names.setdefault((a, b), f"length{len(names)}")
                for a, b in zip(one.sizes, two.sizes, strict=True)
            ]
            leaves.append(replace(one, sizes=tuple(sizes)))
        limits = {ROWS: self.limits[ROWS], **dict.fromkeys(names.values(), (SHORTEST, None))}
        return BatchForm(self.structure, tuple(leaves), limits) if names else None

    def difference(self, first: BatchForm) -> str:
        """In what a batch of this form differs from one of the form ``first``, for people; "" if in nothing."""
        if self.structure != first.structure:
            return f"the batch is {self}, and the first one was {first}"
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(self.leaves), self.structure))
        pairs = zip(paths, self.leaves, first.leaves, strict=True)
        odd = [
            f"batch{pytree.keystr(path)} is {_shown(now)}, and was {_shown(old)}"
            for (path, _), now, old in pairs
            if not _same(now, old)
        ]
        return "; ".join(odd[:4])

    def __str__(self) -> str:
        return str(pytree.tree_unflatten([_Shown(_shown(leaf)) for leaf in self.leaves], self.structure))

    @property
    def lengths(self) -> bool:
        """Whether more varies than the number of rows."""
        return len(self.limits) > 1


def _same(one: Any, two: Any) -> bool:
    """Whether code that is given one or the other does the same: 0.0 is not -0.0, 1 is not True, and nan is nan."""
    if type(one) is not type(two):
        return False
    return repr(one) == repr(two) if isinstance(one, (float, complex)) else bool(one == two)


def _refuse_numpy(batch: Any, leaves: list[Any]) -> None:
    if any(map(_of_numpy, leaves)):
        paths, _ = pytree.tree_flatten_with_path(batch)
        path, x = next((path, x) for path, x in paths if _of_numpy(x))
        raise CompileError(
            "QN102",
            f"batch{pytree.keystr(path)} is a numpy.{type(x).__name__}",
            fix="pass torch.as_tensor(...) of it, or a Python number (.item()) if it decides what the model does",
        )


def _of_numpy(x: Any) -> bool:
    return type(x).__module__ == "numpy" and not isinstance(x, (float, complex, str))  # some are Python's as well


class _Shown(str):
    """Text without quotation marks."""

    __slots__ = ()
    __repr__ = str.__str__


def _shown(leaf: Any) -> str:
    if not isinstance(leaf, TensorForm):
        return repr(leaf)[:80]
    return f"{str(leaf.dtype).removeprefix('torch.')}[{', '.join(map(str, leaf.sizes))}]"
