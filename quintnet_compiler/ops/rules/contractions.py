"""Rules of contractions: matrix products, convolutions, attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ...core.annotations import shape, tensor_inputs
from ..attention.operator import IDS
from .node_factors import Named, aligned, argument, name_dims, opaque
from .notation import Dims, Factors, Notation, SpecFn


def matmul(node: fx.Node) -> Factors:
    """matmul, mm, bmm of any ranks, with broadcast leading dims."""
    a, b = (shape(n) for n in tensor_inputs(node))
    out = shape(node)
    sizes: dict[str, int] = {"k": a[-1]}
    lead = out[: len(out) - (len(a) > 1) - (len(b) > 1)]
    names, more = name_dims(lead, "b")
    sizes |= more
    left, right, tail = list(aligned(names, sizes, a[:-2])), list(aligned(names, sizes, b[:-2])), list(names)
    if len(a) > 1:
        sizes["m"] = a[-2]
        left.append(("m",))
        tail.append(("m",))
    left.append(("k",))
    right.append(("k",))
    if len(b) > 1:
        sizes["n"] = b[-1]
        right.append(("n",))
        tail.append(("n",))
    return Factors((tuple(left), tuple(right)), (tuple(tail),), sizes, linear=((0,), (1,)))


def added(text: str) -> SpecFn:
    """Return a rule for ``beta * first + alpha * product``: ``text`` is of the product, the first input broadcasts."""
    product = Notation.parse(text)

    def factors(node: fx.Node) -> Factors:
        first, *others = tensor_inputs(node)
        fitted = product.fit([shape(n) for n in others], [shape(node)])
        bias = aligned(fitted.outputs[0], fitted.sizes, shape(first))
        return replace(fitted, inputs=(bias, *fitted.inputs), additive=frozenset({0}))

    return factors


_SOLVED = {True: Notation.parse("... m n, ... n k -> ... m k", whole="m n", linear=[[1]])}
_SOLVED[False] = Notation.parse("... m n, ... k m -> ... k n", whole="m n", linear=[[1]])


def solve(node: fx.Node) -> Factors:
    """Each matrix on its own, and each of its right-hand sides."""
    a, b = map(shape, tensor_inputs(node))
    if len(a) != len(b) or a[:-2] != b[:-2]:
        return opaque(node)
    return _SOLVED[bool(argument(node, "left"))].fit([a, b], [shape(node)])


_LU_SOLVED = {True: Notation.parse("... m n, ... p, ... n k -> ... m k", whole="m n p", linear=[[2]])}
_LU_SOLVED[False] = Notation.parse("... m n, ... p, ... k m -> ... k n", whole="m n p", linear=[[2]])


def lu_solve(node: fx.Node) -> Factors:
    """As :func:`solve`; a matrix may be the same for all."""
    input_shapes = [shape(n) for n in tensor_inputs(node)]
    return _LU_SOLVED[bool(argument(node, "left"))].fit(input_shapes, [shape(node)])


def einsum(node: fx.Node) -> Factors:
    """Read the equation as a rule; a letter that one tensor has twice (a diagonal) is whole."""
    equation = argument(node, "equation").replace(" ", "")
    operands = tensor_inputs(node)
    inputs, arrow, output = equation.partition("->")
    if not arrow:  # the letters that occur once, in alphabetical order
        letters = inputs.replace(",", "").replace("...", "")
        output = "..." * ("..." in inputs) + "".join(c for c in sorted(set(letters)) if letters.count(c) == 1)
    text = f"{', '.join(map(_spaced, inputs.split(',')))} -> {_spaced(output)}"
    try:
        notation = Notation.parse(text, linear=[[i] for i in range(len(operands))])
        return notation.fit([shape(n) for n in operands], [shape(node)])
    except ValueError:
        return _einsum_with_diagonals([*inputs.split(","), output], (*operands, node))


def _einsum_with_diagonals(terms: Sequence[str], tensors: Sequence[fx.Node]) -> Factors:
    """Return the factors of an einsum that is no rule. ``terms``: those of the operands and of the result."""
    sizes: dict[str, int] = {}
    dims = [_letters(term, shape(n), sizes) for term, n in zip(terms, tensors, strict=True)]
    repeated = {letter for term in terms for letter in term.replace("...", "") if term.count(letter) > 1}
    broadcasts = any(
        tuple(sizes[name] for (name,) in tensor) != shape(n) for tensor, n in zip(dims, tensors, strict=True)
    )
    whole = frozenset(repeated if repeated and not broadcasts else sizes)  # nothing is known of dims that broadcast
    linear = () if broadcasts else tuple((i,) for i in range(len(tensors) - 1))
    return Factors(tuple(dims[:-1]), (dims[-1],), sizes, whole, linear=linear)


def _letters(term: str, dims: Sequence[int], sizes: dict[str, int]) -> Dims:
    """Return the letter of each dim, and add its size to ``sizes``; dims of ``...`` are b0, b1, ... from the right."""
    leading, dots, trailing = term.partition("...")
    count = len(dims) - len(leading) - len(trailing)
    names = [*leading, *(f"b{i}" for i in reversed(range(count if dots else 0))), *trailing]
    for name, size in zip(names, dims, strict=True):
        sizes[name] = max(size, sizes.get(name, 1))
    return tuple((name,) if size == sizes[name] else () for name, size in zip(names, dims, strict=True))


def _spaced(letters: str) -> str:
    """Return a term of an equation in the notation of rules.

    >>> _spaced("...ij")
    '... i j'
    """
    return " ".join(["..."] * letters.startswith("...") + list(letters.removeprefix("...")))


def convolution(node: fx.Node) -> Factors:
    """Batch (where there is one), input channels (a sum) and output channels; space and groups are whole."""
    operands = tensor_inputs(node)
    x, weight, out = shape(operands[0]), shape(operands[1]), shape(node)
    space = len(weight) - 2
    transposed = "conv_transpose" in str(node.target) or bool(argument(node, "transposed"))
    batch: Named = [("n",)] if len(x) > space + 1 else []
    sizes = {"n": x[0]} if batch else {}
    sizes |= {"i": x[-space - 1], "o": out[-space - 1], "w0": weight[0], "w1": weight[1]}
    whole = {"w0", "w1"}
    first, second = ("i", "o") if transposed else ("o", "i")
    if argument(node, "groups") > 1:
        first, second = "w0", "w1"
        whole |= {"i", "o"}
    places: dict[str, Named] = {}
    for label, dims in (("x", x[-space:]), ("w", weight[2:]), ("y", out[-space:])):
        places[label], more = name_dims(dims, f"{label}_")
        sizes |= more
        whole |= set(more)
    ins: list[Dims] = [(*batch, ("i",), *places["x"]), ((first,), (second,), *places["w"])]
    if len(operands) > 2:
        ins.append((("o",),))
    return Factors(
        tuple(ins),
        ((*batch, ("o",), *places["y"]),),
        sizes,
        frozenset(whole),
        linear=((0,), (1,)) if len(operands) == 2 else (),
        additive=frozenset({2}) if len(operands) > 2 else frozenset(),
    )


def grouped_convolution(node: fx.Node) -> Factors:
    """quintnet.grouped_convolution: images, groups, input channels (a sum) and output channels; space is whole."""
    x, weight = (shape(n) for n in tensor_inputs(node))
    images, filters, out, sizes = _grouped(x, weight, shape(node), transposed=bool(argument(node, "transposed")))
    return Factors((images, filters), (out,), sizes, frozenset(sizes) - set("ngio"), linear=((0,), (1,)))


def grouped_convolution_weight(node: fx.Node) -> Factors:
    """quintnet.grouped_convolution_weight: likewise, and a sum over images."""
    grad, x, weight = (shape(n) for n in tensor_inputs(node))
    images, filters, out, sizes = _grouped(x, weight, grad, transposed=bool(argument(node, "transposed")))
    inputs = (out, images, filters)
    return Factors(inputs, (filters,), sizes, frozenset(sizes) - set("ngio"), linear=((0,), (1,)))


def _grouped(
    x: Sequence[int], weight: Sequence[int], out: Sequence[int], *, transposed: bool
) -> tuple[Dims, Dims, Dims, dict[str, int]]:
    """Return the factors of images, filters and results, and their sizes."""
    sizes = {"n": x[0], "g": x[1], "i": x[2], "o": out[2]}
    places: dict[str, Named] = {}
    for label, dims in (("x", x[3:]), ("w", weight[3:]), ("y", out[3:])):
        places[label], more = name_dims(dims, f"{label}_")
        sizes |= more
    filters: Named = [("i",), ("o",)] if transposed else [("o",), ("i",)]
    images = (("n",), ("g",), ("i",), *places["x"])
    return images, (("g",), *filters, *places["w"]), (("n",), ("g",), ("o",), *places["y"]), sizes


def attention(node: fx.Node) -> Factors:
    """scaled_dot_product_attention: batch, heads and (unless their number says what they see) queries. Fewer key heads
    form groups."""
    q, k, v, *mask = tensor_inputs(node)
    qs, ks, vs = shape(q), shape(k), shape(v)
    out, rank = shape(node), len(qs)
    batch, sizes = name_dims(out[: max(rank - 3, 0)], "b")
    sizes |= {"s": qs[-2], "t": ks[-2], "d": qs[-1], "e": vs[-1]}
    whole = {"t", "d"} | ({"s"} if argument(node, "is_causal") else set())
    heads: Named = []
    if rank > 2:
        sizes |= {"g": ks[-3], "r": out[-3] // ks[-3]}
        heads = [("g", "r") if sizes["r"] > 1 else ("g",)]
        if any(len(dims) != rank or dims[-3] not in (1, size) for dims, size in ((qs, out[-3]), (vs, ks[-3]))):
            return opaque(node)

    def place(dims: Sequence[int], group: Named, *last: str) -> Dims:
        full = (*batch, *group, *((name,) for name in last))
        return aligned(full, sizes, dims)

    keys: Named = [("g",)] if heads else []
    ins = [place(qs, heads, "s", "d"), place(ks, keys, "t", "d"), place(vs, keys, "t", "e")]
    ins += [place(shape(m), heads, "s", "t") for m in mask]
    outs = (place(out, heads, "s", "e"),)
    return Factors(tuple(ins), outs, sizes, frozenset(whole), linear=((2,),))


def masked_attention(node: fx.Node) -> Factors:
    """quintnet.attention: batch, heads and queries, which are told their positions (see LowerAttention). Or queries and
    keys at once, where these are as many: then the operator sends keys and values around itself."""
    q, k, v = (shape(n) for n in tensor_inputs(node)[:3])
    sizes = {"b": q[0], "g": k[1], "r": q[1] // k[1], "s": q[2], "t": k[2], "d": q[3], "e": v[3]}
    heads = ("g", "r") if sizes["r"] > 1 else ("g",)
    keys: Dims = (("b",), ("g",), ("t",))
    # of all positions on every rank, so that all know which keys are seen where
    ids: list[Dims] = [(("b",), ("u",)) for name in IDS if argument(node, name) is not None]
    sizes |= {"u": k[2]} if ids else {}
    return Factors(
        ((("b",), heads, ("s",), ("d",)), (*keys, ("d",)), (*keys, ("e",)), *ids),
        ((("b",), heads, ("s",), ("e",)),),
        sizes,
        frozenset({"t", "d", "u"} & sizes.keys()),
        linear=((2,),),
        joint=frozenset({("s", "t")} if q[2] == k[2] else ()),
    )
