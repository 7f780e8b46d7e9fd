"""The form of a batch: what batches that one capture serves have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..compat.torch import pytree
from ..core.errors import CompileError, Where
from .containers import as_lists, held

ROWS = "rows"
MIN_LENGTH = 2  # code often does something else with one position


def plain_batch(batch: Any) -> tuple[Any, ...] | dict[str, Any]:
    """Return a batch as a plain tuple or dict of containers that torch.export accepts; see :mod:`.containers`.

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
    """A batch that was flattened, once a step.

    Attributes:
        batch: the batch as a plain tuple or dict.
        leaves: its leaves, in order.
        structure: how they are nested.
        rows: the number of rows, see :func:`rows_among`.
    """

    batch: tuple[Any, ...] | dict[str, Any]
    leaves: list[Any]
    structure: pytree.TreeSpec
    rows: int

    @classmethod
    def flatten(cls, batch: Any, rows_at: Mapping[pytree.TreeSpec, int] = MappingProxyType({})) -> FlatBatch:
        """Flatten ``batch``. ``rows_at``: the index of the leaf that has the rows, for batches of some structures.

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
        """Return the leaves that are tensors."""
        return [x for x in self.leaves if isinstance(x, Tensor)]


def _irregular(x: Tensor) -> CompileError:
    nested = x.is_nested or x.layout is torch.jagged
    return CompileError(
        "QN102",
        f"the batch holds a tensor that is {'nested' if nested else 'sparse'}, of which ranks cannot take rows",
        fix="pad it to a plain tensor, and mask" if nested else "pass it as a plain tensor: x.to_dense()",
    )


def _refuse_packed(batch: Any) -> None:
    if any(map(_is_packed, pytree.tree_leaves(batch, is_leaf=_is_packed))):
        raise CompileError(
            "QN102",
            "the batch holds a packed sequence (PackedSequence), in which rows have no place of their own",
            fix="pass the padded tensor and the lengths, and hide what pads with a mask",
        )


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def rows_among(sizes: Sequence[int]) -> int:
    """Return the number of rows of a batch whose tensors have these sizes of dim 0.

    It is the first size, unless only that tensor has it (a temperature, weights of classes, a mask of positions) and
    others agree: then it is the size of the last tensor, if another one shares it. A size of 1 does not count if
    another is larger. A model that cannot run with other sizes there says more, see :class:`RowsElsewhere`.

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
    """Return why a batch has no rows."""
    if any(isinstance(x, Tensor) for x in leaves):
        return "no tensor of the batch has a dim, whose size would be the number of rows"
    kinds = ", ".join(dict.fromkeys(type(x).__name__ for x in leaves))
    return f"the batch holds no tensor, but {kinds}" if kinds else "the batch holds no tensor"


def batch_size_of(batch: Any) -> int:
    """Return the number of rows of ``batch``, see :func:`rows_among`.

    Raises:
        CompileError: QN102 if there is no tensor with a dim.
    """
    return FlatBatch.flatten(batch).rows


class RowsElsewhere(CompileError):
    """The size that was taken for the number of rows is another one.

    The model cannot be traced with other sizes there, and can with other sizes of dim 0 of another tensor.

    Attributes:
        structure: the structure of the batch.
        leaf: the index of that tensor among the leaves.
    """

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
        """Return whether both are the same but for sizes other than the number of rows."""
        same = self.dtype is other.dtype and len(self.sizes) == len(other.sizes)
        return same and (self.sizes[:1] == (ROWS,)) == (other.sizes[:1] == (ROWS,))

    def binds(self, x: Any, sizes: dict[str, int]) -> bool:
        """Return whether ``x`` has this form, and add the sizes that vary to ``sizes``, with which it must agree."""
        if not isinstance(x, Tensor) or x.dtype is not self.dtype or x.dim() != len(self.sizes):
            return False
        for size, expected in zip(x.shape, self.sizes, strict=True):
            if isinstance(expected, str):
                expected = sizes.setdefault(expected, size)
            if size != expected:
                return False
        return True


def zeros_of(x: Any, shape: tuple[int, ...], device: torch.device) -> Any:
    """Return zeros with the dtype of ``x`` if that is a tensor, else ``x``."""
    if not isinstance(x, Tensor):
        return x
    return torch.zeros(shape, dtype=x.dtype, device=device, requires_grad=x.requires_grad)


@dataclass(frozen=True)
class BatchForm:
    """The structure of a batch, and its leaves.

    Attributes:
        structure: how leaves are nested.
        leaves: a :class:`TensorForm` for each tensor, and everything else as it is.
        limits: the least and the greatest value of each size that varies (None: any).
    """

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    limits: Mapping[str, tuple[int, int | None]] = field(default_factory=lambda: {ROWS: (1, None)})

    @classmethod
    def of_batch(cls, batch: Any, rows: int, like: BatchForm | None = None) -> BatchForm:
        """Return the form of ``batch``, in which only the number of rows varies.

        A tensor has rows if its first dim is as long as the batch; in a further batch, only if it has rows in ``like``.

        Raises:
            CompileError: QN102 if there is an array or a number of NumPy in it, or a packed sequence.
        """
        leaves, structure = pytree.tree_flatten(batch)
        _refuse_numpy(batch, leaves)
        _refuse_packed(batch)
        earlier_forms: list[Any] = [None] * len(leaves)
        if like is not None and like.structure == structure:
            earlier_forms = list(like.leaves)

        def form(x: Any, earlier: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            has_rows = x.dim() > 0 and x.shape[0] == rows
            if isinstance(earlier, TensorForm) and len(earlier.sizes) == x.dim():
                has_rows = has_rows and earlier.sizes[:1] == (ROWS,)
            return TensorForm(x.dtype, (ROWS, *x.shape[1:]) if has_rows else tuple(x.shape))

        return cls(structure, tuple(map(form, leaves, earlier_forms)))

    def rows_in(self, batch: Any) -> int:
        """Return the number of rows of a batch of this form."""
        for x, form in zip(pytree.tree_leaves(batch), self.leaves, strict=True):
            if isinstance(form, TensorForm) and form.sizes[:1] == (ROWS,):
                rows: int = x.shape[0]
                return rows
        return batch_size_of(batch)

    def sample(self, batch: Any, device: torch.device) -> Any:
        """Return zeros with the sizes of ``batch``, but at least 2: export takes a size of 1 for a constant."""

        def zeros(x: Any, form: Any) -> Any:
            if not isinstance(form, TensorForm):
                return x
            pairs = zip(x.shape, form.sizes, strict=True)
            return zeros_of(x, tuple(max(size, 2) if isinstance(name, str) else size for size, name in pairs), device)

        leaves = zip(pytree.tree_leaves(batch), self.leaves, strict=True)
        return pytree.tree_unflatten([zeros(x, form) for x, form in leaves], self.structure)

    def dynamic_shapes(self) -> Any:
        """Return torch.export's description of the sizes that vary."""
        dims = {name: torch.export.Dim(name, min=low, max=high) for name, (low, high) in self.limits.items()}
        leaves = [
            {d: dims[size] for d, size in enumerate(leaf.sizes) if isinstance(size, str)} or None
            if isinstance(leaf, TensorForm)
            else None
            for leaf in self.leaves
        ]
        return as_lists(pytree.tree_unflatten(leaves, self.structure))

    def varying_sizes(self, batch: FlatBatch) -> Mapping[str, int] | None:
        """Return the sizes that vary, by name; None if the batch does not have this form."""
        if batch.structure != self.structure:
            return None
        sizes = {ROWS: batch.rows}
        for x, form in zip(batch.leaves, self.leaves, strict=True):
            fits = form.binds(x, sizes) if isinstance(form, TensorForm) else _same(x, form)
            if not fits:
                return None
        for name, (low, high) in self.limits.items():
            if sizes[name] < low or (high is not None and sizes[name] > high):
                return None
        return sizes

    def widened(self, other: BatchForm) -> BatchForm | None:
        """Return the form of both, with a name for each size in which they differ.

        Sizes that differ in the same way share a name. None if they differ in more than sizes, or not at all.
        """
        if self.structure != other.structure:
            return None
        names: dict[tuple[int | str, int | str], str] = {}
        leaves: list[Any] = []
        for ours, theirs in zip(self.leaves, other.leaves, strict=True):
            tensors = isinstance(ours, TensorForm), isinstance(theirs, TensorForm)
            if tensors != (True, True):
                if any(tensors) or not _same(ours, theirs):
                    return None
                leaves.append(ours)
                continue
            if not ours.meets(theirs):
                return None
            sizes = [
                a if a == b else names.setdefault((a, b), f"length{len(names)}")
                for a, b in zip(ours.sizes, theirs.sizes, strict=True)
            ]
            leaves.append(replace(ours, sizes=tuple(sizes)))
        limits = {ROWS: self.limits[ROWS], **dict.fromkeys(names.values(), (MIN_LENGTH, None))}
        return BatchForm(self.structure, tuple(leaves), limits) if names else None

    def difference_from(self, first: BatchForm) -> str:
        """Describe how a batch of this form differs from one of the form ``first``; "" if it does not."""
        if self.structure != first.structure:
            return f"the batch is {self}, and the first one was {first}"
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(self.leaves), self.structure))
        pairs = zip(paths, self.leaves, first.leaves, strict=True)
        changes = [
            f"batch{pytree.keystr(path)} is {_shown(new)}, and was {_shown(old)}"
            for (path, _), new, old in pairs
            if not _same(new, old)
        ]
        return "; ".join(changes[:4])

    def __str__(self) -> str:
        return str(pytree.tree_unflatten([_Shown(_shown(leaf)) for leaf in self.leaves], self.structure))

    @property
    def has_lengths(self) -> bool:
        """Return whether more varies than the number of rows."""
        return len(self.limits) > 1


def _same(a: Any, b: Any) -> bool:
    """Return whether code does the same with either value: 0.0 is not -0.0, 1 is not True, and nan is nan."""
    if type(a) is not type(b):
        return False
    return repr(a) == repr(b) if isinstance(a, (float, complex)) else bool(a == b)


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
