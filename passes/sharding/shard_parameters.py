"""ShardedProgram -> ShardedProgram: parameters are stored in slices over data axes, and gathered for operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from ...core.annotations import Leaf, num_bytes, shape, value
from ...core.errors import CompileError
from ...core.sharding import AxisType, I, R, Shard, local_shape, plain, shard_shape
from ...ir.program import Gathered, ShardedProgram, Strategy
from ...ops.rules.table import RULES
from ..strategies.rule_book import RuleBook, leaf_factors, leaf_strategies, refine
from .axis_view import stores_state
from .cast_slices import on_slices


@dataclass(frozen=True)
class ShardParameters:
    """Give parameters that are whole on a data axis a type that is not, where nothing but their storage changes.

    Before: %w: (R, S(0));  %linear = linear(%x, %w: (R, S(0)))
    After:  %w: (S(1), S(0)), gathered to (R, S(0));  %linear = linear(%x, %w: (R, S(0)))
    Ensures: operators read what they read before; where the plan fixes nothing, an axis slices no dim that an axis
    further in slices, so that ranks exchange slices over this axis alone.

    The conversion S -> R is an all-gather, and its transpose the reduce-scatter of the gradient: ``zero`` only says
    where the two stand. 3 (and 0, for what the plan fixes): both in each microbatch. 2: the gather at the start of the
    step. 1: and the reduce-scatter at its end (ZeRO, Rajbhandari et al. 2019). Of a parameter of which products read
    8-bit numbers alone, ranks cast their slices, and gather these.

    ``axes``: over which to slice all parameters; where no dim divides, the last ranks have less. ``fixed``: (name,
    axis) -> type, before all else. ``experts``: the axes over which experts are spread. ``book``: the
    rules of operators that cast.

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
        for node, found in program.program.leaves.items():
            before = program.produced(node)
            kinds = self._kinds(program, node, found) if found.kind == "parameter" else before
            if kinds != before:
                strategies[node] = _strategies(program, node, kinds)
                self._refuse_crossing(program, found, kinds, before)
                casts, once = on_slices(program, node, kinds, self.book), self.zero in (1, 2)
                gathered[node] = Gathered(before, once and not casts, self.zero == 1 and found.trainable)
                gathered |= {cast: Gathered(program.produced(cast), once, False) for cast in casts}
                strategies |= casts
        if gathered and program.program.stored:
            out = program.program.graph.output_node()
            strategies[out] = _leaving(strategies[out], {k: strategies[n] for k, n in program.program.stored.items()})
        return replace(program, strategies=strategies, gathered=gathered)

    def _refuse_crossing(
        self, program: ShardedProgram, found: Leaf, kinds: tuple[AxisType, ...], before: tuple[AxisType, ...]
    ) -> None:
        """A gradient that is added up in one axis' slices of a dim cannot be scattered to slices of another outside."""
        for position, (axis, kind) in enumerate(zip(program.axes, kinds, strict=True)):
            for inner, other in list(zip(program.axes, before, strict=True))[position + 1 :]:
                crossing = isinstance(kind, Shard) and isinstance(other, Shard) and kind.dim == other.dim
                if self.zero == 1 and kind != before[position] and crossing:
                    raise CompileError(
                        "QN203",
                        f"{found.name} is {kind} over {axis.name} and {other} over {inner.name}, one dim, with zero=1",
                        fix=f"let the plan leave {axis.name} open for it, or use zero=2",
                    )

    def _kinds(self, program: ShardedProgram, node: fx.Node, found: Leaf) -> tuple[AxisType, ...]:
        """The leaf's types, with as many slices as the plan asks for; of what divides first, then of what does not."""
        kinds, whole = list(program.produced(node)), list[int]()
        for position, axis in enumerate(program.axes):
            # R: data is split over the axis; where a trained parameter is I, all ranks compute the same
            if kinds[position] is not (R if found.trainable else I) or axis.role not in ("data", "context"):
                continue
            fixed = self.fixed.get((found.name, axis.name))
            if fixed is not None:
                stored = isinstance(fixed, Shard) and stores_state(axis, self.experts)
                kinds[position] = fixed if stored else kinds[position]
            elif axis.name in self.axes and (found.trainable or self.zero == 3):
                kinds[position] = _slices(program, shape(node), kinds, position, even=True) or kinds[position]
                whole += [] if isinstance(kinds[position], Shard) else [position]
        for position in whole:
            kinds[position] = _slices(program, shape(node), kinds, position) or kinds[position]
        return tuple(kinds)


def _slices(
    program: ShardedProgram, size: Sequence[int], kinds: Sequence[AxisType], position: int, *, even: bool = False
) -> Shard | None:
    """How an axis slices a parameter that it does not split so far: of the dims that no axis further in slices, and in
    which none leaves padding, the one of which ranks hold the least share, and the first of several. ``even``: of those
    that divide."""
    left, taken, ranks = tuple(size), set[int](), program.axes[position].size
    for place, (axis, kind) in enumerate(zip(program.axes, kinds, strict=True)):
        if isinstance(kind, Shard) and (place > position or kind.padded(left[kind.dim], axis.size) != left[kind.dim]):
            taken.add(kind.dim)
        left = shard_shape(left, kind, axis.size)
    share = {d: Shard(d).padded(n, ranks) / n for d, n in enumerate(left) if n > 1 and d not in taken}
    free = [d for d in share if not even or share[d] == 1]
    return Shard(min(free, key=share.__getitem__)) if free else None


def _leaving(before: tuple[Strategy, ...], stored: Mapping[int, tuple[Strategy, ...]]) -> tuple[Strategy, ...]:
    """The types in which outputs leave, where those at the positions ``stored`` are new values of parameters."""
    found = []
    for axis, strategy in enumerate(before):
        types = list(strategy.inputs)
        for position, kinds in stored.items():
            types[position] = plain(kinds[axis].outputs[0])
        found.append(replace(strategy, inputs=tuple(types)))
    return tuple(found)


def _strategies(program: ShardedProgram, node: fx.Node, kinds: tuple[AxisType, ...]) -> tuple[Strategy, ...]:
    """The strategies of a leaf with these types."""
    found: list[Strategy] = []
    factors = leaf_factors(node)
    for position, (axis, kind) in enumerate(zip(program.axes, kinds, strict=True)):
        cuts: dict[str, list[int]] = {}
        if isinstance(kind, Shard) and kind.dim < len(shape(node)):
            cuts = {n: [kind.parts, factors.sizes[n] // kind.unit] for n in factors.outputs[0][kind.dim]}
        made = [s for s in leaf_strategies(node, factors, cuts, axis.size) if s.outputs == (kind,)]
        if not made:
            left = local_shape(shape(node), kinds[:position], program.ranks[:position])
            named = program.program.leaves[node].name
            raise CompileError(
                "QN203",
                f"{named} of shape {tuple(left)} cannot be {kind} over {axis.name}={axis.size}",
                fix=f"let the plan leave {axis.name} open for it",
            )
        found.append(made[0])
        factors = refine(factors, made[0], axis.size)
    return tuple(found)


def storing_axes(program: ShardedProgram) -> list[int]:
    """The axes over which some parameter is stored in slices that its operators do not see."""
    stored = {node: program.produced(node) for node in program.gathered}
    return [
        position
        for position in range(len(program.axes))
        if any(stored[node][position] != held.sharding[position] for node, held in program.gathered.items())
    ]


def stored_whole(program: ShardedProgram, axes: tuple[str, ...]) -> tuple[str, ...]:
    """A line for each of ``axes`` over which some trained parameters are not stored in slices."""
    lines = []
    for position, axis in enumerate(program.axes):
        leaves = [(n, f) for n, f in program.program.leaves.items() if f.kind == "parameter" and f.trainable]
        whole = [(n, f) for n, f in leaves if not isinstance(program.produced(n)[position], Shard)]
        if axis.name in axes and whole:
            node, first = max(whole, key=lambda pair: num_bytes(value(pair[0])))
            more = f" and {len(whole) - 1} more parameters" if len(whole) > 1 else ""
            lines.append(
                f"{axis.name}={axis.size}: {first.name} of {list(shape(node))}{more}, and optimizer state, are whole "
                "on every rank: the plan says so, or the other axes leave no dim to slice"
            )
    return tuple(lines)
