"""Convert torch.export's program to :class:`Captured`: no regions, guards or aliases, a place for every node."""

from __future__ import annotations

import hashlib
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..compat.torch import EXPORT_CHECKS, FakeTensorMode, HigherOrderOperator, free_unbacked_symbols, pytree
from ..core.annotations import Leaf
from ..core.errors import CompileError, Where
from ..ir.batch_form import ROWS, BatchForm, TensorForm
from ..ir.program import Captured
from .block_reuse import Skipped
from .changes.mutations import changed_state
from .changes.stored_results import store
from .places import LEAF, WHERE, where_of
from .sizes_by_value import shape_by_value, sizes_of_picks
from .step_module import StepModule

LITERALS = (bool, int, float, str, type(None))  # types of a batch's leaves besides tensors: flags of the model


def module_of(node: fx.Node) -> str:
    """Return the path of the module in which a node of a captured graph was made."""
    where = node.meta.get(WHERE)
    return where.module if where else ""


@dataclass(frozen=True)
class SizedExport:
    """An exported step, and the batches for which its graph holds.

    Attributes:
        program: The exported step.
        sample: The batch that was traced.
        form: The sizes of a batch, and which of them vary.
        only_rows: The number of rows, if that does not vary.
    """

    program: torch.export.ExportedProgram
    sample: Any
    form: BatchForm
    only_rows: int | None = None

    def flat_inputs(self) -> dict[str, tuple[Any, Any]]:
        """Return the path in the batch and the form of each input, by its name in the graph."""
        names = self.program.graph_signature.user_inputs
        paths, _ = pytree.tree_flatten_with_path(self.sample)
        leaves = [(path, form) for (path, _), form in zip(paths, self.form.leaves, strict=True)]
        return dict(zip(names, leaves, strict=True)) if len(names) == len(leaves) else {}


def canonical(export: SizedExport, step: StepModule, skipped: Skipped, *, training: bool, every: bool) -> Captured:
    """Convert an export of ``step``. ``every``: include the parameters of blocks that were skipped."""
    program = export.program
    state = _State.of_step(step, program)
    assigned = step.assigned if step.buffers_change else None
    changes = changed_state(program, export.sample, assigned)
    changed = {state.aliases.get(name, name): position for name, position in changes.items()}
    inputs = export.flat_inputs()
    copied = _Copy(state, inputs, changed, Skipped() if every else skipped)
    for node in program.graph.nodes:
        copied.copy_node(node)
    store(copied.graph, [copied.leaves[name] for name in changed])
    symbols = _symbols(program.graph, inputs)
    step.result.check(symbols)
    return Captured(
        copied.graph,
        types.MappingProxyType(copied.tensors),
        state.aliases,
        export.form,
        step.result,
        training,
        export.only_rows,
        types.MappingProxyType(symbols),
        types.MappingProxyType({name: tuple(names) for name, names in skipped.like.items()}),
        changed=tuple(changed),
        assigned=(assigned or frozenset()) & changed.keys(),
    )


@dataclass
class _Copy:
    """A copy of an exported graph, without what a program does not have.

    Attributes:
        state: The parameters, buffers and constants.
        inputs: For each input, its path in the batch and its form.
        changed: For each parameter or buffer that forward changes, the output of the graph with its new value.
        left_out: Blocks of which parameters are left out that no operator reads.
        graph: The copy.
        nodes: The nodes of the copy, by those of the exported graph.
        leaves: The placeholders of the copy, by name.
        tensors: The tensors of these placeholders.
        picked: The sizes that are numbers of picked rows.
    """

    state: _State
    inputs: Mapping[str, tuple[Any, Any]]
    changed: Mapping[str, int]
    left_out: Skipped
    graph: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[fx.Node, Any] = field(default_factory=dict)
    leaves: dict[str, fx.Node] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    picked: set[Any] = field(default_factory=set)

    def copy_node(self, node: fx.Node) -> None:
        """Add the copy of a node, if a program has it."""
        if node.op == "placeholder":
            self._add_leaf(node)
        elif node.op == "output":
            outputs: Any = node.args[0]
            results = [fx.map_arg(a, lambda n: self.nodes[n]) for a in outputs]
            own = [x for position, x in enumerate(results) if position not in self.changed.values()]
            self.graph.output((*own, *(results[position] for position in self.changed.values())))
        elif not _is_check(node) and all(source in self.nodes for source in node.all_input_nodes):
            self._add_operator(node)  # others are computed from what is only checked

    def _add_leaf(self, node: fx.Node) -> None:
        leaf, tensor = self.state.leaf(node.name) or (_input(node.name, self.inputs), None)
        if leaf.kind != "input" and leaf.name in self.leaves:
            self.nodes[node] = self.leaves[leaf.name]
        elif node.users or self._stays_unread(node, leaf):
            new = self.graph.placeholder(node.name)
            new.meta = {"val": node.meta.get("val"), LEAF: leaf, WHERE: Where()}
            self.nodes[node] = self.leaves[leaf.name] = new
            if tensor is not None:
                self.tensors[leaf.name] = tensor
            if leaf.kind == "parameter":
                self._add_unseen_after(leaf.name, node)

    def _stays_unread(self, node: fx.Node, leaf: Leaf) -> bool:
        """Return whether an input stays in the graph although no operator reads it."""
        if leaf.kind == "input":
            return not isinstance(node.meta["val"], LITERALS)  # the trace has followed these
        return leaf.name in self.changed or (leaf.kind == "parameter" and not self.left_out.has(leaf.name))

    def _add_unseen_after(self, parameter: str, node: fx.Node) -> None:
        """Add placeholders of the parameters that come after that of ``node``, and that the export does not have."""
        for name in self.state.unseen_after.get(parameter, ()):
            if not self.left_out.has(name):
                self.tensors[name] = unseen = self.state.parameters[name]
                self.leaves[name] = _placeholder(self.graph, name, unseen, node.meta["val"].fake_mode)

    def _add_operator(self, node: fx.Node) -> None:
        _check_operator(node)
        self.picked |= sizes_of_picks(node)
        if not free_unbacked_symbols(node.meta.get("val")) - self.picked:
            new = self.graph.node_copy(node, lambda n: self.nodes[n])
            new.meta = {"val": node.meta.get("val"), WHERE: where_of(node)}
            self.nodes[node] = new
        elif not _only_checked(node):
            raise _value_needed(node)


def _check_operator(node: fx.Node) -> None:
    """Raise CompileError QN105 for a node that no program can have."""
    if node.op != "call_function":
        raise CompileError("QN105", f"a {node.op} node ({node.target})", where=where_of(node))
    if isinstance(node.target, HigherOrderOperator):
        raise CompileError(
            "QN105",
            f"the higher-order operator {node.target} (autocast, cond, scan, ...)",
            where=where_of(node),
            fix="choose the dtype with model.to(dtype); write loops and branches over plain tensors",
        )


def _value_needed(node: fx.Node) -> CompileError:
    """Return an error for a node whose result has a size by value, or is a value."""
    if node.target is torch.ops.aten.item.default:
        return CompileError(
            "QN101",
            "item() makes a Python number of a tensor's value, which a program has only when it runs",
            where=where_of(node),
            fix="compute with the tensor itself: without .item(), int() or float()",
        )
    return shape_by_value(node.target, where_of(node))


def _placeholder(graph: fx.Graph, name: str, parameter: nn.Parameter, mode: FakeTensorMode) -> fx.Node:
    """Append a placeholder as torch.export makes it for a parameter."""
    new = graph.placeholder(re.sub(r"[^a-zA-Z0-9]", "_", f"p_model.{name}").lower())
    with mode:
        like = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device,
            requires_grad=parameter.requires_grad,
        )  # fmt: skip
    new.meta = {"val": like, LEAF: Leaf("parameter", name, trainable=parameter.requires_grad), WHERE: Where()}
    return new


def _is_check(node: fx.Node) -> bool:
    return any(word in str(node.target) for word in EXPORT_CHECKS)


def _only_checked(node: fx.Node) -> bool:
    """Return whether nothing is computed from ``node`` but checks."""
    return node.op != "output" and all(_is_check(user) or _only_checked(user) for user in node.users)


def _mark(constant: Tensor) -> str:
    """Return a suffix that distinguishes constants by value: each trace numbers its own, also in evaluation."""
    if constant.is_meta:
        return ""
    values = constant.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return "_" + hashlib.sha256(f"{constant.dtype} {tuple(constant.shape)} ".encode() + values).hexdigest()[:16]


@dataclass(frozen=True)
class _State:
    """The tensors of a step. A parameter with several names has the first of them.

    Attributes:
        program: The export of the step.
        parameters: The parameters, by name.
        aliases: The first name of a parameter, by each of its further names.
        unseen_after: The parameters that the export does not have, by the one before them that it has.
        lifted: The paths of parameters, buffers and constants, by the names of the graph's inputs. (The properties of
            the signature search for them at every use.)
    """

    program: torch.export.ExportedProgram
    parameters: Mapping[str, nn.Parameter]
    aliases: Mapping[str, str]
    unseen_after: Mapping[str, list[str]]
    lifted: tuple[Mapping[str, str], Mapping[str, str], Mapping[str, str]]

    @classmethod
    def of_step(cls, step: StepModule, program: torch.export.ExportedProgram) -> _State:
        by_path, unseen, signature = step.parameter_paths(), step.unseen.tensors, program.graph_signature
        names = {id(p): name for name, p in reversed(list(by_path.items()))}  # the first of each
        aliases = {name: names[id(p)] for name, p in by_path.items() if names[id(p)] != name}
        parameters = {name: p for name, p in by_path.items() if name not in aliases}
        unseen_after: dict[str, list[str]] = {}
        previous = ""
        for name, parameter in parameters.items():
            if id(parameter) in unseen:
                unseen_after.setdefault(previous, []).append(name)
            else:
                previous = name
        constants = signature.inputs_to_lifted_tensor_constants
        lifted = signature.inputs_to_parameters, signature.inputs_to_buffers, constants
        return cls(program, parameters, aliases, unseen_after, lifted)

    def leaf(self, node_name: str) -> tuple[Leaf, Tensor | None] | None:
        """Return the tensor that an input of the graph stands for; None for an input of the batch."""
        parameters, buffers, constants = self.lifted
        if full := parameters.get(node_name):
            name = full.removeprefix("model.")
            name = self.aliases.get(name, name)
            parameter = self.parameters[name]
            return Leaf("parameter", name, trainable=parameter.requires_grad), parameter
        if full := buffers.get(node_name):
            tensor = self.program.state_dict.get(full, self.program.constants.get(full))
            return Leaf("buffer", full.removeprefix("model.")), tensor
        if full := constants.get(node_name):
            constant = self.program.constants[full]
            return Leaf("constant", f"{full.removeprefix('model.')}{_mark(constant)}"), constant
        return None


def _input(name: str, inputs: Mapping[str, tuple[Any, Any]]) -> Leaf:
    path, form = inputs.get(name, ((), None))
    batched = isinstance(form, TensorForm) and form.sizes[:1] == (ROWS,)
    return Leaf("input", pytree.keystr(path) or name, batched=batched)


def _symbols(graph: fx.Graph, inputs: Mapping[str, tuple[Any, Any]]) -> dict[str, str]:
    """Return the names in :class:`BatchForm` of the trace's symbols for sizes of the inputs."""
    symbols: dict[str, str] = {}
    for node in graph.find_nodes(op="placeholder"):
        _, form = inputs.get(node.name, ((), None))
        if isinstance(form, TensorForm):
            sizes = zip(node.meta["val"].shape, form.sizes, strict=True)
            symbols |= {str(s): name for s, name in sizes if isinstance(s, torch.SymInt)}  # type: ignore[misc]
    return symbols
