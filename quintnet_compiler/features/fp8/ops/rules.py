"""Rules of :mod:`.scaled_products`: blocks of a dim are one factor, and the numbers in a block another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from ....core.annotations import shape, tensor_inputs
from ....ops.rules.node_factors import argument
from ....ops.rules.notation import Dims, Factors

Sizes = dict[str, int]


def _in_blocks(names: Sequence[str], size: Sequence[int], blocks: Sequence[int]) -> tuple[Dims, Dims, Sizes]:
    """Return the factors of a tensor, those of its scale, which has ``blocks`` in each dim, and their sizes."""
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
    """Return the factors of block_max. Over a dim that is one block, ranks exchange maxima; other blocks are whole."""
    size = shape(tensor_inputs(node)[0])
    dims, scale, sizes = _in_blocks([f"d{i}" for i in range(len(size))], size, shape(node))
    remaining = {name for dim in scale for name in dim}
    inside = _insides(sizes)
    return Factors((dims,), (scale,), sizes, inside, settled=frozenset(sizes) - remaining - inside)


def scaled_cast(node: fx.Node) -> Factors:
    """Return the factors of scaled_cast, those of its scale among them."""
    x, scale = map(shape, tensor_inputs(node))
    dims, scale_dims, sizes = _in_blocks([f"d{i}" for i in range(len(x))], x, scale)
    return Factors((dims, scale_dims), (dims,), sizes, _insides(sizes))


def scaled_matmul(node: fx.Node) -> Factors:
    """Return the factors of a product with scales. Blocks of the dim that is summed over are the same in both operands.

    In the equation, ``m`` stands for all leading dims.
    """
    a, b, scale_a, scale_b = map(shape, tensor_inputs(node))
    inputs, _, output = str(argument(node, "equation")).partition("->")
    left, right = (side.strip() for side in inputs.split(","))
    lead = [f"b{i}" for i in range(len(a) - 1)]
    operands = (
        _Operand([*lead, left[1]], a, scale_a),
        _Operand([*(lead if right[0] == "m" else right[0]), right[1]], b, scale_b),
    )
    # a dim that has blocks in one operand is split into blocks in the other as well
    blocks = {name: parts for operand in operands for name, parts in operand.block_counts().items()}
    dims: list[Dims] = []
    sizes: Sizes = {}
    by_name: dict[str, tuple[str, ...]] = {}
    for operand in operands:
        counts = [blocks.get(name, size) for name, size in zip(operand.names, operand.size, strict=True)]
        operand_dims, _, operand_sizes = _in_blocks(operand.names, operand.size, counts)
        dims.append(operand_dims)
        sizes |= operand_sizes
        by_name |= dict(zip(operand.names, operand_dims, strict=True))
    scales = [operand.scale_dims(blocks) for operand in operands]
    out = [by_name[name] for letter in output.strip() for name in (lead if letter == "m" else [letter])]
    return Factors((*dims, *scales), (tuple(out),), sizes, _insides(sizes))


@dataclass(frozen=True)
class _Operand:
    """An operand of a product: the names and sizes of its dims, and the number of scales in each."""

    names: Sequence[str]
    size: Sequence[int]
    scales: Sequence[int]

    def block_counts(self) -> dict[str, int]:
        """Return the number of blocks of each dim that has several numbers in a block."""
        dims = zip(self.names, self.size, self.scales, strict=True)
        return {name: parts for name, count, parts in dims if 1 < parts < count}

    def scale_dims(self, blocks: dict[str, int]) -> Dims:
        """Return the factors of the scale."""
        dims = zip(self.names, self.size, self.scales, strict=True)
        return tuple((name,) if parts != 1 and parts == blocks.get(name, size) else () for name, size, parts in dims)


def scaled_expert_linear(node: fx.Node) -> Factors:
    """Return the factors of ``expert_linear`` with scales. Blocks of features are whole.

    It is linear in nothing: it takes no partial sums of rows, and none of its result's gradient.
    """
    rows, _, weight, *others = tensor_inputs(node)
    features, blocks = (shape(rows)[1], shape(node)[1]), argument(node, "blocks") or (0, 0)
    counts = [n // block if block else 1 for n, block in zip(features, blocks, strict=True)]
    counts = [n if count == 1 else count for n, count in zip(features, counts, strict=True)]
    (i, o), _, sizes = _in_blocks("io", features, counts)
    ends = (i, features[0]), (o, features[1])
    matrices = ((("e",), shape(weight)[0]), *(reversed(ends) if not argument(node, "transposed") else ends))
    dims: list[Dims] = [(("r",), i), (("r",),), tuple(names for names, _ in matrices)]
    biased = argument(node, "bias") is not None
    if biased:
        dims.append((("e",), o))
        others = others[1:]
    dims += [_dims_of_matrices(matrices, shape(other)) for other in others]
    sizes |= {"r": shape(rows)[0], "e": shape(weight)[0]}
    additive = frozenset({3}) if biased else frozenset[int]()
    return Factors(
        tuple(dims), ((("r",), o),), sizes, _insides(sizes), additive=additive, contiguous=frozenset("e"),
        joint=frozenset({("r", "e")}), whole_gradients=True,
    )  # fmt: skip


def _dims_of_matrices(matrices: Sequence[tuple[tuple[str, ...], int]], size: Sequence[int]) -> Dims:
    """Return the factors of 8-bit matrices, or of their scales. ``matrices``: the factors and size of each dim."""
    dims: list[tuple[str, ...]] = []
    for (names, count), n in zip(matrices, size, strict=True):
        if n == count:
            dims.append(names)
        else:
            dims.append(names[:1] if n > 1 else ())
    return tuple(dims)
