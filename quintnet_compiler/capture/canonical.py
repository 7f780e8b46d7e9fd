"""Convert torch.export's program to :class:`Captured`: no regions, guards or aliases, a place for every node."""

from __future__ import annotations

import hashlib
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..compat.torch import EXPORT_CHECKS, FakeTensorMode, HigherOrderOperator, free_unbacked_symbols, pytree
from ..core.annotations import Leaf
from ..core.errors import CompileError, Where
from ..ir.batch_form import ROWS, BatchForm, TensorForm
from ..ir.program import Captured
from ..ir.result_form import ResultForm
from .block_reuse import Skipped, Unseen
from .changes.mutations import changed_state
from .changes.stored_results import store
from .places import LEAF, WHERE, where_of
from .sizes_by_value import shape_by_value, sizes_of_picks

ALL_SEEN = Unseen()
LITERALS = (bool, int, float, str, type(None))  # types of a batch's leaves besides tensors: flags of the model


def module_of(node: fx.Node) -> str:
    """Return the path of the module in which a node of a captured graph was made."""
    where = node.meta.get(WHERE)
    return where.module if where else ""


def canonical(
    exported: torch.export.ExportedProgram,
    parameters: Mapping[str, nn.Parameter],
    sample: Any,
    training: bool,
    skipped: Skipped,
    form: BatchForm,
    output_spec: ResultForm,
    only_rows: int | None = None,
    assigned: frozenset[str] | None = None,
    every: bool = False,
    unseen: Unseen = ALL_SEEN,
) -> Captured:
    """Convert ``exported``.

    ``parameters``: under each of their names. ``form``: of ``sample``. ``assigned``: see
    :func:`.changes.mutations.changed_state`. ``every``: include the parameters of blocks that were skipped.
    ``unseen``: tensors that ``exported`` does not have.
    """
    signature = exported.graph_signature
    names = {id(p): name for name, p in reversed(list(parameters.items()))}  # the first of each
    aliases = {name: names[id(p)] for name, p in parameters.items() if names[id(p)] != name}
    owned = {name: p for name, p in parameters.items() if name not in aliases}
    changed = {aliases.get(name, name): at for name, at in changed_state(exported, sample, assigned).items()}
    tensors: dict[str, Tensor] = {}
    graph, env, kept = fx.Graph(), dict[fx.Node, Any](), dict[str, fx.Node]()
    paths, _ = pytree.tree_flatten_with_path(sample)
    user_inputs, lifted = signature.user_inputs, _Lifted.from_exported(exported)
    inputs = [(path, leaf) for (path, _), leaf in zip(paths, form.leaves, strict=True)]
    flat_inputs = dict(zip(user_inputs, inputs, strict=True)) if len(user_inputs) == len(inputs) else {}
    symbols: dict[str, str] = {}
    picked: set[Any] = set()
    unseen_after = _unseen_after(owned, unseen)
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            leaf, tensor = _leaf(node, lifted, aliases, owned, flat_inputs)
            symbols |= _symbols(node, flat_inputs)
            if leaf.kind != "input" and leaf.name in kept:
                env[node] = kept[leaf.name]
                continue
            unread = leaf.kind != "parameter" or (not every and skipped.has(leaf.name))
            if leaf.kind != "input" and not node.users and unread and leaf.name not in changed:
                continue
            if leaf.kind == "input" and not node.users and isinstance(node.meta["val"], LITERALS):
                continue  # the trace has followed it
            new = graph.placeholder(node.name)
            new.meta = {"val": node.meta.get("val"), LEAF: leaf, WHERE: Where()}
            env[node] = kept[leaf.name] = new
            if tensor is not None:
                tensors[leaf.name] = tensor
            for name in unseen_after.get(leaf.name, ()) if leaf.kind == "parameter" else ():
                if every or not skipped.has(name):
                    kept[name] = _placeholder(graph, name, owned[name], node.meta["val"].fake_mode)
                    tensors[name] = owned[name]
        elif node.op == "output":
            results = [fx.map_arg(a, lambda n: env[n]) for a in node.args[0]]
            own = [x for position, x in enumerate(results) if position not in changed.values()]
            graph.output((*own, *(results[position] for position in changed.values())))
        elif _is_check(node) or any(source not in env for source in node.all_input_nodes):
            continue  # the latter are computed from what is only checked
        else:
            _check_operator(node)
            picked |= sizes_of_picks(node)
            if free_unbacked_symbols(node.meta.get("val")) - picked:
                if _only_checked(node):
                    continue
                raise _value_needed(node)
            new = graph.node_copy(node, lambda n: env[n])
            new.meta = {"val": node.meta.get("val"), WHERE: where_of(node)}
            env[node] = new
    store(graph, [kept[name] for name in changed])
    output_spec.check(symbols)
    state = types.MappingProxyType(tensors)
    like = types.MappingProxyType({name: tuple(names) for name, names in skipped.like.items()})
    return Captured(
        graph,
        state,
        aliases,
        form,
        output_spec,
        training,
        only_rows,
        types.MappingProxyType(symbols),
        like,
        changed=tuple(changed),
        assigned=(assigned or frozenset()) & changed.keys(),
    )


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


def _unseen_after(owned: Mapping[str, nn.Parameter], unseen: Unseen) -> Mapping[str, list[str]]:
    """Return the names of unseen parameters, by the parameter before them that is not."""
    followers: dict[str, list[str]] = {}
    previous = ""
    for name, parameter in owned.items():
        if id(parameter) in unseen.tensors:
            followers.setdefault(previous, []).append(name)
        else:
            previous = name
    return followers


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
class _Lifted:
    """The names of inputs that are the model's own (the signature's properties search for them at every use)."""

    exported: torch.export.ExportedProgram
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, str]

    @classmethod
    def from_exported(cls, exported: torch.export.ExportedProgram) -> _Lifted:
        signature = exported.graph_signature
        constants = signature.inputs_to_lifted_tensor_constants
        return cls(exported, signature.inputs_to_parameters, signature.inputs_to_buffers, constants)


def _leaf(
    node: fx.Node,
    lifted: _Lifted,
    aliases: Mapping[str, str],
    owned: Mapping[str, nn.Parameter],
    flat_inputs: Mapping[str, tuple[Any, Any]],
) -> tuple[Leaf, Tensor | None]:
    exported = lifted.exported
    if full := lifted.parameters.get(node.name):
        name = full.removeprefix("model.")
        name = aliases.get(name, name)
        parameter = owned[name]
        return Leaf("parameter", name, trainable=parameter.requires_grad), parameter
    if full := lifted.buffers.get(node.name):
        tensor = exported.state_dict.get(full, exported.constants.get(full))
        return Leaf("buffer", full.removeprefix("model.")), tensor
    if full := lifted.constants.get(node.name):
        constant = exported.constants[full]
        return Leaf("constant", f"{full.removeprefix('model.')}{_mark(constant)}"), constant
    path, form = flat_inputs.get(node.name, ((), None))
    batched = isinstance(form, TensorForm) and form.sizes[:1] == (ROWS,)
    return Leaf("input", pytree.keystr(path) or node.name, batched=batched), None


def _symbols(node: fx.Node, flat_inputs: Mapping[str, tuple[Any, Any]]) -> dict[str, str]:
    """Return the names in :class:`BatchForm` of the trace's symbols for sizes of an input."""
    _, form = flat_inputs.get(node.name, ((), None))
    if not isinstance(form, TensorForm):
        return {}
    traced = node.meta["val"].shape
    return {str(s): name for s, name in zip(traced, form.sizes, strict=True) if isinstance(s, torch.SymInt)}  # type: ignore[misc]
