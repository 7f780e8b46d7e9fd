"""nn.Module to :class:`Captured`: one torch.export of the whole step, with a symbolic batch size.

``torch.export`` in non-strict mode traces real-world models that ``fx.symbolic_trace`` cannot, works on the meta
device, and shares the module's own parameters. What it leaves in the graph that would be wrong or useless later is
removed here: no_grad regions (inlined, with ``detach``), guards and asserts, aliases of tied parameters.
"""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import re
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from .annotations import Leaf
from .errors import CompileError, Where
from .huggingface import traced_as_few_nodes
from .names import check_batch_names, check_names
from .program import Captured

Batch = tuple[Any, ...] | Mapping[str, Any]
LossFn = Callable[..., Tensor]
_aten = torch.ops.aten
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
LITERALS = (bool, int, float, str, type(None))  # what a batch may hold beside tensors: flags of the model
LEAF = "quintnet_leaf"
WHERE = "quintnet_where"


class _Step(nn.Module):
    """The user's model and loss as one function of the batch."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, want: str) -> None:
        super().__init__()
        self.model, self.loss_fn, self.want = model, loss_fn, want

    def forward(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            out = self.model(**batch)
        elif self.want == "loss" and self.loss_fn is not None:
            out = self.loss_fn(self.model(*batch[:-1]), batch[-1])
        else:
            out = self.model(*batch)
        return loss_of(out) if self.want == "loss" else out


def loss_of(out: Any) -> Any:
    if isinstance(out, Mapping) and "loss" in out:
        out = out["loss"]
    elif not isinstance(out, Tensor) and getattr(out, "loss", None) is not None:
        out = out.loss
    if not isinstance(out, Tensor) or out.dim() != 0:
        found = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise CompileError(
            "QN103",
            f"the model returned {found} where a scalar loss is needed",
            fix="give loss_fn=, or return the loss (or an object with .loss)",
        )
    return out


def batch_size_of(batch: Any) -> int:
    """The size of dim 0 of the first tensor of ``batch``.

    Raises:
        CompileError: QN102 if there is no tensor with a dim.
    """
    for x in pytree.tree_leaves(plain_batch(batch)):
        if isinstance(x, Tensor) and x.dim() > 0:
            return x.shape[0]
    raise CompileError("QN102", "the batch holds no tensor", fix="pass a tuple or a dict of tensors")


def plain_batch(batch: Any) -> tuple[Any, ...] | dict[str, Any]:
    """A batch as a plain tuple or dict.

    Raises:
        CompileError: QN102 if it is neither a tuple (or list), nor a mapping.
    """
    if isinstance(batch, (tuple, list)):
        return tuple(batch)
    if isinstance(batch, Mapping):
        return dict(batch)
    raise CompileError(
        "QN102",
        f"the batch is a {type(batch).__name__}",
        fix="pass what one step consumes: a tuple (arguments) or a dict (keyword arguments)",
    )


def capture(
    model: nn.Module, batch: Any, loss_fn: LossFn | None = None, *, want: str = "loss", training: bool = True
) -> Captured:
    """Trace ``model`` (and its loss) on inputs shaped like ``batch``; nothing is computed.

    ``want`` is ``"loss"`` (one scalar output) or ``"outputs"`` (whatever the model returns).

    Raises:
        CompileError: QN101 with the user's line where tracing fails, QN102, QN103, QN105, QN701.
    """
    batch = plain_batch(batch)
    check_batch_names(batch)  # first of all: export writes names into code, and runs it
    for module in (model, loss_fn):
        if isinstance(module, nn.Module):
            check_names(module)
    size = batch_size_of(batch)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    # A batch of one would be taken for a constant; two stands for any size.
    sample = pytree.tree_map(lambda x: _sample(x, size, max(size, 2), device), batch)
    dynamic = pytree.tree_map(lambda x: {0: torch.export.Dim("batch", min=1)} if _batched(x, size) else None, batch)
    step = _Step(model, loss_fn, want)
    with _mode(model, training), _no_warnings(), traced_as_few_nodes(model):
        try:
            exported = _export(step, sample, dynamic)
        except CompileError:
            raise
        except Exception as error:
            if not _fixes_the_batch(error):
                raise _untraceable(error) from error
            # a loss over pairs of rows, say: a program of this very batch size
            sample = pytree.tree_map(lambda x: _sample(x, size, size, device), batch)
            try:
                return _canonical(_export(step, sample, None), model, sample, training, only_rows=size)
            except CompileError:
                raise
            except Exception:
                raise _untraceable(error) from error
    return _canonical(exported, model, sample, training)


def _export(step: nn.Module, sample: Any, dynamic: Any) -> torch.export.ExportedProgram:
    shapes = None if dynamic is None else (dynamic,)
    exported: torch.export.ExportedProgram = torch.export.export(step, (sample,), dynamic_shapes=shapes, strict=False)
    _inline_no_grad(exported.graph_module)
    exported = exported.run_decompositions(_decompositions())
    return exported


def _fixes_the_batch(error: Exception) -> bool:
    text = str(error)
    signs = "specialized" in text or "Constraints violated" in text or "ConstraintViolation" in type(error).__name__
    return "batch" in text and signs


def _batched(x: Any, size: int) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == size


def _sample(x: Any, size: int, traced: int, device: torch.device) -> Any:
    if not isinstance(x, Tensor):
        return x
    shape = (traced, *x.shape[1:]) if _batched(x, size) else tuple(x.shape)
    return torch.zeros(shape, dtype=x.dtype, device=device)


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Operators that are split here because their parts have rules: losses, mostly."""
    from torch._decomp import get_decompositions

    found: dict[Any, Callable[..., Any]] = get_decompositions(
        [
            _aten.mse_loss.default,
            _aten.smooth_l1_loss.default,
            _aten.huber_loss.default,
            _aten.binary_cross_entropy.default,
            _aten.binary_cross_entropy_with_logits.default,
            _aten.soft_margin_loss.default,
            _aten.addcmul.default,
            _aten.addcdiv.default,
            _aten.hardswish.default,
            _aten.softplus.default,
        ]
    )
    return found


@contextlib.contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was in modes:
            module.training = was


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch logs whole graphs where it gives up; our error says what matters
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _user_frame(stack: Any) -> str:
    for frame in reversed(list(stack)):
        if not frame.filename.startswith(_OWN) and not frame.filename.startswith("<"):
            line = f": {frame.line}" if frame.line else ""
            return f"{Path(frame.filename).name}:{frame.lineno}{line}"
    return ""


def _untraceable(error: Exception) -> CompileError:
    stack = traceback.extract_tb(error.__traceback__)
    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = frame.f_locals.get("self")
        if (
            isinstance(found, nn.Module)
            and not isinstance(found, _Step)
            and not type(found).__module__.startswith("torch.")
        ):
            module = type(found).__name__
    # export raises far from the user's code for data-dependent control flow, and quotes the line in its message
    quoted = re.findall(r'File "([^"]+)", line (\d+), in \w+\n\s+(\S.*)', str(error))
    lines = [f"{Path(f).name}:{n}: {text}" for f, n, text in quoted if not f.startswith(_OWN)]
    source = _user_frame(stack) or (lines[-1] if lines else "")
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    kind = type(error).__name__
    if kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException") or "data-dependent" in reason.lower():
        reason = "control flow depends on the values of a tensor, which a compiled program cannot follow"
        fix = "use torch.where (or a mask) instead of `if`, `.item()` or `nonzero` on tensor values"
    elif _fixes_the_batch(error):
        reason = "the batch size is fixed by the model's code, so it cannot run on another number of rows"
        fix = "use x.shape[0] (or -1) where a literal batch size is used"
    else:
        reason = f"{kind}: {reason[:300]}"
        fix = "run model(*batch) on its own to see whether it works unsplit; then simplify the line above"
    return CompileError("QN101", reason, where=Where(module, source), fix=fix)


def _inline_no_grad(gm: fx.GraphModule) -> None:
    """Replace ``wrap_with_set_grad_enabled`` by its body, each output behind ``detach``.

    ``run_decompositions`` would inline it too, and silently drop the no_grad.
    """
    graph = gm.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or "wrap_with_set_grad_enabled" not in str(node.target):
            continue
        enabled, body = node.args[0], getattr(gm, node.args[1].target)
        _inline_no_grad(body)
        inner = [n for n in body.graph.nodes if n.op == "placeholder"]
        env: dict[fx.Node, Any] = dict(zip(inner, node.args[2:], strict=True))
        with graph.inserting_before(node):
            for n in body.graph.nodes:
                if n.op == "placeholder":
                    continue
                if n.op == "output":
                    continue
                env[n] = graph.node_copy(n, env.__getitem__)
            returned = body.graph.output_node().args[0]
            returned = returned if isinstance(returned, (tuple, list)) else (returned,)
            results = []
            for value in returned:
                found = env.get(value, value) if isinstance(value, fx.Node) else value
                if not enabled and isinstance(found, fx.Node) and isinstance(found.meta.get("val"), Tensor):
                    detached = graph.call_function(_aten.detach.default, (found,))
                    detached.meta = dict(found.meta)
                    found = detached
                results.append(found)
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    gm.recompile()


def _where(node: fx.Node) -> Where:
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    path = re.sub(r"^(L__self___|L\['self'\]\.?)", "", path)
    path = path.removeprefix("model").removeprefix(".")
    source = ""
    text = node.meta.get("stack_trace")
    if text:
        frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n?\s*([^\n]*)', text)
        for name, line, code in reversed(frames):
            if not name.startswith(_OWN):
                source = f"{Path(name).name}:{line}: {code.strip()}"
                break
    return Where(path, source)


_DROPPED = ("_guards_fn", "_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "_assert_async")


def _canonical(
    exported: torch.export.ExportedProgram, model: nn.Module, sample: Any, training: bool, only_rows: int | None = None
) -> Captured:
    signature = exported.graph_signature
    if signature.buffers_to_mutate:
        name = next(iter(signature.buffers_to_mutate.values())).removeprefix("model.")
        raise CompileError(
            "QN105",
            f"the forward pass changes the buffer {name!r} (running statistics of a BatchNorm, say)",
            where=Where(name.rpartition(".")[0]),
            fix="use GroupNorm or LayerNorm, or freeze the module with .eval() inside the model's train()",
        )
    owned = dict(model.named_parameters())
    names = {id(p): name for name, p in owned.items()}
    aliases = {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if names[id(p)] != name}
    tensors: dict[str, Tensor] = {}
    graph, env, kept = fx.Graph(), dict[fx.Node, Any](), dict[str, fx.Node]()
    paths, input_spec = pytree.tree_flatten_with_path(sample)
    literals = tuple(x for _, x in paths if not isinstance(x, Tensor))
    flat_inputs = (
        dict(zip(signature.user_inputs, paths, strict=True)) if len(signature.user_inputs) == len(paths) else {}
    )
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            leaf, tensor = _leaf(node, exported, aliases, owned, flat_inputs, only_rows)
            if leaf.kind != "input" and leaf.name in kept:
                env[node] = kept[leaf.name]
                continue
            if leaf.kind != "input" and not node.users and leaf.kind != "parameter":
                continue
            if leaf.kind == "input" and not node.users and isinstance(node.meta["val"], LITERALS):
                continue  # the trace has followed it
            new = graph.placeholder(node.name)
            new.meta = {"val": node.meta.get("val"), LEAF: leaf, WHERE: Where()}
            env[node] = kept[leaf.name] = new
            if tensor is not None:
                tensors[leaf.name] = tensor
        elif node.op == "output":
            graph.output(tuple(fx.map_arg(a, lambda n: env[n]) for a in node.args[0]))
        elif any(word in str(node.target) for word in _DROPPED):
            continue
        else:
            if node.op != "call_function":
                raise CompileError("QN105", f"a {node.op} node ({node.target})", where=_where(node))
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                raise CompileError(
                    "QN105",
                    f"the higher-order operator {node.target} (autocast, cond, scan, ...)",
                    where=_where(node),
                    fix="choose the dtype with model.to(dtype); write loops and branches over plain tensors",
                )
            if free_unbacked_symbols(node.meta.get("val")):
                raise CompileError(
                    "QN101",
                    f"the shape of what {node.target} returns depends on the values of a tensor",
                    where=_where(node),
                    fix="use a mask (torch.where with three arguments); for experts, quintnet.expert_linear",
                )
            new = graph.node_copy(node, lambda n: env[n])
            new.meta = {"val": node.meta.get("val"), WHERE: _where(node)}
            env[node] = new
    output_spec = exported.call_spec.out_spec
    assert output_spec is not None
    state = types.MappingProxyType(tensors)
    return Captured(graph, state, aliases, input_spec, output_spec, training, only_rows, literals)


def _leaf(
    node: fx.Node,
    exported: torch.export.ExportedProgram,
    aliases: Mapping[str, str],
    owned: Mapping[str, nn.Parameter],
    flat_inputs: Mapping[str, Any],
    only_rows: int | None,
) -> tuple[Leaf, Tensor | None]:
    signature = exported.graph_signature
    if node.name in signature.inputs_to_parameters:
        full = signature.inputs_to_parameters[node.name]
        name = full.removeprefix("model.")
        name = aliases.get(name, name)
        parameter = owned[name] if name in owned else exported.state_dict[full]
        return Leaf("parameter", name, trainable=parameter.requires_grad), parameter
    if node.name in signature.inputs_to_buffers:
        full = signature.inputs_to_buffers[node.name]
        found = exported.state_dict.get(full, exported.constants.get(full))
        return Leaf("buffer", full.removeprefix("model.")), found
    if node.name in signature.inputs_to_lifted_tensor_constants:
        full = signature.inputs_to_lifted_tensor_constants[node.name]
        return Leaf("constant", full.removeprefix("model.")), exported.constants[full]
    path, sample = flat_inputs.get(node.name, ((), None))
    rows = sample.shape[0] if isinstance(sample, Tensor) and sample.dim() > 0 else None
    batched = rows is not None and (isinstance(node.meta["val"].shape[0], torch.SymInt) or rows == only_rows)
    return Leaf("input", pytree.keystr(path) or node.name, batched=batched), None
