"""Rules of operators whose factors depend on their arguments: views, reductions, concatenation, attention.

Each function reads one node and returns its :class:`Factors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ..annotations import facts, shape, tensor_inputs, values
from .rule_notation import Dims, Factors


def arg(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _named(dims: Sequence[int], prefix: str = "d") -> tuple[list[tuple[str, ...]], dict[str, int]]:
    return [(f"{prefix}{i}",) for i in range(len(dims))], {f"{prefix}{i}": s for i, s in enumerate(dims)}


def _dims(dim: Any, rank: int) -> list[int]:
    """Normalize a dim argument: None and [] mean all."""
    if dim is None or dim == []:
        return list(range(rank))
    return [d % rank for d in ([dim] if isinstance(dim, int) else dim)]


def reshape(node: fx.Node) -> Factors:
    """Common refinement of both shapes: [B, S] -> [B*S] has factors B and S. A ragged part must stay whole."""
    before, after = shape(tensor_inputs(node)[0]), shape(node)
    ins: list[list[str]] = [[] for _ in before]
    outs: list[list[str]] = [[] for _ in after]
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    i = j = 0
    left = list(before)
    right = list(after)
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
        else:  # e.g. [2, 3] -> [3, 2]: merge until the products meet, and keep that part whole
            a, b = i, j
            p, q = left[i], right[j]
            while p != q:
                if p < q:
                    a += 1
                    p *= left[a]
                else:
                    b += 1
                    q *= right[b]
            for k in range(i, a + 1):
                ins[k].append(name := f"w{len(sizes)}")
                sizes[name] = left[k]
                whole.add(name)
                left[k] = 1
            for k in range(j, b + 1):
                outs[k].append(name := f"w{len(sizes)}")
                sizes[name] = right[k]
                whole.add(name)
                right[k] = 1
    return Factors((_freeze(ins),), (_freeze(outs),), sizes, frozenset(whole), linear=((0,),))


def _freeze(dims: Sequence[Sequence[str]]) -> Dims:
    return tuple(tuple(d) for d in dims)


def expand(node: fx.Node) -> Factors:
    """A dim of size 1 that grows has a new factor; the others keep theirs."""
    before, after = shape(tensor_inputs(node)[0]), shape(node)
    out, sizes = _named(after)
    skip = len(after) - len(before)
    ins = [out[skip + i] if size == after[skip + i] else () for i, size in enumerate(before)]
    return Factors((tuple(ins),), (tuple(out),), sizes, linear=((0,),))


def permute(node: fx.Node) -> Factors:
    """transpose, permute, t."""
    dims, sizes = _named(shape(tensor_inputs(node)[0]))
    rank = len(dims)
    order = list(range(rank))
    if "permute" in str(node.target):
        order = [d % rank for d in node.args[1]]  # type: ignore[union-attr,operator]
    elif rank >= 2:
        a, b = (0, 1) if len(node.args) == 1 else (int(node.args[1]) % rank, int(node.args[2]) % rank)  # type: ignore[arg-type]
        order[a], order[b] = b, a
    return Factors((tuple(dims),), (tuple(dims[d] for d in order),), sizes, linear=((0,),))


def _blocked(node: fx.Node, blocked: Sequence[int], *, linear: bool) -> Factors:
    """Dims of the first input keep their factor except ``blocked`` ones, which are whole and may change size."""
    first, *others = tensor_inputs(node)
    dims, sizes = _named(shape(first))
    outs, whole = [], {f"d{d}" for d in blocked}
    for k, v in enumerate(values(node)):
        out = list(dims)
        for d in blocked:
            out[d] = (name := f"o{k}_{d}",)
            sizes[name] = v.shape[d]
            whole.add(name)
        outs.append(tuple(out))
    assert not others, "only for operators with one tensor input"
    return Factors((tuple(dims),), tuple(outs), sizes, frozenset(whole), linear=((0,),) if linear else ())


def slice_(node: fx.Node) -> Factors:
    return _blocked(node, _dims(arg(node, 1, "dim", 0), len(shape(tensor_inputs(node)[0]))), linear=True)


def pad(node: fx.Node) -> Factors:
    """constant_pad_nd: pairs of (before, after) from the last dim backwards."""
    widths: list[int] = node.args[1]  # type: ignore[assignment]
    rank = len(shape(node))
    padded = [rank - 1 - i // 2 for i in range(0, len(widths), 2) if widths[i] or widths[i + 1]]
    return _blocked(node, padded, linear=not arg(node, 2, "value", 0) and arg(node, 3, "value", 0) in (0, None))


def scan(node: fx.Node) -> Factors:
    """cumsum and the like: whole along the dim they run over."""
    return _blocked(node, _dims(node.args[1], len(shape(node))), linear="cumsum" in str(node.target))


def topk(node: fx.Node) -> Factors:
    """topk, sort: whole along their dim, several outputs."""
    position = 2 if "topk" in str(node.target) else 1
    return _blocked(node, _dims(arg(node, position, "dim", -1), len(shape(tensor_inputs(node)[0]))), linear=False)


def select(node: fx.Node) -> Factors:
    dims, sizes = _named(shape(tensor_inputs(node)[0]))
    gone = int(node.args[1]) % len(dims)  # type: ignore[arg-type]
    kept = tuple(d for i, d in enumerate(dims) if i != gone)
    return Factors((tuple(dims),), (kept,), sizes, frozenset({f"d{gone}"}), linear=((0,),))


def cat(node: fx.Node) -> Factors:
    """Each part's piece of the dim is whole."""
    parts = tensor_inputs(node)
    dims, sizes = _named(shape(node))
    along = _dims(arg(node, 1, "dim", 0), len(dims))[0]
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
    dims, sizes = _named(shape(node))
    along = _dims(arg(node, 1, "dim", 0), len(dims))[0]
    one = tuple(f for d, f in enumerate(dims) if d != along)
    everyone = tuple(range(len(parts)))
    return Factors((one,) * len(parts), (tuple(dims),), sizes, frozenset({f"d{along}"}), linear=(everyone,))


def split(node: fx.Node) -> Factors:
    """Equal pieces: the dim is (parts, piece) and a piece may be sharded, which gives ``S(dim, parts)``."""
    before = shape(tensor_inputs(node)[0])
    dims, sizes = _named(before)
    along = _dims(arg(node, 2, "dim", 0), len(before))[0]
    lengths = [v.shape[along] for v in values(node)]
    if len(set(lengths)) > 1:
        return _blocked(node, [along], linear=True)
    sizes |= {"parts": len(lengths), "piece": lengths[0]}
    ins = [("parts", "piece") if d == along else f for d, f in enumerate(dims)]
    out = tuple(("piece",) if d == along else f for d, f in enumerate(dims))
    return Factors((tuple(ins),), (out,) * len(lengths), sizes, frozenset({"parts"}), linear=((0,),))


def _reduction(node: fx.Node, *, sums: bool, mean: bool = False) -> Factors:
    before = shape(tensor_inputs(node)[0])
    dims, sizes = _named(before)
    has_dim = any(a.name == "dim" for a in node.target._schema.arguments)  # type: ignore[union-attr]
    gone = _dims(arg(node, 1, "dim") if has_dim else None, len(before))
    keep = bool(arg(node, 2, "keepdim", False)) if has_dim else False
    out = tuple(() if d in gone else f for d, f in enumerate(dims) if keep or d not in gone)
    whole = frozenset() if sums else frozenset(f"d{d}" for d in gone)
    outs = (out,) * len(values(node))
    return Factors((tuple(dims),), outs, sizes, whole, linear=((0,),) if sums else (), mean=mean)


def reduce_sum(node: fx.Node) -> Factors:
    return _reduction(node, sums=True)


def reduce_mean(node: fx.Node) -> Factors:
    return _reduction(node, sums=True, mean=True)


def reduce_other(node: fx.Node) -> Factors:
    """amax, any, argmax, var...: the reduced dims are whole."""
    return _reduction(node, sums=False)


def along_dim(node: fx.Node) -> Factors:
    """softmax and the like: whole along their dim argument, the shape stays."""
    dims, sizes = _named(shape(node))
    whole = frozenset(f"d{d}" for d in _dims(node.args[1], len(dims)))
    return Factors((tuple(dims),), (tuple(dims),), sizes, whole)


def norm_last(node: fx.Node) -> Factors:
    """layer_norm, rms_norm: the normalized dims are whole; weight and bias lack the others."""
    dims, sizes = _named(shape(tensor_inputs(node)[0]))
    count = len(node.args[1])  # type: ignore[arg-type]
    whole = frozenset(f"d{d}" for d in range(len(dims) - count, len(dims)))
    weights = (tuple(dims[-count:]),) * (len(tensor_inputs(node)) - 1)
    return Factors((tuple(dims), *weights), (tuple(dims),), sizes, whole)


def leading(count: int) -> Any:
    """A rule for operators that work on each row of the first ``count`` dims on its own (pooling, group_norm)."""

    def factors(node: fx.Node) -> Factors:
        first, *others = tensor_inputs(node)
        dims, sizes = _named(shape(first))
        whole = {f"d{d}" for d in range(count, len(dims))}
        outs = []
        for k, v in enumerate(values(node)):
            names, more = _named(v.shape, f"o{k}_")
            outs.append((*dims[:count], *names[count:]))
            kept = {f"o{k}_{d}": more[f"o{k}_{d}"] for d in range(count, v.dim())}
            sizes.update(kept)
            whole |= set(kept)
        ins: list[Dims] = [tuple(dims)]
        for i, other in enumerate(others):
            names, more = _named(shape(other), f"i{i}_")
            ins.append(tuple(names))
            sizes.update(more)
            whole |= set(more)
        return Factors(tuple(ins), tuple(outs), sizes, frozenset(whole))

    return factors


def convolution(node: fx.Node) -> Factors:
    """Batch, input channels (a sum) and output channels; space is whole."""
    given = tensor_inputs(node)
    x, weight, out = shape(given[0]), shape(given[1]), shape(node)
    groups = int(arg(node, 8 if "convolution" in str(node.target) else 6, "groups", 1))
    sizes = {"n": x[0], "i": x[1], "o": out[1], "wi": weight[1]}
    whole = {"wi"} if groups > 1 else set()
    if groups > 1:
        whole |= {"i", "o"}
    space: dict[str, list[tuple[str, ...]]] = {}
    for label, dims in (("x", x[2:]), ("w", weight[2:]), ("y", out[2:])):
        names, more = _named(dims, label)
        space[label] = names
        sizes |= more
        whole |= set(more)
    inner = "i" if groups == 1 else "wi"
    ins: list[Dims] = [
        (("n",), ("i",), *space["x"]),
        (("o",), (inner,), *space["w"]),
    ]
    if len(given) > 2:
        ins.append((("o",),))
    return Factors(
        tuple(ins),
        ((("n",), ("o",), *space["y"]),),
        sizes,
        frozenset(whole),
        linear=((0,), (1,)) if len(given) == 2 else (),
        additive=frozenset({2}) if len(given) > 2 else frozenset(),
    )


def attention(node: fx.Node) -> Factors:
    """scaled_dot_product_attention: batch and heads; queries too unless causal. Fewer key heads form groups."""
    q, k, v, *mask = tensor_inputs(node)
    qs, ks, vs = shape(q), shape(k), shape(v)
    batch, sizes = _named(qs[:-3], "b")
    group = qs[-3] // ks[-3]
    sizes |= {"g": ks[-3], "r": group, "s": qs[-2], "t": ks[-2], "d": qs[-1], "e": vs[-1]}
    causal = bool(arg(node, 5, "is_causal", False))
    whole = {"t", "d"} | ({"s"} if causal else set())
    heads: tuple[str, ...] = ("g", "r") if group > 1 else ("g",)
    ins: list[Dims] = [
        (*batch, heads, ("s",), ("d",)),
        (*batch, ("g",), ("t",), ("d",)),
        (*batch, ("g",), ("t",), ("e",)),
    ]
    if mask:
        full: list[tuple[str, ...]] = [*batch, heads, ("s",), ("t",)]
        dims = shape(mask[0])
        expected = (*qs[:-1], ks[-2])[-len(dims) :]
        ins.append(
            tuple(f if have == want else () for f, have, want in zip(full[-len(dims) :], dims, expected, strict=True))
        )
    out = (*batch, heads, ("s",), ("e",))
    return Factors(tuple(ins), (out,), sizes, frozenset(whole), linear=((2,),))


def matmul(node: fx.Node) -> Factors:
    """matmul, mm, bmm of any ranks, with broadcast leading dims."""
    a, b = (shape(n) for n in tensor_inputs(node))
    out = shape(node)
    sizes: dict[str, int] = {"k": a[-1]}
    lead = out[: len(out) - (len(a) > 1) - (len(b) > 1)]
    names, more = _named(lead, "b")
    sizes |= more

    def leads(dims: Sequence[int]) -> list[tuple[str, ...]]:
        skip = len(lead) - len(dims)
        return [names[skip + i] if size == lead[skip + i] else () for i, size in enumerate(dims)]

    left, right, tail = leads(a[:-2]), leads(b[:-2]), list(names)
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


def factory(node: fx.Node) -> Factors:
    """new_ones, full, ...: every dim of the result may be sharded; inputs only give dtype and device."""
    dims, sizes = _named(shape(node))
    ins: list[Dims] = []
    whole: set[str] = set()
    for i, source in enumerate(tensor_inputs(node)):
        names, more = _named(shape(source), f"i{i}_")
        ins.append(tuple(names))
        sizes |= more
        whole |= set(more)
    return Factors(tuple(ins), (tuple(dims),), sizes, frozenset(whole))


def opaque(node: fx.Node) -> Factors:
    """Nothing may be sharded: always correct, never parallel."""
    sizes: dict[str, int] = {}
    sides: list[list[Dims]] = [[], []]
    for side, label, tensors in ((0, "i", [facts(n).value for n in tensor_inputs(node)]), (1, "o", values(node))):
        for k, tensor in enumerate(tensors):
            names, more = _named(tuple(tensor.shape), f"{label}{k}_")  # type: ignore[union-attr]
            sides[side].append(tuple(names))
            sizes |= more
    return Factors(tuple(sides[0]), tuple(sides[1]), sizes, frozenset(sizes))


def index(node: fx.Node) -> Factors:
    """x[..., i, j]: indexed dims are whole; the others pass. Only for indices that lead or stand together."""
    source, picks = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    assert isinstance(source, fx.Node)
    used = [d for d, p in enumerate(picks) if p is not None]
    together = used == list(range(used[0], used[-1] + 1))
    if not together:
        return opaque(node)
    dims, sizes = _named(shape(source))
    broadcast = max((shape(picks[d]) for d in used), key=len)
    out_shape = shape(node)
    lead = used[0]
    names, more = _named(out_shape[lead : lead + len(broadcast)], "p")
    sizes |= more
    whole = {f"d{d}" for d in used}
    ins: list[Dims] = [tuple(dims)]
    for d in used:
        dims_of = shape(picks[d])
        skip = len(names) - len(dims_of)
        ins.append(tuple(names[skip + i] if s == sizes[names[skip + i][0]] else () for i, s in enumerate(dims_of)))
    out = (*dims[:lead], *names, *dims[used[-1] + 1 :])
    return Factors(tuple(ins), (out,), sizes, frozenset(whole), linear=((0,),))


def gather(node: fx.Node) -> Factors:
    """gather(x, dim, index): whole along dim; elsewhere the index must cover x."""
    x, picks = tensor_inputs(node)
    along = int(node.args[1]) % len(shape(x))  # type: ignore[arg-type]
    dims, sizes = _named(shape(picks))
    whole = {f"d{along}"}
    ins = []
    for d, size in enumerate(shape(x)):
        if d != along and size == sizes[f"d{d}"]:
            ins.append(dims[d])
            continue
        ins.append((name := f"x{d}",))
        sizes[name] = size
        whole |= {name, f"d{d}"}
    return Factors((tuple(ins), tuple(dims)), (tuple(dims),), sizes, frozenset(whole), linear=((0,),))
