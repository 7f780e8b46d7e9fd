"""Rules of operators that autograd uses in a backward, which a model has where its forward differentiates."""

from __future__ import annotations

import torch

from .node_factors import rows
from .notation import Rule, rule

aten = torch.ops.aten

BACKWARD_RULES = (
    *(
        rule(target, "..., ... -> ...", linear=[[0]])  # the gradient, and an input or a result of the forward
        for target in (
            aten.tanh_backward.default, aten.sigmoid_backward.default, aten.threshold_backward.default,
            aten.gelu_backward.default, aten.silu_backward.default, aten.mish_backward.default,
            aten.leaky_relu_backward.default, aten.elu_backward.default, aten.hardtanh_backward.default,
            aten.hardswish_backward.default, aten.hardsigmoid_backward.default, aten.softplus_backward.default,
            aten.softshrink_backward.default, aten.hardshrink_backward.default, aten.logit_backward.default,
        )
    ),
    Rule(aten.max_pool2d_with_indices_backward.default, rows("... h w, ... p q, ... r s -> ... t u"), work="memory"),
    *(
        Rule(target, rows("... h w, ... p q -> ... t u"), work="memory")
        for target in (aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d_backward.default)
    ),
    rule(aten.contiguous.default, "... -> ...", linear=[[0]], work="memory"),
)  # fmt: skip
