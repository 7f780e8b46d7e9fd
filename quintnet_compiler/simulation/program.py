"""Simulate a compiled program: its own schedule and functions, priced by a cost model, and its memory rehearsed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import fx

from ..core.annotations import annotate, facts
from ..cost_models.operators import documents_note, with_documents
from ..ir.cost_protocol import RankCosts, guess_note, guesses
from ..ir.distributed_program import DistributedProgram
from .faults import Faults, read_faults
from .host_update import host_updates
from .priced import ProgramPrices
from .rehearsal import rehearse
from .run import Setting, simulate_schedule
from .timeline import Timeline


def simulate_program(
    program: DistributedProgram, costs: RankCosts, faults: Faults | None = None, *, processes: bool = True,
    documents: tuple[int, ...] = (),
) -> Timeline:  # fmt: skip
    """Return the timeline of a step of ``program``.

    One rank per pipeline place stands for all that do the same: by construction those run the same functions (ranks of
    a stage share them), and only what is slow tells them apart.

    Args:
        program: a compiled program.
        costs: what nodes, collectives and transfers take.
        faults: slow ranks and links.
        processes: whether each rank is a process of its own, with buffers for what it receives.
        documents: lengths of packed documents to expect, instead of those that the program was compiled for (see
            :class:`..ir.plan.Plan`).

    Raises:
        CompileError: QN201 for faults that the mesh cannot have, QN210 if something has no price.
    """
    slow = read_faults(faults, program.mesh)
    durations = ProgramPrices(program, costs)
    with _expecting(durations.source.values(), documents):
        setting = Setting(
            program.mesh,
            durations.lockstep,
            slow,
            repr(program.mesh),
            rehearse(program, processes=processes),
            host_updates(program, durations.places, processes=processes),
            _notes(program, durations),
        )
        return simulate_schedule(program.schedule, program.edges, durations, setting)


@contextmanager
def _expecting(nodes: Iterable[fx.Node], documents: tuple[int, ...]) -> Iterator[None]:
    """Let prices of attention among ``nodes`` expect ``documents``, if there are any."""
    previous = {node: facts(node) for node in with_documents(nodes)} if documents else {}
    for node, node_facts in previous.items():
        annotate(node, replace(node_facts, documents=documents))
    try:
        yield
    finally:
        for node, node_facts in previous.items():
            annotate(node, node_facts)


def _notes(program: DistributedProgram, durations: ProgramPrices) -> tuple[str, ...]:
    pieces = [piece for stage in program.stages for piece in stage.pieces.values()]
    nodes = [node for piece in pieces for node in piece.module.graph.nodes]
    methods = {str(node.target) for node in nodes if node.op == "call_method"}
    notes = [f"times as of {durations.costs.source}"]
    priced = [durations.source[node.name] for node in nodes if node.op == "call_function"]
    if unknown := guesses(priced, durations.costs):
        notes.append(guess_note(unknown))
    if "dispatch" in methods:
        notes.append(_expert_note(program.expect.expert_imbalance))
    if expected := documents_note(durations.source.values()):
        notes.append(expected)
    if durations.cores is not None:
        notes.append(f"ranks share {durations.cores} cores of one machine")
    return tuple(notes)


def _expert_note(imbalance: float) -> str:
    if imbalance == 1:
        return "experts are taken to get equally many rows each"
    return f"the busiest rank of experts is taken to get {imbalance:g} times its share"
