"""Rules of views: operators that move elements and compute nothing. All are linear.

Each function reads one node and returns its :class:`Factors`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ...core.annotations import shape, tensor_inputs, values
from .node_factors import aligned, argument, blocked, chosen_dims, name_dims, opaque
from .notation import Dims, Factors


def reshape(node: fx.Node) -> Factors:
    """Refine both shapes to common factors: [B, S] -> [B*S] has factors B and S. A ragged part must stay whole."""
    left, right = list(shape(tensor_inputs(node)[0])), list(shape(node))  # what remains of each dim of both shapes
    if 0 in left:
        return opaque(node)
    ins: list[list[str]] = [[] for _ in left]
    outs: list[list[str]] = [[] for _ in right]
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    i = j = 0
    while i < len(left) or j < len(right):
        if i < len(left) and left[i] == 1:
            i += 1
        elif j < len(right) and right[j] == 1:
            j += 1
        elif max(left[i], right[j]) % min(left[i], right[j]) == 0:
            name, size = f"v{len(sizes)}", min(left[i], right[j])
            ins[i].append(name)
            outs[j].append(name)
            sizes[name] = size
            left[i] //= size
            right[j] //= size
        else:
            a, b = _meeting(left[i:], right[j:])
            for side, dims, start, count in ((ins, left, i, a), (outs, right, j, b)):
                for k in range(start, start + count):
                    side[k].append(name := f"w{len(sizes)}")
                    sizes[name] = dims[k]
                    whole.add(name)
                    dims[k] = 1
    return Factors((_freeze(ins),), (_freeze(outs),), sizes, frozenset(whole), linear=((0,),))


def _meeting(left: Sequence[int], right: Sequence[int]) -> tuple[int, int]:
    """Return how many leading dims of each side have the same product, at least one.

    >>> _meeting([2, 3, 5], [3, 2, 5])
    (2, 2)
    """
    a = b = 1
    p, q = left[0], right[0]
    while p != q:
        if p < q:
            p *= left[a]
            a += 1
        else:
            q *= right[b]
            b += 1
    return a, b


def _freeze(dims: Sequence[Sequence[str]]) -> Dims:
    return tuple(tuple(d) for d in dims)


def expand(node: fx.Node) -> Factors:
    """Give a dim of size 1 that grows a new factor; the others keep theirs."""
    out, sizes = name_dims(shape(node))
    return Factors((aligned(out, sizes, shape(tensor_inputs(node)[0])),), (tuple(out),), sizes, linear=((0,),))


def permute(node: fx.Node) -> Factors:
    """transpose, permute, t."""
    dims, sizes = name_dims(shape(tensor_inputs(node)[0]))
    rank = len(dims)
    order = list(range(rank))
    if "permute" in str(node.target):
        order = chosen_dims(argument(node, "dims"), rank)
    elif rank >= 2:
        swapped = (0, 1) if len(node.args) == 1 else (argument(node, "dim0"), argument(node, "dim1"))
        a, b = chosen_dims(list(swapped), rank)
        order[a], order[b] = b, a
    return Factors((tuple(dims),), (tuple(dims[d] for d in order),), sizes, linear=((0,),))


def pad(node: fx.Node) -> Factors:
    """constant_pad_nd, pad: pairs of (before, after) from the last dim backwards."""
    widths: list[int] = argument(node, "pad")
    rank = len(shape(node))
    padded = [rank - 1 - i // 2 for i in range(0, len(widths), 2) if widths[i] or widths[i + 1]]
    return blocked(node, padded, linear=not argument(node, "value"))


def select(node: fx.Node) -> Factors:
    """select, unbind: the dim is whole and gone from the outputs."""
    dims, sizes = name_dims(shape(tensor_inputs(node)[0]))
    (gone,) = chosen_dims(argument(node, "dim"), len(dims))
    kept = tuple(d for i, d in enumerate(dims) if i != gone)
    return Factors((tuple(dims),), (kept,) * len(values(node)), sizes, frozenset({f"d{gone}"}), linear=((0,),))


def diagonal(node: fx.Node) -> Factors:
    """Keep the two dims whole; their diagonal becomes the last dim."""
    dims, sizes = name_dims(shape(tensor_inputs(node)[0]))
    gone = chosen_dims([argument(node, "dim1"), argument(node, "dim2")], len(dims))
    kept = [d for i, d in enumerate(dims) if i not in gone]
    sizes["diagonal"] = shape(node)[-1]
    whole = frozenset({"diagonal", *(f"d{d}" for d in gone)})
    return Factors((tuple(dims),), ((*kept, ("diagonal",)),), sizes, whole, linear=((0,),))


def diagonal_scatter(node: fx.Node) -> Factors:
    """Keep the two dims whole of the diagonal of the first input that the second replaces."""
    x, part = tensor_inputs(node)
    dims, sizes = name_dims(shape(x))
    gone = chosen_dims([argument(node, "dim1"), argument(node, "dim2")], len(dims))
    kept = [d for i, d in enumerate(dims) if i not in gone]
    sizes["diagonal"] = shape(part)[-1]
    whole = frozenset({"diagonal", *(f"d{d}" for d in gone)})
    return Factors((tuple(dims), (*kept, ("diagonal",))), (tuple(dims),), sizes, whole, linear=((0, 1),))


def unfold(node: fx.Node) -> Factors:
    """Windows along a dim, which is whole; the window becomes the last dim."""
    dims, sizes = name_dims(shape(tensor_inputs(node)[0]))
    (along,) = chosen_dims(argument(node, "dimension"), len(dims))
    out = [("windows",) if d == along else f for d, f in enumerate(dims)]
    sizes |= {"windows": shape(node)[along], "window": shape(node)[-1]}
    whole = frozenset({f"d{along}", "windows", "window"})
    return Factors((tuple(dims),), ((*out, ("window",)),), sizes, whole, linear=((0,),))


def cat(node: fx.Node) -> Factors:
    """Each part's piece of the dim is whole."""
    parts = tensor_inputs(node)
    dims, sizes = name_dims(shape(node))
    (along,) = chosen_dims(argument(node, "dim"), len(dims))
    whole = {f"d{along}"}
    ins = []
    for i, part in enumerate(parts):
        name = f"c{i}"
        sizes[name] = shape(part)[along]
        whole.add(name)
        ins.append(tuple((name,) if d == along else f for d, f in enumerate(dims)))
    return Factors(tuple(ins), (tuple(dims),), sizes, frozenset(whole), linear=(tuple(range(len(parts))),))


def stack(node: fx.Node) -> Factors:
    parts = tensor_inputs(node)
    dims, sizes = name_dims(shape(node))
    (along,) = chosen_dims(argument(node, "dim"), len(dims))
    part_dims = tuple(f for d, f in enumerate(dims) if d != along)
    everyone = tuple(range(len(parts)))
    return Factors((part_dims,) * len(parts), (tuple(dims),), sizes, frozenset({f"d{along}"}), linear=(everyone,))


def split(node: fx.Node) -> Factors:
    """Equal pieces: the dim is (parts, piece) and a piece may be sharded, which gives ``S(dim, parts)``."""
    dims, sizes = name_dims(shape(tensor_inputs(node)[0]))
    (along,) = chosen_dims(argument(node, "dim"), len(dims))
    lengths = [v.shape[along] for v in values(node)]
    if len(set(lengths)) > 1:
        return blocked(node, [along], linear=True)
    sizes |= {"parts": len(lengths), "piece": lengths[0]}
    ins = [("parts", "piece") if d == along else f for d, f in enumerate(dims)]
    out = tuple(("piece",) if d == along else f for d, f in enumerate(dims))
    return Factors((tuple(ins),), (out,) * len(lengths), sizes, frozenset({"parts"}), linear=((0,),))


def repeat_interleave(node: fx.Node) -> Factors:
    """Make the dim of the result (dim, repeats)."""
    dim = argument(node, "dim")
    if dim is None or argument(node, "output_size") is not None:
        return opaque(node)
    dims, sizes = name_dims(shape(tensor_inputs(node)[0]))
    (along,) = chosen_dims(dim, len(dims))
    sizes["r"] = argument(node, "repeats")
    out = tuple((*f, "r") if d == along else f for d, f in enumerate(dims))
    return Factors((tuple(dims),), (out,), sizes, frozenset({"r"}), linear=((0,),))


def scatter_view(node: fx.Node) -> Factors:
    """select_scatter, slice_scatter: the second input replaces a part of the first along a dim, which is whole."""
    x, part = tensor_inputs(node)
    dims, sizes = name_dims(shape(x))
    (along,) = chosen_dims(argument(node, "dim"), len(dims))
    piece: list[tuple[str, ...]] = []
    if len(shape(part)) == len(dims):
        piece, sizes["piece"] = [("piece",)], shape(part)[along]
    ins = (tuple(dims), (*dims[:along], *piece, *dims[along + 1 :]))
    return Factors(ins, (tuple(dims),), sizes, frozenset({f"d{along}", "piece"}), linear=((0, 1),))


def factory(node: fx.Node) -> Factors:
    """new_ones, full, ...: every dim of the result may be sharded; inputs only give dtype and device."""
    dims, sizes = name_dims(shape(node))
    ins: list[Dims] = []
    whole: set[str] = set()
    for i, source in enumerate(tensor_inputs(node)):
        names, more = name_dims(shape(source), f"i{i}_")
        ins.append(tuple(names))
        sizes |= more
        whole |= set(more)
    return Factors(tuple(ins), (tuple(dims),), sizes, frozenset(whole))
