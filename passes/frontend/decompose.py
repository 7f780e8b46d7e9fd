"""Decompose operators without a rule into those that torch defines them by."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.torch import FakeTensorMode, composite_definition, composite_in_cpp, get_decompositions, make_fx, pytree
from ...compat.torch_codegen import forgotten_texts
from ...core.absent_gpu import compute_device
from ...core.annotations import value
from ...core.replaced import one_thread
from .norm_rewrites import NARROW_DTYPES
from .recurrent_layers import RECURRENT

aten = torch.ops.aten

# Decomposed although torch has kernels for them, because their parts have rules: losses, copies of views, sums of
# products. Not those whose parts have other derivatives at a kink or a pole (special_entr, _safe_softmax, renorm).
_OF_TORCH: MappingProxyType[Any, Callable[..., Any]] = MappingProxyType(
    get_decompositions(
        [
            aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
            aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
            aten.soft_margin_loss.default, aten.addcmul.default, aten.addcdiv.default, aten.hardswish.default,
            aten.softplus.default, aten.addr.default, aten.vdot.default, aten.linalg_cross.default, aten.trace.default,
            aten.ldexp.Tensor, aten.rsub.Tensor, aten.heaviside.default, aten.isposinf.default, aten.isneginf.default,
            aten.mvlgamma.default, aten.block_diag.default, aten.diag_embed.default, aten.rot90.default,
            aten._chunk_cat.default, aten.unsafe_split.Tensor, aten.diagonal_copy.default, aten.expand_copy.default,
            aten.narrow_copy.default, aten.permute_copy.default, aten.split_with_sizes_copy.default,
            aten.t_copy.default, aten.transpose_copy.int, aten.unbind_copy.int, aten.unfold_copy.default,
            aten.slice_backward.default, aten.select_backward.default, aten.diagonal_backward.default,
            aten.glu_backward.default, aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
            aten.native_layer_norm_backward.default, aten.native_group_norm_backward.default,
            aten.native_batch_norm_backward.default, aten.log_sigmoid_backward.default,
            aten._prelu_kernel_backward.default,
        ]
    )
)  # fmt: skip


def _batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    scale: Tensor | None,
    train: bool,
    eps: float,
    wanted: list[bool],
) -> Any:
    """Compute torch's definition with statistics that are computed from ``x`` again.

    The statistics that the norm returns have no gradient, but the derivative of this operator with respect to ``x``
    includes the gradient through them.
    """
    if train:
        wide = x.float() if x.dtype in NARROW_DTYPES else x
        dims = [0, *range(2, x.dim())]
        average = wide.mean(dims, keepdim=True)
        mean, scale = average.flatten(), torch.rsqrt((wide - average).square().mean(dims) + eps)
    of_torch = _OF_TORCH[aten.native_batch_norm_backward.default]
    return of_torch(grad, x, weight, running_mean, running_var, mean, scale, train, eps, wanted)


def _embedding_backward(grad: Tensor, ids: Tensor, rows: int, padding: int, by_count: bool) -> Tensor:
    """Add the gradients of the rows that were looked up where they were; torch's definition allows ids without one."""
    if by_count:
        counts = grad.new_zeros(rows).index_add(0, ids.flatten(), torch.ones_like(ids, dtype=grad.dtype).flatten())
        grad = grad / counts[ids][..., None]
    if padding >= 0:
        grad = grad.masked_fill((ids == padding)[..., None], 0)
    return grad.new_zeros((rows, grad.shape[-1])).index_add(0, ids.flatten(), grad.reshape(-1, grad.shape[-1]))


_SPLIT: MappingProxyType[Any, Callable[..., Any]] = MappingProxyType(
    {
        **_OF_TORCH, **RECURRENT, aten.native_batch_norm_backward.default: _batch_norm_backward,
        aten.embedding_dense_backward.default: _embedding_backward,
    }
)  # fmt: skip


def _python(target: Any) -> Callable[..., Any] | None:
    """Return an operator's definition in Python, if it has one."""
    return _SPLIT.get(target) or composite_definition(target)


def has_parts(target: Any) -> bool:
    """Return whether torch defines an operator by others."""
    return composite_in_cpp(target) or _python(target) is not None


@contextlib.contextmanager
def _torch_alone() -> Iterator[None]:
    """Switch oneDNN off: it has a kernel for LSTMs whose derivative needs values that only autograd has."""
    with one_thread():
        (enabled, *_) = torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            torch.backends.mkldnn.set_flags(enabled)  # type: ignore[no-untyped-call]


def decompose(mode: FakeTensorMode, target: Any, args: Any, kwargs: Any) -> tuple[fx.Graph, list[fx.Node]]:
    """Return the graph of an operator's definition, and the nodes among the arguments in the order of its inputs.

    ``args`` and ``kwargs`` may hold nodes, nested in lists; nothing is computed.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    leaves = [compute_device(leaf) if isinstance(leaf, torch.device) else leaf for leaf in leaves]
    nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    python = _python(target)

    def call(*tensors: Tensor) -> Any:
        remaining = iter(tensors)
        with_tensors = [next(remaining) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        tensor_args, tensor_kwargs = pytree.tree_unflatten(with_tensors, spec)
        return (python or target)(*tensor_args, **tensor_kwargs)

    # new tensors, which the trace distinguishes by identity: nodes may share a value
    with mode, _torch_alone(), forgotten_texts():
        inputs = [torch.empty_like(x, device=compute_device(x.device)) for x in map(value, nodes)]
        if python is not None:  # operators that it calls are not decomposed
            return make_fx(call, pre_dispatch=True)(*inputs).graph, nodes
        # a definition in C++ may change its own results in place
        inner = make_fx(call)(*inputs)
        return make_fx(torch.func.functionalize(inner, remove="mutations"))(*inputs).graph, nodes
