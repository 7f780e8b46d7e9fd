"""What a program does with a part of the model, what that costs, and what another way would cost."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Mapping
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
from ..passes.strategies.rule_book import RuleBook
from ..simulation.priced import ProgramPrices
from ..simulation.program import simulate_program


@dataclass(frozen=True)
class StepCost:
    """A step: seconds of all of it, and on the fullest rank seconds of computing, seconds that it waits for each axis,
    and bytes at the peak."""

    seconds: float
    computing: float
    waiting: Mapping[str, float]
    memory_bytes: int

    @classmethod
    def of(cls, program: DistributedProgram, costs: RankCosts) -> StepCost:
        line = simulate_program(program, costs)
        busiest = max(line.rows, key=lambda row: row.busy_seconds)
        return cls(line.seconds, busiest.busy_seconds, dict(busiest.exposed), max(row.peak.bytes for row in line.rows))


@dataclass(frozen=True)
class LayoutDifference:
    """Two programs of one model: what of their plans differs, which parameters lie otherwise (name -> types before and
    after), and what a step costs. ``str()`` for people, ``to_json()`` for programs."""

    plan: Mapping[str, tuple[Any, Any]]
    parameters: Mapping[str, tuple[str, str]]
    before: StepCost
    after: StepCost

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        lines = [f"{key}: {old} -> {new}" for key, (old, new) in self.plan.items()]
        for kinds, count in Counter(self.parameters.values()).most_common():
            example = next(name for name, found in self.parameters.items() if found == kinds)
            lines.append(f"{count} parameter{'s' if count > 1 else ''}: {kinds[0]} -> {kinds[1]} ({example})")
        a, b = self.before, self.after
        rows = [("step", a.seconds, b.seconds), ("computing", a.computing, b.computing)]
        rows += [(f"waiting for {x}", a.waiting.get(x, 0.0), b.waiting.get(x, 0.0)) for x in {**a.waiting, **b.waiting}]
        lines += [f"{name:<16} {x * 1e3:10.3f} ms -> {y * 1e3:10.3f} ms {_change(x, y):>8}" for name, x, y in rows]
        x, y = a.memory_bytes / 2**20, b.memory_bytes / 2**20
        return "\n".join([*lines, f"{'memory':<16} {x:9.2f} MiB -> {y:9.2f} MiB {_change(x, y):>8}"])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else ("" if after == before else "new")


@dataclass(frozen=True)
class Explanation:
    """``text`` says what is done and what it costs; ``otherwise`` compares with what was asked about (``why_not``),
    and ``refused`` says why that cannot be."""

    text: str
    otherwise: LayoutDifference | None = None
    refused: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        return "\n\n".join([self.text, *map(str, filter(None, (self.otherwise, self.refused)))])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def difference(
    a: DistributedProgram, b: DistributedProgram, plans: tuple[Plan, Plan], costs: RankCosts
) -> LayoutDifference:
    """What differs between two programs of one model, from their complete plans and their simulated steps."""
    before, after = (plan.model_dump(mode="json", exclude={"parameters"}) for plan in plans)
    changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    kinds = [{s.name: _types(p, s.sharding) for s in p.state.values() if s.kind == "parameter"} for p in (a, b)]
    moved = {name: (found, kinds[1][name]) for name, found in kinds[0].items() if kinds[1].get(name, found) != found}
    return LayoutDifference(changed, moved, StepCost.of(a, costs), StepCost.of(b, costs))


def _types(program: DistributedProgram, kinds: Any) -> str:
    pairs = zip(program.axes, kinds, strict=True)
    return ", ".join(f"{axis.name}: {kind}" for axis, kind in pairs if axis.role != "time") or "one rank"


@dataclass(frozen=True)
class Explain:
    """Explanations of a program. ``plan``: what was asked for; ``complete``: what became of it; ``recompile``: makes
    another program of the same model and batch.

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
        found = difference(self.program, other, (self.complete, plan), self.costs)
        return Explanation(f"{text}\n\nWith {_shown(pinned)}:", found)

    def _operators(self, name: str) -> list[fx.Node]:
        """Operators of a module (or with this name, or that read the parameter of this name)."""
        leaves = {found.name: node for node, found in self.sharded.program.leaves.items()}
        found = []
        for node in self.sharded.program.graph.nodes:
            if node.op != "call_function" or is_getitem(node):
                continue
            reads = any(origin(x)[0] is leaves.get(name) for x in tensor_inputs(node))
            if reads or node.name == name or f"{facts(node).where.module}.".startswith(f"{name}."):
                found.append(node)
        if not found:
            modules = {facts(n).where.module for n in self.sharded.program.graph.nodes if n.op == "call_function"}
            close = difflib.get_close_matches(name, [*modules, *leaves], n=3, cutoff=0.3)
            raise CompileError("QN204", f"nothing is called {name!r}", fix=f"did you mean {', '.join(close)}?")
        return found

    def _described(self, name: str) -> str:
        sharded, lines = self.sharded, [name]
        operators = self._operators(name)
        for node in operators:
            stage = self.program.source.local.staged.stage.get(node)
            where = facts(node).where.source
            lines.append(f"  {node.name} (stage {stage}) {where}" if stage is not None else f"  {node.name} {where}")
            for source in tensor_inputs(node):
                found = sharded.program.leaves.get(origin(source)[0])
                if found is not None and found.kind == "parameter":
                    kinds = sharded.produced(source)
                    here = local_shape(shape(source), kinds, sharded.ranks)
                    lines.append(
                        f"    {found.name} {list(shape(source))}, on a rank {list(here)}: {self._kinds(kinds)}"
                    )
            for axis, strategy in zip(sharded.axes, sharded.strategies[node], strict=True):
                lines.append(f"    {axis.name}={axis.size}: {strategy.label}: {strategy.signature}")
        return "\n".join([*lines, *self._prices({facts(node).where.module for node in operators})])

    def _kinds(self, kinds: Any) -> str:
        return ", ".join(f"{a.name}: {k}" for a, k in zip(self.sharded.axes, kinds, strict=True)) or "one rank"

    def _prices(self, modules: set[str]) -> list[str]:
        """Seconds of one microbatch on one rank: computing, and each collective."""
        priced = ProgramPrices(self.program, self.costs)
        computing: Counter[str] = Counter()
        moved: list[str] = []
        for stage in self.program.stages:
            for label in stage.pieces:
                for time in priced.nodes(stage, label):
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
        """The parameters that ``why_not`` places, and how."""
        sharded, found = self.sharded, dict[str, dict[str, str]]()
        axis = next((axis.name for axis in sharded.axes if axis.role == "model"), None)
        parameters = {known.name for known in sharded.program.leaves.values()}
        for node in self._operators(name):
            for position, source in enumerate(tensor_inputs(node)):
                known = sharded.program.leaves.get(origin(source)[0])
                alone = name in parameters and known is not None and known.name != name
                if known is None or known.kind != "parameter" or alone:
                    continue
                if isinstance(why_not, Mapping):
                    found[known.name] = dict(why_not)
                elif axis is not None and (kind := self._kind(node, position, why_not)):
                    found[known.name] = {axis: kind}
        if not found:
            what = "there is no tp axis" if axis is None else f"no parameter of {name} can be {why_not!r}"
            raise CompileError("QN204", what, fix='use "column", "row", "replicated" or {"tp": "S(0)"}')
        return found

    def _kind(self, node: fx.Node, position: int, word: str) -> str | None:
        """Megatron's words: a column is what no sum runs over, a row is what one does."""
        if word == "replicated":
            return str(I)
        factors = RuleBook(self.rules, self.plan.unknown_ops).factors(self.sharded.program.graph)[node]
        kept = {f for dims in factors.outputs for dim in dims for f in dim}
        for place, dim in enumerate(factors.inputs[position]):
            if dim and word == ("column" if dim[0] in kept else "row"):
                return str(Shard(place))
        return None


def _shown(pins: Mapping[str, Mapping[str, str]]) -> str:
    return "; ".join(f"{name} as {', '.join(f'{a}: {k}' for a, k in kinds.items())}" for name, kinds in pins.items())
