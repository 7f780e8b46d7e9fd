"""Check of fake kernels: what a user's operator returns in memory is what ``register_fake`` says of it.

A program is built of what fake kernels say. Where sizes, strides or dtypes are others, compilers of kernels read the
wrong memory, or stop at the first step. The operator runs once for each kind of call, on small inputs on the CPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.torch import FakeTensorMode, OpOverload, pytree, runs_on
from ..core.annotations import facts, value
from ..core.errors import CompileError
from ..ir.program import DifferentiatedProgram
from ..ops.functional_forms import name_for_users, writing_operator
from .derivatives.calls import INVALID, OperatorCall
from .derivatives.operands import drawn, elements
from .derivatives.smaller_calls import in_numbers, smaller

MAX_ELEMENTS = 1 << 13  # of all inputs together; calls of more are made smaller
CPU = torch.device("cpu")
_OWN_NAMESPACES = ("aten", "prims", "quintnet")
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")  # these wait for other ranks


def check_fake_kernels(program: DifferentiatedProgram) -> None:
    """Run each of the users' operators that has a kernel for CPUs, with small inputs, and compare its results.

    Whole numbers among the inputs are zeros, which are valid indices. Operators that do not take drawn inputs are not
    compared, nor are those without tensors among their inputs, and those of programs for other devices: a kernel for
    these may have another layout than that for CPUs.

    Raises:
        CompileError: QN114 with the layout that the operator has and that of its fake kernel; also for an operator that
            writes to an argument of which its schema does not say so.
    """
    compared: set[Hashable] = set()
    for node in program.graph.nodes:
        if not _is_users(node):
            continue
        call = _call(node)
        on_cpu = call.operands and all(x.device == CPU for x in call.operands)
        if on_cpu and call.proof_key not in compared:
            compared.add(call.proof_key)
            error = _difference(call, _mode(call))
            if error:
                name = name_for_users(node.target)
                raise CompileError(
                    "QN114", f"{name}: {error}", where=facts(node).where, fix="correct what register_fake returns"
                )


def _is_users(node: fx.Node) -> bool:
    operator: Any = node.target
    if node.op != "call_function" or not isinstance(operator, OpOverload):
        return False
    if operator.namespace in (*_OWN_NAMESPACES, *_COLLECTIVES):
        return False
    writing = writing_operator(operator)
    return _runs_on_cpu(operator if writing is None else writing.operator)


def _runs_on_cpu(operator: OpOverload) -> bool:
    return runs_on(operator, CPU) and torch.Tag.nondeterministic_seeded not in operator.tags


def _call(node: fx.Node) -> OperatorCall:
    inputs: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), inputs.append)
    operands = tuple(value(x) for x in inputs)
    first_use = tuple(inputs.index(x) for x in inputs)
    return OperatorCall(
        node.target,
        (node.args, node.kwargs),
        operands,
        (False,) * len(inputs),
        first_use,
        _results(facts(node).value),
        (),
    )


def _results(result: Any) -> tuple[Tensor, ...]:
    return tuple(x for x in pytree.tree_leaves(result) if isinstance(x, Tensor))


def _mode(call: OperatorCall) -> FakeTensorMode:
    mode: FakeTensorMode = call.operands[0].fake_mode  # type: ignore[attr-defined]
    return mode


def _difference(call: OperatorCall, mode: FakeTensorMode) -> str:
    """Return how the results of a call differ from what its fake kernel says; empty if they do not."""
    example = in_numbers(call, mode) or call
    if elements(example) > MAX_ELEMENTS:
        small = next(smaller(example, mode), None)
        if small is None:
            return ""
        example = small
    generator = torch.Generator().manual_seed(0)
    unlike = [drawn(x, generator, 1, True) for x in example.operands]
    inputs = [unlike[first] for first in example.first_use]
    copies = [x.clone() for x in inputs]
    args, kwargs = example.with_operands(inputs)
    fake_args, fake_kwargs = example.with_operands(example.operands)
    try:
        with torch.no_grad():
            actual = _results(example.target(*args, **kwargs))
            with mode:
                said = _results(example.target(*fake_args, **fake_kwargs))
    except (*INVALID, NotImplementedError):
        return ""  # the operator does not take these inputs
    changed = [i for i, (x, copy) in enumerate(zip(inputs, copies, strict=True)) if not _same_bits(x, copy)]
    if changed:
        return (
            f"the operator writes to its tensor argument {changed[0]}, of which its schema (mutates_args) says nothing"
        )
    return _difference_of_layouts(actual, said)


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) if x.is_floating_point() else torch.equal(x, y)


def _difference_of_layouts(actual: Sequence[Tensor], said: Sequence[Tensor]) -> str:
    if len(actual) != len(said):
        return f"the operator returns {len(actual)} tensors, its fake kernel {len(said)}"
    for place, (x, fake) in enumerate(zip(actual, said, strict=True)):
        if _layout(x) != _layout(fake):
            return f"result {place} of the operator is {_described(x)}, that of its fake kernel {_described(fake)}"
    return ""


def _layout(x: Tensor) -> Hashable:
    """Return size, dtype, and the strides that matter: of a dim of size 1 none does."""
    strides = [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]
    return tuple(x.shape), x.dtype, tuple(strides) if x.numel() else ()


def _described(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} with strides {list(x.stride())}"
