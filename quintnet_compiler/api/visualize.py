"""``quintnet.visualize``: which rank holds which part of a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..core.errors import CompileError
from ..core.mesh import Mesh
from ..reports.tensor_picture import TensorPicture, picture_of_types
from .compiled_program import CompiledProgram


def visualize(
    of: CompiledProgram | Mesh, what: str | Mapping[str, str], shape: Sequence[int] | None = None
) -> TensorPicture:
    """Which rank holds which part of a tensor.

    Args:
        of: a program, or a mesh.
        what: a parameter or buffer of the program; for a mesh types by axis: ``{"dp": "S(0)", "tp": "S(1)"}``, as in
            plans. Axes that are left out hold the same.
        shape: of the tensor, for a mesh.

    Raises:
        CompileError: QN204 for a name that the program does not have, QN201 for an axis that the mesh does not have,
            QN203 for a size that does not divide, QN207 for a type that is none.
    """
    if isinstance(of, Mesh) and isinstance(what, Mapping) and shape is not None:
        return picture_of_types(of, what, shape)
    if isinstance(of, CompiledProgram) and isinstance(what, str):
        return of.visualize(what)
    raise CompileError(
        "QN204", f"a {type(of).__name__} and {what!r} are no tensor",
        fix='visualize(program, "name"), or visualize(mesh, {"tp": "S(0)"}, (8, 4))',
    )  # fmt: skip
