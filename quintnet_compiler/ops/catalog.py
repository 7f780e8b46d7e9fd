"""What is known of operators by their names: one line each, which prices, mixed precision and recomputation read.

``work``: ``matmul`` (its size: :data:`..cost_models.operators.PRODUCTS`), ``attention``, ``view`` (moves nothing) or
``memory`` (bound by the bytes that it reads and writes); ``-`` where torch's own tags say it (pointwise, reduction).
``autocast``: the bits in which mixed precision computes it, as torch.autocast has it
(https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference); ``-``: in those that it is given. Norms are
in the list of 16 bits, as their kernels keep statistics in float32 (torch.autocast has them in the other list, which
costs passes over memory and gives the same to the last bit of the result); of batch norms, statistics are buffers,
which stay float32. ``recompute``: ``keep`` if computing it again takes longer than a few passes over memory.

Sharding rules are in :mod:`.rules.table`, proven one by one; derivatives are traced from autograd.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, cast

Work = Literal["matmul", "attention", "view", "memory", "-"]
_NAMESPACES = ("aten", "quintnet")  # a user's own operator of the same name is another


@dataclass(frozen=True)
class OperatorFacts:
    """A line of the table. ``autocast``: 16, 32, or None."""

    work: Work = "-"
    autocast: int | None = None
    keep: bool = False


def facts_of(target: Any) -> OperatorFacts:
    """What is known of an operator (an overload); nothing, if it has no line."""
    if getattr(target, "namespace", None) not in _NAMESPACES:
        return _UNKNOWN
    return OPERATORS.get(target.overloadpacket.__name__, _UNKNOWN)


def _read(table: str) -> Mapping[str, OperatorFacts]:
    rows = [line.split() for line in table.strip().splitlines()]
    return MappingProxyType(
        {
            name: OperatorFacts(cast(Work, work), None if bits == "-" else int(bits), again == "keep")
            for name, work, bits, again in rows
        }
    )


_UNKNOWN = OperatorFacts()
OPERATORS = _read(
    # name, work, autocast, recompute
    """
    addbmm                                                matmul     16  -
    addmm                                                 matmul     16  keep
    addmv                                                 matmul     16  -
    all_gather_matmul                                     matmul     -   -
    baddbmm                                               matmul     16  keep
    bilinear                                              matmul     -   -
    bmm                                                   matmul     16  keep
    cdist                                                 matmul     32  -
    _cdist_forward                                        matmul     -   -
    conv1d                                                matmul     16  -
    conv2d                                                matmul     16  -
    conv3d                                                matmul     16  -
    conv_transpose1d                                      matmul     16  -
    conv_transpose2d                                      matmul     16  -
    conv_transpose3d                                      matmul     16  -
    convolution                                           matmul     16  keep
    convolution_backward                                  matmul     -   -
    dot                                                   matmul     -   -
    einsum                                                matmul     16  keep
    expert_linear                                         matmul     16  keep
    expert_weight_grad                                    matmul     -   -
    linear                                                matmul     16  keep
    matmul                                                matmul     16  keep
    matmul_reduce_scatter                                 matmul     -   -
    mm                                                    matmul     16  keep
    mv                                                    matmul     16  -
    attention                                             attention  16  -
    cached_attention                                      attention  -   -
    ring_attention                                        attention  -   -
    ring_attention_backward                               attention  -   -
    scaled_dot_product_attention                          attention  16  -
    _scaled_dot_product_cudnn_attention                   attention  -   -
    _scaled_dot_product_cudnn_attention_backward          attention  -   -
    _scaled_dot_product_efficient_attention               attention  -   -
    _scaled_dot_product_efficient_attention_backward      attention  -   -
    _scaled_dot_product_flash_attention                   attention  -   -
    _scaled_dot_product_flash_attention_backward          attention  -   -
    _scaled_dot_product_flash_attention_for_cpu           attention  -   -
    _scaled_dot_product_flash_attention_for_cpu_backward  attention  -   -
    after_gradients                                       view       -   -
    alias                                                 view       -   -
    declare_gradient                                      view       -   -
    detach                                                view       -   -
    diagonal                                              view       -   -
    expand                                                view       -   -
    permute                                               view       -   -
    reshape                                               view       -   -
    select                                                view       -   -
    slice                                                 view       -   -
    split_with_sizes                                      view       -   -
    squeeze                                               view       -   -
    t                                                     view       -   -
    transpose                                             view       -   -
    unbind                                                view       -   -
    unfold                                                view       -   -
    _unsafe_view                                          view       -   -
    unsqueeze                                             view       -   -
    view                                                  view       -   -
    view_as_complex                                       view       -   -
    view_as_real                                          view       -   -
    with_tangent                                          view       -   -
    adaptive_avg_pool1d                                   memory     -   -
    adaptive_avg_pool2d                                   memory     -   -
    adaptive_avg_pool3d                                   memory     -   -
    adaptive_max_pool1d                                   memory     -   -
    adaptive_max_pool2d                                   memory     -   -
    addcdiv                                               memory     -   -
    addcmul                                               memory     -   -
    all                                                   memory     -   -
    amax                                                  memory     -   -
    amin                                                  memory     -   -
    aminmax                                               memory     -   -
    any                                                   memory     -   -
    arange                                                memory     -   -
    argmax                                                memory     -   -
    argmin                                                memory     -   -
    argsort                                               memory     -   -
    avg_pool1d                                            memory     -   -
    avg_pool2d                                            memory     -   -
    avg_pool2d_backward                                   memory     -   -
    avg_pool3d                                            memory     -   -
    bernoulli                                             memory     -   -
    bucketize                                             memory     -   -
    cat                                                   memory     -   -
    channel_shuffle                                       memory     -   -
    clone                                                 memory     -   -
    col2im                                                memory     -   -
    combine                                               memory     -   -
    complex                                               memory     -   -
    constant_pad_nd                                       memory     -   -
    contiguous                                            memory     -   -
    copy                                                  memory     -   -
    count_nonzero                                         memory     -   -
    cross_entropy_loss                                    memory     -   -
    cummax                                                memory     -   -
    cummin                                                memory     -   -
    cumprod                                               memory     32  -
    cumsum                                                memory     32  keep
    diff                                                  memory     -   -
    dispatch                                              memory     -   -
    dispatch_plan                                         memory     -   -
    dropout                                               memory     -   -
    embedding                                             memory     -   -
    embedding_dense_backward                              memory     -   -
    embedding_rows                                        memory     -   -
    embedding_rows_backward                               memory     -   -
    empty                                                 memory     -   -
    empty_like                                            memory     -   -
    expert_bias_grad                                      memory     -   -
    eye                                                   memory     -   -
    fill                                                  memory     -   -
    flip                                                  memory     -   -
    floor_divide                                          memory     -   -
    full                                                  memory     -   -
    full_like                                             memory     -   -
    _fused_rms_norm                                       memory     -   -
    _fused_rms_norm_backward                              memory     -   -
    gather                                                memory     -   -
    gelu_backward                                         memory     -   -
    glu                                                   memory     -   -
    grid_sampler                                          memory     -   -
    grid_sampler_2d                                       memory     -   -
    group_norm                                            memory     16  -
    im2col                                                memory     -   -
    index                                                 memory     -   -
    index_add                                             memory     -   -
    index_copy                                            memory     -   -
    index_fill                                            memory     -   -
    index_put                                             memory     -   -
    index_put_                                            memory     -   -
    index_select                                          memory     -   -
    instance_norm                                         memory     32  -
    isin                                                  memory     -   -
    keep_mask                                             memory     -   -
    kthvalue                                              memory     -   -
    layer_norm                                            memory     16  -
    linalg_vector_norm                                    memory     32  -
    linspace                                              memory     -   -
    local_experts                                         memory     -   -
    log_sigmoid                                           memory     -   -
    _log_softmax                                          memory     32  -
    log_softmax                                           memory     32  -
    _log_softmax_backward_data                            memory     -   -
    logcumsumexp                                          memory     32  -
    logsumexp                                             memory     32  -
    loss_scale                                            memory     -   -
    masked_fill                                           memory     -   -
    masked_scatter                                        memory     -   -
    max                                                   memory     -   -
    max_pool1d                                            memory     -   -
    max_pool2d                                            memory     -   -
    max_pool2d_with_indices                               memory     -   -
    max_pool2d_with_indices_backward                      memory     -   -
    max_pool3d                                            memory     -   -
    mean                                                  memory     -   -
    median                                                memory     -   -
    microbatch                                            memory     -   -
    min                                                   memory     -   -
    mode                                                  memory     -   -
    nansum                                                memory     32  -
    _native_batch_norm_legit                              memory     32  -
    _native_batch_norm_legit_no_training                  memory     32  -
    native_dropout                                        memory     -   -
    native_dropout_backward                               memory     -   -
    native_group_norm                                     memory     -   -
    native_group_norm_backward                            memory     -   -
    native_layer_norm                                     memory     -   -
    native_layer_norm_backward                            memory     -   -
    new_empty                                             memory     -   -
    new_full                                              memory     -   -
    new_ones                                              memory     -   -
    new_zeros                                             memory     -   -
    nll_loss2d_backward                                   memory     -   -
    nll_loss2d_forward                                    memory     32  -
    nll_loss_backward                                     memory     -   -
    nll_loss_forward                                      memory     32  -
    nll_terms                                             memory     -   -
    nll_terms_backward                                    memory     -   -
    norm                                                  memory     32  -
    one_hot                                               memory     -   -
    ones                                                  memory     -   -
    ones_like                                             memory     -   -
    outer                                                 memory     -   -
    pad                                                   memory     -   -
    pixel_shuffle                                         memory     -   -
    pixel_unshuffle                                       memory     -   -
    polar                                                 memory     -   -
    prelu                                                 memory     16  -
    _prelu_kernel                                         memory     -   -
    prod                                                  memory     32  -
    rand                                                  memory     -   -
    randn                                                 memory     -   -
    repeat_interleave                                     memory     -   -
    rms_norm                                              memory     16  -
    roll                                                  memory     -   -
    row_nll                                               memory     32  -
    rows_of                                               memory     -   -
    _safe_softmax                                         memory     -   -
    scalar_tensor                                         memory     -   -
    scatter                                               memory     -   -
    scatter_add                                           memory     -   -
    select_backward                                       memory     -   -
    select_scatter                                        memory     -   -
    shard_pad                                             memory     -   -
    shard_slice                                           memory     -   -
    share                                                 memory     -   -
    sigmoid_backward                                      memory     -   -
    silu_backward                                         memory     -   -
    slice_backward                                        memory     -   -
    slice_scatter                                         memory     -   -
    _softmax                                              memory     32  -
    softmax                                               memory     32  -
    _softmax_backward_data                                memory     -   -
    sort                                                  memory     -   keep
    stack                                                 memory     -   -
    std                                                   memory     32  -
    std_mean                                              memory     32  -
    sum                                                   memory     32  -
    take                                                  memory     -   -
    tanh_backward                                         memory     -   -
    threshold_backward                                    memory     -   -
    _to_copy                                              memory     -   -
    topk                                                  memory     -   keep
    tril                                                  memory     -   -
    tril_indices                                          memory     -   -
    triu                                                  memory     -   -
    triu_indices                                          memory     -   -
    _unsafe_index                                         memory     -   -
    upsample_bicubic2d                                    memory     32  -
    upsample_bilinear2d                                   memory     32  -
    upsample_linear1d                                     memory     32  -
    upsample_nearest1d                                    memory     32  -
    upsample_nearest2d                                    memory     32  -
    upsample_nearest3d                                    memory     32  -
    upsample_trilinear3d                                  memory     32  -
    var                                                   memory     32  -
    var_mean                                              memory     32  -
    _weight_norm                                          memory     -   -
    _weight_norm_interface                                memory     -   -
    where                                                 memory     -   -
    zeros                                                 memory     -   -
    zeros_like                                            memory     -   -
    acos                                                  -          32  -
    asin                                                  -          32  -
    binary_cross_entropy                                  -          32  -
    binary_cross_entropy_with_logits                      -          32  -
    cosh                                                  -          32  -
    cosine_similarity                                     -          32  -
    dist                                                  -          32  -
    erfinv                                                -          32  -
    exp                                                   -          32  -
    exp2                                                  -          32  -
    expm1                                                 -          32  -
    _grouped_mm                                           -          -   keep
    hinge_embedding_loss                                  -          32  -
    huber_loss                                            -          32  -
    kl_div                                                -          32  -
    log                                                   -          32  -
    log10                                                 -          32  -
    log1p                                                 -          32  -
    log2                                                  -          32  -
    logaddexp                                             -          32  -
    mse_loss                                              -          32  -
    nll_loss                                              -          32  -
    pow                                                   -          32  -
    reciprocal                                            -          32  -
    renorm                                                -          32  -
    rsqrt                                                 -          32  -
    sinh                                                  -          32  -
    smooth_l1_loss                                        -          32  -
    soft_margin_loss                                      -          32  -
    softplus                                              -          32  -
    square                                                -          32  -
    tan                                                   -          32  -
    xlogy                                                 -          32  -
    """
)
