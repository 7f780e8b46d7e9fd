"""The programs that textbooks draw, from one device to five dimensions. Sizes are numbers to play with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..schedules.schedule import COMPUTE, RECEIVE, RELEASES, SEND, Action, Op, Schedule, chain, with_transfers
from .steps import Collective, Compute, Hold, Receive, Release, Send, Step

Programs = list[list[Step]]


def one_device(layers: int, flops: float, activation: float = 0.0) -> Programs:
    """0D: forward, then backward at twice the price. ``activation``: bytes that each layer keeps until then."""
    program: list[Step] = []
    for i in range(layers):
        program += [Compute(f"F{i}", flops, kind="F"), Hold(f"layer {i}", activation)]
    for i in reversed(range(layers)):
        program += [Compute(f"B{i}", 2 * flops, kind="B"), Release(f"layer {i}")]
    return [program]


def data_parallel(ranks: int, layers: int, flops: float, gradient: float, *, overlap: bool = True) -> Programs:
    """Return 1D data parallelism: each rank has its rows.

    ``gradient`` bytes of each layer are added up over ranks, in the background if ``overlap``.
    """
    everyone = tuple(range(ranks))
    program: list[Step] = [Compute(f"F{i}", flops / ranks, kind="F") for i in range(layers)]
    sums: list[Step] = []
    for i in reversed(range(layers)):
        reduction = Collective("all_reduce", everyone, gradient, f"gradient {i}", "dp", background=overlap)
        program.append(Compute(f"B{i}", 2 * flops / ranks, kind="B"))
        (program if overlap else sums).append(reduction)
    return [[*program, *sums] for _ in everyone]


def tensor_parallel(ranks: int, layers: int, flops: float, activation: float, *, per_layer: int = 2) -> Programs:
    """2D: each rank has a share of each layer's columns and rows; ``per_layer`` partial sums of ``activation`` bytes
    are added up on the way forward, and as many on the way back (Shoeybi et al. 2019: attention and MLP)."""
    everyone = tuple(range(ranks))
    program: list[Step] = []
    for kind, factor, order in (("F", 1, range(layers)), ("B", 2, reversed(range(layers)))):
        for i in order:
            for part in range(per_layer):
                program.append(Compute(f"{kind}{i}.{part}", factor * flops / ranks / per_layer, kind=kind))
                program.append(Collective("all_reduce", everyone, activation, f"sum {kind}{i}.{part}", "tp"))
    return [list(program) for _ in everyone]


def pipeline(schedule: Schedule, forward: float, backward: float, activation: float) -> Programs:
    """3D: each rank has its layers, and microbatches go through. ``schedule``: as :mod:`..schedules.kinds` makes it;
    seconds of a stage's ``forward`` and ``backward`` (halves of it where it is in two); ``activation``: bytes between
    stages, and those that a microbatch holds in a stage."""
    times = {Op.FORWARD: forward, Op.BACKWARD: backward}
    halves = {Op.BACKWARD_INPUT: backward / 2, Op.BACKWARD_WEIGHT: backward / 2}
    whole = with_transfers(schedule, chain(schedule.num_stages), hoist=0)
    return [_pipeline_rank(actions, whole, times | halves, activation) for actions in whole.actions]


def _pipeline_rank(
    actions: Sequence[Action], schedule: Schedule, seconds: Mapping[Op, float], activation: float
) -> list[Step]:
    steps: list[Step] = []
    for action in actions:
        name, held = str(action), f"stage {action.stage}, microbatch {action.microbatch}"
        if action.op in SEND.values():
            steps.append(Send(schedule.placement[action.peer], activation, name))
        elif action.op in RECEIVE.values():
            steps.append(Receive(schedule.placement[action.peer], name))
        elif action.op in COMPUTE:
            done = Compute(name, seconds=seconds[action.op], kind=action.op.value, microbatch=action.microbatch)
            steps += [done, Hold(held, activation)] if action.op is Op.FORWARD else [done]
            steps += [Release(held)] if action.op in RELEASES else []
    return steps


def ring_attention(ranks: int, flops: float, keys: float) -> Programs:
    """4D: each rank has its part of a sequence; keys and values (``keys`` bytes of each rank's part) travel around
    while each rank's queries meet those that it has (Liu et al. 2023). ``flops``: of all attention."""
    programs: Programs = []
    for rank in range(ranks):
        steps: list[Step] = []
        for turn in range(ranks):
            if turn < ranks - 1:
                steps.append(Send((rank + 1) % ranks, keys, f"keys of {(rank - turn) % ranks}"))
            steps.append(Compute(f"part {(rank - turn) % ranks}", flops / ranks**2, kind="F"))
            if turn < ranks - 1:
                steps.append(Receive((rank - 1) % ranks))
        programs.append(steps)
    return programs


def expert_parallel(tokens: Sequence[Sequence[int]], flops: float, token: float) -> Programs:
    """5D: each rank has an expert. ``tokens[i][j]``: how many of rank i's tokens go to rank j's expert, at ``flops``
    each; ``token``: bytes of one. The rank whose expert is the most popular decides."""
    everyone = tuple(range(len(tokens)))
    total = sum(map(sum, tokens)) * token
    programs: Programs = []
    for rank in everyone:
        arrived = sum(row[rank] for row in tokens)
        programs.append(
            [
                Collective("all_to_all", everyone, total, "dispatch", "ep"),
                Compute(f"{arrived} tokens", arrived * flops, kind="F"),
                Collective("all_to_all", everyone, total, "combine", "ep"),
            ]
        )
    return programs


def ring_all_reduce(ranks: int, num_bytes: float) -> Programs:
    """Return the steps of an all-reduce: 2 (n-1) in which each rank sends 1/n of the bytes to its neighbour.

    The first half adds up, the second half copies the sums.
    """
    programs: Programs = []
    for rank in range(ranks):
        steps: list[Step] = []
        for turn in range(2 * (ranks - 1)):
            operation = "add" if turn < ranks - 1 else "copy"
            steps.append(Send((rank + 1) % ranks, num_bytes / ranks, f"{operation} {(rank - turn) % ranks}"))
            steps.append(Receive((rank - 1) % ranks))
        programs.append(steps)
    return programs
