"""ops.attention.ids and huggingface.masks: which positions see each other, as the host reads it from their ids."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quintnet_compiler.huggingface.masks import known_mask
from quintnet_compiler.ops.attention.blocks import Block, Seen, Sight
from quintnet_compiler.ops.attention.ids import Row
from quintnet_compiler.ops.attention.operator import visible


def _ids(dice: random.Random, length: int, kind: str) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "any":
        return torch.tensor([dice.randrange(-1, 3) for _ in range(length)])
    sizes = [dice.randrange(1, 7) for _ in range(length)]
    return torch.tensor([i for i, size in enumerate(sizes) for _ in range(size)][:length]) - 1


def _rows(count: int) -> Iterator[tuple[random.Random, Sight, Row, int]]:
    dice = random.Random(0)
    for _ in range(count):
        length, kinds = dice.randrange(1, 24), ["none", "any", "runs"]
        padding = torch.tensor([dice.random() < 0.7 for _ in range(length)]) if dice.random() < 0.5 else None
        segments, groups = (_ids(dice, length, dice.choice(kinds)) for _ in range(2))
        if padding is None and segments is None and groups is None:
            continue
        sight = Sight(dice.random() < 0.6, dice.choice([0, 0, 2, 5]), dice.choice([0, 0, 3]))
        yield dice, sight, Row(padding, segments, groups, dice.choice([1, 2, 4, 64])), length


def _seen(sight: Sight, row: Row, length: int) -> Tensor:
    """Of all queries and keys, by one dense formula."""
    both: Callable[[Tensor | None], Any] = lambda x: None if x is None else (x[None], x[None])  # noqa: E731
    at, padding = torch.arange(length), None if row.padding is None else row.padding[None]
    mask = visible(at, at, sight, padding=padding, segments=both(row.segments), groups=both(row.groups))
    return mask.reshape(-1, length, length)[0]


def _parts(row: Row, sight: Sight, block: Block, cells: int, tiled: bool = False) -> list[tuple[Block, Seen, bool]]:
    return [(*tile, pair.hidden) for pair in row.pairs(sight, block) for tile in pair.tiles(cells, tiled)]


def test_parts_are_what_a_dense_mask_says() -> None:
    for dice, sight, row, length in _rows(1500):
        dense, first, col = _seen(sight, row, length), dice.randrange(length), dice.randrange(length)
        block = Block(first, dice.randrange(1, length - first + 3), col, dice.randrange(1, length - col + 3))
        cells, tiled, covered = dice.choice([4, 16, 1000]), dice.random() < 0.4, set[tuple[int, int]]()
        for part, seen, hidden in _parts(row, sight, block, cells, tiled):
            pairs = set(itertools.product(range(part.row, part.ends[0]), range(part.col, part.ends[1])))
            assert pairs and not pairs & covered and (not hidden or seen == "some")
            covered |= pairs
            assert all(part.row >= block.row and part.col >= block.col for part in (part,))
            assert len(pairs) <= cells or (seen != "some" and not tiled)
            for i, j in pairs if not hidden else ():  # positions alone say it
                by_place = {"all": True, "diagonal": j - part.col <= i - part.row}
                grouped = row.groups is not None and bool(row.groups[i] == row.groups[j] >= 0)
                alone = bool(visible(torch.tensor([i]), torch.tensor([j]), Sight() if grouped else sight))
                assert bool(dense[i, j]) == (alone if seen == "some" else by_place[seen])
        rows, cols = (range(at, min(end, length)) for at, end in zip((first, col), block.ends, strict=True))
        shown = {(i, j) for i, j in itertools.product(rows, cols) if dense[i, j]}
        assert shown <= covered
        assert row.sees(sight, block) or not shown


def test_documents_save_work() -> None:
    """Of documents of unequal length, the pairs that causality leaves are computed and no other."""
    sizes = [700, 100, 1500, 64, 800, 932]
    segments = torch.repeat_interleave(torch.tensor(sizes))
    parts = _parts(Row(None, segments, None), Sight(causal=True), Block(0, 4096, 0, 4096), 2**20)
    assert [(part.rows, seen, hidden) for part, seen, hidden in parts] == [(n, "diagonal", False) for n in sizes]
    # on the last of four ranks, that has parts of two documents
    parts = _parts(Row(None, segments, None), Sight(causal=True), Block(3072, 1024, 0, 4096), 2**20)
    assert sum(part.rows * part.cols for part, _, _ in parts) == 92 * 708 + 92 * 92 + 932 * 932


def test_many_short_documents_are_few_runs() -> None:
    segments = torch.arange(4096) // 5
    row = Row(None, segments, None)
    assert all(64 <= run.end - run.first <= 70 for run in row.queries[:-1]) and len(row.queries) <= 64
    parts = _parts(row, Sight(), Block(0, 4096, 0, 4096), 2**16)
    assert sum(part.rows * part.cols for part, _, _ in parts) <= 3 * 4096 * 70


LENGTH = 12
POSITIONS = torch.cat([torch.arange(5), torch.arange(7)])[None]
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7])
GROUPS = torch.tensor([[0, 0, 0, -1, -1, 0, 0, -1, -1, -1, 1, 1]])
PACKED: tuple[Any, ...] = ("segments", DOCUMENTS)
KNOWN: dict[str, tuple[Any, ...]] = {
    "causal": ("causal",),
    "window": ("and", [("window", 3), ("causal",)]),
    "chunk": ("and", [("chunk", 4, torch.tensor([0])), ("causal",)]),
    "padded chunk": ("and", [("chunk", 4, torch.tensor([2])), ("causal",)]),
    "packed chunk": ("and", [PACKED, ("at", POSITIONS, ("and", [("chunk", 3, torch.tensor([0])), ("causal",)]))]),
    "packed window": ("and", [PACKED, ("at", POSITIONS, ("and", [("window", 3), ("causal",)]))]),
    "prefix": ("or", [("causal",), ("groups", GROUPS)]),
    "packed, then a prefix": ("or", [("and", [PACKED, ("at", POSITIONS, ("causal",))]), ("groups", GROUPS)]),
    "packed prefix": ("and", [PACKED, ("at", POSITIONS, ("or", [("causal",), ("groups", GROUPS)]))]),
}
UNKNOWN: dict[str, tuple[Any, ...]] = {
    "positions of no documents": ("at", POSITIONS, ("causal",)),
    "a window of groups": ("and", [("window", 3), ("or", [("causal",), ("groups", GROUPS)])]),
    "two groups": ("or", [("or", [("causal",), ("groups", GROUPS)]), ("groups", GROUPS)]),
    "either of two": ("or", [("causal",), ("window", 3)]),
}


def _dense(part: tuple[Any, ...], b: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A mask as its parts say, at batch rows, queries and keys."""
    if part[0] == "causal":
        return j <= i
    if part[0] == "window":
        return j > i - part[1]
    if part[0] == "chunk":
        return (i - part[2][b]) // part[1] == (j - part[2][b]) // part[1]
    if part[0] == "segments":
        return part[1][b, i] == part[1][b, j]
    if part[0] == "groups":
        return (part[1][b, i] == part[1][b, j]) & (part[1][b, i] >= 0)
    if part[0] == "at":
        return _dense(part[2], b, part[1][b, i], part[1][b, j])
    several = torch.stack([_dense(one, b, i, j).expand(1, LENGTH, LENGTH) for one in part[1]])
    return several.all(0) if part[0] == "and" else several.any(0)


@pytest.mark.parametrize("name", KNOWN)
def test_masks_of_hugging_face_models_are_functions_of_positions(name: str) -> None:
    known = known_mask(KNOWN[name], LENGTH, torch.device("cpu"))
    assert known is not None
    at = torch.arange(LENGTH)
    expected = _dense(KNOWN[name], torch.zeros(1, 1, 1, dtype=torch.long), at[None, :, None], at[None, None, :])
    ids = ((x[0] if x is not None else None) for x in (known.segments, known.groups))
    assert torch.equal(_seen(known.sight, Row(None, *ids), LENGTH), expected.expand(1, LENGTH, LENGTH)[0])


@pytest.mark.parametrize("name", UNKNOWN)
def test_masks_that_are_more_than_that_are_not_taken_for_one(name: str) -> None:
    assert known_mask(UNKNOWN[name], LENGTH, torch.device("cpu")) is None
