"""Captured -> Program: fix the batch size, and rewrite operators to a few canonical ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from ...capture.places import LEAF, WHERE
from ...capture.sizes_by_value import shape_by_value
from ...compat.torch import FakeTensorMode, OpOverload, draws_random_numbers, pytree, schema
from ...core.absent_gpu import AbsentGpu
from ...core.annotations import Leaf, facts, is_getitem, needs_grad, shape, value
from ...core.errors import CompileError, Where
from ...ir.batch_form import ROWS
from ...ir.builder import GraphBuilder
from ...ir.expectations import Expectations
from ...ir.program import Captured, Program, outputs
from ...ir.symbolic_sizes import sizes_env
from ...ops.catalog import op_spec
from ...ops.rules.table import RULES
from .counted.counters import is_counter
from .decompose import decompose, has_parts
from .derivative_rewrites import detach_backward_values
from .document_ids import expect_documents
from .inner_gradients import inner_gradient, without_starts
from .list_rewrites import row_by_row
from .picked_rows import PickedRows
from .picked_values import picks
from .rewrites import REWRITES

aten = torch.ops.aten
# arithmetic on sizes, which are numbers here
_OF_SIZES: Mapping[Any, Callable[..., Any]] = {
    aten.sym_size.int: lambda x, dim: shape(x)[dim],
    torch.sym_float: lambda number: number,
    torch.sym_int: lambda number: number,
}


class _Fails(Exception):
    """An operator cannot be run; ``message``: torch's error."""

    def __init__(self, target: str, message: str, where: Where) -> None:
        super().__init__(message)
        self.target, self.message, self.where = target, message, where


@dataclass(frozen=True)
class Normalize:
    """Give every value a concrete global shape and every computation one canonical form.

    Before: ``view(x, [sym_size, -1])``, ``clone``, ``add(x, 1)``, ``cross_entropy_loss``
    After:  ``reshape(x, [8, 64])``, nothing, ``add.Scalar(x, 1)``, ``log_softmax``, ``nll_loss``, ``sum``, ``div``
    Ensures: no symbolic sizes; no views other than reshape, expand, permute, slice, select, split; no copies.

    Attributes:
        batch_size: Rows of the global batch: of all data ranks and all microbatches.
        device: Where programs will run; only its type enters the program.
        absent: The GPU that programs are for, if this machine has none.
        lengths: Further sizes of batches, by their names in :class:`~quintnet_compiler.ir.batch_form.BatchForm`; they
            may be symbols, see :class:`~quintnet_compiler.ir.symbolic_sizes.SymbolicSizes`.
        batches: The number of such batches in a step, see :class:`~quintnet_compiler.ir.program.Program`.
        parts: The number of microbatches in which a batch is computed.
        expect: see :class:`~quintnet_compiler.ir.plan.Plan`.

    Raises:
        CompileError: QN105 for random operators that would differ between layouts; QN106 if the model's code runs with
            other numbers of rows but not with this one; QN109 if an operator fails for any number of rows.
    """

    batch_size: int
    device: torch.device
    absent: AbsentGpu | None = None
    lengths: Mapping[str, int] = field(default_factory=dict)
    batches: int = 1
    parts: int = 1
    expect: Expectations = Expectations()

    def __call__(self, captured: Captured, /) -> Program:
        if captured.only_rows not in (None, self.batch_size):
            raise CompileError(
                "QN106",
                f"a batch of {self.batch_size} rows, and the model's code fixes the batch size that it was traced "
                f"with: {captured.only_rows}",
                fix="use x.shape[0] (or -1) where len(x) or a literal batch size is used, or batches of that size",
            )
        parameters = {
            leaf.name for node in captured.graph.nodes if (leaf := node.meta.get(LEAF)) and leaf.kind == "parameter"
        }
        if self.batches > 1 and (changed := parameters & set(captured.changed)):
            raise CompileError(
                "QN104",
                f"the forward pass changes the parameter {min(changed)!r}, and each of {self.batches} microbatches "
                "would begin with what the one before has left",
                fix='use microbatches=1, or leave batch_statistics="microbatch" away',
            )
        try:
            return self._program(captured)
        except _Fails as failure:
            raise self._diagnosed(captured, failure) from failure.__cause__

    def _diagnosed(self, captured: Captured, failure: _Fails) -> CompileError:
        """Return QN106 if the program can be made for another number of rows, else QN109."""
        rows = self.batch_size
        for size in (*(rows * k for k in (2, 3, 4, 8)), *(rows // k for k in (2, 4) if rows % k == 0), 1):
            try:
                replace(self, batch_size=size)._program(captured)
            except (_Fails, CompileError):
                continue
            return CompileError(
                "QN106",
                f"with a batch of {rows}, {failure.target} fails: {failure.message}",
                where=failure.where,
                fix=f"the model's code can run with a batch of {size}; use one, if the mesh divides it",
            )
        return CompileError("QN109", f"{failure.target} fails: {failure.message}", where=failure.where)

    def _program(self, captured: Captured) -> Program:
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes_env(self.lengths))
        builder = GraphBuilder(mode)
        env: dict[fx.Node, Any] = {}
        alive = _alive(captured.graph)
        for node in captured.graph.nodes:
            if node not in alive:
                continue  # a number that only an assertion reads
            builder.where = node.meta.get(WHERE, Where())
            if node.op == "placeholder":
                env[node] = self._leaf(builder, node, captured.symbols)
                if is_counter(captured, node.meta[LEAF]):
                    env[node] = builder.call(aten.arange.default, shape(env[node])[0], device=self.device)
            elif node.op == "output":
                for end in node.args[0]:
                    if not isinstance(env[end], fx.Node):
                        raise shape_by_value("the model", end.meta.get(WHERE, Where()))
                first, *rest = (_unrounded(env[n]) for n in node.args[0])
                if self.batches > 1:  # the step's loss is the mean of the batches' losses
                    first = builder.call(aten.div.Scalar, first, self.batches)
                builder.output((first, *rest))
            else:
                args = [_resolve(a, env) for a in node.args]
                kwargs = {k: _resolve(a, env) for k, a in node.kwargs.items()}
                env[node] = detach_backward_values(builder, node.target, self._node(builder, node, args, kwargs))
        without_starts(builder.graph)
        _refuse_gradients(captured, outputs(builder.graph))
        _drop_unused(builder.graph)
        expect_documents(builder.graph, self.expect.documents)
        return Program(captured, builder.graph, mode, self.batch_size, absent=self.absent, batches=self.batches)

    def _leaf(self, builder: GraphBuilder, node: fx.Node, symbols: Mapping[str, str]) -> fx.Node:
        leaf: Leaf = node.meta[LEAF]
        traced = node.meta["val"]
        if not isinstance(traced, Tensor):
            raise CompileError(
                "QN102",
                f"the batch has a {type(traced).__name__} at {leaf.name}",
                fix="pass tensors, and flags that the model's code branches on",
            )
        numbers = {ROWS: self.batch_size, **self.lengths}
        sizes = [numbers[symbols[str(s)]] if isinstance(s, SymInt) else int(s) for s in traced.shape]
        with builder.mode:
            fake = torch.empty(sizes, dtype=traced.dtype, device=self.device.type)
        return builder.placeholder(node.name, fake, leaf, needs_grad=leaf.trainable)

    def _node(self, builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        if picks(node, args, kwargs):
            return PickedRows(builder, partial(self._node, builder))(node, args, kwargs)
        of_size = _OF_SIZES.get(target)
        if of_size is not None:
            return of_size(*args)
        if not any(isinstance(a, fx.Node) for a in _flat((args, kwargs))) and not isinstance(target, OpOverload):
            return target(*args, **kwargs)  # arithmetic on sizes
        if is_getitem(node) and not isinstance(args[0], fx.Node):
            return args[0][args[1]]
        if "device" in kwargs:
            kwargs["device"] = self.device
        kwargs.pop("pin_memory", None)
        kwargs.pop("memory_format", None)
        try:
            return self._rewritten(builder, node, args, kwargs)
        except CompileError:
            raise
        except Exception as error:
            raise _Fails(
                str(target), str(error).strip().partition("\n")[0][:200] or type(error).__name__, builder.where
            ) from error

    def _rewritten(self, builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        if op_spec(node).inner_gradient == "gradient":
            outs, ins, arriving, again = args
            return inner_gradient(builder, outs, ins, arriving, again, partial(self._part, builder), self.absent)
        if target is aten.masked_scatter.default and self.parts > 1:
            filled = row_by_row(builder, self.batch_size, args)
            if filled is not None:
                return filled
        rewrite = REWRITES.get(target)
        if rewrite is not None:
            return rewrite(builder, node, args, kwargs)
        random = draws_random_numbers(target) and not _drops_nothing(target, args, kwargs)
        if target not in RULES and has_parts(target):
            graph, inputs = decompose(builder.mode, target, args, kwargs)
            drawn = {part.target for part in graph.nodes if draws_random_numbers(part.target)}
            # else the error names the operator that the user wrote, not its parts
            if drawn <= REWRITES.keys() and all(map(_is_supported, graph.nodes)):
                return self._parts(builder, graph, inputs)
            random = bool(drawn)
        if random:
            raise CompileError(
                "QN105",
                f"{target} draws random numbers, which would differ between layouts",
                where=builder.where,
                fix="draw uniform, normal, exponential or whole numbers, or pass the random numbers in the batch",
            )
        return builder.call(target, *args, **kwargs)

    def _part(self, builder: GraphBuilder, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        args = [_resolve(a, env) for a in node.args]
        return self._node(builder, node, args, {k: _resolve(a, env) for k, a in node.kwargs.items()})

    def _parts(self, builder: GraphBuilder, graph: fx.Graph, inputs: list[fx.Node]) -> Any:
        """Emit the definition of an operator."""
        env = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
        for node in graph.nodes:
            if node.op == "call_function":
                env[node] = self._part(builder, node, env)
        return fx.map_arg(graph.output_node().args[0], lambda node: env[node])


def _unrounded(result: fx.Node) -> fx.Node:
    """Return a 16-bit loss before it is rounded.

    Its terms are added up in 32 bits first, and the caller of the program rounds (``Captured.result_dtypes``).
    """
    if not op_spec(result).casts or shape(result):
        return result
    (source,) = result.all_input_nodes
    wide, narrow = value(source).dtype, value(result).dtype
    rounds = wide.is_floating_point and narrow.is_floating_point and wide.itemsize > narrow.itemsize
    return source if rounds else result


def _refuse_gradients(captured: Captured, results: Sequence[fx.Node]) -> None:
    """Raise CompileError QN110 if autograd would go from a new value of a buffer or parameter to the step before."""
    changed = captured.changed
    for name, node in zip(changed, results[len(results) - len(changed) :], strict=True):
        if captured.training and needs_grad(node):
            raise CompileError(
                "QN110",
                f"the new value of {name!r} requires a gradient: autograd would go on from it into the step "
                "before, whose graph is freed",
                where=facts(node).where,
                fix="compute it without gradients: of x.detach(), or under torch.no_grad()",
            )


def _is_supported(part: fx.Node) -> bool:
    """Return whether a node of an operator's definition has a canonical form, a rule, or parts."""
    if part.op != "call_function" or is_getitem(part):
        return part.op in ("call_function", "placeholder", "output")
    return part.target in REWRITES or part.target in RULES or has_parts(part.target)


def _flat(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree)


def _resolve(arg: Any, env: dict[fx.Node, Any]) -> Any:
    if isinstance(arg, fx.Node):
        return env[arg]
    if isinstance(arg, (list, tuple)):
        return [_resolve(a, env) for a in arg]
    return arg


def _alive(graph: fx.Graph) -> set[fx.Node]:
    """Return all inputs and tensors, and the nodes that these and the outputs need."""
    ends = ("output", "placeholder")
    alive = {n for n in graph.nodes if n.op in ends or isinstance(n.meta.get("val"), Tensor)}
    for node in reversed(graph.nodes):
        if node in alive:
            alive.update(node.all_input_nodes)
    return alive


def _drop_unused(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op not in ("output", "placeholder") and not node.users:
            graph.erase_node(node)


def _drops_nothing(target: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator draws for a dropout alone, whose probability is 0."""
    names = [argument.name for argument in schema(target).arguments]
    return "dropout_p" in names and not (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p")
