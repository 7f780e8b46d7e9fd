"""``torch.autograd.grad`` inside a model's forward, as operators of the graph that is traced.

    x1 = start(x, 0)                       # what reads x from here on reads x1
    y = f(x1)
    (g,) = gradient([y], [x1], [], True)   # the gradient of y with respect to x1

:class:`...passes.frontend.normalize.Normalize` writes both out: ``gradient`` becomes the operators of the backward of
``f``, which are differentiated again as all others, and ``start`` is ``x``.
"""

from __future__ import annotations

from ...compat.torch_codegen import SHIPPED
from ..define import define_operator

# ``number`` tells those of equal values apart
start = define_operator("start(Tensor x, int number) -> Tensor", lambda x, number: SHIPPED.empty_like(x))
# ``arriving``: the gradient of each output, or none at all where each output is a scalar, whose gradient is one;
# ``again``: whether the result may be differentiated
gradient = define_operator(
    "gradient(Tensor[] outputs, Tensor[] inputs, Tensor[] arriving, bool again) -> Tensor[]",
    lambda outputs, inputs, arriving, again: [SHIPPED.empty_like(x) for x in inputs],
)
