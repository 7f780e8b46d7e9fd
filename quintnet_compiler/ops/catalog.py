"""The specs of operators (:class:`.op_spec.OpSpec`): columns that the table below gives by name, and traits
(:mod:`.traits`) of single overloads.

``work``, of operators without a rule (backward operators, operators of decompositions): ``matmul`` (its size:
:data:`..cost_models.operators.SIZES`), ``attention``, ``view`` (moves nothing) or ``memory`` (bound by the bytes that
it reads and writes); ``-`` where a rule (:mod:`.rules.table`) or torch's own tags (pointwise, reduction) say it.
``autocast``: the bits in which mixed precision computes it, as torch.autocast has it
(https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference); ``-``: in those that it is given. Norms are
in the list of 16 bits, as their kernels keep statistics in float32 (torch.autocast has them in the other list, which
costs passes over memory and gives the same to the last bit of the result); of batch norms, statistics are buffers,
which stay float32. Lookups are in that list, too (torch.autocast has them in none): what is added to a row has 16 bits,
and so has the sum; the gradient of the table is added up in float32. ``recompute``: ``keep`` if computing it again
takes longer than a few passes over memory; ``save``: it never is, as it is small and the host may have to wait for it;
``pointwise`` or ``reduction``: compilers take it apart into operators of these kinds, which they fuse with their
neighbours.

Derivatives are traced from autograd.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, cast

from torch import fx

from ..compat.torch import operator_name
from ..core.annotations import shape
from .collectives import CollectiveSpec
from .extensions import extension, extension_of_method
from .op_spec import FUSED, OpSpec
from .rules.notation import Work
from .traits import TRAITS

_NAMESPACES = ("aten", "quintnet")  # a user's own operator of the same name is another


def spec_of(target: Any) -> OpSpec:
    """Return the spec of an operator (an overload), from where it is defined or from the tables of this package.

    It is the default one if nothing is declared of the operator.
    """
    return extension(target, OpSpec) or _of_tables(target)


def op_spec(node: fx.Node) -> OpSpec:
    """Return the spec of the operator that a node calls, in generated code as a method; others have the default one."""
    if node.op == "call_method":
        return spec_of_method(str(node.target))
    return spec_of(node.target)


def collective_of(called: str) -> CollectiveSpec | None:
    """Return the collective that generated code calls, or starts, by a name; None for other names."""
    return spec_of_method(called).collective


def spec_of_method(name: str) -> OpSpec:
    """Return the spec of the operator that generated code calls the runtime for, by its name."""
    spec = _OF_METHODS.get(name) or extension_of_method(name, OpSpec)
    return spec if spec is not None and (spec.on_rank or spec.accumulates) else _DEFAULT


def adds_two(node: fx.Node) -> bool:
    """Return whether a node adds two different tensors of its own shape."""
    terms = node.all_input_nodes
    plain = op_spec(node).adds and not node.kwargs and len(terms) == 2
    return plain and all(shape(term) == shape(node) for term in terms)


def priced_as(node: fx.Node) -> Any:
    """Return the operator as which that of a node is priced: another of the same form, or itself."""
    return op_spec(node).priced_as or node.target


def name_of(target: Any) -> str | None:
    """Return the name of an operator of torch or of this package, without its overload; None for others."""
    return str(target.overloadpacket.__name__) if getattr(target, "namespace", None) in _NAMESPACES else None


@cache
def _of_tables(target: Any) -> OpSpec:
    return _WITH_TRAITS.get(target) or _of_name(target)


def _of_name(target: Any) -> OpSpec:
    name = name_of(target)
    return OPERATORS.get(name, _DEFAULT) if name else _DEFAULT


def _read(table: str) -> Mapping[str, OpSpec]:
    rows = [line.split() for line in table.strip().splitlines()]
    return MappingProxyType(
        {
            name: OpSpec(
                work=None if work == "-" else cast(Work, work),
                autocast=None if bits == "-" else int(bits),
                keep=again in ("keep", "save"),
                save=again == "save",
                fused_as=again if again in FUSED else None,
            )
            for name, work, bits, again in rows
        }
    )


_DEFAULT = OpSpec()
OPERATORS = _read(
    # name, work, autocast, recompute
    """
    convolution_backward                                  matmul     -   -
    grouped_linear                                        matmul     -   keep
    grouped_weight_grad                                   matmul     -   -
    _trilinear                                            matmul     -   -
    ring_attention                                        attention  -   -
    ring_attention_backward                               attention  -   -
    _scaled_dot_product_cudnn_attention                   attention  -   -
    _scaled_dot_product_cudnn_attention_backward          attention  -   -
    _scaled_dot_product_efficient_attention               attention  -   -
    _scaled_dot_product_efficient_attention_backward      attention  -   -
    _scaled_dot_product_flash_attention                   attention  -   -
    _scaled_dot_product_flash_attention_backward          attention  -   -
    _scaled_dot_product_flash_attention_for_cpu           attention  -   -
    _scaled_dot_product_flash_attention_for_cpu_backward  attention  -   -
    tiled_attention                                       attention  -   -
    tiled_attention_backward                              attention  -   -
    alias                                                 view       -   -
    arrived                                               view       -   -
    _conj                                                 view       -   -
    squeeze                                               view       -   -
    _unsafe_view                                          view       -   -
    unsqueeze                                             view       -   -
    view                                                  view       -   -
    _adaptive_avg_pool2d                                  memory     -   -
    _adaptive_avg_pool3d                                  memory     -   -
    addcdiv                                               memory     -   -
    addcmul                                               memory     -   -
    batch_norm_backward                                   memory     -   -
    bernoulli                                             memory     -   -
    clone                                                 memory     -   -
    combine                                               memory     -   -
    copy                                                  memory     -   -
    cross_entropy_loss                                    memory     -   -
    ctc_rows_backward                                     memory     -   -
    diag_embed                                            memory     -   -
    diagonal_backward                                     memory     -   -
    dispatch                                              memory     -   -
    dispatch_plan                                         memory     -   save
    _embedding_bag                                        memory     -   -
    _embedding_bag_backward                               memory     -   -
    embedding_dense_backward                              memory     -   -
    embedding_rows                                        memory     -   -
    embedding_rows_backward                               memory     -   -
    _fused_rms_norm                                       memory     -   -
    _fused_rms_norm_backward                              memory     -   -
    group_plan                                            memory     -   save
    group_rows                                            memory     -   -
    grouped_bias_grad                                     memory     -   -
    index_put_                                            memory     -   -
    keep_mask                                             memory     -   -
    _linalg_det                                           memory     -   -
    _linalg_eigh                                          memory     -   -
    local_experts                                         memory     -   -
    local_noise                                           memory     -   -
    log_sigmoid_forward                                   memory     -   -
    _log_softmax_backward_data                            memory     -   reduction
    loss_scale                                            memory     -   -
    mean                                                  memory     -   -
    microbatch                                            memory     -   -
    native_batch_norm                                     memory     -   -
    native_batch_norm_backward                            memory     -   -
    native_dropout                                        memory     -   -
    native_group_norm_backward                            memory     -   -
    native_layer_norm_backward                            memory     -   -
    nll_loss2d_backward                                   memory     -   -
    nll_loss_backward                                     memory     -   pointwise
    nll_terms                                             memory     -   -
    nll_terms_backward                                    memory     -   -
    padding_of                                            memory     -   -
    _pdist_forward                                        memory     -   -
    rand                                                  memory     -   -
    randn                                                 memory     -   -
    reflection_pad1d                                      memory     -   -
    reflection_pad2d                                      memory     -   -
    reflection_pad3d                                      memory     -   -
    repeat                                                memory     -   -
    replication_pad1d                                     memory     -   -
    replication_pad2d                                     memory     -   -
    replication_pad3d                                     memory     -   -
    return_runs                                           memory     -   -
    ring_plan                                             memory     -   save
    rows_of                                               memory     -   -
    select_backward                                       memory     -   -
    send_runs                                             memory     -   -
    shard_pad                                             memory     -   -
    shard_slice                                           memory     -   -
    share                                                 memory     -   -
    slice_backward                                        memory     -   -
    ungroup_rows                                          memory     -   -
    _unsafe_index_put                                     memory     -   -
    _weight_norm_interface                                memory     -   -
    acos                                                  -          32  -
    _to_copy                                              -          -   pointwise
    addbmm                                                -          16  -
    addmm                                                 -          16  keep
    addmv                                                 -          16  -
    asin                                                  -          32  -
    attention                                             -          16  -
    baddbmm                                               -          16  keep
    binary_cross_entropy                                  -          32  -
    binary_cross_entropy_with_logits                      -          32  -
    bmm                                                   -          16  keep
    cdist                                                 -          32  -
    conv1d                                                -          16  -
    conv2d                                                -          16  -
    conv3d                                                -          16  -
    conv_transpose1d                                      -          16  -
    conv_transpose2d                                      -          16  -
    conv_transpose3d                                      -          16  -
    convolution                                           -          16  keep
    cosh                                                  -          32  -
    cosine_similarity                                     -          32  -
    cumprod                                               -          32  -
    cumsum                                                -          32  keep
    dist                                                  -          32  -
    einsum                                                -          16  keep
    embedding                                             -          16  -
    erfinv                                                -          32  -
    exp                                                   -          32  -
    exp2                                                  -          32  -
    expert_linear                                         -          16  keep
    grouped_convolution                                   -          16  keep
    grouped_convolution_weight                            -          16  keep
    expm1                                                 -          32  -
    group_norm                                            -          16  -
    _grouped_mm                                           -          -   keep
    hinge_embedding_loss                                  -          32  -
    huber_loss                                            -          32  -
    instance_norm                                         -          32  -
    kl_div                                                -          32  -
    layer_norm                                            -          16  -
    linalg_vector_norm                                    -          32  -
    linear                                                -          16  keep
    log                                                   -          32  -
    log10                                                 -          32  -
    log1p                                                 -          32  -
    log2                                                  -          32  -
    _log_softmax                                          -          32  reduction
    log_softmax                                           -          32  -
    logaddexp                                             -          32  -
    logcumsumexp                                          -          32  -
    logsumexp                                             -          32  -
    matmul                                                -          16  keep
    mm                                                    -          16  keep
    mse_loss                                              -          32  -
    mv                                                    -          16  -
    nansum                                                -          32  -
    _native_batch_norm_legit                              -          32  -
    _native_batch_norm_legit_no_training                  -          32  -
    nll_loss                                              -          32  -
    nll_loss2d_forward                                    -          32  -
    nll_loss_forward                                      -          32  -
    norm                                                  -          32  -
    pow                                                   -          32  -
    prelu                                                 -          16  -
    prod                                                  -          32  -
    reciprocal                                            -          32  -
    renorm                                                -          32  -
    rms_norm                                              -          16  -
    row_nll                                               -          32  -
    rsqrt                                                 -          32  -
    scaled_dot_product_attention                          -          16  -
    sinh                                                  -          32  -
    smooth_l1_loss                                        -          32  -
    soft_margin_loss                                      -          32  -
    _softmax                                              -          32  -
    softmax                                               -          32  -
    softplus                                              -          32  -
    sort                                                  -          -   keep
    square                                                -          32  -
    std                                                   -          32  -
    std_mean                                              -          32  -
    sum                                                   -          32  -
    tan                                                   -          32  -
    topk                                                  -          -   keep
    upsample_bicubic2d                                    -          32  -
    upsample_bilinear2d                                   -          32  -
    upsample_linear1d                                     -          32  -
    upsample_nearest1d                                    -          32  -
    upsample_nearest2d                                    -          32  -
    upsample_nearest3d                                    -          32  -
    upsample_trilinear3d                                  -          32  -
    var                                                   -          32  -
    var_mean                                              -          32  -
    xlogy                                                 -          32  -
    """
)
_WITH_TRAITS: Mapping[Any, OpSpec] = MappingProxyType(
    {target: replace(_of_name(target), **traits) for target, traits in TRAITS.items()}
)
# generated code calls the runtime by the names of operators, and by two names that are none
_OF_METHODS: Mapping[str, OpSpec] = MappingProxyType(
    {operator_name(target): spec for target, spec in _WITH_TRAITS.items() if spec.on_rank}
    | {"accumulate": OpSpec(accumulates="value"), "accumulate_matmul": OpSpec(accumulates="product")}
)
