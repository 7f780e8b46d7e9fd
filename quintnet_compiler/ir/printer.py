"""One text form per program type: deterministic, and readable without the program at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any

from torch import fx

from ..core.annotations import facts, is_getitem, leaf, num_bytes, values
from ..core.errors import Where
from ..core.name_patterns import by_pattern
from ..core.names import one_line
from ..ops.catalog import op_spec
from ..schedules.grid import grid
from .distributed_program import DistributedProgram, Piece, RankProgram, StateSpec
from .headings import heading
from .program import Captured, DifferentiatedProgram, LocalProgram, Program, ShardedProgram, StagedProgram


def _type(node: fx.Node) -> str:
    kinds = [f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}" for v in values(node) if v is not None]
    return kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})"


def _call(node: fx.Node) -> str:
    if node.op == "placeholder":
        source = leaf(node)
        return f"{source.kind} {source.name!r}" if source else "value"
    if is_getitem(node):
        return f"{node.args[0]}[{node.args[1]}]"
    args = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    name = str(node.target).removesuffix(".default")
    return f"{name}({', '.join(args)})"


def _argument(arg: Any) -> str:
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(_argument(a) for a in arg)}]"
    return f"%{arg}" if isinstance(arg, fx.Node) else repr(arg)


@dataclass(frozen=True)
class Listing:
    """A program as text: ``head``, a line for each node of ``graph`` (if there is one) with its note, and ``tail``."""

    head: str
    graph: fx.Graph | None = None
    notes: Mapping[fx.Node, str] = field(default_factory=dict)
    tail: str = ""

    def line(self, node: fx.Node) -> str:
        """Return the line of a node."""
        if node.op == "output":
            return f"return {_argument(node.args[0])}"
        note = self.notes.get(node, "")
        return f"%{node.name}: {_type(node)} = {_call(node)}" + (f"  {note}" if note else "")

    def __str__(self) -> str:
        """Return the whole text.

        Parameters and buffers come first, by pattern; then one line per node, under a comment whenever the place in
        the user's model changes.
        """
        nodes = list(self.graph.nodes) if self.graph is not None else []
        placeholders = [node for node in nodes if node.op == "placeholder"]
        state = {n: source for n in placeholders if (source := leaf(n)) is not None and source.kind != "input"}
        lines = by_pattern((source.name, self.line(node)) for node, source in state.items())
        previous: Where | None = None
        for node in nodes:
            if node in state:
                continue
            if node.op != "output" and str(where := facts(node).where):
                lines += [text] if (text := heading(previous, where)) else []
                previous = where
            lines.append(self.line(node))
        return self.head + "".join(f"{line}\n" for line in lines) + self.tail


def program_text(program: Any) -> str:
    """Return the text of a program after a pass."""
    return str(listing(program))


@singledispatch
def listing(program: Any) -> Listing:
    """Return the printed form of a program after a pass."""
    return Listing(f"{program}\n")


@listing.register
def _(program: Captured) -> Listing:
    return Listing(f"{program.graph}\n")  # as fx prints it: nothing is known of its nodes yet


@listing.register
def _(program: Program) -> Listing:
    tail = "" if program.end is None else f"\nat the end of a step:\n{Listing('', program.end.graph)}"
    return Listing("", program.graph, tail=tail)


@listing.register
def _(program: ShardedProgram) -> Listing:
    notes = {}
    for node, strategies in program.strategies.items():
        if node.op != "output":
            notes[node] = (
                "{"
                + "; ".join(
                    f"{axis.name}: {', '.join(map(str, s.inputs))} -> {', '.join(map(str, s.outputs))}"
                    for axis, s in zip(program.axes, strategies, strict=True)
                )
                + "}"
            )
    axes = ", ".join(f"{a.name}={a.size} ({a.role})" for a in program.axes)
    return Listing(f"axes: {axes}\n", program.program.graph, notes)


@listing.register
def _(program: StagedProgram) -> Listing:
    notes = {node: f"@ stage {stage}" for node, stage in program.stage.items()}
    return Listing(f"stages: {program.num_stages}\n", program.sharded.program.graph, notes)


def _placed(program: LocalProgram | DifferentiatedProgram) -> dict[fx.Node, str]:
    notes = {node: "once" for node in program.once if node.op != "placeholder"}
    return notes | {node: f"@ stage {stage}" for node, stage in program.stage.items()}


@listing.register
def _(program: LocalProgram) -> Listing:
    return Listing("", program.graph, _placed(program))


@listing.register
def _(program: DifferentiatedProgram) -> Listing:
    notes = _placed(program)
    for node in program.graph.nodes:
        if op_spec(node).waits:
            (start,) = node.all_input_nodes
            notes[start] += f", {sum(map(num_bytes, values(node)))} bytes under way until %{node.name}"
    return Listing("", program.graph, notes)


@listing.register
def _(program: DistributedProgram) -> Listing:
    lines = [f"{program.mesh}", "", grid(program.schedule, None) if program.schedule.num_stages > 1 else ""]
    lines += [
        f"transfer {t.source} -> {t.target}: {', '.join(t.forward)}; back: {', '.join(t.backward)}"
        for t in program.transfers
    ]
    lines += ["", "state:"]
    lines += by_pattern(
        (spec.name, f"  {spec.kind} {spec.name!r} {_layout(program, spec)} stages {list(spec.stages)}")
        for spec in program.state.values()
    )
    return Listing("\n".join(lines) + "\n")


def _layout(program: DistributedProgram, spec: StateSpec) -> str:
    kinds = ", ".join(f"{a.name}: {k}" for a, k in zip(program.axes, spec.sharding, strict=True))
    dtype = str(spec.dtype).removeprefix("torch.")
    return f"{dtype}{list(spec.shape)} {{{kinds}}}"


def _function(name: str, piece: Piece) -> str:
    """Return the source of a generated function, under the numbers of its arguments and results."""
    takes = f"comm, values of the step ({len(piece.static)}), of the microbatch ({len(piece.dynamic)})"
    code = piece.code.strip().replace("def forward(", f"def {name}(").replace("torch.ops.", "ops.")
    return f"# {name} takes {takes}; returns {len(piece.outputs)}\n{code}\n"


def code_text(program: DistributedProgram, part: RankProgram) -> str:
    """Return what one rank runs: its functions and its actions."""
    place = ", ".join(f"{axis}={index}" for axis, index in part.coordinate.items())
    lines = [f"# rank {part.rank} of {program.mesh}: {place}", f"# actions: {' '.join(map(str, part.actions))}", ""]
    sites: set[int] = {len(program.sites) - 1}
    for stage in part.stages:
        lines += [f"# ---- stage {stage.index}", "# state (shapes of the whole model):"]
        held = (
            (name, f"{value}: {name} {_layout(program, program.state[name])}") for value, name in stage.state.items()
        )
        lines += [*(f"#   {line}" for line in by_pattern(held)), f"# batch: {dict(stage.inputs)}"]
        lines += [_function(name, piece) for name, piece in stage.pieces.items()]
        sites.update(site for piece in stage.pieces.values() for site in _sites(piece))
    if program.end is not None:
        lines += [_function("end", program.end)]
    places = [f"#   {number}: {one_line(program.sites[number])}" for number in sorted(sites)]
    return "\n".join([*lines, "# communication:", *places]) + "\n"


def _sites(piece: Piece) -> list[int]:
    """Return the numbers at a function's communication calls."""
    calls = [
        n for n in piece.module.graph.nodes if n.op == "call_method" and not str(n.target).startswith("accumulate")
    ]
    return [n.args[-1] for n in calls]
