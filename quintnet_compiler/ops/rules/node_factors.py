"""What functions that compute :class:`Factors` share: arguments by name, dims as factors, the plainest rules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from ...compat.torch import schema
from ...core.annotations import facts, shape, tensor_inputs, values
from .notation import Dims, Factors, SpecFn

Named = list[tuple[str, ...]]


def argument(node: fx.Node, name: str) -> Any:
    """An argument by its name in the operator's schema; its default where the call leaves it out."""
    for position, known in enumerate(schema(node.target).arguments):
        if known.name == name:
            if position < len(node.args) and not known.kwarg_only:
                return node.args[position]
            return node.kwargs.get(name, known.default_value)
    return None


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
    """A rule for operators that work along the dims of the argument ``name``: softmax, cumsum, slice, sort."""

    def factors(node: fx.Node) -> Factors:
        first, *others = tensor_inputs(node)
        if others:
            return opaque(node)
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


def together(count: int) -> SpecFn:
    """As :func:`leading`, where all inputs have these dims; nothing is split where one lacks them."""

    def factors(node: fx.Node) -> Factors:
        first, *others = map(shape, tensor_inputs(node))
        rows = count if count > 0 else len(first) + count
        tensors = [*others, *(tuple(v.shape) for v in values(node))]
        if rows < 1 or any(size[:rows] != first[:rows] for size in tensors):
            return opaque(node)
        dims, sizes = named(first[:rows])
        sides: list[list[Dims]] = [[], []]
        for side, label, shapes in ((0, "i", (first, *others)), (1, "o", [tuple(v.shape) for v in values(node)])):
            for k, size in enumerate(shapes):
                rest, more = named(size[rows:], f"{label}{k}_")
                sizes |= more
                sides[side].append((*dims, *rest))
        whole = frozenset(sizes) - {name for (name,) in dims}
        return Factors(tuple(sides[0]), tuple(sides[1]), sizes, whole)

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
