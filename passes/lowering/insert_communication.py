"""StagedProgram -> LocalProgram: every operator on local shapes, every change of sharding a visible node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from ...compat.torch import pytree
from ...core.annotations import facts, is_getitem, leaf, needs_grad, origin, shape, tensor_inputs, value, values
from ...core.errors import REPORT, CompileError
from ...core.sharding import AxisType, I, P, R, Shard, Sharding, conversion_path, local_shape, plain
from ...ir.builder import GraphBuilder
from ...ir.program import TILE_BYTES, Gathered, LocalProgram, ShardedProgram, StagedProgram, outputs
from ...ops.attention.operator import attention
from ...ops.collectives import convert, share
from ...ops.cross_entropy import nll_terms, row_nll
from ...ops.experts.scaled_groups import EXPERT_LAYERS
from ...ops.rank_local import (
    DRAWS,
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
from ...ops.scaled_products import CASTS, block_max
from ..strategies.hot_experts import hot_experts
from ..strategies.rule_book import RuleBook
from .lower_attention import LowerAttention
from .lower_experts import LowerExperts
from .padding import Mixed, Padding, mixed, padded_dims
from .scales import largest_of_ranks

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
    :class:`.lower_attention.LowerAttention`; ``hot_experts``: :mod:`..strategies.hot_experts`.
    """

    rules: dict[Any, Rule]
    context_load_balance: bool = True
    attention_tile_bytes: int = TILE_BYTES
    hot_experts: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __call__(self, staged: StagedProgram, /) -> LocalProgram:
        hot = hot_experts(staged.sharded.program.graph, self.hot_experts)
        how = self.context_load_balance, self.attention_tile_bytes, hot
        return _CommunicationLowering(staged, self.rules, *how).run()


@dataclass
class _CommunicationLowering:
    staged: StagedProgram
    rules: dict[Any, Rule]
    balance: bool = True
    tile_bytes: int = TILE_BYTES
    hot: Mapping[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    stage: dict[fx.Node, int] = field(default_factory=dict)
    sharding: dict[fx.Node, Sharding] = field(default_factory=dict)
    made: dict[tuple[fx.Node, int, Sharding, int | None], fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sharded: ShardedProgram = self.staged.sharded
        self.axes = self.sharded.axes
        self.builder = GraphBuilder(self.sharded.program.mode)
        self.local: dict[tuple[fx.Node, int], fx.Node] = {}
        self.host_copies: dict[tuple[fx.Node, int | None], fx.Node] = {}
        self.shared: dict[tuple[Any, ...], fx.Node] = {}
        self.reads: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.at_start: set[fx.Node] = set()
        self.deferred: dict[fx.Node, fx.Node] = {}
        self.copies: dict[tuple[fx.Node, int | None], fx.Node] = {}
        self.padding = Padding(self.builder, self.axes)
        self.book = RuleBook(self.rules, unknown="replicate")
        self.experts = LowerExperts(self.builder, self.sharded, self.hot)

    def run(self) -> LocalProgram:
        for node in self.sharded.program.graph.nodes:
            if node.op == "output":
                continue
            with self.builder.at(node):
                if node.op == "placeholder":
                    self._leaf(node)
                elif not is_getitem(node):
                    self._operator(node)
        out = self.sharded.program.graph.output_node()
        wanted = self.sharded.strategies[out]
        results = []
        for position, result in enumerate(outputs(self.sharded.program.graph)):
            source, index = origin(result)
            target = tuple(s.inputs[position] for s in wanted)
            with self.builder.at(source):
                node = self._converted(source, index, target, needs_grad(result), self.staged.stage.get(source))
            self.sharding[node] = target
            results.append(node)
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
            {key: found for key, found in self.reads.items() if nodes.issuperset(found)},
            {n: found for n, found in self.deferred.items() if n in nodes},
        )

    def _leaf(self, node: fx.Node) -> None:
        known = facts(node)
        assert known.leaf is not None
        kind = self.sharded.produced(node)
        size = self._local(shape(node), kind)
        with self.builder.mode:
            fake = torch.empty(size, dtype=known.leaf.held or values(node)[0].dtype, device=values(node)[0].device)
        batches = self.sharded.program.batches if known.leaf.batched else 1
        if batches > 1:  # the rows of all of them arrive, one of them is read
            with self.builder.mode:
                fake = fake.new_empty((batches * size[0], *size[1:]))
        new = self.builder.placeholder(node.name, fake, known.leaf, needs_grad=known.needs_grad)
        self.sharding[new] = kind
        if batches > 1:
            new = self.builder.call(microbatch, new, batches, 0, 1)
        self.local[node, 0] = new
        self.sharding[new] = kind
        self.padding.zeros[new] = self._padded(shape(node), kind)

    def _operator(self, node: fx.Node) -> None:
        stage = self.staged.stage.get(node)
        replacement: dict[int, fx.Node] = {}
        for position, given in enumerate(tensor_inputs(node)):
            source, index = origin(given)
            grad = needs_grad(node) and needs_grad(given)
            replacement[position] = self._converted(source, index, self.sharded.wanted(node, position), grad, stage)
        before, self.padding.stage = len(self.builder.made), stage
        uneven = any(strategy.uneven for strategy in self.sharded.strategies[node])
        if uneven:
            replacement = self._filled(node, replacement)
        self.reads[node] = tuple(replacement.values())
        results = self._emit(node, replacement)
        for index, result in enumerate(results):
            if result is None:
                continue
            expected = self._local(values(node)[index].shape, self.sharded.produced(node, index))
            actual = tuple(values(result)[0].shape)
            if actual != expected:
                raise CompileError(
                    "QN209",
                    f"{node.target} makes {actual} on each rank where its sharding says {expected}",
                    where=facts(node).where,
                    fix=REPORT,
                )
            if uneven:
                result = self._made_uneven(node, index, result, replacement)
            self.local[node, index] = result
            self.sharding[result] = self.sharded.produced(node, index)
        if stage is not None:
            for new in self.builder.made[before:]:
                if new.target is not padding_of:  # once a step, whoever asks
                    self.stage[new] = stage
            if _casts(node) and all(n in self.at_start or _parameter(n) for n in self.reads[node]):
                self.at_start.update(self.builder.made[before:])  # of copies that are made once a step

    def _filled(self, node: fx.Node, given: dict[int, fx.Node]) -> dict[int, fx.Node]:
        """The inputs of an operator, with zeros in their padding where it would bring that together with anything."""
        how = self._mixed(node)
        found = {}
        for position, x in given.items():
            dims = how.inputs[position] - self.padding.zeros.get(x, frozenset())
            known = leaf(x)
            if known is not None and known.trainable:
                dims |= how.own[position]
            whole = shape(tensor_inputs(node)[position])
            kind = self.sharded.wanted(node, position)
            x = self.padding.filled(x, whole, kind, dims - how.ones[position])
            found[position] = self.padding.filled(x, whole, kind, how.ones[position], 1.0)
        return found

    def _made_uneven(self, node: fx.Node, index: int, made: fx.Node, given: dict[int, fx.Node]) -> fx.Node:
        """A result of an operator, whose gradient has zeros where the operator's backward brings padding together."""
        how, whole, kind = self._mixed(node), values(node)[index].shape, self.sharded.produced(node, index)
        read = [
            (x, self._padded(shape(tensor_inputs(node)[i]), self.sharded.wanted(node, i))) for i, x in given.items()
        ]
        if how.alone and not how.anything and self.padding.passed_on(node, self.book.factors_of(node), read):
            self.padding.zeros[made] = self._padded(whole, kind)
        return self.padding.filled(made, whole, kind, how.outputs[index])

    def _mixed(self, node: fx.Node) -> Mixed:
        return mixed(node, self.book.factors_of(node), self.sharded.strategies[node], self.axes)

    def _padded(self, sizes: Sequence[int], kind: Sharding) -> frozenset[int]:
        return padded_dims(sizes, kind, self.axes)

    def _emit(self, node: fx.Node, given: dict[int, fx.Node]) -> list[fx.Node | None]:
        """The operator on local inputs, with local sizes for its literals; one node per output that is used."""
        target: Any = node.target
        args, kwargs = _substitute(node, given)
        produced = [self._local(v.shape, self.sharded.produced(node, i)) for i, v in enumerate(values(node))]
        rule = self.rules.get(target)
        if target is aten.reshape.default:
            new = self.builder.reshape(args[0], list(produced[0]))
        elif target is aten.split_with_sizes.default:
            dim = args[2] if len(args) > 2 else 0
            new = self.builder.call(target, args[0], [p[dim] for p in produced], dim)
        elif target is aten.embedding.default and (axes := self._split_on(node, 0, 0)):
            padding = args[2] if len(args) > 2 else kwargs.get("padding_idx", -1)
            names, sizes = [axis.name for axis in axes], [axis.size for axis in axes]
            new = self.builder.call(embedding_rows, args[0], args[1], padding, names, sizes)
        elif target is attention:
            chosen = self.sharded.strategies[node]
            both = [partial(one, self.staged.stage.get(node)) for one in (self._on_host, self._shared)]
            new = LowerAttention(self.builder, self.axes, chosen, self.balance, self.tile_bytes, *both)(
                node, list(given.values())
            )
        elif target in EXPERT_LAYERS:
            new = self.experts(node, self.staged.stage.get(node), *args)
        elif target is block_max:
            kinds = self.sharded.wanted(node, 0)
            new = largest_of_ranks(self.builder, args[0], args[1], kinds, self.axes)
        elif target is row_nll:
            new = self._cross_entropy(node, args[0], args[1], args[2])
        elif target is dropout:
            new = self._dropout(node, args[0], args[1], kwargs["op"])
        elif target is noise:
            made = value(node)
            how = args[1], args[2], made.dtype, kwargs["device"]
            new = self.builder.call(local_noise, list(produced[0]), *how, *self._layout(node))
        else:
            if rule is not None and rule.shape_arg is not None:
                args[rule.shape_arg] = list(produced[0])
            new = self.builder.call(target, *args, **kwargs)
        if isinstance(facts(node).value, tuple):
            used = {user.args[1] for user in node.users if is_getitem(user)}
            return [self.builder.getitem(new, i) if i in used else None for i in range(len(values(node)))]
        return [new]

    def _cross_entropy(self, node: fx.Node, logits: fx.Node, labels: fx.Node, ignore: int) -> fx.Node:
        """log(sum of exp(logits)) minus the label's logit. Where ranks hold slices of the classes, they exchange three
        numbers per row instead of logits (as Shoeybi et al. 2019, who do so in three steps)."""
        call, axes = self.builder.call, self._split_on(node, 0, 1)
        if any(axis.role == "time" for axis in axes):
            raise CompileError("QN104", "classes cannot be split over microbatches", where=self.builder.where)
        if not axes:
            scores = call(aten._log_softmax.default, logits, 1, False)
            return self.builder.getitem(call(aten.nll_loss_forward.default, scores, labels, None, 0, ignore), 0)
        names, sizes = [axis.name for axis in axes], [axis.size for axis in axes]
        kinds, whole = self.sharded.wanted(node, 0), shape(tensor_inputs(node)[0])
        if 1 in self._padded(whole, kinds):  # no class: the least likely
            least = torch.finfo(value(logits).dtype).min
            logits = self.padding.filled(logits, whole, kinds, frozenset({1}), least)
        terms = call(nll_terms, logits, labels, names, sizes)
        for axis in reversed(axes):
            terms = self._joined_terms(call(convert, terms, axis.name, axis.size, "S(0)", "I"))
        top, total, picked = (call(aten.select.int, call(aten.select.int, terms, 0, 0), 0, i) for i in range(3))
        gap = call(aten.sub.Tensor, top, picked)
        losses = self._cast(call(aten.add.Tensor, call(aten.log.default, total), gap), logits)
        return call(aten.masked_fill.Scalar, losses, call(aten.eq.Scalar, labels, ignore), 0.0)

    def _joined_terms(self, terms: fx.Node) -> fx.Node:
        """Of the terms of all ranks, those of their classes together."""
        call = self.builder.call
        tops, totals, picked = (call(aten.slice.Tensor, terms, 1, i, i + 1) for i in range(3))
        tops = call(aten.detach.default, tops)
        top = call(aten.amax.default, tops, [0], True)
        totals = call(aten.mul.Tensor, totals, call(aten.exp.default, call(aten.sub.Tensor, tops, top)))
        sums = [call(aten.sum.dim_IntList, x, [0], True) for x in (totals, picked)]
        return call(aten.cat.default, [top, *sums], 1)

    def _on_host(self, stage: int | None, ids: fx.Node) -> fx.Node:
        """A value in the host's memory: it waits for that once a microbatch, whatever reads it."""
        if value(ids).device.type == "cpu":
            return ids
        if (ids, stage) not in self.host_copies:
            self.host_copies[ids, stage] = self.builder.call(aten._to_copy.default, ids, device=torch.device("cpu"))
        return self.host_copies[ids, stage]

    def _shared(self, stage: int | None, target: Any, *args: Any) -> fx.Node:
        """A call that all layers of a stage have in common."""
        if (stage, target, *args) not in self.shared:
            self.shared[stage, target, *args] = self.builder.call(target, *args)
        return self.shared[stage, target, *args]

    def _cast(self, x: fx.Node, like: fx.Node) -> fx.Node:
        wanted = values(like)[0].dtype
        return x if values(x)[0].dtype == wanted else self.builder.call(aten._to_copy.default, x, dtype=wanted)

    def _dropout(self, node: fx.Node, x: fx.Node, p: float, op: int) -> fx.Node:
        """Its mask is a value of its own, so that the backward keeps that and not ``x``."""
        mask = self.builder.call(keep_mask, x, p, op, *self._layout(node))
        return self.builder.call(aten.native_dropout_backward.default, x, mask, 0.0 if p == 1 else 1 / (1 - p))

    def _layout(self, node: fx.Node) -> list[list[Any]]:
        """The shape of a whole value, and the axes that split it: their names, sizes, dims, in how many parts, and in
        units of what."""
        cuts = [
            (axis.name, axis.size, kind.dim, kind.parts, kind.unit)
            for axis, kind in zip(self.axes, self.sharded.produced(node), strict=True)
            if isinstance(kind, Shard)
        ]
        return [list(shape(node)), *([list(column) for column in zip(*cuts, strict=True)] or [[], [], [], [], []])]

    def _split_on(self, node: fx.Node, position: int, dim: int) -> list[Any]:
        wanted = self.sharded.wanted(node, position)
        return [a for a, kind in zip(self.axes, wanted, strict=True) if isinstance(kind, Shard) and kind.dim == dim]

    # -- conversions

    def _converted(self, source: fx.Node, index: int, target: Sharding, grad: bool, stage: int | None) -> fx.Node:
        """``source`` in sharding ``target``, for a user in ``stage``."""
        start, node = self.sharded.produced(source, index), self.local[source, index]
        found, held = leaf(source), self.sharded.gathered.get(source)
        # a parameter is at hand in every stage that uses it
        home = stage if found is not None and found.kind == "parameter" else self.staged.stage.get(source)
        if found is not None and found.held is not None:
            node = self._copied(node, values(source)[0].dtype, stage)
        later = held is not None and held.deferred and grad  # a gradient is of what is gathered, for whoever reads it
        if held is not None and (later or [plain(kind) for kind in target] != [plain(kind) for kind in start]):
            whole = values(source)[index].shape
            node, start = self._gathered(node, start, held, stage, whole), held.sharding
        if not grad:  # without gradients I and R are the same bits
            start, target = tuple(map(plain, start)), tuple(map(plain, target))
        return self._moved(node, start, target, R if grad else I, (home, stage), values(source)[index].shape)

    def _copied(self, stored: fx.Node, dtype: torch.dtype, stage: int | None) -> fx.Node:
        """What ``stage`` reads of a parameter that is held in another dtype."""
        if (stored, stage) not in self.copies:
            copy = self.copies[stored, stage] = self.builder.call(aten._to_copy.default, stored, dtype=dtype)
            if stage is not None:
                self.stage[copy] = stage
                self.at_start.add(copy)
            if needs_grad(stored):
                self.deferred[copy] = stored
        return self.copies[stored, stage]

    def _gathered(
        self, stored: fx.Node, start: Sharding, held: Gathered, stage: int | None, whole: Sequence[int]
    ) -> fx.Node:
        """What operators of ``stage`` see of a parameter that is stored in slices."""
        before = len(self.builder.made)
        same = R if needs_grad(stored) else I
        node = self._moved(stored, start, held.sharding, same, (stage, stage), whole)
        if held.once or held.deferred:
            self.at_start.update(self.builder.made[before:])
        if held.deferred:
            self.deferred[node] = self.deferred.get(stored, stored)
        return node

    def _moved(
        self,
        node: fx.Node,
        start: Sharding,
        target: Sharding,
        same: AxisType,
        at: tuple[int | None, int | None],
        whole: Sequence[int],
    ) -> fx.Node:
        """``at``: the stage where the value is at home, and that of its user. ``whole``: its global shape."""
        state, (home, stage) = list(start), at
        for position, kind in self._path(start, target, same, whole):
            before = state[position]
            state[position] = kind
            away = stage if isinstance(before, Shard) and not isinstance(kind, Shard) else home
            where = away if home is not None else None
            # users with a gradient and without see other types: I and R are transposed in other ways
            key = (node, position, (before, kind), where)
            if key not in self.made:
                first = len(self.builder.made)
                had = self._padded(whole, (*state[:position], before, *state[position + 1 :]))
                self.made[key] = self._convert(node, position, before, kind, self._local(whole, tuple(state)), had)
                if where is not None:
                    self.stage |= dict.fromkeys(self.builder.made[first:], where)
            node = self.made[key]
            home = where
        return node

    def _path(
        self, start: Sharding, target: Sharding, same: AxisType, whole: Sequence[int]
    ) -> list[tuple[int, AxisType]]:
        """As :func:`conversion_path`. Ranks that slice one dim in two ways exchange slices only where all have as
        much."""
        state, steps = list(start), list[tuple[int, AxisType]]()
        for position, kind in conversion_path(start, target, same):
            before = state[position]
            if isinstance(before, Shard) and isinstance(kind, Shard) and before.dim == kind.dim:
                left = self._local(whole, tuple(state[:position]), position)[kind.dim]
                if any(one.padded(left, self.axes[position].size) != left for one in (before, kind)):
                    steps.append((position, same))
            steps.append((position, kind))
            state[position] = kind
        return steps

    def _convert(
        self,
        node: fx.Node,
        position: int,
        before: AxisType,
        after: AxisType,
        result: Sequence[int],
        padded: frozenset[int],
    ) -> fx.Node:
        """``result``: the local shape afterwards; ``padded``: the dims that have padding before. What is cut is made
        longer first, and what is joined shorter."""
        axis = self.axes[position]
        if isinstance(before, Shard) and isinstance(after, Shard) and before.dim == after.dim:  # and all have as much
            return self._exchanged(node, position, before, after)
        if isinstance(after, Shard):
            size = result[after.dim] * axis.size
            node = self.padding.extended(node, after.dim, after.parts, size, padded=after.dim in padded)
        made = self._exchanged(node, position, before, after)
        self.padding.moved(node, made)
        if isinstance(before, Shard):
            made = self.padding.trimmed(made, before.dim, before.parts, result[before.dim])
        return made

    def _exchanged(self, node: fx.Node, position: int, before: AxisType, after: AxisType) -> fx.Node:
        axis = self.axes[position]
        if axis.role == "time" and isinstance(after, Shard):
            unit = [after.unit] if after.unit > 1 else []
            return self.builder.call(microbatch, node, axis.size, after.dim, after.parts, *unit)
        alone = plain(before) is I and (after is P or (before is R and after is I))
        if axis.role == "time" and not alone:
            raise CompileError(
                "QN104",
                f"a value split over {axis.size} microbatches would have to be exchanged between them",
                where=self.builder.where,
                fix="use microbatches=1",
            )
        if plain(before) is I and after is P and not needs_grad(node):
            return self.builder.call(share, node, axis.name, axis.size)
        return self.builder.call(convert, node, axis.name, axis.size, str(before), str(after))

    def _local(self, size: Sequence[int], kind: Sharding, axes: int | None = None) -> tuple[int, ...]:
        return local_shape(size, kind, self.sharded.ranks[:axes])

    def _once(self) -> frozenset[fx.Node]:
        """What runs once a step: nodes that no parameter and no one microbatch touches, and gathers of parameters.
        A node that names the axis in time reads which microbatch it is in (the positions of a random mask do); each
        batch of a step draws numbers of its own, and reads the buffers that the one before has left."""
        once: set[fx.Node] = set()
        program = self.sharded.program
        own = DRAWS if program.batches > 1 else frozenset()
        for node in self.builder.graph.nodes:
            if node.op == "placeholder":
                found = leaf(node)
                if found is not None and found.kind != "parameter" and found.name not in program.carried:
                    once.add(node)
                continue
            anywhere = node.op == "call_function" and node.target is not microbatch and node not in self.stage
            anywhere = anywhere and MICROBATCHES not in pytree.tree_leaves(node.args) and node.target not in own
            if node in self.at_start or (anywhere and all(source in once for source in tensor_inputs(node))):
                once.add(node)
        return frozenset(once)


def _casts(node: fx.Node) -> bool:
    """Whether it is a part of a cast to 8 bits, which begins with what has no gradient."""
    if node.target is aten.detach.default:
        return bool(node.users) and all(user.target in CASTS for user in node.users)
    return node.target in CASTS


def _parameter(node: fx.Node) -> bool:
    known = leaf(node)
    return known is not None and known.kind == "parameter"


def _substitute(node: fx.Node, given: dict[int, fx.Node]) -> tuple[list[Any], dict[str, Any]]:
    """The node's arguments with its tensor inputs replaced, by position among them."""
    counter = iter(range(len(given)))
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: given[next(counter)])
    return [list(a) if isinstance(a, (list, tuple)) else a for a in args], dict(kwargs)


def _drop_unused(graph: fx.Graph, keep: set[fx.Node]) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and node not in keep:
            graph.erase_node(node)
