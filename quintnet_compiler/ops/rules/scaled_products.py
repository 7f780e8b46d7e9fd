"""Rules of :mod:`...ops.scaled_products`: the blocks of a dim are one factor, and what is in a block is another."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ...core.annotations import shape, tensor_inputs
from .node_factors import argument
from .notation import Dims, Factors

Sizes = dict[str, int]


def _in_blocks(names: Sequence[str], size: Sequence[int], blocks: Sequence[int]) -> tuple[Dims, Dims, Sizes]:
    """The factors of a tensor, those of its scale, which has ``blocks`` of them in each dim, and their sizes."""
    whole: list[tuple[str, ...]] = []
    scale: list[tuple[str, ...]] = []
    sizes: Sizes = {}
    for name, count, parts in zip(names, size, blocks, strict=True):
        if parts in (1, count):
            whole.append((name,))
            scale.append((name,) if parts == count else ())
            sizes[name] = count
        else:
            whole.append((name, f"{name}_inside"))
            scale.append((name,))
            sizes |= {name: parts, f"{name}_inside": count // parts}
    return tuple(whole), tuple(scale), sizes


def _insides(sizes: Sizes) -> frozenset[str]:
    return frozenset(name for name in sizes if name.endswith("_inside"))


def block_max(node: fx.Node) -> Factors:
    """Over a dim that has one block, ranks have the largest of their parts; a block of several is whole."""
    size = shape(tensor_inputs(node)[0])
    given, made, sizes = _in_blocks([f"d{i}" for i in range(len(size))], size, shape(node))
    kept = {name for dim in made for name in dim}
    inside = _insides(sizes)
    return Factors((given,), (made,), sizes, inside, settled=frozenset(sizes) - kept - inside)


def scaled_cast(node: fx.Node) -> Factors:
    x, scale = map(shape, tensor_inputs(node))
    given, blocks, sizes = _in_blocks([f"d{i}" for i in range(len(x))], x, scale)
    return Factors((given, blocks), (given,), sizes, _insides(sizes))


def scaled_matmul(node: fx.Node) -> Factors:
    """``m`` stands for all leading dims. Blocks of the dim that is summed over are the same in both."""
    a, b, scale_a, scale_b = map(shape, tensor_inputs(node))
    left, right = (side.strip() for side in str(argument(node, "equation")).partition("->")[0].split(","))
    lead = [f"b{i}" for i in range(len(a) - 1)]
    # a dim that has blocks in one of the two is cut in the other as well
    first, second = [*lead, left[1]], [*(lead if right[0] == "m" else right[0]), right[1]]
    cut: dict[str, int] = {}
    for names, size, scale in ((first, a, scale_a), (second, b, scale_b)):
        for name, count, parts in zip(names, size, scale, strict=True):
            if 1 < parts < count:
                cut[name] = parts
    dims: list[Dims] = []
    scales: list[Dims] = []
    sizes: Sizes = {}
    for names, size, scale in ((first, a, scale_a), (second, b, scale_b)):
        whole, _, more = _in_blocks(names, size, [cut.get(n, s) for n, s in zip(names, size, strict=True)])
        one = [(name,) if parts == cut.get(name, n) else () for name, n, parts in zip(names, size, scale, strict=True)]
        dims.append(whole)
        scales.append(tuple(() if n == 1 else part for part, n in zip(one, scale, strict=True)))
        sizes |= more
    made = str(argument(node, "equation")).partition("->")[2].strip()
    of = dict(zip([*first, *second], [*dims[0], *dims[1]], strict=True))
    out = [of[name] for letter in made for name in (lead if letter == "m" else [letter])]
    return Factors((*dims, *scales), (tuple(out),), sizes, _insides(sizes))


def scaled_expert_linear(node: fx.Node) -> Factors:
    """As ``expert_linear``, but linear in nothing: it takes no terms of rows, and no terms of its result's gradient.
    Blocks of features are whole."""
    rows, _, weight, *rest = tensor_inputs(node)
    features, blocks = (shape(rows)[1], shape(node)[1]), argument(node, "blocks") or (0, 0)
    parts = [n // block if block else 1 for n, block in zip(features, blocks, strict=True)]
    (i, o), _, sizes = _in_blocks("io", features, [n if p == 1 else p for n, p in zip(features, parts, strict=True)])
    ends = (i, features[0]), (o, features[1])
    matrices = ((("e",), shape(weight)[0]), *(reversed(ends) if not argument(node, "transposed") else ends))
    dims: list[Dims] = [(("r",), i), (("r",),), tuple(names for names, _ in matrices)]
    biased = argument(node, "bias") is not None
    for given in rest:
        if biased and given is rest[0]:
            dims.append((("e",), o))
        else:
            each = zip(matrices, shape(given), strict=True)
            dims.append(tuple(names if n == count else names[:1] if n > 1 else () for (names, count), n in each))
    sizes |= {"r": shape(rows)[0], "e": shape(weight)[0]}
    additive = frozenset({3}) if biased else frozenset[int]()
    return Factors(
        tuple(dims), ((("r",), o),), sizes, _insides(sizes), additive=additive, contiguous=frozenset("e"),
        joint=frozenset({("r", "e")}), whole_gradients=True,
    )  # fmt: skip
