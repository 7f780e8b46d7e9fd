"""``quintnet.visualize``: which rank holds which part of a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..core.errors import CompileError
from ..core.mesh import Mesh
from ..reports.tensor_picture import TensorPicture, picture_of_dtensor, picture_of_types
from .compiled_program import CompiledProgram


def visualize(
    of: CompiledProgram | Mesh | Tensor,
    what: str | Tensor | Mapping[str, str] | None = None,
    shape: Sequence[int] | Tensor | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> TensorPicture:
    """Show which rank holds which part of a tensor. Nothing is communicated.

    Args:
        of: a program, a mesh, or a DTensor.
        what: of a program: the name of a parameter or buffer (``"0.weight"``); of an operator or an input, as
            ``program.explain`` and dumps have it (``"gelu"``), or a module, for what it makes last (``"0.mlp"``); any
            of them with ``.grad`` for its gradient; with ``optimizer``, a parameter and a key of its state
            (``"0.weight.exp_avg"``); or the parameter or gradient itself. Of a mesh: types by axis, as in plans:
            ``{"dp": "S(0)", "tp": "S(1)"}``; axes that are left out hold the same.
        shape: of a plain tensor on a mesh, or the tensor.
        optimizer: of the program's parameters, which has taken a step.

    Raises:
        CompileError: QN204 for a name that the program does not have, QN201 for an axis that the mesh does not have,
            QN203 for a size that does not divide, QN207 for a type that is none, QN102 if a program is not compiled
            yet.
    """
    if isinstance(of, Tensor) and what is None and (picture := picture_of_dtensor(of)) is not None:
        return picture
    if isinstance(of, Mesh) and isinstance(what, Mapping) and shape is not None:
        return picture_of_types(of, what, tuple(shape.shape if isinstance(shape, Tensor) else shape))
    if isinstance(of, CompiledProgram) and isinstance(what, (str, Tensor)):
        return of.visualize(what, optimizer=optimizer)
    raise CompileError(
        "QN204", f"a {type(of).__name__} and {_said(what)} are no tensor whose ranks are known",
        fix='visualize(program, "name"), visualize(mesh, {"tp": "S(0)"}, (8, 4)), or visualize(dtensor)',
    )  # fmt: skip


def _said(what: object) -> str:
    return f"a {type(what).__name__} {list(what.shape)}" if isinstance(what, Tensor) else repr(what)
