"""The schedules that plans name: pure functions from sizes to compute actions.

``p`` ranks run ``m`` microbatches on ``v`` stages each. Bubbles are idle shares of all ranks' time where every stage
takes as long as any other, and a backward as long as two forwards, each half of it as long as one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from .schedule import Action, Op, Schedule, ScheduleError


class Generator(Protocol):
    """A pure function of the number of ranks, of microbatches, and of stages per rank, to the compute actions.

    Raises:
        ScheduleError: QN208 for a number of stages per rank that the schedule does not have.
    """

    def __call__(self, num_ranks: int, num_microbatches: int, virtual_stages: int = ..., /) -> Schedule: ...


def looped(num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Return stages in turn around the ranks: (0, 1, 0, 1)."""
    return tuple(range(num_ranks)) * virtual_stages


def there_and_back(num_ranks: int) -> tuple[int, ...]:
    """Return two stages per rank in the form of a V: (0, 1, 1, 0)."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def _refuse(name: str, virtual_stages: int, wanted: int, stages: str) -> ScheduleError:
    return ScheduleError("QN208", f"{name} has {stages}, not {virtual_stages}", fix=f"use virtual_stages={wanted}")


def gpipe(num_ranks: int, num_microbatches: int, virtual_stages: int = 1, /) -> Schedule:
    """All forwards, then all backwards; a rank holds the activations of all m microbatches of its stages.

    Huang et al., GPipe, 2019 (arXiv:1811.06965); with several stages per rank, each for all microbatches before the
    next: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022 (arXiv:2211.05953).
    Bubble: (p - 1) / (v m + p - 1), for v > 1 if m >= p.
    """
    placement, microbatches = looped(num_ranks, virtual_stages), range(num_microbatches)
    rows = []
    for rank in range(num_ranks):
        mine = range(rank, len(placement), num_ranks)
        row = [Action(Op.FORWARD, stage, index) for stage in mine for index in microbatches]
        rows.append(row + [Action(Op.BACKWARD, stage, index) for stage in reversed(mine) for index in microbatches])
    return Schedule("gpipe", num_microbatches, placement, tuple(map(tuple, rows)))


def one_f_one_b(num_ranks: int, num_microbatches: int, virtual_stages: int = 1, /) -> Schedule:
    """Warm up, then one forward and one backward in turn, then cool down.

    Narayanan et al., PipeDream, 2019 (doi:10.1145/3341301.3359646), with the flush of Narayanan et al.,
    Megatron-LM, 2021 (arXiv:2104.04473). Bubble: (p - 1) / (m + p - 1), as GPipe, but rank r holds the
    activations of only min(m, p - r) microbatches.
    """
    if virtual_stages != 1:
        raise _refuse("1f1b", virtual_stages, 1, "one stage per rank (interleaved has several)")
    return _in_turn("1f1b", num_ranks, num_microbatches, 1)


def interleaved(num_ranks: int, num_microbatches: int, virtual_stages: int = 2, /) -> Schedule:
    """1F1B over several stages per rank: p microbatches through one stage, then the same through the rank's next.

    Narayanan et al., Megatron-LM, 2021 (arXiv:2104.04473), section 2.2; where p does not divide m, rounds of a few
    microbatches more, g at most. Bubble: (p - 1) / (v m + p - 1) if m >= p. Rank r holds the activations of up to
    (v - 1) g + 2 (p - r) - 1 microbatches of one stage.
    """
    if virtual_stages < 2:
        raise _refuse("interleaved", virtual_stages, 2, "two stages per rank or more (1f1b has one)")
    return _in_turn("interleaved", num_ranks, num_microbatches, virtual_stages)


def _in_turn(name: str, num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    placement, chunks = looped(num_ranks, virtual_stages), range(virtual_stages)
    rounds = max(1, num_microbatches // max(1, num_ranks))
    groups = [range(num_microbatches * i // rounds, num_microbatches * (i + 1) // rounds) for i in range(rounds)]
    most = max(map(len, groups))
    # one stage needs no rounds, so that its warm-up is no longer than the way to the last rank and back
    ahead = 2 if virtual_stages > 1 else 1
    rows = []
    for rank in range(num_ranks):
        places = [(chunk * num_ranks + rank, index) for group in groups for chunk in chunks for index in group]
        back = [(chunk * num_ranks + rank, index) for group in groups for chunk in reversed(chunks) for index in group]
        forwards = [Action(Op.FORWARD, *place) for place in places]
        backwards = [Action(Op.BACKWARD, *place) for place in back]
        warmup = min(len(places), ahead * (num_ranks - rank - 1) + (virtual_stages - 1) * most)
        steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
        rows.append(forwards[:warmup] + steady + backwards[len(places) - warmup :])
    return Schedule(name, num_microbatches, placement, tuple(map(tuple, rows)))


def zero_bubble_h1(num_ranks: int, num_microbatches: int, virtual_stages: int = 1, /) -> Schedule:
    """1F1B with backwards in two halves: the weight half of rank r lags by r microbatches, and fills its waits.

    ZB-H1 of Qi et al., Zero Bubble Pipeline Parallelism, 2023 (arXiv:2401.10241). Bubble: (p - 1) / (3 m + p - 1) if
    m >= p, a third of 1F1B's time. Every rank holds min(m, p) microbatches: as much as 1F1B's fullest.
    """
    if virtual_stages != 1:
        raise _refuse("zb-h1", virtual_stages, 1, "one stage per rank (zb-v has two)")
    rows = []
    for rank in range(num_ranks):
        warmup = min(num_microbatches, num_ranks - 1 - rank)
        row = [Action(Op.FORWARD, rank, index) for index in range(warmup)]
        for step in range(num_microbatches + rank):
            if warmup + step < num_microbatches:
                row.append(Action(Op.FORWARD, rank, warmup + step))
            if step < num_microbatches:
                row.append(Action(Op.BACKWARD_INPUT, rank, step))
            if step >= rank:
                row.append(Action(Op.BACKWARD_WEIGHT, rank, step - rank))
        rows.append(row)
    return Schedule("zb-h1", num_microbatches, tuple(range(num_ranks)), tuple(map(tuple, rows)))


def zero_bubble_v(num_ranks: int, num_microbatches: int, virtual_stages: int = 2, /) -> Schedule:
    """Two stages per rank, there and back, so that the rank of the first stage also has the last.

    ZB-V of Qi et al., Pipeline Parallelism with Controllable Memory, 2024 (arXiv:2405.15362). Bubble:
    (p - 1) / (6 m + p - 1) if m >= 2 p - 1. Every rank holds at most 2 p microbatches of one stage, each half as large
    as 1F1B's: as much as 1F1B's fullest.
    """
    if virtual_stages != 2:
        raise _refuse("zb-v", virtual_stages, 2, "two stages per rank")
    placement = there_and_back(num_ranks)
    rows = [_v_row(rank, len(placement) - 1 - rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return Schedule("zb-v", num_microbatches, placement, tuple(map(tuple, rows)))


def _v_row(there: int, back: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Return the actions of the rank of stages ``there`` and ``back``.

    The order is that of as many microbatches as fill the pipeline; those beyond ``num_microbatches`` are left out.
    """
    count = max(num_microbatches, 2 * num_ranks - 1)
    row: list[Action] = []
    done: dict[tuple[Op, int], int] = {}

    def take(stage: int, *ops: Op) -> None:
        for op in ops:
            index = done[op, stage] = done.get((op, stage), -1) + 1
            if index < num_microbatches:
                row.append(Action(op, stage, index))

    halves = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    for _ in range(2 * (num_ranks - there) - 1):
        take(there, Op.FORWARD)
    for _ in range(there):
        take(back, Op.FORWARD)
        take(there, Op.FORWARD)
    for _ in range(num_ranks - there):
        take(back, Op.FORWARD, *halves)
    for _ in range(count - num_ranks):
        take(there, Op.FORWARD, *halves)
        take(back, Op.FORWARD, *halves)
    for _ in range(there):
        take(there, Op.BACKWARD_INPUT)
        take(back, Op.BACKWARD_INPUT)
    for _ in range(num_ranks - there):
        take(there, *halves)
    for stage in (back, there):
        for _ in range(there):
            take(stage, Op.BACKWARD_WEIGHT)
    return row


def dual_pipe_v(num_ranks: int, num_microbatches: int, virtual_stages: int = 2, /) -> Schedule:
    """Two stages per rank, there and back; in between, the forward of one microbatch beside the backward of another.

    DualPipeV of https://github.com/deepseek-ai/DualPipe (DeepSeek-V3, 2024, arXiv:2412.19437; the V is the "cut in
    half" of https://hackmd.io/@ufotalent/r1lVXsa9Jg). There such a forward and backward are one action, F&B, in which
    each computes while the other communicates, and a rank waits (p - 1) (F&B + B - 3 W). Here one follows the other:
    ranks compute one thing at a time, and communication inside a stage hides behind nothing. What a forward made leaves
    at once, though, and not with its backward's, so that the bubble is ZB-V's: (p - 1) / (6 m + p - 1) if m >= 2 p.
    Every rank holds at most 2 p + 1 microbatches of one stage.
    """
    if virtual_stages != 2:
        raise _refuse("dualpipe-v", virtual_stages, 2, "two stages per rank")
    placement = there_and_back(num_ranks)
    rows = [_dual_row(rank, len(placement) - 1 - rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return Schedule("dualpipe-v", num_microbatches, placement, tuple(map(tuple, rows)))


def _dual_row(there: int, back: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """As :func:`_v_row`: of as many microbatches as fill the pipeline, those that are not there are left out."""
    count, after = max(num_microbatches, 2 * num_ranks), num_ranks - 1 - there
    row: list[Action] = []
    done: Counter[tuple[bool, int]] = Counter()
    later: deque[Action] = deque()  # weight halves, the first that waits first

    def take(op: Op, stage: int) -> None:
        key = op is Op.FORWARD, stage
        row.append(Action(op, stage, done[key]))
        if op is Op.BACKWARD_INPUT:
            later.append(Action(Op.BACKWARD_WEIGHT, stage, done[key]))
        done[key] += 1

    for _ in range(2 * after):
        take(Op.FORWARD, there)
    for _ in range(there + 1):
        take(Op.FORWARD, there)
        take(Op.FORWARD, back)
    for _ in range(after):
        take(Op.BACKWARD_INPUT, back)
        row.append(later.popleft())
        take(Op.FORWARD, back)
    for _ in range(count - 2 * num_ranks + there + 1):
        for forward, backward in ((there, back), (back, there)):
            take(Op.FORWARD, forward)
            take(Op.BACKWARD, backward)
    for _ in range(after):
        take(Op.BACKWARD, back)
        take(Op.FORWARD, back)
        take(Op.BACKWARD, there)
    for index in range(2 * (there + 1)):
        take(Op.BACKWARD if index <= there else Op.BACKWARD_INPUT, there if index % 2 else back)
    for _ in range(after):
        row.append(later.popleft())
        take(Op.BACKWARD_INPUT, there)
    return [action for action in (*row, *later) if action.microbatch < num_microbatches]


def forward_only(placement: tuple[int, ...], num_microbatches: int) -> Schedule:
    """Return forwards alone, for evaluation and inference; each rank takes what has arrived, of its latest stage.

    >>> print(forward_only((0, 1, 0, 1), 3))
    forward: stages 4, microbatches 3, bubble 25.0%
    rank 0  0F0 0F1 2F0 2F1 0F2 .   2F2 .
    rank 1  .   1F0 1F1 3F0 3F1 1F2 .   3F2
    """
    rows: list[list[Action]] = [[] for _ in range(1 + max(placement))]
    done = [0] * len(placement)
    while done[-1] < num_microbatches:
        arrived = [num_microbatches, *done[:-1]]
        latest = {rank: stage for stage, rank in enumerate(placement) if done[stage] < arrived[stage]}
        for rank, stage in latest.items():
            rows[rank].append(Action(Op.FORWARD, stage, done[stage]))
            done[stage] += 1
    return Schedule("forward", num_microbatches, placement, tuple(map(tuple, rows)))


SCHEDULES: Mapping[str, Generator] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
        "zb-h1": zero_bubble_h1,
        "zb-v": zero_bubble_v,
        "dualpipe-v": dual_pipe_v,
    }
)
"""Schedule generators by the names that plans use."""
