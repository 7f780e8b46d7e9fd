"""How attention to pages may be sharded."""

from __future__ import annotations

from torch import fx

from ...core.annotations import shape, tensor_inputs
from ...ops.rules.notation import Dims, Factors


def paged_attention(node: fx.Node) -> Factors:
    """Return pools of pages, with the rows that have theirs in them, and heads as what may be split.

    Rows of one pool are whole: each rank that has its pages writes all of them; and so are positions.
    """
    q, k, v, keys, _, table, _ = (shape(n) for n in tensor_inputs(node))
    sizes = {"p": keys[0], "b": q[0] // keys[0], "g": k[1], "r": q[1] // k[1], "s": q[2], "d": q[3], "e": v[3]}
    sizes |= {"n": keys[1], "l": keys[2], "m": table[1]}
    rows = ("p", "b") if sizes["b"] > 1 else ("p",)
    heads = ("g", "r") if sizes["r"] > 1 else ("g",)
    new: Dims = (rows, ("g",), ("s",))
    kept: Dims = (("p",), ("n",), ("l",), ("g",))
    ins = ((rows, heads, ("s",), ("d",)), (*new, ("d",)), (*new, ("e",)), (*kept, ("d",)), (*kept, ("e",)))
    out: Dims = (rows, heads, ("s",), ("e",))
    return Factors((*ins, (rows, ("m",)), (rows, ("s",))), (out,), sizes, frozenset("bsdenlm"))
