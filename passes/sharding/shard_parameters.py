"""ShardedProgram -> ShardedProgram: parameters are stored in slices over data axes, and gathered for operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from ...core.annotations import Leaf, num_bytes, shape, value
from ...core.errors import CompileError
from ...core.sharding import AxisType, I, R, Shard, forward_type, local_shape, shard_shape
from ...ir.program import Gathered, ShardedProgram, Strategy
from ...ops.rules.table import RULES
from ...strategies.rule_book import RuleBook, leaf_factors, leaf_strategies, refine
from .axis_view import stores_state
from .cast_slices import slice_cast_strategies


@dataclass(frozen=True)
class ShardParameters:
    """Store parameters that are whole on a data axis in slices, and change nothing but their storage.

    Before: %w: (R, S(0));  %linear = linear(%x, %w: (R, S(0)))
    After:  %w: (S(1), S(0)), gathered to (R, S(0));  %linear = linear(%x, %w: (R, S(0)))
    Ensures: operators read what they read before; where the plan fixes nothing, an axis slices no dim that an inner
    axis slices, so that ranks exchange slices over this axis alone.

    The conversion S -> R is an all-gather, and its transpose the reduce-scatter of the gradient: ``zero`` only says
    where the two stand. 3 (and 0, for what the plan fixes): both in each microbatch. 2: the gather at the start of the
    step. 1: and the reduce-scatter at its end (ZeRO, Rajbhandari et al. 2019). Where a parameter is only
    read cast, with scales, ranks cast their slices, and gather the casts.

    Attributes:
        axes: over which to slice all parameters; where no dim divides, the last ranks have less.
        fixed: (name, axis) -> type; it wins over ``axes``.
        experts: the axes over which experts are spread.
        book: the rules of operators that cast.

    Raises:
        CompileError: QN203 if a fixed type does not divide.
    """

    zero: int = 0
    axes: tuple[str, ...] = ()
    fixed: Mapping[tuple[str, str], AxisType] = field(default_factory=dict)
    experts: tuple[str, ...] = ()
    book: RuleBook = field(default_factory=lambda: RuleBook(RULES))

    def __call__(self, program: ShardedProgram, /) -> ShardedProgram:
        strategies = dict(program.strategies)
        gathered: dict[fx.Node, Gathered] = {}
        gathers_once = self.zero in (1, 2)
        for node, info in program.program.leaves.items():
            if info.kind != "parameter":
                continue
            read_types = program.produced(node)
            kinds = self._stored_types(program, node, info)
            if kinds == read_types:
                continue
            strategies[node] = _strategies(program, node, kinds)
            self._refuse_crossing(program, info, kinds, read_types)
            casts = slice_cast_strategies(program, node, kinds, self.book)
            gathered[node] = Gathered(read_types, gathers_once and not casts, self.zero == 1 and info.trainable)
            gathered |= {cast: Gathered(program.produced(cast), gathers_once, False) for cast in casts}
            strategies |= casts
        if gathered and program.program.stored:
            output = program.program.graph.output_node()
            stored = {position: strategies[node] for position, node in program.program.stored.items()}
            strategies[output] = _with_stored_types(strategies[output], stored)
        return replace(program, strategies=strategies, gathered=gathered)

    def _refuse_crossing(
        self, program: ShardedProgram, info: Leaf, kinds: tuple[AxisType, ...], read_types: tuple[AxisType, ...]
    ) -> None:
        """Raise QN203 where two axes slice one dim and the gradient is scattered at the end of the step (zero=1).

        A gradient that is added up in slices of an inner axis cannot be scattered to slices of an outer one.
        """
        if self.zero != 1:
            return
        for position, (axis, kind) in enumerate(zip(program.axes, kinds, strict=True)):
            if not isinstance(kind, Shard) or kind == read_types[position]:
                continue
            for inner_axis, inner in list(zip(program.axes, read_types, strict=True))[position + 1 :]:
                if isinstance(inner, Shard) and kind.dim == inner.dim:
                    raise CompileError(
                        "QN203",
                        f"{info.name} is {kind} over {axis.name} and {inner} over {inner_axis.name}, one dim, with "
                        "zero=1",
                        fix=f"let the plan leave {axis.name} open for it, or use zero=2",
                    )

    def _stored_types(self, program: ShardedProgram, node: fx.Node, info: Leaf) -> tuple[AxisType, ...]:
        """Return the types in which a parameter is stored: even slices first, then those with padding."""
        kinds, uneven = list(program.produced(node)), list[int]()
        for position, axis in enumerate(program.axes):
            # R: data is split over the axis; where a trained parameter is I, all ranks compute the same
            if kinds[position] is not (R if info.trainable else I) or axis.role not in ("data", "context"):
                continue
            fixed = self.fixed.get((info.name, axis.name))
            if fixed is not None:
                if isinstance(fixed, Shard) and stores_state(axis, self.experts):
                    kinds[position] = fixed
            elif axis.name in self.axes and (info.trainable or self.zero == 3):
                even = _slices(program, shape(node), kinds, position, even=True)
                if even is None:
                    uneven.append(position)
                else:
                    kinds[position] = even
        for position in uneven:
            kinds[position] = _slices(program, shape(node), kinds, position) or kinds[position]
        return tuple(kinds)


def _slices(
    program: ShardedProgram, size: Sequence[int], kinds: Sequence[AxisType], position: int, *, even: bool = False
) -> Shard | None:
    """Return how an axis slices a parameter that it does not split so far; None where no dim is free.

    A dim is free if no inner axis slices it, and no outer axis leaves padding in it. Of the free dims, the first of
    which ranks hold the least share is taken. ``even``: only of dims that divide.
    """
    local, taken_dims, ranks = tuple(size), set[int](), program.axes[position].size
    for other, (axis, kind) in enumerate(zip(program.axes, kinds, strict=True)):
        if isinstance(kind, Shard):
            has_padding = kind.padded(local[kind.dim], axis.size) != local[kind.dim]
            if other > position or has_padding:
                taken_dims.add(kind.dim)
        local = shard_shape(local, kind, axis.size)
    share = {d: Shard(d).padded(n, ranks) / n for d, n in enumerate(local) if n > 1 and d not in taken_dims}
    free = [d for d in share if not even or share[d] == 1]
    return Shard(min(free, key=share.__getitem__)) if free else None


def _with_stored_types(
    strategies: tuple[Strategy, ...], stored: Mapping[int, tuple[Strategy, ...]]
) -> tuple[Strategy, ...]:
    """Return the output node's strategies, where the outputs ``stored`` leave in the types of their parameters."""
    replaced = []
    for axis, strategy in enumerate(strategies):
        types = list(strategy.inputs)
        for position, leaf_strategy in stored.items():
            types[position] = forward_type(leaf_strategy[axis].outputs[0])
        replaced.append(replace(strategy, inputs=tuple(types)))
    return tuple(replaced)


def _strategies(program: ShardedProgram, node: fx.Node, kinds: tuple[AxisType, ...]) -> tuple[Strategy, ...]:
    """Return the strategies of a leaf with these types."""
    chosen: list[Strategy] = []
    factors = leaf_factors(node)
    for position, (axis, kind) in enumerate(zip(program.axes, kinds, strict=True)):
        cuts: dict[str, list[int]] = {}
        if isinstance(kind, Shard) and kind.dim < len(shape(node)):
            cuts = {n: [kind.parts, factors.sizes[n] // kind.unit] for n in factors.outputs[0][kind.dim]}
        options = [s for s in leaf_strategies(node, factors, cuts, axis.size) if s.outputs == (kind,)]
        if not options:
            local = local_shape(shape(node), kinds[:position], program.axis_sizes[:position])
            name = program.program.leaves[node].name
            raise CompileError(
                "QN203",
                f"{name} of shape {tuple(local)} cannot be {kind} over {axis.name}={axis.size}",
                fix=f"let the plan leave {axis.name} open for it",
            )
        chosen.append(options[0])
        factors = refine(factors, options[0], axis.size)
    return tuple(chosen)


def storing_axes(program: ShardedProgram) -> list[int]:
    """Return the axes over which some parameter is stored in slices that its operators do not see."""
    stored = {node: program.produced(node) for node in program.gathered}
    return [
        position
        for position in range(len(program.axes))
        if any(stored[node][position] != gathered.sharding[position] for node, gathered in program.gathered.items())
    ]


def stored_whole(program: ShardedProgram, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return a line for each of ``axes`` over which some trained parameters are not stored in slices."""
    trained = {n: info for n, info in program.program.leaves.items() if info.kind == "parameter" and info.trainable}
    lines = []
    for position, axis in enumerate(program.axes):
        whole = [n for n in trained if not isinstance(program.produced(n)[position], Shard)]
        if axis.name not in axes or not whole:
            continue
        largest = max(whole, key=lambda node: num_bytes(value(node)))
        more = f" and {len(whole) - 1} more parameters" if len(whole) > 1 else ""
        lines.append(
            f"{axis.name}={axis.size}: {trained[largest].name} of {list(shape(largest))}{more}, and optimizer state, "
            "are whole on every rank: the plan says so, or the other axes leave no dim to slice"
        )
    return tuple(lines)
