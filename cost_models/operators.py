"""A node of an fx graph -> the :class:`Kernel` that it launches. An operator that nobody described raises."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ..core.annotations import copies, facts, is_getitem, num_bytes, shape, tensor_inputs, values
from ..core.errors import CompileError
from ..core.slices import runs
from ..ops.attention.blocks import Sight
from ..ops.attention.seen_keys import SeenKeys, seen_by
from ..ops.catalog import op_spec, priced_as, spec_of
from ..ops.experts.grouped_rows import grouped_linear, grouped_weight_grad
from ..ops.extensions import extension
from ..ops.filters_of_rows import grouped_convolution, grouped_convolution_weight
from ..ops.op_spec import Attention
from ..ops.rules.node_factors import argument
from ..ops.rules.table import RULES
from ..ops.rules.work import work_of
from .kernels import Kernel, merged_bytes

aten = torch.ops.aten

DTYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp32"}
    | dict.fromkeys([torch.float8_e4m3fn, torch.float8_e5m2], "fp8")
)

ProductSize = tuple[int, int, int, int]  # batch, rows, columns, depth: a multiply-add for each of their product


@dataclass(frozen=True)
class SizeOfProduct:
    """The size of a feature's operator that is priced as a product, and has no rule that says it.

    Attributes:
        size: takes the node of a rank's graph.
    """

    size: Callable[[fx.Node], ProductSize]


def _convolution(node: fx.Node) -> ProductSize:
    """Return the size of a product of every element of the result (transposed: of the input) with a filter."""
    image, weight = shape(tensor_inputs(node)[0]), shape(tensor_inputs(node)[1])
    if _transposed(node):
        return 1, _positions(image, weight), math.prod(weight[1:]), weight[0]
    return 1, _positions(shape(node), weight), weight[0], math.prod(weight[1:])


def _convolution_backward(node: fx.Node) -> ProductSize:
    """Return the size of two products of the forward's size: for the input, and for the weight."""
    grad, image, weight = (shape(source) for source in tensor_inputs(node)[:3])
    return 2, _positions(image if _transposed(node) else grad, weight), weight[0], math.prod(weight[1:])


def _grouped_convolution(node: fx.Node) -> ProductSize:
    """Return the size of :func:`_convolution` for each group, or of its gradient of the filters (grad, x, weight)."""
    *grad, x, weight = (shape(source) for source in tensor_inputs(node))
    result = grad[0] if grad else shape(node)
    image = x if argument(node, "transposed") else result
    return x[1], x[0] * math.prod(image[3:]), weight[1], math.prod(weight[2:])


def _positions(image: tuple[int, ...], weight: tuple[int, ...]) -> int:
    return math.prod(image) // max(1, weight[0])  # without the channels, which are the weight's first dim


def _transposed(node: fx.Node) -> bool:
    return "conv_transpose" in str(node.target) or bool(argument(node, "transposed"))


def _grouped_linear(node: fx.Node) -> ProductSize:
    rows, out = shape(tensor_inputs(node)[0]), shape(node)
    return 1, out[0], out[1], rows[1]


def _grouped_weight_grad(node: fx.Node) -> ProductSize:
    grad, rows = (shape(source) for source in tensor_inputs(node)[:2])
    return 1, grad[-1], rows[-1], math.prod(rows[:-1])


def _trilinear(node: fx.Node) -> ProductSize:
    """Return the size of torch.bilinear: a multiply-add for each element of three tensors' common shape."""
    operands: Any = node.args
    wide = []
    for source, places in zip(operands[:3], operands[3:6], strict=True):
        dims = list(shape(source))
        for place in places:
            dims.insert(place, 1)
        wide.append(dims)
    sizes = [max(dims) for dims in zip(*wide, strict=True)]
    depth = math.prod(sizes[dim] for dim in operands[6])
    return 1, math.prod(sizes) // max(1, depth * sizes[-1]), sizes[-1], depth


# Of products without a rule, and of groups of filters, whose places in the image are no factors of a rule
SIZES: Mapping[Any, Callable[[fx.Node], ProductSize]] = MappingProxyType(
    {
        grouped_linear: _grouped_linear,
        grouped_weight_grad: _grouped_weight_grad,
        aten.convolution_backward.default: _convolution_backward,
        grouped_convolution: _grouped_convolution,
        grouped_convolution_weight: _grouped_convolution,
        aten._trilinear.default: _trilinear,
    }
)  # fmt: skip
# What factorises or solves: of each matrix, about as many multiply-adds as its product with itself has. Few devices
# reach the speed of products there, so a plan with them is too good, and says that it guessed.
LINEAR_ALGEBRA = frozenset(
    {
        "cholesky", "cholesky_inverse", "cholesky_solve", "linalg_cholesky", "linalg_cholesky_ex", "_linalg_det",
        "linalg_det", "linalg_eig", "_linalg_eigh", "linalg_eigh", "linalg_eigvalsh", "linalg_householder_product",
        "linalg_inv", "linalg_inv_ex", "linalg_lu", "linalg_lu_factor", "linalg_lu_factor_ex", "linalg_lu_solve",
        "linalg_matrix_exp", "linalg_pinv", "linalg_qr", "_linalg_slogdet", "linalg_slogdet", "linalg_solve",
        "_linalg_solve_ex", "linalg_solve_triangular", "_linalg_svd", "linalg_svd", "linalg_svdvals",
        "linalg_tensorinv", "linalg_tensorsolve", "lu_unpack", "matrix_exp", "ormqr", "triangular_solve",
    }
)  # fmt: skip


ATTENTION_BACKWARD_LAUNCHES = 3  # the sums of the result times its gradient, the gradients, a cast


def traffic(node: fx.Node) -> float:
    """Return the bytes that a node reads and writes."""
    written = float(sum(num_bytes(v) for v in values(node) if isinstance(v, torch.Tensor)))
    inputs = (facts(source).value for source in tensor_inputs(node))
    return accessed_bytes(node.target, [num_bytes(v) if isinstance(v, torch.Tensor) else 0 for v in inputs], written)


def accessed_bytes(target: Any, inputs: Sequence[float], written: float) -> float:
    """Return the bytes that an operator reads and writes, by those of each tensor input and of all its results."""
    spec, read = spec_of(target), 0.0
    for place, size in enumerate(inputs):
        if place == spec.shape_only:
            continue
        needed = min(size, written) if place == 0 and spec.reads_result_size else size
        read += needed * (2 if spec.reads_twice and place < 2 else 1)
    return read + written


def _dtype(node: fx.Node) -> str:
    """Return the dtype in which an operator computes: of its result, or of the numbers that it multiplies."""
    if op_spec(node).operand_dtype:
        return DTYPES[values(tensor_inputs(node)[0])[0].dtype]
    result = next(v for v in values(node) if isinstance(v, torch.Tensor))
    return DTYPES.get(result.dtype, "fp32")


def _kind(node: fx.Node) -> Attention:
    """Return what kind of attention a node is; the default for others."""
    return op_spec(node).attention or Attention()


def attention_flops(node: fx.Node) -> float:
    """Return the arithmetic of scores and their use, without the causal half that fused kernels skip.

    Where a mask is a function of positions, keys are those that :func:`seen_keys` counts. The backward has five
    products where the forward has two (Dao et al. 2022).
    """
    kind = _kind(node)
    query, key, value = tensor_inputs(node)[kind.backward : kind.backward + 3]
    seen, keys = seen_keys(node), float(shape(key)[-2])
    if seen is not None:
        keys = seen.mean if kind.positions == "ring" else min(keys, seen.mean)
    elif argument(node, "is_causal"):
        keys /= 2
    count = 2.0 * math.prod(shape(query)[:-1]) * keys * (shape(query)[-1] + shape(value)[-1])
    return count * (2.5 if kind.backward else 1.0)


def ring_size(node: fx.Node) -> int:
    """Return the ranks of a ring: ``(q, axis, size, ...)`` and ``(grad, axis, size, ...)``."""
    return int(node.args[2])  # type: ignore[arg-type]


def with_documents(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return attention whose mask has documents, and plans of its runs."""
    kinds = (node for node in nodes if work_of(node.target) == "attention" or op_spec(node).plans_ring)
    return [node for node in kinds if argument(node, "segments") is not None]


def documents_note(nodes: Iterable[fx.Node]) -> str:
    """Return a note about the packed documents that are assumed; "" where no mask has documents."""
    of_attention = (node for node in with_documents(nodes) if not op_spec(node).plans_ring)
    keys = [seen for node in of_attention if (seen := seen_keys(node)) is not None]
    if not keys:
        return ""
    longest = max(keys, key=lambda seen: seen.length)
    if not longest.documents:
        return 'each row is taken to be one document: expect={"documents": ...} says their lengths'
    count = sum(len(row.ends) for row in longest.rows) / len(longest.rows)
    share = f"{longest.uneven:.2f} of the mean"
    return f"rows are taken to have {count:.3g} documents; the rank with most attention has {share}"


def ring_steps(node: fx.Node) -> float:
    """Return the steps of a ring in which any query sees any key: keys travel between these."""
    seen = seen_keys(node)
    return ring_size(node) if seen is None else seen.steps


def _merged(node: fx.Node) -> float:
    backward = _kind(node).backward
    q, k, v = tensor_inputs(node)[backward : 3 + backward]
    element = num_bytes(values(q)[0]) / max(1, math.prod(shape(q)))
    results = math.prod(shape(q)[:-1]) * (shape(q) if backward else shape(v))[-1]
    return merged_bytes(element, ring_steps(node), results, math.prod(shape(k)) + math.prod(shape(v)), backward)


def seen_keys(node: fx.Node) -> SeenKeys | None:
    """Return the keys that queries of attention see on each rank, by its mask and the documents that are expected.

    None where a mask is a tensor, or none, or causality as a kernel knows it, or where keys may be of another sequence.
    """
    mask = argument(node, "mask")
    if not isinstance(mask, str):
        return None
    documents, kind = _expected(node), _kind(node)
    if mask == "all" and not documents and kind.positions != "ring":
        return None
    rows, _, queries, _ = shape(tensor_inputs(node)[kind.backward])
    whole, ranks, assigned = queries, [[(0, queries)]], 0
    if kind.positions == "ring":
        size, plan = ring_size(node), argument(node, "plan")
        whole, ranks = queries * size, _in_order(size, queries)
        assigned = 0 if plan is None else shape(plan)[1]
    elif kind.positions == "tiles":
        whole, sizes, parts = (argument(node, name) for name in ("whole", "sizes", "parts"))
        ranks = [runs(whole, parts, sizes, place) for place in itertools.product(*map(range, sizes))]
    return seen_by(Sight.parse(mask), whole, tuple(map(tuple, ranks)), documents, rows, assigned)


def leaving_runs(node: fx.Node) -> float:
    """Return the share of its positions that the busiest rank of ``send_runs`` or ``return_runs`` sends."""
    plan, x = argument(node, "plan"), tensor_inputs(node)[0]
    mask, whole, size, runs = (argument(plan, name) for name in ("mask", "whole", "ranks", "runs"))
    documents = _expected(plan)
    ranks = tuple(map(tuple, _in_order(size, whole // size)))
    return seen_by(Sight.parse(mask), whole, ranks, documents, shape(x)[0], runs).leaving


def _in_order(size: int, length: int) -> list[list[tuple[int, int]]]:
    return [[(rank * length, length)] for rank in range(size)]


def _expected(node: fx.Node) -> tuple[int, ...]:
    """Return the lengths of documents that are expected where a mask has some."""
    return tuple(facts(node).documents) if argument(node, "segments") is not None else ()


def product_size(node: fx.Node) -> ProductSize | None:
    """Return the size of a product; None where it sums over nothing that two inputs share (an outer product).

    Raises:
        CompileError: QN210 for a product without a rule and without an entry in :data:`SIZES`.
    """
    own_size, rule = size_of(node), RULES.get(node.target)
    if own_size is not None:
        return own_size(node)
    if rule is None:
        raise _unpriced(node)
    return rule.factors(node).product


def size_of(node: fx.Node) -> Callable[[fx.Node], ProductSize] | None:
    """Return the function that computes the size of a product, where the factors of a rule do not say it."""
    if op_spec(node).convolves:
        return _convolution
    of_feature = extension(node.target, SizeOfProduct)
    return SIZES.get(priced_as(node)) if of_feature is None else of_feature.size


def _unpriced(node: fx.Node) -> CompileError:
    return CompileError(
        "QN210",
        f"the operator {node.target} has no price",
        where=facts(node).where,
        fix="say what it does: work=... in its sharding rule, or a line in ops/catalog.py; for a product without a "
        "rule also its size, in cost_models/operators.py",
    )


def _factorises(target: Any) -> bool:
    return getattr(target, "namespace", "") == "aten" and target.overloadpacket.__name__ in LINEAR_ALGEBRA


def _factorising(node: fx.Node) -> float:
    """Return the FLOPs of linear algebra, by its largest operand."""
    sizes = [shape(source) for source in tensor_inputs(node)]
    return max((2.0 * math.prod(size) * min(size[-2:]) for size in sizes if len(size) > 1), default=0.0)


def guessed(node: fx.Node) -> bool:
    """Return whether a price is a bound: of an undescribed operator (its bytes) or linear algebra (a product)."""
    if node.op != "call_function" or is_getitem(node) or getattr(node.target, "namespace", "") == "quintnet":
        return False
    return (work_of(node.target) is None and not op_spec(node).relayouts) or _factorises(node.target)


def kernel_of(node: fx.Node, unknown: str = "error") -> Kernel:
    """Return the kernel of a call_function node, forward or backward, at its shapes.

    Undescribed operators of a backward, and with ``unknown="memory"`` any other, are priced by their bytes: they come
    from autograd's formula of an operator that has a price.

    Raises:
        CompileError: QN210 for an undescribed operator of the forward: it never costs 0 by default.
    """
    target, work = node.target, work_of(node.target)
    launches = launches_of(node)
    if work == "view" or _already_contiguous(node):
        return Kernel(node.name, "view", launches=launches)
    size_moved = traffic(node)
    if work == "attention":
        size_moved += _merged(node) if _kind(node).positions == "ring" else 0
        return Kernel(node.name, "attention", attention_flops(node), size_moved, _dtype(node), launches=launches)
    if work == "matmul" and (size := product_size(node)) is not None:
        batch, rows, columns, depth = size
        flops = 2.0 * batch * rows * columns * depth
        return Kernel(node.name, "matmul", flops, size_moved, _dtype(node), rows, columns, depth, batch, launches)
    if _factorises(target):
        return Kernel(node.name, "matmul", _factorising(node), size_moved, "fp32")
    if work is not None or unknown == "memory" or facts(node).phase == "backward":
        return Kernel(node.name, "memory", bytes=size_moved, launches=launches)
    raise _unpriced(node)


def _already_contiguous(node: fx.Node) -> bool:
    return op_spec(node).relayouts and not copies(node)


def launches_of(node: fx.Node) -> int:
    """Return the number of kernels that a call_function node launches."""
    target, work = node.target, work_of(node.target)
    if work == "view" or _already_contiguous(node):
        return 0
    if work == "attention":
        return _attention_calls(node) * (ATTENTION_BACKWARD_LAUNCHES if _kind(node).backward else 1)
    if spec_of(target).slice_at is not None:
        return int(node.args[2])  # type: ignore[arg-type]
    return 2 if spec_of(target).reads_twice else 1


def _attention_calls(node: fx.Node) -> int:
    """Return the calls of attention's kernel: one, or one for each document of each row; of a ring, for each run."""
    seen, positions = seen_keys(node), _kind(node).positions
    if seen is None or positions is None:
        return 1
    rows = seen.together if argument(node, "segments") is not None else 1
    return math.ceil(rows * max(seen.blocks if positions == "ring" else 1, seen.parts if seen.documents else 1))


def model_flops(graph: fx.Graph) -> float:
    """Return the FLOPs of products and attention in a step of an unsplit model's forward; twice as many go backward."""
    return 3 * sum(kernel_of(node, "memory").flops for node in graph.nodes if node.op == "call_function")
