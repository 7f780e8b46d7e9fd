"""Rules of lookups by index, and of the losses that look up a label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ...core.annotations import is_float, shape, tensor_inputs, value
from ...ops.catalog import op_spec
from .node_factors import Named, aligned, argument, chosen_dims, name_dims, opaque
from .notation import Dims, Factors, Notation

_ROWS = Notation.parse("n v, n -> n", contiguous="v")
_EXPERTS = Notation.parse("r i, r, e o i, e o -> r o", additive=[3], contiguous="e")
_EXPERTS_T = Notation.parse("r i, r, e i o, e o -> r o", additive=[3], contiguous="e")
_EMBEDDING = Notation.parse("v e, ... -> ... e", linear=[[0]], contiguous="v")


def embedding(node: fx.Node) -> Factors:
    """Rows too: InsertCommunication masks the ids of other ranks' rows. Not with gradients scaled by frequency."""
    if argument(node, "scale_grad_by_freq"):
        return opaque(node)
    return _EMBEDDING.fit([shape(n) for n in tensor_inputs(node)], [shape(node)])


def row_nll(node: fx.Node) -> Factors:
    """Rows, and classes: InsertCommunication adds up what ranks have of a row."""
    factors = _ROWS.fit([shape(n) for n in tensor_inputs(node)], [shape(node)])
    return replace(factors, settled=frozenset({"v"}))


def expert_linear(node: fx.Node) -> Factors:
    """Rows, features, and experts: a rank adds the rows of its own experts, or rows travel to their experts' ranks."""
    notation = _EXPERTS_T if argument(node, "transposed") else _EXPERTS
    factors = notation.fit([shape(n) for n in tensor_inputs(node)], [shape(node)])
    return replace(factors, joint=frozenset({("r", "e")}))


def fill_rows(node: fx.Node) -> Factors:
    """Rows, of which each takes its share of the values."""
    x, _, source = map(shape, tensor_inputs(node))
    dims, sizes = name_dims(x)
    rest, more = name_dims(source, "v")
    share = source[0] // x[0]
    rest[0] = ("d0",) if share == 1 else ("d0", "v0")
    sizes |= {name: size for name, size in more.items() if name != "v0"} | ({"v0": share} if share > 1 else {})
    whole = frozenset(sizes) - {"d0"}
    return Factors((tuple(dims), tuple(dims), tuple(rest)), (tuple(dims),), sizes, whole)


def label_loss(node: fx.Node) -> Factors:
    """nll_loss_forward, nll_loss2d_forward without a mean: samples and pixels; classes are whole."""
    scores, *others = (shape(n) for n in tensor_inputs(node))
    reduction = argument(node, "reduction")
    if reduction == 1 or len(scores) == 1:
        return opaque(node)
    rows, sizes = name_dims((scores[0], *scores[2:]))
    sizes["v"] = scores[1]
    ins: list[Dims] = [(rows[0], ("v",), *rows[1:]), tuple(rows), (("v",),)]
    losses = tuple(rows) if reduction == 0 else ()
    return Factors(tuple(ins[: len(others) + 1]), (losses, ()), sizes, frozenset({"v"}))


def index(node: fx.Node) -> Factors:
    """x[..., i, j]: indexed dims are whole; the others pass. Only for indices that lead or stand together."""
    source, *indices = tensor_inputs(node)
    used = [d for d, pick in enumerate(argument(node, "indices")) if pick is not None]
    if used != list(range(used[0], used[-1] + 1)):
        return opaque(node)
    dims, sizes = name_dims(shape(source))
    count = max(len(shape(pick)) for pick in indices)
    names, more = name_dims(shape(node)[used[0] : used[0] + count], "p")
    sizes |= more
    picks = (aligned(names, sizes, shape(pick)) for pick in indices)
    out = (*dims[: used[0]], *names, *dims[used[-1] + 1 :])
    return Factors((tuple(dims), *picks), (out,), sizes, frozenset(f"d{d}" for d in used), linear=((0,),))


def index_select(node: fx.Node) -> Factors:
    """Keep the dim whole; the index may be split."""
    source, picks = tensor_inputs(node)
    if not shape(source) or not shape(picks):
        return opaque(node)
    dims, sizes = name_dims(shape(source))
    (along,) = chosen_dims(argument(node, "dim"), len(dims))
    sizes["p"] = shape(node)[along]
    out = tuple(("p",) if d == along else f for d, f in enumerate(dims))
    return Factors((tuple(dims), (("p",),)), (out,), sizes, frozenset({f"d{along}"}), linear=((0,),))


def index_add(node: fx.Node) -> Factors:
    """index_add, index_copy, index_fill, index_reduce: the dim and the index are whole. Of numbers with fractions that
    are added up, the index may be split: ranks then have terms."""
    x, picks, *source = tensor_inputs(node)
    if not shape(x) or not shape(picks):
        return opaque(node)
    dims, sizes = name_dims(shape(x))
    (along,) = chosen_dims(argument(node, "dim"), len(dims))
    sizes["p"] = shape(picks)[0]
    other = tuple(("p",) if d == along else f for d, f in enumerate(dims))
    ins = (tuple(dims), (("p",),), *((other,) * len(source)))
    linear = ((0, 2),) if source and shape(source[0]) and argument(node, "reduce") is None else ()
    if source and len(shape(source[0])) != len(dims):
        return opaque(node)
    terms = op_spec(node).adds_at_indices and bool(linear) and is_float(value(x))
    whole = frozenset({f"d{along}"} if terms else {f"d{along}", "p"})
    return Factors(ins, (tuple(dims),), sizes, whole, linear=linear, additive=frozenset({0} if terms else ()))


def gather(node: fx.Node) -> Factors:
    """gather(x, dim, index): whole along dim; elsewhere the index must cover x."""
    x, picks = tensor_inputs(node)
    if not shape(x) or not shape(picks):
        return opaque(node)
    (along,) = chosen_dims(argument(node, "dim"), len(shape(x)))
    dims, sizes = name_dims(shape(picks))
    whole = {f"d{along}"}
    ins: Named = []
    for d, size in enumerate(shape(x)):
        if d != along and size == sizes[f"d{d}"]:
            ins.append(dims[d])
            continue
        ins.append((name := f"x{d}",))
        sizes[name] = size
        whole |= {name, f"d{d}"}
    return Factors((tuple(ins), tuple(dims)), (tuple(dims),), sizes, frozenset(whole), linear=((0,),))


def scatter(node: fx.Node) -> Factors:
    """Return the factors of scatter and scatter_reduce (x, dim, index, source).

    Dims are whole along dim, and where the three differ in size. The numbers that scatter_add adds along dim may be
    split if they are floating-point: ranks then have terms of a sum.
    """
    x, *others = tensor_inputs(node)
    if not shape(x) or not all(map(shape, others)):
        return opaque(node)
    (along,) = chosen_dims(argument(node, "dim"), len(shape(x)))
    dims, sizes = name_dims(shape(x))
    unlike = [d for d, size in enumerate(shape(x)) if d == along or any(shape(other)[d] != size for other in others)]
    inputs: list[list[tuple[str, ...]]] = [list(dims) for _ in (x, *others)]
    whole: set[str] = set()
    for d in unlike:
        whole.add(f"d{d}")
        for k, other in enumerate(others):
            name = f"i{k}_{d}"
            inputs[k + 1][d] = (name,)
            sizes[name] = shape(other)[d]
            whole.add(name)
    adds = argument(node, "reduce") in (None, "sum")
    linear = ((0, 2),) if len(others) == 2 and adds else ()
    if not _adds_numbers_to_row(node, others) or not is_float(value(x)):
        return Factors(tuple(map(tuple, inputs)), (tuple(dims),), sizes, frozenset(whole), linear=linear)
    inputs[2] = inputs[1]
    del sizes["i1_0"]
    return Factors(
        tuple(map(tuple, inputs)), (tuple(dims),), sizes, frozenset({"d0"}), linear=linear, additive=frozenset({0})
    )


def _adds_numbers_to_row(node: fx.Node, others: Sequence[fx.Node]) -> bool:
    """Return whether scatter_add adds a row of numbers at a row of indices."""
    return op_spec(node).adds_at_indices and [shape(n) for n in others] == [shape(others[0])[:1]] * 2


def histc(node: fx.Node) -> Factors:
    """Let each rank count its values between the ends; without these, they are the least and the largest value."""
    (x,) = tensor_inputs(node)
    if not argument(node, "min") < argument(node, "max"):
        return opaque(node)
    dims, sizes = name_dims(shape(x))
    sizes["bins"] = shape(node)[0]
    return Factors((tuple(dims),), ((("bins",),),), sizes, frozenset({"bins"}))


def searchsorted(node: fx.Node) -> Factors:
    """One sorted row for all values, or one for each row of values; sorted rows are whole."""
    ordered, *others = tensor_inputs(node)
    if len(others) != 1 or not shape(others[0]):
        return opaque(node)
    dims, sizes = name_dims(shape(others[0]))
    rows = dims[: len(shape(ordered)) - 1]
    sizes["n"] = shape(ordered)[-1]
    return Factors(((*rows, ("n",)), tuple(dims)), (tuple(dims),), sizes, frozenset({"n"}))
