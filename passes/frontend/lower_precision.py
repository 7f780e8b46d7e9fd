"""Program -> Program: compute in bfloat16 or float16 where that is faster. Every change of dtype is a node."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from ...compat.torch import pytree
from ...core.annotations import facts, is_getitem, leaf, origin, tensor_inputs, value, values
from ...core.errors import CompileError
from ...core.precision import Precision
from ...ir.builder import GraphBuilder
from ...ir.program import Program, outputs
from ...ops.catalog import op_spec
from .narrow_leaves import narrow_leaves

aten = torch.ops.aten
FULL = torch.float32


@dataclass(frozen=True)
class LowerPrecision:
    """Cast the inputs of operators to the dtype that they compute in.

    Before: %y: float32 = linear(%x, %w);  %l: float32 = row_nll(%y, %labels)
    After:  %y: bfloat16 = linear(%x, %w);  %z: float32 = _to_copy(%y);  %l: float32 = row_nll(%z, %labels)
    Ensures: all float32 inputs of an operator have one dtype; the loss is float32; the model's own casts stay; values
    that depend on neither parameters nor floating inputs (positions, masks) are computed in float32.

    An operator computes in its dtype of :mod:`...ops.catalog`, or else in that of its activations. If these differ, it
    computes in float32, and its result is cast to 16 bits. A parameter that no operator reads in float32 becomes a
    narrow leaf (ranks hold it in :attr:`...core.annotations.Leaf.held`), of which
    :class:`..lowering.insert_communication.InsertCommunication` makes a copy once a step, before ranks gather it. So
    does, whatever the precision, a parameter that the model itself reads through a cast. A cache becomes narrow, too,
    and has no wide copy.

    Raises:
        CompileError: QN215 if the model has no float32 parameter.
    """

    precision: Precision = Precision()

    def __call__(self, program: Program, /) -> Program:
        if self.precision.compute is None:
            return narrow_leaves(replace(program, precision=self.precision))
        _require_full(program, self.precision.compute)
        return narrow_leaves(_PrecisionLowering(program, self.precision).lower_program())


def _require_full(program: Program, compute: torch.dtype) -> None:
    dtypes = {value(node).dtype for node, stored in program.leaves.items() if stored.kind == "parameter"}
    if FULL not in dtypes:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "none"
        raise CompileError(
            "QN215",
            f"copies in {str(compute).removeprefix('torch.')} are made of float32 parameters; this model's are {names}",
            fix='build the model in float32 (model.float()), or use precision="model"',
        )


class _PrecisionLowering:
    """A program in which operators compute in few bits.

    Attributes:
        exact: Nodes that depend on neither parameters nor floating inputs.
        loose: Nodes that depend on leaves alone, and get the dtype that their users want.
        mixed: Nodes that compute in float32, and whose results are cast to 16 bits.
        computes: The dtype that a node computes in.
        dtype: The dtype of its result.
    """

    def __init__(self, program: Program, precision: Precision) -> None:
        assert precision.compute is not None
        self.program, self.precision, self.low = program, precision, precision.compute
        self.builder = GraphBuilder(program.mode)
        self.env: dict[fx.Node, fx.Node] = {}
        self.casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self.nodes = [n for n in program.graph.nodes if n.op != "output"]
        self.exact = _exact(program)
        self.loose: set[fx.Node] = set()
        self.mixed: set[fx.Node] = set()
        self.computes: dict[fx.Node, torch.dtype] = {}
        self.dtype: dict[fx.Node, torch.dtype] = {}
        self._decide()
        self._settle()

    # -- decisions

    def _decide(self) -> None:
        for node in self.nodes:
            source = origin(node)[0]
            if node in self.exact:
                self.computes[node] = self.dtype[node] = FULL
            elif is_getitem(node) and source in self.dtype:
                self.computes[node] = self.dtype[node] = self.dtype[source]
            elif node.op == "placeholder" or is_getitem(node):
                self.loose.add(node)
            elif (fixed := self._fixed(node)) is not None:
                self.computes[node] = self.dtype[node] = fixed
            elif read := {self.dtype[n] for n in tensor_inputs(node) if self._activation(n)}:
                self.computes[node] = self.dtype[node] = self.low if read == {self.low} else FULL
                if len(read) == 2 and isinstance(facts(node).value, Tensor):
                    self.mixed.add(node)
                    self.dtype[node] = self.low
            else:
                self.loose.add(node)

    def _activation(self, node: fx.Node) -> bool:
        return _full(node) and node not in self.exact and node not in self.loose

    def _fixed(self, node: fx.Node) -> torch.dtype | None:
        """Return the dtype in which an operator computes whatever its inputs are, if there is one."""
        spec = op_spec(node)
        if spec.casts or spec.autocast == 32 or node.kwargs.get("dtype") is FULL:
            return FULL
        limit = torch.finfo(self.low).max
        numbers = [x for x in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(x, float)]
        if any(limit < abs(x) < float("inf") for x in numbers):
            return FULL
        return self.low if spec.autocast == 16 else None

    def _settle(self) -> None:
        """Decide that loose values are narrow unless one of their users computes in float32."""
        ends = set(self._kept_wide())
        for node in reversed(self.nodes):
            if node in self.loose:
                users = [self.computes[user] for user in node.users if user.op != "output"]
                wide = node in ends or FULL in users or not node.users
                self.computes[node] = self.dtype[node] = FULL if wide else self.low

    def _kept_wide(self) -> set[fx.Node]:
        """Return the results that stay in float32: a loss, and new values of buffers."""
        results, changed = outputs(self.program.graph), len(self.program.last)
        loss = results[:1] if results and value(results[0]).shape == () else ()
        return {node for node in (*loss, *results[len(results) - changed :]) if value(node).dtype is FULL}

    # -- the new graph

    def lower_program(self) -> Program:
        for node in self.nodes:
            with self.builder.at(node):
                self.env[node] = self._leaf(node) if node.op == "placeholder" else self._operator(node)
        wide = self._kept_wide()
        ends = [self._read(self.env[n], FULL) if n in wide else self.env[n] for n in outputs(self.program.graph)]
        self.builder.output(tuple(ends))
        _drop_unused(self.builder.graph)
        return replace(self.program, graph=self.builder.graph, precision=self.precision)

    def _leaf(self, node: fx.Node) -> fx.Node:
        node_facts, node_leaf = facts(node), leaf(node)
        assert isinstance(node_facts.value, Tensor) and node_leaf is not None
        fake = node_facts.value
        if node_leaf.kind in ("parameter", "cache") and fake.dtype is FULL and self.dtype[node] is self.low:
            if node_leaf.kind == "parameter":  # a cache has no wide copy
                node_leaf = replace(node_leaf, held=FULL)
            with self.builder.mode:
                fake = torch.empty(fake.shape, dtype=self.low, device=fake.device)
        return self.builder.placeholder(node.name, fake, node_leaf, needs_grad=node_facts.needs_grad)

    def _operator(self, node: fx.Node) -> fx.Node:
        if is_getitem(node):
            return self.builder.getitem(self.env[node.args[0]], int(node.args[1]))  # type: ignore[index,arg-type]
        wanted = self.computes[node]
        keeps = op_spec(node).casts and node.kwargs.get("dtype") is not FULL
        inputs = {
            n: self.env[n] if keeps or not _full(n) else self._read(self.env[n], wanted) for n in node.all_input_nodes
        }
        args, kwargs = fx.map_arg((node.args, node.kwargs), inputs.__getitem__)
        args = tuple(list(a) if isinstance(a, (list, tuple)) else a for a in args)
        result = self.builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
        return self._read(result, self.low) if node in self.mixed else result

    def _read(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return a value in ``dtype``, by a cast that all readers share."""
        stored = value(node).dtype
        if stored is dtype or stored not in (FULL, self.low):
            return node
        key = node, dtype
        if key not in self.casts:
            self.casts[key] = self.builder.call(aten._to_copy.default, node, dtype=dtype)
        return self.casts[key]


def _full(node: fx.Node) -> bool:
    return {x.dtype for x in values(node) if x is not None and x.is_floating_point()} == {FULL}


def _exact(program: Program) -> set[fx.Node]:
    """Return the nodes that depend on no parameter and no floating input."""
    exact: set[fx.Node] = set()
    for node in program.graph.nodes:
        node_leaf = leaf(node) if node.op == "placeholder" else None
        if node_leaf is not None:
            if node_leaf.kind in ("buffer", "constant") or not value(node).is_floating_point():
                exact.add(node)
        elif node.op == "call_function" and all(source in exact for source in node.all_input_nodes):
            exact.add(node)
    return exact


def _drop_unused(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
