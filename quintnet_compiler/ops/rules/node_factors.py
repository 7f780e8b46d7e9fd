"""What functions that compute :class:`Factors` share: arguments by name, dims as factors, the plainest rules."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from ...compat.torch import schema
from ...core.annotations import facts, shape, tensor_inputs, values
from .notation import Dims, Factors, Notation, SpecFn

Named = list[tuple[str, ...]]


def argument(node: fx.Node, name: str) -> Any:
    """An argument by its name in the operator's schema; its default where the call leaves it out."""
    for position, known in enumerate(schema(node.target).arguments):
        if known.name == name:
            if position < len(node.args) and not known.kwarg_only:
                return node.args[position]
            return node.kwargs.get(name, known.default_value)
    return None


def arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by their names in the operator's schema, with its defaults."""
    defaults = {known.name: known.default_value for known in schema(target).arguments}
    return defaults | dict(zip(defaults, args, strict=False)) | dict(kwargs)


def named(sizes: Sequence[int], prefix: str = "d") -> tuple[Named, dict[str, int]]:
    """One factor per dim, and its size.

    >>> named((4, 6))
    ([('d0',), ('d1',)], {'d0': 4, 'd1': 6})
    """
    return [(f"{prefix}{i}",) for i in range(len(sizes))], {f"{prefix}{i}": s for i, s in enumerate(sizes)}


def chosen_dims(dim: Any, rank: int) -> list[int]:
    """A dim argument as a list: one, several, or all (None or empty). Negative ones count from the end."""
    if dim is None or dim == [] or rank == 0:
        return list(range(rank))
    return [d % rank for d in ([dim] if isinstance(dim, int) else dim)]


def aligned(full: Sequence[tuple[str, ...]], sizes: Mapping[str, int], given: Sequence[int]) -> Dims:
    """The dims of a tensor of shape ``given`` that broadcasts to ``full``.

    >>> aligned([("m",), ("n",)], {"m": 4, "n": 6}, (1, 6))
    ((), ('n',))
    """
    last = full[len(full) - len(given) :]
    return tuple(f if size == math.prod(sizes[g] for g in f) else () for f, size in zip(last, given, strict=True))


def blocked(node: fx.Node, dims: Iterable[int], *, linear: bool = False) -> Factors:
    """For one input: ``dims`` are whole and may change size, the others pass."""
    given, sizes = named(shape(tensor_inputs(node)[0]))
    whole, outs = {f"d{d}" for d in dims}, []
    for k, v in enumerate(values(node)):
        out = list(given)
        for d in dims:
            out[d] = (name := f"o{k}_{d}",)
            sizes[name] = v.shape[d]
            whole.add(name)
        outs.append(tuple(out))
    return Factors((tuple(given),), tuple(outs), sizes, frozenset(whole), linear=((0,),) if linear else ())


def along(name: str = "dim", *, linear: bool = False) -> SpecFn:
    """A rule for operators that work along the dims of the argument ``name``: softmax, cumsum, slice, sort. Further
    inputs have the size of the first."""

    def factors(node: fx.Node) -> Factors:
        first, *others = tensor_inputs(node)
        if any(shape(other) != shape(first) for other in others):
            return opaque(node)
        if others:
            found = blocked(node, chosen_dims(argument(node, name), len(shape(first))))
            return replace(found, inputs=found.inputs * (1 + len(others)))
        return blocked(node, chosen_dims(argument(node, name), len(shape(first))), linear=linear)

    return factors


def leading(count: int, *, linear: bool = False) -> SpecFn:
    """A rule for operators that work on each row of the first ``count`` dims on its own (pooling, group_norm).

    A negative ``count`` leaves out so many last dims: images may come with or without a batch dim.
    """

    def factors(node: fx.Node) -> Factors:
        first, *others = tensor_inputs(node)
        dims, sizes = named(shape(first))
        rows = count if count > 0 else len(dims) + count
        whole = {f"d{d}" for d in range(rows, len(dims))}
        sides: list[list[Dims]] = [[tuple(dims)], []]
        for side, label, tensors in ((0, "i", map(shape, others)), (1, "o", [v.shape for v in values(node)])):
            for k, size in enumerate(tensors):
                names, more = named(size, f"{label}{k}_")
                if side:
                    assert tuple(size[:rows]) == shape(first)[:rows], "the leading dims change"
                    names[:rows] = dims[:rows]
                kept = {name: more[name] for (name,) in names if name in more}
                sizes |= kept
                whole |= set(kept)
                sides[side].append(tuple(names))
        return Factors(tuple(sides[0]), tuple(sides[1]), sizes, frozenset(whole), linear=((0,),) if linear else ())

    return factors


def rows(text: str) -> SpecFn:
    """A rule for operators whose rows are independent: all results for ``...`` depend on the inputs' ``...`` alone. The
    dims with names are whole, so a name says no more than that there is a dim; nothing is split where ``text`` does not
    fit, or where a result lacks a leading dim.

    >>> rows("... m n, ... k -> ... p q")  # doctest: +ELLIPSIS
    <function ...>
    """
    names = {name for tensor in re.split("->|,", text) for name in tensor.split()} - {"..."}
    notation = Notation.parse(text, whole=" ".join(sorted(names)))

    def factors(node: fx.Node) -> Factors:
        try:
            found = notation.fit([shape(n) for n in tensor_inputs(node)], [tuple(v.shape) for v in values(node)])
        except ValueError:
            return opaque(node)
        made = [{name for dim in dims for name in dim} for dims in found.outputs]
        lost = frozenset(name for name in found.sizes if not all(name in one for one in made))
        return replace(found, whole=found.whole | lost)

    return factors


def opaque(node: fx.Node) -> Factors:
    """Nothing may be sharded: always correct, never parallel."""
    sizes: dict[str, int] = {}
    sides: list[list[Dims]] = [[], []]
    for side, label, tensors in ((0, "i", [facts(n).value for n in tensor_inputs(node)]), (1, "o", values(node))):
        for k, tensor in enumerate(tensors):
            names, more = named(tuple(tensor.shape), f"{label}{k}_")  # type: ignore[union-attr]
            sides[side].append(tuple(names))
            sizes |= more
    return Factors(tuple(sides[0]), tuple(sides[1]), sizes, frozenset(sizes))
