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
    """Return an argument by its name in the operator's schema; its default where the call leaves it out."""
    for position, declared in enumerate(schema(node.target).arguments):
        if declared.name == name:
            if position < len(node.args) and not declared.kwarg_only:
                return node.args[position]
            return node.kwargs.get(name, declared.default_value)
    return None


def arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by their names in the operator's schema, with its defaults."""
    defaults = {declared.name: declared.default_value for declared in schema(target).arguments}
    return defaults | dict(zip(defaults, args, strict=False)) | dict(kwargs)


def name_dims(sizes: Sequence[int], prefix: str = "d") -> tuple[Named, dict[str, int]]:
    """Return one factor per dim, and its size.

    >>> name_dims((4, 6))
    ([('d0',), ('d1',)], {'d0': 4, 'd1': 6})
    """
    return [(f"{prefix}{i}",) for i in range(len(sizes))], {f"{prefix}{i}": s for i, s in enumerate(sizes)}


def chosen_dims(dim: Any, rank: int) -> list[int]:
    """Return a dim argument as a list: one, several, or all (None or empty). Negative ones count from the end."""
    if dim is None or dim == [] or rank == 0:
        return list(range(rank))
    return [d % rank for d in ([dim] if isinstance(dim, int) else dim)]


def aligned(full: Sequence[tuple[str, ...]], sizes: Mapping[str, int], dims: Sequence[int]) -> Dims:
    """Return the factors of a tensor of shape ``dims`` that broadcasts to ``full``.

    >>> aligned([("m",), ("n",)], {"m": 4, "n": 6}, (1, 6))
    ((), ('n',))
    """
    last = full[len(full) - len(dims) :]
    return tuple(f if size == math.prod(sizes[g] for g in f) else () for f, size in zip(last, dims, strict=True))


def blocked(node: fx.Node, dims: Iterable[int], *, linear: bool = False) -> Factors:
    """Return the factors of one input where ``dims`` are whole and may change size; the others pass."""
    input_dims, sizes = name_dims(shape(tensor_inputs(node)[0]))
    whole, outs = {f"d{d}" for d in dims}, []
    for k, v in enumerate(values(node)):
        out = list(input_dims)
        for d in dims:
            out[d] = (name := f"o{k}_{d}",)
            sizes[name] = v.shape[d]
            whole.add(name)
        outs.append(tuple(out))
    return Factors((tuple(input_dims),), tuple(outs), sizes, frozenset(whole), linear=((0,),) if linear else ())


def along(name: str = "dim", *, linear: bool = False) -> SpecFn:
    """Return a rule for operators along the dims of argument ``name`` (softmax, slice, sort); inputs have one size."""

    def factors(node: fx.Node) -> Factors:
        first, *others = tensor_inputs(node)
        if any(shape(other) != shape(first) for other in others):
            return opaque(node)
        if others:
            of_first = blocked(node, chosen_dims(argument(node, name), len(shape(first))))
            return replace(of_first, inputs=of_first.inputs * (1 + len(others)))
        return blocked(node, chosen_dims(argument(node, name), len(shape(first))), linear=linear)

    return factors


def leading(count: int, *, linear: bool = False) -> SpecFn:
    """Return a rule for operators that work on each row of the first ``count`` dims on its own (pooling, group_norm).

    A negative ``count`` leaves out so many last dims: images may come with or without a batch dim.
    """

    def factors(node: fx.Node) -> Factors:
        first, *others = tensor_inputs(node)
        dims, sizes = name_dims(shape(first))
        rows = count if count > 0 else len(dims) + count
        whole = {f"d{d}" for d in range(rows, len(dims))}
        sides: list[list[Dims]] = [[tuple(dims)], []]
        for side, label, tensors in ((0, "i", map(shape, others)), (1, "o", [v.shape for v in values(node)])):
            for k, size in enumerate(tensors):
                names, more = name_dims(size, f"{label}{k}_")
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
    """Return a rule for operators whose rows are independent: results for ``...`` depend on the inputs' ``...`` alone.

    The dims with names are whole, so a name says no more than that there is a dim; nothing is split where ``text`` does
    not fit, or where a result lacks a leading dim.

    >>> rows("... m n, ... k -> ... p q")  # doctest: +ELLIPSIS
    <function ...>
    """
    names = {name for tensor in re.split("->|,", text) for name in tensor.split()} - {"..."}
    notation = Notation.parse(text, whole=" ".join(sorted(names)))

    def factors(node: fx.Node) -> Factors:
        try:
            fitted = notation.fit([shape(n) for n in tensor_inputs(node)], [tuple(v.shape) for v in values(node)])
        except ValueError:
            return opaque(node)
        outputs = [{name for dim in dims for name in dim} for dims in fitted.outputs]
        lost = frozenset(name for name in fitted.sizes if not all(name in output for output in outputs))
        return replace(fitted, whole=fitted.whole | lost)

    return factors


def opaque(node: fx.Node) -> Factors:
    """Return factors that must all be whole: always correct, never parallel."""
    sizes: dict[str, int] = {}
    sides: list[list[Dims]] = [[], []]
    for side, label, tensors in ((0, "i", [facts(n).value for n in tensor_inputs(node)]), (1, "o", values(node))):
        for k, tensor in enumerate(tensors):
            names, more = name_dims(tuple(tensor.shape), f"{label}{k}_")  # type: ignore[union-attr]
            sides[side].append(tuple(names))
            sizes |= more
    return Factors(tuple(sides[0]), tuple(sides[1]), sizes, frozenset(sizes))
