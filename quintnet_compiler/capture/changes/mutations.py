"""Find the buffers and parameters that a traced function changes, which a program writes back."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from ...compat.torch import OpOverload, pytree, schema
from ...core.errors import CompileError, Where
from ..places import where_of

_MUTATED = types.MappingProxyType(
    {
        OutputKind.BUFFER_MUTATION: "buffer",
        OutputKind.PARAMETER_MUTATION: "parameter",
        OutputKind.USER_INPUT_MUTATION: "input",
    }
)


def changed_state(exported: ExportedProgram, sample: Any, assigned: frozenset[str] | None) -> dict[str, int]:
    """Return the buffers and parameters that are changed, with the output of the graph that has the new value.

    Args:
        exported: The traced function.
        sample: Of a batch.
        assigned: The buffers that forward replaces by other tensors; None if nothing may change.

    Raises:
        CompileError: QN110 if another tensor changes, or if an assigned tensor would change with another one.
    """
    positions: dict[str, int] = {}
    nodes = {node.name: node for node in exported.graph.nodes}
    for position, spec in enumerate(exported.graph_signature.output_specs):
        if spec.kind in _MUTATED:
            name = (spec.target or "").removeprefix("model.")
            if spec.kind is OutputKind.USER_INPUT_MUTATION or assigned is None:
                raise _refusal(exported, sample, spec.kind, name, where_of(nodes[spec.arg.name]))
            positions[name] = position
    ends: Any = exported.graph.output_node().args[0]
    buffer_of: dict[fx.Node, str] = {}
    for name in sorted((assigned or frozenset()) & positions.keys()):
        source = _memory_of(ends[positions[name]])
        other = f"the buffer {buffer_of[source]!r}" if source in buffer_of else _input_name(exported, source)
        if other:
            raise CompileError(
                "QN110",
                f"the forward pass assigns a view of {other} to the buffer {name!r}, which would change with it",
                where=where_of(ends[positions[name]]),
                fix="assign a copy: .clone()",
            )
        buffer_of[source] = name
    return positions


def _refusal(exported: ExportedProgram, sample: Any, kind: OutputKind, name: str, where: Where) -> CompileError:
    kind_name, fix = _MUTATED[kind], "change it outside forward, between steps"
    if kind_name == "input":
        paths, _ = pytree.tree_flatten_with_path(sample)
        input_paths = dict(zip(exported.graph_signature.user_inputs, (path for path, _ in paths), strict=False))
        name = f"batch{pytree.keystr(input_paths.get(name, ()))}"
        fix = f"change a copy: {name}.clone()"
    return CompileError(
        "QN110", f"the forward pass changes the {kind_name} {name!r}; a program would not", where=where, fix=fix
    )


def _memory_of(node: Any) -> fx.Node:
    """Return the first node with the memory of a value that is written over another one."""
    while isinstance(node, fx.Node) and isinstance(node.target, OpOverload) and node.args:
        returned = schema(node.target).returns
        if node.target.namespace == "aten" and schema(node.target).name == "aten::copy":
            node = node.args[1]
        elif returned and returned[0].alias_info is not None and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        else:
            break
    assert isinstance(node, fx.Node)
    return node


def _input_name(exported: ExportedProgram, node: fx.Node) -> str:
    """Return a text about an input of the graph, or "" for a node that the graph computes."""
    signature, name = exported.graph_signature, node.name
    kinds: list[tuple[str, Mapping[str, str]]] = [
        ("parameter", signature.inputs_to_parameters),
        ("buffer", signature.inputs_to_buffers),
    ]
    for kind, names in kinds:
        if name in names:
            return f"the {kind} {names[name].removeprefix('model.')!r}"
    return "the batch" if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor) else ""
