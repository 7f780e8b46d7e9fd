"""Functional forms of operators that write to their arguments: operators that return what the others write.

Kernels of libraries often take the memory of their results as arguments (``mutates_args`` of
``torch.library.custom_op``, ``Tensor(a!) out`` in a schema). No value of a program changes, so a program calls the
functional form: it copies the arguments that are written, calls the operator, and returns the copies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..compat.torch import OpOverload, pytree, schema
from ..core.errors import CompileError
from .extensions import extend, extension

_NAMESPACE = "quintnet_functional"
_library = torch.library.Library(_NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_ALIAS = re.compile(r"\bTensor\([^)]*\)")


@dataclass(frozen=True)
class WritingOperator:
    """The operator that a functional form calls.

    Attributes:
        operator: the operator.
        written: the names of the arguments that it writes to.
        returned: for each of its results the name of the argument that it returns; None for a tensor of its own.
    """

    operator: OpOverload
    written: tuple[str, ...]
    returned: tuple[str | None, ...]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        names = [argument.name for argument in schema(self.operator).arguments]
        return dict(zip(names, args, strict=False)) | kwargs

    def call_on_copies(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Return the operator's own results, then the new values of the tensors that it writes to."""
        arguments = self.bind(args, kwargs)
        copies = {name: pytree.tree_map_only(Tensor, torch.clone, arguments.get(name)) for name in self.written}
        results = self.operator(**{**arguments, **copies})
        results = results if isinstance(results, (tuple, list)) else (results,)
        own_results = [x for x, name in zip(results, self.returned, strict=False) if name is None]
        return [*own_results, *(x for x in pytree.tree_leaves(copies) if isinstance(x, Tensor))]

    def refuse_gradient(self, *_: object) -> NoReturn:
        """Raise the error about a gradient that PyTorch does not have either."""
        raise CompileError(
            "QN109",
            f"{self.operator} writes to its arguments, and PyTorch has no derivative of such an operator",
            fix="call it in a torch.autograd.Function, whose backward has the derivative; or call it with x.detach()",
        )


def writes_arguments(operator: object) -> bool:
    """Return whether an operator writes to its arguments, and is not torch's own."""
    return isinstance(operator, OpOverload) and operator.namespace != "aten" and bool(schema(operator).is_mutable)


def functional_form(operator: OpOverload) -> OpOverload:
    """Return the functional form of an operator that writes to its arguments.

    It takes the same arguments. Its results are a list: the operator's own, then the new value of each tensor that it
    writes to, in the order of the arguments.

    Raises:
        CompileError: QN105 for an operator that returns anything but tensors of its own and arguments that it writes.
    """
    name = str(operator).replace(".", "__")
    packet = getattr(getattr(torch.ops, _NAMESPACE), name, None)
    form: OpOverload = _define(name, operator) if packet is None else packet.default
    return form


def writing_operator(operator: object) -> WritingOperator | None:
    """Return what a functional form calls; None for other operators."""
    return extension(operator, WritingOperator)


def name_for_users(operator: object) -> str:
    """Return the name of an operator, and of a functional form that of the operator that it calls."""
    writing = writing_operator(operator)
    return str(operator if writing is None else writing.operator)


def _define(name: str, operator: OpOverload) -> OpOverload:
    writing = WritingOperator(operator, *_written_and_returned(operator))
    text = str(schema(operator))
    arguments = _ALIAS.sub("Tensor", text[text.index("(") : text.rindex(") ->") + 1])
    _library.define(f"{name}{arguments} -> Tensor[]")  # type: ignore[no-untyped-call]
    _library.impl(name, writing.call_on_copies, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{_NAMESPACE}::{name}", writing.call_on_copies, lib=_library)
    torch.library.register_autograd(f"{_NAMESPACE}::{name}", writing.refuse_gradient, lib=_library)
    form: OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
    extend(form, writing)
    return form


def _written_and_returned(operator: OpOverload) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
    """Return the names of the arguments that are written, and for each result that of the argument that it is."""
    signature = schema(operator)
    written = {a.name: a.alias_info.before_set for a in signature.arguments if _is_written(a)}
    returned = []
    for result in signature.returns:
        alias = None if result.alias_info is None else result.alias_info.before_set
        same = [name for name, memory in written.items() if memory == alias]
        if str(result.type) != "Tensor" or (alias is not None and not same):
            raise CompileError(
                "QN105",
                f"the operator {operator} writes to its arguments, and returns a view, a list or a number",
                fix="let it return tensors of its own, or nothing",
            )
        returned.append(same[0] if same else None)
    return tuple(written), tuple(returned)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)
