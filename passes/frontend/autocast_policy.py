"""Which operators compute in few bits, and which keep float32: as torch.autocast has them.

https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference. Other operators take what they are given.
"""

from __future__ import annotations

from typing import Any

from ...compat.torch import operator_name

# Products. And norms, whose kernels keep statistics in float32 for inputs of 16 bits (torch.autocast has them in the
# other list, which costs passes over memory and gives the same to the last bit of the result).
NARROW = frozenset(
    {
        "addbmm", "addmm", "addmv", "attention", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
        "conv_transpose2d", "conv_transpose3d", "convolution", "einsum", "expert_linear", "linear", "matmul", "mm",
        "mv", "prelu", "scaled_dot_product_attention",
        "group_norm", "layer_norm", "rms_norm",
    }
)  # fmt: skip
WIDE = frozenset(
    {
        "_log_softmax", "_softmax", "acos", "asin", "binary_cross_entropy", "binary_cross_entropy_with_logits",
        "cdist", "cosh", "cosine_similarity", "cumprod", "cumsum", "dist", "erfinv", "exp", "exp2", "expm1",
        "hinge_embedding_loss", "huber_loss", "kl_div", "linalg_vector_norm", "log", "log10", "log1p", "log2",
        "log_softmax", "logaddexp", "logcumsumexp", "logsumexp", "mse_loss", "nll_loss", "nll_loss2d_forward",
        "nll_loss_forward", "norm", "pow", "prod", "reciprocal", "renorm", "row_nll", "rsqrt", "sinh",
        "smooth_l1_loss", "soft_margin_loss", "softmax", "softplus", "square", "std", "std_mean", "sum", "nansum",
        "tan", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d",
        "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d", "var", "var_mean", "xlogy",
        # their statistics are buffers, which stay float32
        "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "instance_norm",
    }
)  # fmt: skip


def name_of(target: Any) -> str:
    """An operator's name without overload."""
    return operator_name(target)
