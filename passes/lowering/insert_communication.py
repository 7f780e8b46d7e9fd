"""StagedProgram -> LocalProgram: every operator on local shapes, every change of sharding a visible node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from ...compat.torch import pytree
from ...core.annotations import facts, is_getitem, leaf, needs_grad, origin, shape, tensor_inputs, value, values
from ...core.errors import REPORT, CompileError
from ...core.sharding import Shard, Sharding, local_shape
from ...ir.builder import GraphBuilder
from ...ir.program import TILE_BYTES, LocalProgram, ShardedProgram, StagedProgram, outputs
from ...ops.attention.operator import attention
from ...ops.catalog import op_spec
from ...ops.cross_entropy import row_nll
from ...ops.extensions import extension
from ...ops.rank_local import (
    MICROBATCHES,
    dropout,
    embedding_rows,
    keep_mask,
    local_noise,
    microbatch,
    noise,
    padding_of,
)
from ...ops.rules.notation import Rule
from ...strategies.expert_copies import ExpertCopies
from ...strategies.padding_fills import PaddingFills, padded_dims, padding_fills
from ...strategies.rule_book import RuleBook
from .conversions import Conversions
from .extensions import LocalForm
from .lower_attention import LowerAttention
from .lower_cross_entropy import LowerCrossEntropy
from .lower_experts import LowerExperts
from .padding import Padding

aten = torch.ops.aten


@dataclass(frozen=True)
class InsertCommunication:
    """Lower a sharded program to what one rank runs.

    Before: %linear = linear(%x: S(1) -> R, %w: S(0))
    After:  %all = convert(%x, "tp", 2, "S(1)", "R");  %linear = linear(%all, %w)
    Ensures: every value has the local shape of its sharding; two conversions of one value to one sharding are one.

    A conversion belongs to the stage of its source if it makes the value smaller or whole once for all (reductions,
    slices), else to the stage of the user. What gathers a stored parameter comes before all its other conversions, and
    runs once a step where the program says so. ``context_load_balance`` and ``attention_tile_bytes``: see
    :class:`.lower_attention.LowerAttention`; ``copies``: of experts, on all ranks.
    """

    rules: dict[Any, Rule]
    context_load_balance: bool = True
    attention_tile_bytes: int = TILE_BYTES
    copies: ExpertCopies | None = None

    def __call__(self, staged: StagedProgram, /) -> LocalProgram:
        balance, tile_bytes = self.context_load_balance, self.attention_tile_bytes
        return _CommunicationLowering(staged, self.rules, balance, tile_bytes, self.copies).lower_program()


@dataclass
class _CommunicationLowering:
    staged: StagedProgram
    rules: dict[Any, Rule]
    balance: bool = True
    tile_bytes: int = TILE_BYTES
    copies: ExpertCopies | None = None
    stage: dict[fx.Node, int] = field(default_factory=dict)
    sharding: dict[fx.Node, Sharding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sharded: ShardedProgram = self.staged.sharded
        self.axes = self.sharded.axes
        self.builder = GraphBuilder(self.sharded.program.mode)
        self.local: dict[tuple[fx.Node, int], fx.Node] = {}
        self.host_copies: dict[tuple[fx.Node, int | None], fx.Node] = {}
        self.shared: dict[tuple[Any, ...], fx.Node] = {}
        self.reads: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.padding = Padding(self.builder, self.axes)
        self.conversions = Conversions(self.builder, self.staged, self.padding, self.local, self.stage)
        self.book = RuleBook(self.rules, unknown="replicate")
        self.experts = LowerExperts(self.builder, self.sharded, self.copies)

    def lower_program(self) -> LocalProgram:
        for node in self.sharded.program.graph.nodes:
            if node.op == "output":
                continue
            with self.builder.at(node):
                if node.op == "placeholder":
                    self._leaf(node)
                elif not is_getitem(node):
                    self._operator(node)
        results = self._outputs()
        self.builder.output(tuple(results))
        _drop_unused(self.builder.graph, set(results))
        nodes = set(self.builder.graph.nodes)
        return LocalProgram(
            self.staged,
            self.builder.graph,
            self.builder.mode,
            {n: s for n, s in self.stage.items() if n in nodes},
            {n: s for n, s in self.sharding.items() if n in nodes},
            self._once(),
            {key: n for key, n in self.local.items() if n in nodes},
            {key: inputs for key, inputs in self.reads.items() if nodes.issuperset(inputs)},
            {n: stored for n, stored in self.conversions.deferred.items() if n in nodes},
        )

    def _outputs(self) -> list[fx.Node]:
        """Convert each result to the sharding that the program returns it in."""
        graph = self.sharded.program.graph
        strategies = self.sharded.strategies[graph.output_node()]
        results = []
        for position, result in enumerate(outputs(graph)):
            source, index = origin(result)
            target = tuple(s.inputs[position] for s in strategies)
            with self.builder.at(source):
                node = self.conversions.converted(
                    source, index, target, needs_grad(result), self.staged.stage.get(source)
                )
            self.sharding[node] = target
            results.append(node)
        return results

    def _leaf(self, node: fx.Node) -> None:
        node_facts = facts(node)
        assert node_facts.leaf is not None
        sharding = self.sharded.produced(node)
        size = self._local(shape(node), sharding)
        dtype = node_facts.leaf.held or values(node)[0].dtype
        with self.builder.mode:
            fake = torch.empty(size, dtype=dtype, device=values(node)[0].device)
        batches = self.sharded.program.batches if node_facts.leaf.batched else 1
        if batches > 1:  # the rows of all batches arrive together; a function reads those of one
            with self.builder.mode:
                fake = fake.new_empty((batches * size[0], *size[1:]))
        new = self.builder.placeholder(node.name, fake, node_facts.leaf, needs_grad=node_facts.needs_grad)
        self.sharding[new] = sharding
        if batches > 1:
            new = self.builder.call(microbatch, new, batches, 0, 1)
        self.local[node, 0] = new
        self.sharding[new] = sharding
        self.padding.zeros[new] = self._padded(shape(node), sharding)

    def _operator(self, node: fx.Node) -> None:
        stage = self.staged.stage.get(node)
        inputs = self._inputs(node, stage)
        first_new, self.padding.stage = len(self.builder.made), stage
        uneven = any(strategy.uneven for strategy in self.sharded.strategies[node])
        if uneven:
            inputs = self._filled(node, inputs)
        self.reads[node] = tuple(inputs.values())
        for index, result in enumerate(self._emit(node, inputs)):
            if result is None:
                continue
            self._check_shape(node, index, result)
            if uneven:
                result = self._filled_result(node, index, result, inputs)
            self.local[node, index] = result
            self.sharding[result] = self.sharded.produced(node, index)
        if stage is not None:
            self._assign_stage(node, stage, self.builder.made[first_new:])

    def _inputs(self, node: fx.Node, stage: int | None) -> dict[int, fx.Node]:
        """Convert each tensor input to the sharding that the operator's strategies read, by position."""
        inputs: dict[int, fx.Node] = {}
        for position, operand in enumerate(tensor_inputs(node)):
            source, index = origin(operand)
            grad = needs_grad(node) and needs_grad(operand)
            inputs[position] = self.conversions.converted(
                source, index, self.sharded.wanted(node, position), grad, stage
            )
        return inputs

    def _check_shape(self, node: fx.Node, index: int, result: fx.Node) -> None:
        """Raise CompileError unless a local result has the shape that its sharding says."""
        expected = self._result_shape(node, index)
        actual = tuple(values(result)[0].shape)
        if actual != expected:
            raise CompileError(
                "QN209",
                f"{node.target} makes {actual} on each rank where its sharding says {expected}",
                where=facts(node).where,
                fix=REPORT,
            )

    def _assign_stage(self, node: fx.Node, stage: int, new_nodes: Sequence[fx.Node]) -> None:
        for new in new_nodes:
            if new.target is not padding_of:  # computed once a step, for all stages
                self.stage[new] = stage
        if _casts(node) and all(map(self.conversions.made_at_start, self.reads[node])):
            self.conversions.at_start.update(new_nodes)  # casts of copies that are made once a step

    def _filled(self, node: fx.Node, inputs: dict[int, fx.Node]) -> dict[int, fx.Node]:
        """Return the inputs of an operator, with their padding filled where the operator would mix it with data."""
        fills = self._fills(node)
        filled = {}
        for position, x in inputs.items():
            dims = fills.inputs[position] - self.padding.zeros.get(x, frozenset())
            parameter = leaf(x)
            if parameter is not None and parameter.trainable:
                dims |= fills.parameters[position]
            whole = shape(tensor_inputs(node)[position])
            sharding = self.sharded.wanted(node, position)
            x = self.padding.filled(x, whole, sharding, dims - fills.ones[position])
            filled[position] = self.padding.filled(x, whole, sharding, fills.ones[position], 1.0)
        return filled

    def _filled_result(self, node: fx.Node, index: int, result: fx.Node, inputs: dict[int, fx.Node]) -> fx.Node:
        """Return a result whose gradient has zeros where the operator's backward would mix padding with data."""
        fills, whole, sharding = self._fills(node), values(node)[index].shape, self.sharded.produced(node, index)
        padded_inputs = [
            (x, self._padded(shape(tensor_inputs(node)[i]), self.sharded.wanted(node, i))) for i, x in inputs.items()
        ]
        elementwise = fills.everywhere and not fills.any
        if elementwise and self.padding.keeps_zeros(node, self.book.factors_of(node), padded_inputs):
            self.padding.zeros[result] = self._padded(whole, sharding)
        return self.padding.filled(result, whole, sharding, fills.outputs[index])

    def _fills(self, node: fx.Node) -> PaddingFills:
        return padding_fills(node, self.book.factors_of(node), self.sharded.strategies[node], self.axes)

    def _padded(self, sizes: Sequence[int], sharding: Sharding) -> frozenset[int]:
        return padded_dims(sizes, sharding, self.axes)

    # -- operators on local inputs

    def _emit(self, node: fx.Node, inputs: dict[int, fx.Node]) -> list[fx.Node | None]:
        """Emit the operator on local inputs, with local sizes for its literals; return a node per output in use."""
        args, kwargs = _substitute(node, inputs)
        form = extension(node.target, LocalForm)
        if form is not None:
            new = form.emit(self.builder, args, self.sharded.wanted(node, 0), self.axes)
        elif op_spec(node).by_expert:
            new = self.experts(node, self.staged.stage.get(node), *args)
        else:
            new = _LOWERINGS.get(node.target, _CommunicationLowering._call)(self, node, args, kwargs)
        if isinstance(facts(node).value, tuple):
            used = {user.args[1] for user in node.users if is_getitem(user)}
            return [self.builder.getitem(new, i) if i in used else None for i in range(len(values(node)))]
        return [new]

    def _call(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        """Emit the same operator. A shape among its arguments becomes the local one."""
        target: Any = node.target
        rule = self.rules.get(target)
        if rule is not None and rule.shape_arg is not None:
            args[rule.shape_arg] = list(self._result_shape(node))
        return self.builder.call(target, *args, **kwargs)

    def _reshape(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        return self.builder.reshape(args[0], list(self._result_shape(node)))

    def _split(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        dim = args[2] if len(args) > 2 else 0
        sizes = [self._result_shape(node, index)[dim] for index in range(len(values(node)))]
        return self.builder.call(aten.split_with_sizes.default, args[0], sizes, dim)

    def _embedding(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        """Emit a lookup. Where ranks hold slices of the table's rows, each looks up those that it holds."""
        axes = self._split_on(node, 0, 0)
        if not axes:
            return self._call(node, args, kwargs)
        padding = args[2] if len(args) > 2 else kwargs.get("padding_idx", -1)
        names, sizes = [axis.name for axis in axes], [axis.size for axis in axes]
        return self.builder.call(embedding_rows, args[0], args[1], padding, names, sizes)

    def _attention(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        stage = self.staged.stage.get(node)
        lower = LowerAttention(
            self.builder, self.axes, self.sharded.strategies[node], self.balance, self.tile_bytes,
            partial(self._on_host, stage), partial(self._shared, stage),
        )  # fmt: skip
        return lower(node, self.reads[node])

    def _noise(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        size = list(self._result_shape(node))
        return self.builder.call(
            local_noise, size, args[1], args[2], value(node).dtype, kwargs["device"], *self._layout(node)
        )

    def _cross_entropy(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        lower = LowerCrossEntropy(self.builder, self.padding, self.sharded.wanted(node, 0))
        return lower(shape(tensor_inputs(node)[0]), *args[:3])

    def _on_host(self, stage: int | None, ids: fx.Node) -> fx.Node:
        """Return the copy of a value in the host's memory. The stage waits for it once a microbatch."""
        if value(ids).device.type == "cpu":
            return ids
        if (ids, stage) not in self.host_copies:
            self.host_copies[ids, stage] = self.builder.call(aten._to_copy.default, ids, device=torch.device("cpu"))
        return self.host_copies[ids, stage]

    def _shared(self, stage: int | None, target: Any, *args: Any) -> fx.Node:
        """Return a call that all layers of a stage share."""
        if (stage, target, *args) not in self.shared:
            self.shared[stage, target, *args] = self.builder.call(target, *args)
        return self.shared[stage, target, *args]

    def _dropout(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        """Emit a mask and its product with ``x``, so that the backward saves the mask and not ``x``."""
        x, p = args[:2]
        mask = self.builder.call(keep_mask, x, p, kwargs["op"], *self._layout(node))
        return self.builder.call(aten.native_dropout_backward.default, x, mask, 0.0 if p == 1 else 1 / (1 - p))

    def _layout(self, node: fx.Node) -> list[list[Any]]:
        """Return the global shape, and the names, sizes, dims, parts and units of the axes that split the value."""
        splits = [
            (axis.name, axis.size, kind.dim, kind.parts, kind.unit)
            for axis, kind in zip(self.axes, self.sharded.produced(node), strict=True)
            if isinstance(kind, Shard)
        ]
        return [list(shape(node)), *([list(column) for column in zip(*splits, strict=True)] or [[], [], [], [], []])]

    def _split_on(self, node: fx.Node, position: int, dim: int) -> list[Any]:
        """Return the axes that split ``dim`` of an input."""
        sharding = self.sharded.wanted(node, position)
        return [a for a, kind in zip(self.axes, sharding, strict=True) if isinstance(kind, Shard) and kind.dim == dim]

    def _result_shape(self, node: fx.Node, index: int = 0) -> tuple[int, ...]:
        """Return the local shape of a result."""
        return self._local(values(node)[index].shape, self.sharded.produced(node, index))

    def _local(self, size: Sequence[int], sharding: Sharding) -> tuple[int, ...]:
        return local_shape(size, sharding, self.sharded.axis_sizes)

    # -- nodes that run once a step

    def _once(self) -> frozenset[fx.Node]:
        """Return the nodes that run once a step.

        They depend on no parameter and no microbatch, or gather parameters. A node that names the axis in time depends
        on the microbatch (positions of a random mask do). Each batch of a step draws random numbers anew, and reads the
        buffers that the previous batch has written.
        """
        once: set[fx.Node] = set()
        for node in self.builder.graph.nodes:
            if node.op == "placeholder":
                constant = self._constant_leaf(node)
            else:
                constant = self._independent(node) and all(source in once for source in tensor_inputs(node))
            if constant or node in self.conversions.at_start:
                once.add(node)
        return frozenset(once)

    def _constant_leaf(self, node: fx.Node) -> bool:
        """Return whether a leaf is the same in all microbatches and batches of a step, and no parameter."""
        source = leaf(node)
        return source is not None and source.kind != "parameter" and source.name not in self.sharded.program.carried

    def _independent(self, node: fx.Node) -> bool:
        """Return whether a node belongs to no stage, and computes the same in every microbatch from the same inputs."""
        if node.op != "call_function" or op_spec(node).cuts_microbatch or node in self.stage:
            return False
        draws = op_spec(node).random and self.sharded.program.batches > 1
        return MICROBATCHES not in pytree.tree_leaves(node.args) and not draws


_Lowering = Callable[[_CommunicationLowering, fx.Node, list[Any], dict[str, Any]], fx.Node]
# operators that run as something else on a rank than themselves with a local shape
_LOWERINGS: Mapping[Any, _Lowering] = {
    aten.reshape.default: _CommunicationLowering._reshape,
    aten.split_with_sizes.default: _CommunicationLowering._split,
    aten.embedding.default: _CommunicationLowering._embedding,
    attention: _CommunicationLowering._attention,
    row_nll: _CommunicationLowering._cross_entropy,
    dropout: _CommunicationLowering._dropout,
    noise: _CommunicationLowering._noise,
}


def _casts(node: fx.Node) -> bool:
    """Return whether a node belongs to a cast with scales, which begins with a detach."""
    if op_spec(node).detaches:
        return bool(node.users) and all(op_spec(user).cast_step for user in node.users)
    return op_spec(node).cast_step is not None


def _substitute(node: fx.Node, inputs: dict[int, fx.Node]) -> tuple[list[Any], dict[str, Any]]:
    """Return the node's arguments with its tensor inputs replaced, by position among them."""
    counter = iter(range(len(inputs)))
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: inputs[next(counter)])
    return [list(a) if isinstance(a, (list, tuple)) else a for a in args], dict(kwargs)


def _drop_unused(graph: fx.Graph, keep: set[fx.Node]) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and node not in keep:
            graph.erase_node(node)
