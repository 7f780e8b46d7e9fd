"""Errors about kernels that are launched without ``torch.library``, which a trace does not see."""

from __future__ import annotations

import re
import traceback

import torch

# What makes such a kernel an operator with a derivative and a rule. ``{name}``: of the operator.
WRAPPER = """\
@torch.library.custom_op("kernels::{name}", mutates_args=())
def {name}(x: torch.Tensor) -> torch.Tensor:
    return launch(x)
{name}.register_fake(lambda x: torch.empty_like(x))
@torch.library.custom_op("kernels::{name}_backward", mutates_args=())
def {name}_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return launch_backward(gradient, x)
{name}_backward.register_fake(lambda gradient, x: torch.empty_like(x))
{name}.register_autograd(
    lambda ctx, gradient: {name}_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
rules = [
    quintnet.rule({name}, "... n -> ... n", whole="n"),
    quintnet.rule({name}_backward, "... n, ... n -> ... n", whole="n"),
]
"""


def raw_kernel(error: Exception) -> tuple[str, str] | None:
    """Return the cause and the fix, if an error is about a kernel that was given the address of a traced tensor."""
    if "data pointer" not in str(error):
        return None
    function = _function_of(error)
    launched_by = f"torch.autograd.Function {function}" if function else "the line below"
    cause = f"a kernel that {launched_by} launches reads addresses of tensors, which a trace does not have"
    lines = WRAPPER.format(name=re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", function).lower() or "kernel")
    fix = f"call it as an operator (docs/kernels.md). With its launches, and if rows are independent:\n{lines}"
    return cause, fix


def _function_of(error: Exception) -> str:
    """Return the name of the innermost ``torch.autograd.Function`` that was traced; empty if there was none."""
    name = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        function = frame.f_locals.get("function")
        if isinstance(function, type) and issubclass(function, torch.autograd.Function):
            name = function.__name__
    return name
