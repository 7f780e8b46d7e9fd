"""Explanations of a part of the model: its layout, its cost, and the cost of another layout."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from torch import fx

from ..core.annotations import facts, is_getitem, origin, shape, tensor_inputs
from ..core.errors import CompileError
from ..core.sharding import I, Shard, local_shape
from ..ir.cost_protocol import RankCosts
from ..ir.distributed_program import DistributedProgram
from ..ir.plan import Plan
from ..ir.program import ShardedProgram
from ..ops.rules.notation import Rule
from ..simulation.priced import ProgramPrices
from ..simulation.program import simulate_program
from ..strategies.rule_book import RuleBook


@dataclass(frozen=True)
class StepCost:
    """A step: its seconds; of the busiest rank those of computing, and of waiting by axis; the most bytes of a rank."""

    seconds: float
    computing: float
    waiting: Mapping[str, float]
    memory_bytes: int

    @classmethod
    def simulated(cls, program: DistributedProgram, costs: RankCosts) -> StepCost:
        """Return the simulated cost of a program."""
        line = simulate_program(program, costs)
        busiest = max(line.rows, key=lambda row: row.busy_seconds)
        return cls(line.seconds, busiest.busy_seconds, dict(busiest.exposed), max(row.peak.bytes for row in line.rows))


@dataclass(frozen=True)
class LayoutDifference:
    """The difference of two programs of one model. ``str()`` for people, ``to_json()`` for programs.

    Attributes:
        plan: fields of their plans that differ.
        parameters: types before and after, by the name of a parameter that has others.
        before: the cost of a step of the first program.
        after: the cost of a step of the second program.
    """

    plan: Mapping[str, tuple[Any, Any]]
    parameters: Mapping[str, tuple[str, str]]
    before: StepCost
    after: StepCost

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        lines = [f"{key}: {old} -> {new}" for key, (old, new) in self.plan.items()]
        for kinds, count in Counter(self.parameters.values()).most_common():
            example = next(name for name, pair in self.parameters.items() if pair == kinds)
            lines.append(f"{count} parameter{'s' if count > 1 else ''}: {kinds[0]} -> {kinds[1]} ({example})")
        a, b = self.before, self.after
        rows = [("step", a.seconds, b.seconds), ("computing", a.computing, b.computing)]
        rows += [(f"waiting for {x}", a.waiting.get(x, 0.0), b.waiting.get(x, 0.0)) for x in {**a.waiting, **b.waiting}]
        lines += [f"{name:<16} {x * 1e3:10.3f} ms -> {y * 1e3:10.3f} ms {_change(x, y):>8}" for name, x, y in rows]
        x, y = a.memory_bytes / 2**20, b.memory_bytes / 2**20
        return "\n".join([*lines, f"{'memory':<16} {x:9.2f} MiB -> {y:9.2f} MiB {_change(x, y):>8}"])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def _change(old: float, new: float) -> str:
    return f"{new / old - 1:+.1%}" if old else ("" if new == old else "new")


@dataclass(frozen=True)
class Explanation:
    """``text`` says how a part is split and what it costs.

    ``otherwise`` compares with what was asked about (``why_not``), and ``refused`` says why that cannot be.
    """

    text: str
    otherwise: LayoutDifference | None = None
    refused: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        return "\n\n".join([self.text, *map(str, filter(None, (self.otherwise, self.refused)))])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def layout_difference(
    a: DistributedProgram, b: DistributedProgram, plans: tuple[Plan, Plan], costs: RankCosts
) -> LayoutDifference:
    """Return what differs between two programs of one model, from their complete plans and their simulated steps."""
    first, second = (plan.model_dump(mode="json", exclude={"parameters"}) for plan in plans)
    changed = {key: (first[key], second[key]) for key in first if first[key] != second[key]}
    old, new = ({s.name: _types(p, s.sharding) for s in p.state.values() if s.kind == "parameter"} for p in (a, b))
    moved = {name: (types, new[name]) for name, types in old.items() if new.get(name, types) != types}
    return LayoutDifference(changed, moved, StepCost.simulated(a, costs), StepCost.simulated(b, costs))


def _types(program: DistributedProgram, kinds: Any) -> str:
    pairs = zip(program.axes, kinds, strict=True)
    return ", ".join(f"{axis.name}: {kind}" for axis, kind in pairs if axis.role != "time") or "one rank"


@dataclass(frozen=True)
class Explain:
    """Explanations of a program.

    Attributes:
        plan: what was asked for.
        complete: what became of it.
        recompile: compiles another program of the same model and batch.

    Raises:
        CompileError: QN204 for a name that the model does not have, or a way that it has not.
    """

    program: DistributedProgram
    plan: Plan
    complete: Plan
    rules: Mapping[Any, Rule]
    costs: RankCosts
    recompile: Callable[[Plan], tuple[DistributedProgram, Plan]]

    @property
    def sharded(self) -> ShardedProgram:
        return self.program.source.local.staged.sharded

    def __call__(self, name: str, why_not: str | Mapping[str, str] | None = None) -> Explanation:
        text = self._described(name)
        if why_not is None:
            return Explanation(text)
        pinned = self._pins(name, why_not)
        try:
            other, plan = self.recompile(self.plan.changed({"parameters": {**self.plan.parameters, **pinned}}))
        except CompileError as error:
            return Explanation(text, None, f"{_shown(pinned)} cannot be:\n{error}")
        otherwise = layout_difference(self.program, other, (self.complete, plan), self.costs)
        return Explanation(f"{text}\n\nWith {_shown(pinned)}:", otherwise)

    def _operators(self, name: str) -> list[fx.Node]:
        """Return the operators of a module (or with this name, or that read the parameter of this name)."""
        leaves = {leaf.name: node for node, leaf in self.sharded.program.leaves.items()}
        operators = []
        for node in self.sharded.program.graph.nodes:
            if node.op != "call_function" or is_getitem(node):
                continue
            reads = any(origin(x)[0] is leaves.get(name) for x in tensor_inputs(node))
            if reads or node.name == name or f"{facts(node).where.module}.".startswith(f"{name}."):
                operators.append(node)
        if not operators:
            modules = {facts(n).where.module for n in self.sharded.program.graph.nodes if n.op == "call_function"}
            close = difflib.get_close_matches(name, [*modules, *leaves], n=3, cutoff=0.3)
            raise CompileError("QN204", f"nothing is called {name!r}", fix=f"did you mean {', '.join(close)}?")
        return operators

    def _described(self, name: str) -> str:
        sharded, lines = self.sharded, [name]
        operators = self._operators(name)
        for node in operators:
            stage = self.program.source.local.staged.stage.get(node)
            where = facts(node).where.source
            lines.append(f"  {node.name} (stage {stage}) {where}" if stage is not None else f"  {node.name} {where}")
            for source in tensor_inputs(node):
                leaf = sharded.program.leaves.get(origin(source)[0])
                if leaf is not None and leaf.kind == "parameter":
                    kinds = sharded.produced(source)
                    part = list(local_shape(shape(source), kinds, sharded.axis_sizes))
                    lines.append(f"    {leaf.name} {list(shape(source))}, on a rank {part}: {self._kinds(kinds)}")
            for axis, strategy in zip(sharded.axes, sharded.strategies[node], strict=True):
                lines.append(f"    {axis.name}={axis.size}: {strategy.label}: {strategy.signature}")
        return "\n".join([*lines, *self._prices({facts(node).where.module for node in operators})])

    def _kinds(self, kinds: Any) -> str:
        return ", ".join(f"{a.name}: {k}" for a, k in zip(self.sharded.axes, kinds, strict=True)) or "one rank"

    def _prices(self, modules: set[str]) -> list[str]:
        """Return the seconds of one microbatch on one rank: computing, and each collective."""
        priced = ProgramPrices(self.program, self.costs)
        computing: Counter[str] = Counter()
        moved: list[str] = []
        for stage in self.program.stages:
            for label in stage.pieces:
                for time in priced.node_times(stage, label):
                    source = priced.source.get(time.node.name)
                    if source is None or facts(source).where.module not in modules:
                        continue
                    computing[label] += time.compute  # type: ignore[assignment]
                    if time.axis:
                        took = f"{time.communication * 1e6:.1f} us"
                        moved.append(f"  {label}: {time.node.target} over {time.axis}, {took} ({time.node.name})")
        spent = ", ".join(f"{label} {seconds * 1e6:.1f} us" for label, seconds in computing.items() if seconds)
        return [f"  one microbatch on one rank computes: {spent or 'nothing'}", *moved]

    def _pins(self, name: str, why_not: str | Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Return the types of parameters that ``why_not`` asks for, by axis."""
        pins: dict[str, dict[str, str]] = {}
        axis = next((axis.name for axis in self.sharded.axes if axis.role == "model"), None)
        for node, position, parameter in self._read_parameters(name):
            if isinstance(why_not, Mapping):
                pins[parameter] = dict(why_not)
            elif axis is not None and (kind := self._kind(node, position, why_not)):
                pins[parameter] = {axis: kind}
        if not pins:
            problem = "there is no tp axis" if axis is None else f"no parameter of {name} can be {why_not!r}"
            raise CompileError("QN204", problem, fix='use "column", "row", "replicated" or {"tp": "S(0)"}')
        return pins

    def _read_parameters(self, name: str) -> Iterator[tuple[fx.Node, int, str]]:
        """Yield operators of ``name`` with the position and the name of a parameter that they read.

        If ``name`` is that of a parameter, others are left out.
        """
        leaves = self.sharded.program.leaves
        only = {name} & {leaf.name for leaf in leaves.values()}
        for node in self._operators(name):
            for position, source in enumerate(tensor_inputs(node)):
                leaf = leaves.get(origin(source)[0])
                if leaf is not None and leaf.kind == "parameter" and (not only or leaf.name in only):
                    yield node, position, leaf.name

    def _kind(self, node: fx.Node, position: int, word: str) -> str | None:
        """Return the type of Megatron's word: a column is what no sum runs over, a row is what one does."""
        if word == "replicated":
            return str(I)
        factors = RuleBook(self.rules, self.plan.unknown_ops).factors(self.sharded.program.graph)[node]
        in_result = {f for dims in factors.outputs for dim in dims for f in dim}
        for place, dim in enumerate(factors.inputs[position]):
            if dim and word == ("column" if dim[0] in in_result else "row"):
                return str(Shard(place))
        return None


def _shown(pins: Mapping[str, Mapping[str, str]]) -> str:
    return "; ".join(f"{name} as {', '.join(f'{a}: {k}' for a, k in kinds.items())}" for name, kinds in pins.items())
